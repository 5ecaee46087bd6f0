"""What may come into a site and what may leave it: every request passes here, and every reply.

`Client.answer` calls `admit` and `release`, so the checks hold whatever part of Flower calls it.
A model leaves as it is, under masks, or sealed, as the request's contract says; the other halves of
that are `strategies/upload_channel.py` at the server and `fedda.secure.hiding`.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from flwr.app import RecordDict

from fedda import models, records
from fedda.errors import PolicyError, WireError
from fedda.settings import Task
from fedda.wire import ANSWERS, LOSS, Rule
from fedda.wire.packing import Kind, Packed

from . import state
from .crafted import GROWING, check_rows
from .memory import Site
from .output_privacy import quantise, rounded
from .request import Numbers, Request
from .sealed import Received

# The roles that may play each part. A target that is adapted can be the collaborator of another
# target. Whether a part needs labels is in its contract.
PLAYED_BY = {"source": {"source"}, "target": {"target"}, "collaborator": {"source", "target"}}

Arrays = dict[str, Packed]
# The trained model, what the method sends and the training's numbers -> both as they leave.
Leave = Callable[[models.Model, Arrays, Numbers], tuple[Arrays, Numbers]]

logger = logging.getLogger("fedda.site")


@dataclass(frozen=True)
class SiteReply:
    """What leaves a site in answer to a request: its arrays and its numbers, by name."""

    arrays: Mapping[str, Packed]
    numbers: Numbers

    @cached_property
    def content(self) -> RecordDict:
        """The reply as the records of a message."""
        return records.write(self.arrays, metrics=self.numbers)


def offered(site: Site, settings: Mapping[str, Any] | None) -> Numbers:
    """Tell what this site offers a run, after a check that it can take part in it.

    Args:
        site: this site.
        settings: the training's; None if the server only asks.

    Raises:
        FeddaError: the site cannot or may not take part.
    """
    task = None if settings is None else Task.parse(settings)
    if task is not None:
        site.gate.admit_frozen(task)
        _check_noise(site, task)
        site.frozen.part(task)
    offer = site.offer()
    if task is not None:
        site.check_classes(task)
        site.check_fit(task)
    site.gate.release({}, sum(records.size(records.write(offer=offer)).values()))
    return offer


def admit(site: Site, request: Request, test: bool) -> None:
    """Let a request in if it passes every check, and book it.

    Args:
        site: this site.
        request: the request.
        test: whether it came where a model is tested, and not trained.

    Raises:
        FeddaError: this site may not or cannot serve it.
    """
    if request.is_test and not test:
        raise WireError("A training request asks for a test.")
    if test and not request.is_test:
        raise WireError(f"An evaluation request asks for '{request.hop[:40]}', not for a test.")
    if test and request.exchange is not None:
        raise WireError("An evaluation request invites to an exchange of gradients.")
    task, contract = request.task, request.contract
    if site.role not in PLAYED_BY[request.part] or (contract.labels and not site.labels):
        raise WireError(
            f"{task.method} asks this {site.role} for the part of a {request.part}, which it "
            "cannot play."
        )
    # The site's own policy lets it in; the log says once what the phase shows of examples.
    site.gate.admit(request)
    if site.origin is not None and (text := request.stage.phase.tells):
        site.say(text)
    site.check_classes(task)  # they are this site's, or those that its operator confirmed
    _check_noise(site, task)
    # It brings what the method's contract lists, in the layouts of the run's model.
    _check(site, request, contract.enters, request.arrays, request.numbers, "received")
    for name, packed in request.arrays.items():
        packed.check_finite(f"'{name}' of the server")
    for name, packed in request.arrays.items():
        if packed.manifest.kind is Kind.MODEL and not name.startswith(GROWING):
            check_rows(name, packed.unpack())
    if site.origin is not None:
        site.origin.check(request)
    if request.exchange is not None:
        sizes = {group.name: group.size for group in request.exchange.groups}
        contract.check_groups(sizes, request.layouts(site.workspace(task).schema))
    if not test:
        state.make_room(site, task, site.keep.megabytes)
    site.gate.book(request)


def release(
    site: Site, request: Request, arrays: Mapping[str, Packed], numbers: Numbers
) -> SiteReply:
    """Let a reply leave if it passes every check -> it, its numbers as coarse as they may leave.

    Args:
        site: this site.
        request: the request that it answers.
        arrays: its arrays.
        numbers: its numbers.

    Raises:
        FeddaError: something in it may not leave.
    """
    if not request.is_test:
        state.make_room(site, request.task, site.keep.megabytes)
    for name, packed in arrays.items():
        packed.check_finite(f"'{name}' of this site")
    leaves = request.contract.leaves
    _check(site, request, leaves, arrays, numbers, "to be sent")  # numbers as they were computed
    reply = SiteReply(arrays, quantise(numbers, leaves))
    if ANSWERS & {*reply.numbers}:
        site.gate.check_classes()
    sizes = records.size(reply.content)
    site.gate.release(arrays, sum(sizes.values()), request.contract)  # its bytes are booked
    sent = ", ".join(f"{kind} {n:,} bytes" for kind, n in sizes.items())
    logger.info("sent after %s: %s", "evaluate" if request.is_test else "train", sent)
    return reply


def _check_noise(site: Site, task: Task) -> None:
    """Check that with noise on tests all that is told of models carries it."""
    if site.test_noise and (bare := getattr(task.options, "bare", "")):
        raise PolicyError(
            f"This site has noise on tests (test-noise), but {task.method} tells {bare}."
        )


def _check(
    site: Site,
    request: Request,
    rule: Rule,
    arrays: Mapping[str, Packed],
    numbers: Mapping[str, Any],
    what: str,
) -> None:
    """Check arrays and numbers by the contract's rule for them."""
    task, schema = request.task, site.workspace(request.task).schema
    rule.check(
        arrays,
        numbers,
        model=schema,
        sites=task.sites,
        where=f"{site.name} ({request.part}, {task.method}, {what})",
        layouts=request.layouts(schema),
        classes=task.classes,
    )


def leaving(site: Site, request: Request) -> Leave:
    """How a model will leave this site, as the request's contract asks; called before it trains.

    Raises:
        FeddaError: this site would not be hidden, or not well enough for its policy.
    """
    kinds = request.contract.leaves.arrays.values()
    if Kind.MASKED in kinds:
        seeds = site.summed.agree(request)

        def masked(model: models.Model, arrays: Arrays, numbers: Numbers) -> tuple[Arrays, Numbers]:
            loss = rounded(LOSS, numbers.pop("loss", 0.0))  # nobody sees it hidden
            whole = models.to_arrays(model)  # in full precision
            return {"masked": site.summed.hide(request, seeds, whole, loss, site.examples)}, numbers

        return masked
    if Kind.SEALED in kinds:
        address = site.sealed.address(request)

        def sealed(model: models.Model, arrays: Arrays, numbers: Numbers) -> tuple[Arrays, Numbers]:
            numbers.pop("loss", None)  # the server, which reads no source's model, chose the first
            return {"sealed": site.sealed.seal(address, arrays["model"], site.examples)}, numbers

        return sealed
    return lambda model, arrays, numbers: (arrays, numbers)


def signed(site: Site, request: Request) -> tuple[Arrays, Numbers]:
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
