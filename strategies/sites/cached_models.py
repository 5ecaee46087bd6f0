"""Which models each site keeps, so that they are sent once although two requests need them.

The target gets a round's model for its test, and in many methods again in the next round, to train
with. So the test's request asks the site to keep the model, and the next request only names it, by
the SHA-256 of its bytes. A site that no longer has it, as after a restart, says so, and is sent the
whole request at once. The same holds for a model per source, `model/SITE`.
"""

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping

from flwr.app import Message

from fedda.errors import Code
from fedda.wire.packing import Packed

MODEL = "model"  # arrays of this name are kept, and of names such as model/SITE
MOST_LOST = 2  # times that a site loses it in a row; then it is no more asked to keep any

Whole = Callable[[], Message]


class CachedModels:
    """The models that the sites of one training keep, as far as the server knows."""

    def __init__(self) -> None:
        self._asked: dict[str, dict[str, str]] = {}  # by site: what its request asks it to keep
        self._held: dict[str, dict[str, str]] = {}  # by site: what it keeps, hashes by name
        self._whole: dict[int, tuple[str, Whole]] = {}  # by node: the site, and its request
        self._lost: Counter[str] = Counter()
        self._hashed: tuple[object, str] = (None, "")  # the last buffer, and its hash

    def ask(self, site: str, arrays: Mapping[str, Packed]) -> dict[str, str]:
        """The table of a request that asks a site to keep the models that come with it."""
        kept = {n: p for n, p in arrays.items() if n.partition("/")[0] == MODEL}
        if not kept or self._lost[site] >= MOST_LOST:
            return {}
        self._asked[site] = {name: self._hash(packed) for name, packed in kept.items()}
        return self._asked[site]

    def name(self, site: str, arrays: Mapping[str, Packed]) -> dict[str, str]:
        """The table of a request that leaves out the models that a site has; empty if it has none.

        A site gives a model away with the next request that has arrays.
        """
        if not arrays:
            return {}
        held = self._held.pop(site, {})
        return {n: d for n, d in held.items() if n in arrays and self._hash(arrays[n]) == d}

    def named(self, site: str, node: int, whole: Whole) -> None:
        """Note how to make a request with all its arrays, if the site has lost one."""
        self._whole[node] = (site, whole)

    def answered(self, site: str, node: int, ok: bool) -> None:
        """Note the answer to a request: only a site that served it has kept what it was to keep."""
        asked = self._asked.pop(site, None)
        if ok and asked:
            self._held[site] = asked
        if ok and self._whole.pop(node, None) is not None:
            self._lost[site] = 0

    def again(self, reply: Message) -> Message | None:
        """The whole request for a site that has lost what the last one named; else None."""
        site, whole = self._whole.get(reply.metadata.src_node_id, ("", None))
        if whole is None or not reply.has_error() or reply.error.code != Code.FORGOTTEN:
            return None
        del self._whole[reply.metadata.src_node_id]
        self._lost[site] += 1
        return whole()

    def forget(self) -> None:
        """Free the requests that nobody will ask for any more, as a hop is over."""
        self._whole.clear()

    def _hash(self, packed: Packed) -> str:
        buffer, digest = self._hashed
        if buffer is not packed.buffer:
            digest = hashlib.sha256(packed.buffer).hexdigest()
            self._hashed = (packed.buffer, digest)
        return digest
