"""The ClientApp, one for every engine, method and role: from a message to a client, and back.

An exception becomes an error code here: Flower would send its text to the server, and that may
quote data.
"""

import logging
import os
import time
import traceback
from collections.abc import Callable, Collection, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, cast

from flwr.app import Context, Error, Message
from flwr.clientapp import ClientApp

from fedda import plugins, records
from fedda.errors import FULL, Code, FeddaError, WireError, code_of, reason
from fedda.methods import PartName
from fedda.wire.packing import Packed, shown

from .base import Client
from .site import boundary, site_statistics
from .site.boundary import SiteReply
from .site.memory import Site, resident
from .site.request import Numbers, Request

logger = logging.getLogger("fedda.site")
# By site and kind of request: the first and the last exception since it was last answered, and what
# was told of the last.
Failures = MutableMapping[tuple[str, str], tuple[BaseException, BaseException, str]]


def guarded(
    handle: Callable[[Message, Site], Message],
    message: Message,
    node: Mapping[str, Any],
    failures: Failures | None = None,
) -> Message:
    """Call a handler if the site's policy lets it; turn an exception into its code and wording.

    The exception's text stays in the site's log. The request and the decision about it go into the
    site's audit log; a site that cannot write there answers nothing.

    Args:
        handle: answers the request.
        message: the request.
        node: this site's configuration.
        failures: keeps the exceptions themselves, where server and sites are one process.
    """
    failures = {} if failures is None else failures
    place, site, told = (str(node.get("name", "")), message.metadata.message_type), None, ""
    try:
        site = resident(tuple(sorted(node.items())))
        site.trail.received(message)
        reply = _decided(handle, message, site)
        site.trail.answered(message, reply)
        failures.pop(place, None)
        return reply
    except plugins.FAILURES as error:
        first, last, _ = failures.get(place, (error, None, ""))
        reply, told = _failure(error, message, last, node), getattr(error, "filename", "")
        traceback.clear_frames(error.__traceback__)  # else what failed stays in memory
        failures[place] = first, error, str(reply.error.reason)
    try:
        if site is not None:
            site.trail.answered(message, reply)
    except OSError as error:
        if error.filename != told:  # else the log says it already
            reply = _failure(error, message, None, node)
    return reply


def _decided(handle: Callable[[Message, Site], Message], message: Message, site: Site) -> Message:
    """The handler's reply, or the refusal of a request that came too late or at the wrong hour."""
    if expired(message):
        logger.warning("a %s request came after it had expired", message.metadata.message_type)
        return Message(Error(int(Code.EXPIRED), Code.EXPIRED.public), reply_to=message)
    site.gate.check_time()
    return handle(message, site)


def _failure(
    error: BaseException, message: Message, before: BaseException | None, node: Mapping[str, Any]
) -> Message:
    code = code_of(error)
    if isinstance(error, FeddaError):
        logger.error("%s", error)
    elif isinstance(error, OSError) and (code is Code.DISK or _is_own(error, node)):
        code, where = Code.DISK, error.filename or "a file below --state-dir"
        full = error.errno in FULL
        todo = "make room there" if full else "put back there what this account can read and write"
        why = f"{where} cannot be used ({reason(error)}), so a request is refused"
        logger.error("%s: %s, and the site goes on", why, todo)
    elif before and traceback.format_exception(before) == traceback.format_exception(error):
        logger.error("the request failed again: %s: %s", type(error).__name__, error)
    else:
        logger.exception("the request failed", exc_info=error)
    return Message(Error(int(code), code.public), reply_to=message)


def _is_own(error: OSError, node: Mapping[str, Any]) -> bool:
    """Whether an error is about a file in the site's state folder or data."""
    if not isinstance(error.filename, str | bytes | os.PathLike):
        return False  # no file, as of a connection, or one that is open
    file = Path(os.fsdecode(error.filename)).absolute()
    places = (Path(str(node[key])).absolute() for key in ("state-dir", "data") if node.get(key))
    return any(file.is_relative_to(place) for place in places)


def expired(message: Message) -> bool:
    """Whether the server no longer waits for the reply, so that work on it would be wasted."""
    return time.time() > message.metadata.created_at + message.metadata.ttl


def most_bytes(message: Message, node: Mapping[str, Any]) -> int:
    """The most bytes that a request's arrays have, by its settings; 0 if the site refuses it.

    Args:
        message: the request, of which the arrays are not there yet.
        node: this site's configuration.
    """
    try:
        site, tables = resident(tuple(sorted(node.items()))), dict(message.content)
        task, step = (dict(tables[name]) for name in ("task", "step"))  # type: ignore[call-overload]
        site.gate.check_method(str(task.get("method", "")))
        return site.gate.admit(Request.make(task, step, {}))
    except Exception:  # whoever answers the request finds the same again, and says it
        return 0


def query(message: Message, site: Site) -> Message:
    """Tell the server what this site offers; with a task, check that the site can take part."""
    tables = records.read(message.content)[1]
    if {*tables} - {"task"}:
        raise WireError(f"A question may hold a task, but holds {sorted(tables)}.")
    offer = boundary.offered(site, tables.get("task"))
    return Message(records.write(offer=offer), reply_to=message)


def look(message: Message, site: Site) -> Message:
    """Tell the server what this site's data look like; the request can choose nothing of it."""
    arrays, tables = records.read(message.content)
    if arrays or {*tables} != {"look"} or {*tables["look"]} != {"run"}:
        raise WireError(f"A request for look holds a run's name, but this one {sorted(tables)}.")
    told, table = site_statistics.tell(site)
    return Message(records.write(told, look=table), reply_to=message)


def train(message: Message, site: Site) -> Message:
    """Let the method's client train."""
    arrays, tables = _read(message, {"task", "step", "exchange", "kept"})
    arrays = site.shelf.take(arrays, tables.get("kept", {}))
    return Message(answer(site, arrays, tables, test=False).content, reply_to=message)


def evaluate(message: Message, site: Site) -> Message:
    """Let the method's client test; keep what the next request names."""
    arrays, tables = _read(message, {"task", "step", "kept"})
    arrays = site.shelf.take(arrays, {})  # a test's arrays are kept afterwards
    reply = Message(answer(site, arrays, tables, test=True).content, reply_to=message)
    site.shelf.put(arrays, tables.get("kept", {}))
    return reply


def _read(
    message: Message, allowed: Collection[str]
) -> tuple[dict[str, Packed], dict[str, Numbers]]:
    """The arrays and tables of a request.

    Raises:
        WireError: it has other tables.
    """
    arrays, tables = records.read(message.content)
    if not {"task", "step"} <= set(tables) <= set(allowed):
        raise WireError(f"A request must hold task and step, but holds {sorted(tables)}.")
    return arrays, tables


def answer(
    site: Site, arrays: Mapping[str, Packed], tables: Mapping[str, Mapping[str, Any]], test: bool
) -> SiteReply:
    """Let the client of the request's method and part train or test; every engine calls this.

    Args:
        site: this site.
        arrays: of the request, by name.
        tables: of the request: task, step, and maybe exchange.
        test: whether it came where a model is tested, and not trained.

    Raises:
        FeddaError: the site cannot or may not serve it, or the reply may not leave.
    """
    task, step = tables["task"], tables["step"]
    method, hop, part = str(task.get("method")), str(step.get("hop")), str(step.get("part"))
    parts = {part for phase in plugins.method(method).phases for part in phase.parts}
    if part not in parts | {"target"}:  # which every method has, for its test
        raise WireError(
            f"{method} asks no {shown(part)[:40]} for '{shown(hop)[:40]}'; server and site need "
            "the same version of fedda."
        )
    site.gate.check_method(method)
    client: Client = plugins.client(method, cast(PartName, part))(site)
    return client.answer(Request.make(task, step, arrays, tables.get("exchange")), test)


def make_app(
    sites: Sequence[Mapping[str, Any]] = (), failures: Failures | None = None
) -> ClientApp:
    """Make a ClientApp for real nodes, or for simulated ones.

    Args:
        sites: node configurations by partition, for engines that number their nodes; a real node
            brings its own configuration.
        failures: keeps the sites' exceptions, where server and sites are one process.
    """
    made = ClientApp()

    def node(context: Context) -> Mapping[str, Any]:
        own = context.node_config
        return sites[int(own["partition-id"])] if sites else own

    made.query()(lambda asked, own: guarded(query, asked, node(own), failures))
    made.query("look")(lambda asked, own: guarded(look, asked, node(own), failures))
    made.train()(lambda asked, own: guarded(train, asked, node(own), failures))
    made.evaluate()(lambda asked, own: guarded(evaluate, asked, node(own), failures))
    return made


app = make_app()
