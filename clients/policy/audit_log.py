"""The audit log of a site: every message in and out, and the decision about it, but never a value.

    started     the client began, with this policy
    received    a request came: its kinds, shapes, dtypes, bytes and hash
    answered    the reply that was handed to the connection, in the same way
    refused     the code that went back instead of a reply
    joins       the site is about to sum gradients: groups, sizes and how many sums
    summed      per group, the frames with gradients that left: how many, their bytes, and the hash
                of all of them, one after the other

The hash of a message is `fedda.records.digest`. The server keeps the same hashes, so that both logs
can be laid side by side. A request is booked before anything is done with it.
"""

import hashlib
import logging
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Message

from fedda import __version__, records
from fedda.errors import Code, WireError
from fedda.exchange import Stream
from fedda.ops.chain import Chain, Entry
from fedda.wire.packing import Packed

from ..site.request import HEADING, Request

SHAPES = 1000  # of one array; a request could name any number
PLACE = ("run", "training", *HEADING)
LETTERS = 100  # of a name that a server sent

logger = logging.getLogger("fedda.site")
AUDIT = "audit.jsonl"  # the audit log's name in the client's state folder

# What a site calls an event -> what the server calls it.
AT_SERVER = {
    "received": "sent",
    "answered": "received",
    "refused": "received",
    "summed": "summed",
}
WORDS = {
    "sent": "a request of the server",
    "received": "a reply of this site",
    "summed": "gradients of this site",
}


class AuditLog:
    """Writes a site's audit log; without a folder it writes nothing."""

    def __init__(self, state: Path | None) -> None:
        self._chain = None if state is None else Chain(state / AUDIT)
        self._run_id = 0  # Flower's number of the run that is worked for
        self._asked: dict[str, Any] = {}  # where the request that is worked on belongs

    def started(self, site: str, policy: str) -> None:
        """Note that the client begins, with the site's name and the hash of its policy."""
        digest = hashlib.sha256(policy.encode()).hexdigest()
        self._add("started", site=site, version=__version__, policy=digest)

    def received(self, message: Message) -> None:
        """Note a request before anything is done with it."""
        self._run_id = message.metadata.run_id
        if self._chain is not None:
            about = _described(message)
            self._add("received", **_which(message), **about)
            self._asked = {key: about[key] for key in PLACE if key in about}

    def answered(self, request: Message, reply: Message) -> None:
        """Note a reply before it is handed to the connection."""
        if self._chain is None:
            return
        if reply.has_error():
            code = Code(reply.error.code).name
            about = {"code": code, "sha256": records.digest(reply)}
            self._add("refused", **_which(request), **self._asked, **about)
        else:
            self._add("answered", **_which(request), **self._asked, **_described(reply))
        self._asked = {}

    def joins(self, request: Request) -> None:
        """Note that the site is about to connect to an exchange."""
        assert request.exchange is not None
        invitation = request.exchange.invitation
        groups = {g.name: {"values": g.size, "sums": g.syncs} for g in invitation.groups}
        self._add("joins", **self._place(request), groups=groups)

    def summed(self, request: Request, stream: Stream) -> None:
        """Note what left in an exchange, after its connection was closed."""
        for group, tally in stream.tallies.items():
            self._add("summed", **self._place(request), group=group, **tally.about())

    def _place(self, request: Request) -> dict[str, Any]:
        """To which run, training and round a request belongs."""
        task = request.task
        place = {"run_id": self._run_id, "run": task.run, "training": task.label}
        return place | {"round": request.round, "hop": request.hop}

    def _add(self, event: str, **facts: Any) -> None:
        if self._chain is not None:
            self._chain.add(event=event, **facts)


def _which(request: Message) -> dict[str, Any]:
    """What tells one request from others, and connects it with its reply."""
    meta = request.metadata
    kind, message = meta.message_type[:LETTERS], meta.message_id[:16]
    return {"run_id": meta.run_id, "message": message, "kind": kind}


def _described(message: Message) -> dict[str, Any]:
    """A message without its values."""
    about: dict[str, Any] = {"sha256": records.digest(message)}
    content = message.content
    about["bytes"] = sum(records.size(content).values())
    try:
        arrays, tables = records.read(content)
    except WireError:
        return about | {"unreadable": True}
    task, step = tables.get("task", {}), tables.get("step", {})
    asked = tables.get("look", {})
    if "run" in asked:
        about["run"] = _short(asked["run"])
    if task:
        about["run"] = _short(task.get("run"))
        names = (task.get(key) for key in ("method", "seed", "target"))
        about["training"] = _short("-".join(str(name) for name in names if name not in (None, "")))
    about |= {key: _short(step[key]) for key in HEADING if key in step}
    names = [n for table in ("step", "metrics", "look") for n in tables.get(table, {})]
    about["numbers"] = sorted(str(_short(n)) for n in names if n not in HEADING)
    about["arrays"] = [_array(name, packed) for name, packed in arrays.items()]
    return about


def _array(name: str, packed: Packed) -> Mapping[str, Any]:
    entries, layout = packed.manifest.entries, packed.manifest
    about = {"name": _short(name), "kind": str(layout.kind), "dtype": layout.floats}
    about |= {"bytes": layout.nbytes, "entries": len(entries)}
    return about | {"shapes": [list(entry.shape) for entry in entries[:SHAPES]]}


def _short(value: object) -> object:
    return value if isinstance(value, int | float | None) else str(value)[:LETTERS]


def compare(site: str, here: Iterable[Entry], there: Iterable[Entry]) -> tuple[int, list[str]]:
    """Compare two logs -> how many payloads are in both, and a sentence about each other one.

    Compared are the runs of the server's record. Questions about what a site offers are in no
    run's record, nor are sums of which no gradient left.
    """
    theirs = [entry for entry in there if entry.get("site") == site]
    runs = {entry.get("run_id") for entry in theirs}
    mine = [e for e in here if e.get("run_id") in runs and e.get("event") in AT_SERVER]
    mine = [e for e in mine if e.get("kind") != "query" and e.get("frames") != 0]
    ours = Counter((AT_SERVER[str(e["event"])], str(e.get("sha256"))) for e in mine)
    known = Counter((str(e.get("event")), str(e.get("sha256"))) for e in theirs)
    rounds = {str(e.get("sha256")): e.get("round") for e in (*mine, *theirs)}
    odd = [
        f"{_words(key, count, rounds)} in this site's log, but not in the server's record"
        for key, count in (ours - known).items()
    ]
    odd += [
        f"{_words(key, count, rounds)} in the server's record, but not in this site's log"
        for key, count in (known - ours).items()
    ]
    return sum((ours & known).values()), odd


def _words(key: tuple[str, str], count: int, rounds: Mapping[str, object]) -> str:
    event, digest = key
    often = f", {count} times," if count > 1 else ""
    when = rounds[digest]
    of = f" of round {when}" if isinstance(when, int) else ""
    return f"{WORDS.get(event, event)}{of} (hash {digest[:16]}) is{often}"
