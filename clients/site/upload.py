"""How a site's model leaves it: as it is, under masks, or sealed, as the request's contract says.

`of` is called before anything is trained: a site that would not be hidden does no work. The other
halves are `strategies/upload_channel.py` at the server and `fedda.secure.hiding`.
"""

import time
from collections.abc import Mapping
from typing import Any

from fedda import models
from fedda.models import Model
from fedda.wire import LOSS
from fedda.wire.packing import Kind, Packed

from . import output_privacy
from .memory import Site
from .request import Numbers, Request
from .sealed import Received


class AsItIs:
    """A model leaves as it is."""

    def __init__(self, site: Site, request: Request) -> None:
        self.site = site
        self.request = request

    def leave(
        self, model: Model, arrays: dict[str, Packed], numbers: Numbers
    ) -> tuple[dict[str, Packed], Numbers]:
        """Return the reply: arrays and numbers as they leave this site.

        Args:
            model: the trained one.
            arrays: what the method sends.
            numbers: of the training.
        """
        return arrays, numbers


class UnderMasks(AsItIs):
    """A model and its loss leave under masks, on which the group has agreed before."""

    def __init__(self, site: Site, request: Request) -> None:
        super().__init__(site, request)
        self._seeds = site.summed.agree(request)

    def leave(
        self, model: Model, arrays: dict[str, Packed], numbers: Numbers
    ) -> tuple[dict[str, Packed], Numbers]:
        """Mask the model in full precision."""
        loss = output_privacy.rounded(LOSS, numbers.pop("loss", 0.0))  # no door sees it hidden
        whole, examples = models.to_arrays(model), self.site.examples
        masked = self.site.summed.hide(self.request, self._seeds, whole, loss, examples)
        return {"masked": masked}, numbers


class UnderSeal(AsItIs):
    """A model leaves sealed to the target's key, and no loss beside it."""

    def __init__(self, site: Site, request: Request) -> None:
        super().__init__(site, request)
        self._address = site.sealed.address(request)

    def leave(
        self, model: Model, arrays: dict[str, Packed], numbers: Numbers
    ) -> tuple[dict[str, Packed], Numbers]:
        """Seal the model as it would be sent."""
        numbers.pop("loss", None)  # the server, which reads no model of a source, chose the first
        sealed = self.site.sealed.seal(self._address, arrays["model"], self.site.examples)
        return {"sealed": sealed}, numbers


CHANNELS: Mapping[Kind, type[AsItIs]] = {Kind.MASKED: UnderMasks, Kind.SEALED: UnderSeal}


def of(site: Site, request: Request) -> AsItIs:
    """Make the channel that a request's contract asks for.

    Raises:
        FeddaError: this site would not be hidden, or not well enough for its policy.
    """
    assert request.contract
    kinds = request.contract.leaves.arrays.values()
    return next((CHANNELS[kind] for kind in kinds if kind in CHANNELS), AsItIs)(site, request)


def signed(site: Site, request: Request) -> tuple[dict[str, Packed], Numbers]:
    """Answer a request for a key: a source's for masks, a target's to which sources seal."""
    start = time.perf_counter()
    key = (site.sealed if request.part == "target" else site.summed).offer(request)
    return {"key": key}, {"seconds": time.perf_counter() - start}


def received(site: Site, request: Request, name: str) -> Received:
    """Return the sources' models that came for the target: called `name/SOURCE`, or sealed.

    Raises:
        SecureError: they are sealed, and too few can be used.
    """
    assert request.contract
    if Kind.SEALED in request.contract.enters.arrays.values():
        return site.sealed.open(request)
    return Received(by_site(request.arrays, name), by_site(request.numbers, "examples"))


def by_site(named: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Return the numbers or arrays called `what/SITE`, by site."""
    return {n.removeprefix(f"{what}/"): v for n, v in named.items() if n.startswith(f"{what}/")}
