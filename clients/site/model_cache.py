"""The model of a test, kept until the next request trains with it, so that it is sent only once.

The server asks for it with a request's table `kept`: the SHA-256 of an array's bytes, by the
array's name. If the array comes with the request, the site keeps it. If it does not, the site uses
the one that it kept, which passes the same checks as an array that was sent.
"""

import hashlib
from collections.abc import Mapping
from typing import Any

from fedda.errors import ForgottenError, WireError
from fedda.wire.packing import Packed, shown

Arrays = dict[str, Packed]


class ModelCache:
    """What a site keeps of one request for the next; only in memory, and never more than that."""

    def __init__(self) -> None:
        self._kept: dict[str, tuple[str, Packed]] = {}  # by name: the hash, and the array

    def put(self, arrays: Mapping[str, Packed], table: Mapping[str, Any]) -> None:
        """Keep arrays of a request, and nothing that was kept before.

        Raises:
            WireError: an array is not there, or has another hash.
        """
        self._kept = {}
        for name, digest in table.items():
            if name not in arrays or hashlib.sha256(arrays[name].buffer).hexdigest() != digest:
                raise WireError(f"The array '{shown(name)}' to keep is not the one that came.")
            self._kept[name] = (str(digest), arrays[name])

    def take(self, arrays: Mapping[str, Packed], table: Mapping[str, Any]) -> Arrays:
        """Return a request's arrays with those that it only names, which are kept no longer.

        A request that has no arrays, as for a key, changes nothing.

        Raises:
            WireError: an array comes with the request although it is named as kept.
            ForgottenError: an array is not kept here.
        """
        if not arrays and not table:
            return {}
        kept, self._kept = self._kept, {}
        found = dict(arrays)
        for name, digest in table.items():
            if name in arrays:
                raise WireError(f"The request names '{shown(name)}' as kept, but brings it.")
            if name not in kept or kept[name][0] != digest:
                raise ForgottenError(
                    f"This site no longer has the '{shown(name)}' that the request names, as after "
                    "a restart; the server sends it again."
                )
            found[name] = kept[name][1]
        return found
