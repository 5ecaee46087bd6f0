"""Flower message <-> NumPyClient: the only place where both Flower APIs meet.

Everything that enters or leaves a site passes here, so here the contract is checked, and here an
exception becomes a code: Flower would send its text to the server, and the text may quote data.
"""

import json
import logging
import time
from collections.abc import Callable, Collection, Mapping
from typing import Any

import numpy as np
from flwr.app import Error, Message

from fedda import records
from fedda.config import Task, layouts, method_module
from fedda.errors import Code, FeddaError, WireError, code_of
from fedda.folders import load_half
from fedda.wire import EVALUATION, Contract, Manifest, Packed, Role, Rule

from .base import EXCHANGE, MANIFESTS, STEP, Client, Exchange, Numbers
from .site import Site, resident

logger = logging.getLogger("fedda.site")


def guarded(
    handle: Callable[[Message, Site], Message], message: Message, node: Mapping[str, Any]
) -> Message:
    """Call a handler; turn its exception into a code and our own words.

    The exception's text stays in the site's log.
    """
    code = Code.EXPIRED
    try:
        if not expired(message):
            return handle(message, resident(tuple(sorted(node.items()))))
        logger.warning("a %s request came after its time", message.metadata.message_type)
    except FeddaError as error:
        code = code_of(error)
        logger.error("%s", error)
    except Exception as error:
        code = code_of(error)
        logger.exception("the request failed")
    return Message(Error(int(code), code.public), reply_to=message)


def expired(message: Message) -> bool:
    """Whether nobody waits for the reply any more, so that work on it would be wasted."""
    return time.time() > message.metadata.created_at + message.metadata.ttl


def query(message: Message, site: Site) -> Message:
    """Answer the server's question what this site offers."""
    offer = Client(site).get_properties({})
    return Message(records.write(offer=offer), reply_to=message)


def train(message: Message, site: Site) -> Message:
    """Check what came, let the method's client train, check what goes."""
    arrays, tables, task = _open(message, {"task", "step", "exchange"})
    client = _client(task, site)
    contract = _contract(task, arrays)
    model = site.workspace(task).schema
    _check(contract.enters, arrays, _told(tables), task, model, site, "received")
    for name, packed in arrays.items():
        packed.check_finite(f"'{name}' of the server")
    if "exchange" in tables:
        asked = {g.name: g.size for g in Exchange.read(tables["exchange"]).invitation.groups}
        contract.check_groups(site.role, asked, layouts(task.method, task.options, model))
    flat, _, numbers = client.fit(*_as_parameters(arrays, tables))
    texts = json.loads(numbers.pop(MANIFESTS))
    reply = {
        name: Packed(Manifest.parse(text), part.tobytes())
        for (name, text), part in zip(texts, flat, strict=True)
    }
    for name, packed in reply.items():
        packed.check_finite(f"'{name}' of this site")
    _check(contract.leaves, reply, numbers, task, model, site, "to be sent")
    return _reply(message, site, reply, numbers)


def evaluate(message: Message, site: Site) -> Message:
    """Test the model that came."""
    arrays, tables, task = _open(message)
    model = site.workspace(task).schema
    contract: Contract = getattr(method_module(task.method), "EVALUATION", EVALUATION)
    _check(contract.enters, arrays, _told(tables), task, model, site, "received", tested=True)
    _, _, numbers = _client(task, site).evaluate(*_as_parameters(arrays, tables))
    _check(contract.leaves, {}, numbers, task, model, site, "to be sent")
    return _reply(message, site, {}, numbers)


def _open(
    message: Message, allowed: Collection[str] = ("task", "step")
) -> tuple[dict[str, Packed], dict[str, Numbers], Task]:
    arrays, tables = records.read(message.content)
    if not {"task", "step"} <= set(tables) <= set(allowed):
        raise WireError(f"A request must hold task and step, but holds {sorted(tables)}.")
    return arrays, tables, Task.parse(tables["task"])


def _told(tables: Mapping[str, Numbers]) -> Numbers:
    """A request's numbers but for the round, which all have and `Request.read` checks."""
    return {name: value for name, value in tables["step"].items() if name != "round"}


def _contract(task: Task, arrays: Mapping[str, Packed]) -> Contract:
    """The method's, or where it has stages that of the one that these arrays belong to."""
    module = method_module(task.method)
    return module.contract(arrays) if hasattr(module, "contract") else module.CONTRACT


def _client(task: Task, site: Site) -> Client:
    half = load_half("clients", task.method)
    return (half.Source if site.role == "source" else half.Target)(site)


def _as_parameters(
    arrays: dict[str, Packed], tables: dict[str, Numbers]
) -> tuple[list[np.ndarray], Numbers]:
    """What a NumPyClient is called with."""
    config = dict(tables["task"]) | {f"{STEP}{k}": v for k, v in tables["step"].items()}
    config |= {f"{EXCHANGE}{k}": v for k, v in tables.get("exchange", {}).items()}
    config[MANIFESTS] = json.dumps([[n, p.manifest.text] for n, p in arrays.items()])
    return [np.frombuffer(p.buffer, np.uint8) for p in arrays.values()], config


def _check(
    rules: Mapping[Role, Rule],
    arrays: Mapping[str, Packed],
    numbers: Numbers,
    task: Task,
    model: Manifest,
    site: Site,
    what: str,
    tested: bool = False,
) -> None:
    rule = rules.get(site.role)
    if rule is None:
        raise WireError(f"{task.method} has no part for a {site.role} here.")
    where = f"{site.name} ({site.role}, {task.method}, {what})"
    others = layouts(task.method, task.options, model, tested)
    rule.check(arrays, numbers, model=model, sites=task.sites, where=where, layouts=others)


def _reply(message: Message, site: Site, arrays: dict[str, Packed], numbers: Numbers) -> Message:
    content = records.write(arrays, metrics=numbers)
    sent = ", ".join(f"{kind} {n:,} bytes" for kind, n in records.size(content).items())
    logger.info("sent after %s: %s", message.metadata.message_type, sent)
    return Message(content, reply_to=message)
