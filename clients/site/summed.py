"""A site's part in sums under masks, of models and of gradients: its keys, and whom it adds to."""

import hashlib
import json
import logging
from collections.abc import Collection, Mapping
from pathlib import Path

from fedda.errors import PolicyError, SecureError
from fedda.exchange import Stream
from fedda.exchange.groups import KEYS
from fedda.exchange.masked import tell
from fedda.secure.agree import Occasion, Own, verify
from fedda.secure.masks import FixedPoint, hide, layouts, narrow
from fedda.wire.packing import Arrays, Packed

from ..policy.rules import Secure
from .identity import Drawer, Identity
from .remembered import Remembered
from .request import Request

PAIR = 2
MOST = 2**40  # the largest weight of a site, and the highest number of a try

logger = logging.getLogger("fedda.site")


class Summed:
    """Signs keys, checks groups and masks models, for one site.

    A model is masked once for one group. What was sent for a round and try is never sent for
    another group; how small a group may be and how often it may change is up to the site's policy.

    Args:
        identity: its node key and the other sites' keys.
        rules: the policy's part about secure sums.
        state: the folder in which groups are remembered; None: in memory only.
        drawer: for its key of a try of a round.
    """

    def __init__(
        self,
        identity: Identity,
        rules: Secure,
        state: Path | None,
        drawer: Drawer,
    ) -> None:
        self._identity = identity
        self._rules = rules
        self._remembered = Remembered(identity.name, state, rules.changes)
        self._drawer = drawer

    def offer(self, request: Request) -> Packed:
        """Make this site's key for a try of a round, and sign it.

        Raises:
            SecureError: the site has no node key or knows no peers.
        """
        own = Own(_occasion(request))
        self._drawer.put(own)
        return self._identity.offer(own)

    def agree(self, request: Request) -> dict[bytes, bool]:
        """Check the group of a sum, before training -> the seeds of this site's masks.

        Each key of this site serves for one request.

        Raises:
            SecureError: a key is not its site's, or this site was not asked for its key before.
            PolicyError: the group is too small, or changes too often.
        """
        own = self._drawer.take()
        peers, occasion = self._identity.peers(), _occasion(request)
        group = {}
        for name, packed in request.arrays.items():
            if name.startswith("key/"):
                site, parts = name.removeprefix("key/"), packed.raw()
                group[site] = parts["public"].tobytes()
                verify(occasion, site, group[site], parts["signature"].tobytes(), peers)
        if own is None or own.occasion != occasion or group.get(self._identity.name) != own.public:
            raise SecureError(
                f"The group for round {occasion.round}, try {occasion.attempt}, does not have the "
                "key that this site made for it; the round has to be repeated."
            )
        if len(set(group.values())) < len(group):
            raise SecureError("Two sites of the group have the same key; remove one of them.")
        self._check_size("models", group)
        self._remembered.add("models", [[*group]], occasion)
        logger.info("secure sum of round %d over %s", occasion.round, ", ".join(sorted(group)))
        agreed = [vars(occasion), request.task.digest, _most(request)]
        agreed += [hashlib.sha256(request.arrays["model"].buffer).hexdigest()]
        return own.seeds(self._identity.name, group, json.dumps(agreed).encode())

    def hide(
        self, request: Request, seeds: Mapping[bytes, bool], model: Arrays, loss: float, weight: int
    ) -> Packed:
        """Mask a trained model.

        Args:
            request: the one that asked for it.
            seeds: from `agree`.
            model: what was trained.
            loss: of the training.
            weight: this site's examples; it counts at most what the whole group agreed on.
        """
        sent, most = request.arrays["model"], _most(request)
        point = FixedPoint(sent.unpack(), len(seeds) + 1, most, narrow(sent.manifest))
        layout = layouts(None, sent.manifest)["masked"]
        return hide(model, loss, min(weight, most), point, seeds, layout)

    def meet(self, request: Request, stream: Stream) -> dict[str, dict[bytes, bool]]:
        """Agree with the members of a session's groups on masks -> the seeds of each group.

        Args:
            request: the one with the invitation.
            stream: to the session, before anything else was sent.

        Raises:
            SecureError: a key is not its site's, or a group is not masked.
            PolicyError: a group is too small, or they change too often.
            ExchangeError: the session ended early.
        """
        assert request.exchange is not None
        groups, peers = request.exchange.groups, self._identity.everyone()
        agreeing = next((g for g in request.exchange.invitation.groups if g.name == KEYS), None)
        if agreeing is None or not all(group.masked for group in groups):
            raise SecureError("The request asks for masked gradients, but not in all its groups.")
        for group in groups:
            self._check_size("gradients", group.members)
            if not set(group.members) <= set(agreeing.members):
                raise SecureError("The request's sum of keys leaves out members of its groups.")
        own = Own(Occasion(request.task.training, request.round, 1, "exchange"))
        signed = own.public + own.sign(self._identity.name, self._identity.private())
        keys = tell(stream, agreeing, signed)
        for site, (public, signature) in keys.items():
            verify(own.occasion, site, public, signature, peers)
        if len({public for public, _ in keys.values()}) < len(keys):
            raise SecureError("Two sites of the exchange have the same key; remove one of them.")
        self._remembered.add("gradients", [group.members for group in groups])
        who = "; ".join(", ".join(sorted(group.members)) for group in groups)
        logger.info("masked sums of gradients of round %d over %s", own.occasion.round, who)
        lazy, seeds = request.exchange.lazy, {}
        for group in groups:
            about = [vars(own.occasion), group.name, group.size, group.syncs, lazy.flat()]
            agreed = json.dumps([*about, request.task.digest], sort_keys=True).encode()
            members = {name: keys[name][0] for name in group.members}
            seeds[group.name] = own.seeds(self._identity.name, members, agreed)
        return seeds

    def _check_size(self, kind: str, group: Collection[str]) -> None:
        """Check that a group is large enough; for a pair see `Secure.pairs`.

        Raises:
            PolicyError: it is not.
        """
        least, pairs = self._rules.least, kind == "gradients" and self._rules.pairs
        if len(group) < least and not (pairs and len(group) == PAIR):
            also = ", or in pairs with secure.pairs = true" * (kind == "gradients")
            raise PolicyError(
                f"The group of a sum under masks has {len(group)} sites, but this site adds its "
                f"{kind} to those of {least} or more in all{also} (secure.least)."
            )


def _occasion(request: Request) -> Occasion:
    attempt = request.numbers.get("attempt")
    if type(attempt) is not int or not 1 <= attempt <= MOST:
        raise SecureError("The request does not number the try of its round; it needs 1 or more.")
    return Occasion(request.task.training, request.round, attempt)


def _most(request: Request) -> int:
    most = request.numbers.get("most")
    if type(most) is not int or not 1 <= most <= MOST:
        raise SecureError(f"The request has no largest weight; it needs 1 to {MOST}.")
    return most
