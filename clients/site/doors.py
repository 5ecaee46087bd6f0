"""What may come into a site and what may leave it: every request passes here, and every reply.

`Client.fit` and `evaluate` call these, so the checks hold whatever part of Flower calls them.
"""

import logging
from collections.abc import Mapping
from typing import Any

from fedda import records
from fedda.errors import WireError
from fedda.settings import Task
from fedda.wire import ANSWERS, Kind, Packed, Rule

from . import state
from .crafted import GROWING, check_rows
from .memory import Site
from .request import Numbers, Request
from .tested import coarse

# The roles that may play each part. A target that is adapted can be the collaborator of another
# target. Whether a part needs labels is in its contract.
PLAYED_BY = {"source": {"source"}, "target": {"target"}, "collaborator": {"source", "target"}}

logger = logging.getLogger("fedda.site")


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
        site.frozen.part(task)
    offer = site.offer()
    if task is not None:
        site.check_classes(task)
        site.check_fit(task)
    site.gate.release({}, sum(records.size(records.write(offer=offer)).values()))
    return offer


def admit(site: Site, request: Request, test: bool) -> None:
    """Let a request in, and book it.

    Args:
        site: this site.
        request: the request.
        test: whether it came where a model is tested, and not trained.

    Raises:
        FeddaError: this site may not or cannot serve it.
    """
    task, contract = request.task, request.contract
    if request.is_test and not test:
        raise WireError("A training request asks for a test.")
    if test and not request.is_test:
        raise WireError(f"An evaluation request asks for '{request.hop[:40]}', not for a test.")
    if test and request.exchange is not None:
        raise WireError("An evaluation request invites to an exchange of gradients.")
    if site.role not in PLAYED_BY[request.part] or (contract.labels and not site.labels):
        raise WireError(
            f"{task.method} asks this {site.role} for the part of a {request.part}, which it "
            "cannot play."
        )
    site.gate.admit(request)
    site.check_classes(task)
    _check(site, request, contract.enters, request.arrays, request.numbers, "received")
    for name, packed in request.arrays.items():
        packed.check_finite(f"'{name}' of the server")
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
) -> Numbers:
    """Let a reply leave -> its numbers, as coarse as they may leave.

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
    _check(site, request, request.contract.leaves, arrays, numbers, "to be sent")
    told = coarse(numbers, request.contract.leaves)
    if ANSWERS & {*told}:
        site.gate.check_classes()
    sizes = records.size(records.write(arrays, metrics=told))
    site.gate.release(arrays, sum(sizes.values()), request.contract)
    sent = ", ".join(f"{kind} {n:,} bytes" for kind, n in sizes.items())
    logger.info("sent after %s: %s", "evaluate" if request.is_test else "train", sent)
    return told


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
