"""Models that only the target reads: sources seal them to its key of the round, it opens them."""

import hashlib
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from fedda.errors import NotFiniteError, SecureError, WireError
from fedda.maths.bounds import NAMED, Bounds, norm, scaled, too_long
from fedda.secure.agree import Occasion, Own, check, sign, verify
from fedda.secure.seal import Envelope, layouts, seal, unseal
from fedda.wire.packing import CHANGE, ROWS, Kind, Packed, lay_out, pack

from ..policy.rules import Secure
from .crafted import check_rows
from .identity import Drawer, Identity, as_array
from .request import Request

logger = logging.getLogger("fedda.site")


@dataclass
class Received:
    """The sources' models that a target received in a round.

    Attributes:
        models: the usable ones, by source.
        examples: N_k of these sources, as they signed it; none counts more than the server says.
            Of models that were not sealed, what the server says, and N_T.
        refused: the sources whose models are not used.
        least: if they were sealed, the fewest sites of the mean that goes back; else 0.
    """

    models: dict[str, Packed] = field(default_factory=dict)
    examples: dict[str, int] = field(default_factory=dict)
    refused: list[str] = field(default_factory=list)
    least: int = 0

    @property
    def sealed(self) -> bool:
        """Whether the server could not read them, so that this site makes their mean."""
        return self.least > 0

    def leave_out(self, sources: Iterable[str]) -> None:
        """Leave out sources whose models turned out not to be usable.

        Raises:
            SecureError: too few models are left.
        """
        for source in sources:
            del self.models[source]
            self.examples.pop(source, None)
            self.refused.append(source)
        if len(self.models) + 1 < self.least:
            raise SecureError(
                f"{len(self.models)} sealed models can be used, but this site sends back a mean "
                f"over {self.least} sites or more, itself included (secure.least)."
            )


class Sealed:
    """Makes keys and opens models at a target, and seals models at a source.

    Args:
        identity: the site's node key and the other sites' keys.
        rules: the policy's part about models that are hidden from the server.
        drawer: for its key of a round.
    """

    def __init__(self, identity: Identity, rules: Secure, drawer: Drawer) -> None:
        self._identity = identity
        self._rules = rules
        self._drawer = drawer

    def offer(self, request: Request) -> Packed:
        """Make the target's key of a round, and sign it.

        Raises:
            SecureError: this site has no node key or knows no peers.
        """
        own = Own(_occasion(request))
        self._drawer.put(own)
        return self._identity.offer(own)

    def address(self, request: Request) -> Envelope:
        """Check the target's key, before a source trains -> where its model is to go.

        Raises:
            SecureError: the key is not that of a site that may be a target.
        """
        found = {n: p.raw() for n, p in request.arrays.items() if n.startswith("key/")}
        if len(found) != 1:
            raise SecureError(f"The request has {len(found)} targets' keys; it needs one.")
        ((name, key),) = found.items()
        target, public = name.removeprefix("key/"), key["public"].tobytes()
        peers = self._identity.peers("target")
        verify(_occasion(request), target, public, key["signature"].tobytes(), peers)
        return _envelope(request, self._identity.name, target, public)

    def seal(self, address: Envelope, model: Packed, examples: int) -> Packed:
        """Seal a trained model, and sign it with the number of examples behind it."""
        sealed = seal(bytes(model.buffer), address)
        arrays = {
            "sealed": as_array(sealed),
            "examples": np.array([examples]),
            "signature": as_array(sign(address.text(sealed, examples), self._identity.private())),
        }
        return lay_out(layouts(None, model.manifest)["sealed"], arrays)

    def open(self, request: Request) -> Received:
        """Open a round's models; the key serves for one request.

        A model that is not its source's, or that breaks the bounds, is left out; one whose update
        is much longer than the others' is scaled down.

        Raises:
            SecureError: this site was not asked for its key before, or too few models are left.
        """
        own = self._drawer.take()
        if own is None or own.occasion != _occasion(request):
            raise SecureError(
                f"This site has no key for round {request.round}; the round has to be repeated."
            )
        most = request.numbers.get("most")
        if type(most) is not int or most < 1:
            raise SecureError("The request has no largest weight; it needs 1 or more.")
        bounds = Bounds(*(_bound(request, n) for n in ("max-change", "max-statistics")))
        bounds.begin(request.arrays["model"])
        sent = request.arrays["model"].unpack()
        opened = Received(least=self._rules.least)
        peers, lengths = self._identity.peers(), {}
        for array in sorted(n for n in request.arrays if n.startswith("sealed/")):
            source = array.removeprefix("sealed/")
            address = _envelope(request, source, self._identity.name, own.public)
            try:
                model, examples = _opened(request, array, address, own, peers)
                check_rows("model", model.unpack())
                bounds.check(source, "model", model.unpack())
                lengths[source] = norm(model.unpack(), sent)
            except (SecureError, WireError, NotFiniteError) as error:
                logger.error("%s", error)
                opened.refused.append(source)
                continue
            opened.models[source], opened.examples[source] = model, min(examples, most)
        long = too_long(lengths, *(_bound(request, n) for n in ("max-update", "liars")))
        for source, (times, factor) in long.items():
            if factor < NAMED:
                text = (
                    "the update of %s is %.3g times as long as the longest of the others'; scaled"
                )
                logger.warning(f"{text} by %.2g", source, times, factor)
            model = scaled(opened.models[source].unpack(), sent, factor)
            opened.models[source] = pack(model, Kind.MODEL)
        opened.leave_out(())  # which checks that enough are left
        return opened


def _opened(
    request: Request, array: str, address: Envelope, own: Own, peers: Mapping[str, Any]
) -> tuple[Packed, int]:
    """Return one source's model and its number of examples.

    Raises:
        SecureError: the source did not sign it, or it was sealed for something else.
        WireError: it is no model of this training.
        NotFiniteError: it has a value that is not finite.
    """
    raw = request.arrays[array].raw()
    sealed, examples = raw["sealed"].tobytes(), int(raw["examples"][0])
    text, signature = address.text(sealed, examples), raw["signature"].tobytes()
    check(text, "sealed model", address.source, signature, peers)
    if examples < 1:
        raise WireError(f"{address.source} trained on {examples} examples; it needs 1 or more.")
    sent, floats = request.arrays["model"], request.task.wire.dtype
    layout = replace(sent.manifest, floats=CHANGE if floats in ROWS else floats)
    model = Packed(layout, unseal(sealed, address, own)).of(sent)
    model.check_finite(address.source)
    return model, examples


def _occasion(request: Request) -> Occasion:
    return Occasion(request.task.training, request.round, 1, "target")


def _envelope(request: Request, source: str, target: str, public: bytes) -> Envelope:
    """All that source and target must agree on.

    A server that could tell sources other settings, such as a rate of almost 0, or another model,
    would know what they send, and so what the target adds to the mean.
    """
    begun = request.task.digest + hashlib.sha256(request.arrays["model"].buffer).hexdigest()
    return Envelope(request.task.training, request.round, source, target, public, begun)


def _bound(request: Request, name: str) -> float:
    """A bound of the server's guard; without one a model may be anything."""
    value = request.numbers.get(name, 0.0)
    if not value >= 0:
        raise WireError(f"The request's {name} is {value}; it needs 0 or more.")
    return float(value)
