"""From a Flower message to a method's client, and back: the only place where the two meet.

Everything that enters or leaves a site passes through this module, so the contract is checked here.
An exception becomes an error code here, too: Flower would send the exception's text to the server,
and the text may quote data.
"""

import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

from flwr.app import Error, Message

from fedda import plugins, records
from fedda.errors import Code, FeddaError, WireError, code_of
from fedda.methods import PartName
from fedda.settings import Task
from fedda.wire import Kind, Manifest, Packed, Rule

from ..base import Client
from ..site import state
from ..site.crafted import GROWING, check_rows
from ..site.memory import Site, resident
from ..site.request import Request
from ..site.tested import coarse

# The roles that may play each part. A target that is adapted can be the collaborator of another
# target. Whether a part needs labels is in its contract.
PLAYED_BY = {"source": {"source"}, "target": {"target"}, "collaborator": {"source", "target"}}

logger = logging.getLogger("fedda.site")


def guarded(
    handle: Callable[[Message, Site], Message], message: Message, node: Mapping[str, Any]
) -> Message:
    """Call a handler if the site's policy lets it; turn an exception into its code and wording.

    The exception's text stays in the site's log. The request and the decision about it go into the
    site's audit log; a site that cannot write there answers nothing.
    """
    site = None
    try:
        site = resident(tuple(sorted(node.items())))
        site.trail.received(message)
        reply = _decided(handle, message, site)
        site.trail.answered(message, reply)
        return reply
    except Exception as error:
        reply = _failure(error, message)
    try:
        if site is not None:
            site.trail.answered(message, reply)
    except OSError:
        logger.exception("the audit log cannot be written")
    return reply


def _decided(handle: Callable[[Message, Site], Message], message: Message, site: Site) -> Message:
    """The handler's reply, or the refusal of a request that came too late or at the wrong hour."""
    if expired(message):
        logger.warning("a %s request came after it had expired", message.metadata.message_type)
        return Message(Error(int(Code.EXPIRED), Code.EXPIRED.public), reply_to=message)
    site.gate.check_time()
    return handle(message, site)


def _failure(error: Exception, message: Message) -> Message:
    code = code_of(error)
    if isinstance(error, FeddaError):
        logger.error("%s", error)
    else:
        logger.exception("the request failed", exc_info=error)
    return Message(Error(int(code), code.public), reply_to=message)


def expired(message: Message) -> bool:
    """Whether the server no longer waits for the reply, so that work on it would be wasted."""
    return time.time() > message.metadata.created_at + message.metadata.ttl


def query(message: Message, site: Site) -> Message:
    """Tell the server what this site offers; with a task, check that the site can take part."""
    tables = records.read(message.content)[1]
    if set(tables) - {"task"}:
        raise WireError(f"A question may hold a task, but holds {sorted(tables)}.")
    task = Task.parse(tables["task"]) if "task" in tables else None
    if task is not None:
        site.gate.admit_frozen(task)
        site.frozen.part(task)
    content = records.write(offer=site.offer())
    if task is not None:
        site.check_fit(task)
    site.gate.release({}, sum(records.size(content).values()))
    return Message(content, reply_to=message)


def train(message: Message, site: Site) -> Message:
    """Check the request, let the method's client train, check the reply."""
    request = _read(message, site, {"task", "step", "exchange", "kept"})
    if request.is_test:
        raise WireError("A training request asks for a test.")
    if request.exchange is not None:
        sizes = {g.name: g.size for g in request.exchange.groups}
        request.contract.check_groups(sizes, _layouts(request, site))
    state.make_room(site, request.task, site.keep.megabytes)
    site.gate.book(request)
    arrays, numbers = _client(request, site).serve(request)
    state.make_room(site, request.task, site.keep.megabytes)
    for name, packed in arrays.items():
        packed.check_finite(f"'{name}' of this site")
    return _reply(message, request, site, arrays, numbers)


def evaluate(message: Message, site: Site) -> Message:
    """Check the request, let the method's client test the model, check the reply."""
    request = _read(message, site, {"task", "step", "kept"})
    if not request.is_test:
        raise WireError(f"An evaluation request asks for '{request.hop[:40]}', not for a test.")
    site.gate.book(request)
    client = _client(request, site)
    answer = getattr(client, request.hop, None)  # `test`, or at a source `calibrate`
    if answer is None:
        raise WireError(f"{request.task.method} has no {request.part} that can {request.hop}.")
    reply = _reply(message, request, site, {}, answer(request))
    site.shelf.put(request.arrays, dict(message.content.get("kept", {})))  # type: ignore[arg-type]
    return reply


def _read(message: Message, site: Site, allowed: Collection[str]) -> Request:
    """The request in a message, after checking that this site may serve it."""
    arrays, tables = records.read(message.content)
    if not {"task", "step"} <= set(tables) <= set(allowed):
        raise WireError(f"A request must hold task and step, but holds {sorted(tables)}.")
    tests = message.metadata.message_type.startswith("evaluate")  # its arrays are kept afterwards
    arrays = site.shelf.take(arrays, {} if tests else tables.get("kept", {}))
    request = Request.make(tables["task"], tables["step"], arrays, tables.get("exchange"))
    if site.role not in PLAYED_BY[request.part] or (request.contract.labels and not site.labels):
        raise WireError(
            f"{request.task.method} asks this {site.role} for the part of a {request.part}, which "
            "it cannot play."
        )
    site.gate.admit(request)
    _check(request.contract.enters, arrays, request.numbers, request, site, "received")
    for name, packed in arrays.items():
        packed.check_finite(f"'{name}' of the server")
        if packed.manifest.kind is Kind.MODEL and not name.startswith(GROWING):
            check_rows(name, packed.unpack())
    return request


def _client(request: Request, site: Site) -> Client:
    # `Request.make` has already refused every other name of a part.
    part = "target" if request.hop == "test" else cast(PartName, request.part)
    return plugins.client(request.task.method, part)(site)


def _layouts(request: Request, site: Site) -> Mapping[str, Manifest]:
    """Return the layouts of the arrays that are sent besides the run's model."""
    return request.layouts(request.task.options, site.workspace(request.task).schema)


def _check(
    rule: Rule,
    arrays: Mapping[str, Packed],
    numbers: Mapping[str, Any],
    request: Request,
    site: Site,
    what: str,
) -> None:
    task = request.task
    rule.check(
        arrays,
        numbers,
        model=site.workspace(task).schema,
        sites=task.sites,
        where=f"{site.name} ({request.part}, {task.method}, {what})",
        layouts=_layouts(request, site),
    )


def _reply(
    message: Message,
    request: Request,
    site: Site,
    arrays: Mapping[str, Packed],
    numbers: Mapping[str, Any],
) -> Message:
    _check(request.contract.leaves, arrays, numbers, request, site, "to be sent")
    content = records.write(arrays, metrics=coarse(numbers))
    sizes = records.size(content)
    site.gate.release(arrays, sum(sizes.values()), request.contract)
    sent = ", ".join(f"{kind} {n:,} bytes" for kind, n in sizes.items())
    logger.info("sent after %s: %s", message.metadata.message_type, sent)
    return Message(content, reply_to=message)
