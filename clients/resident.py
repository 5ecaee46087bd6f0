"""The resident node: one process that holds a site's data and answers a SuperLink's messages.

It runs only the ClientApp that the site installed itself. Whatever program the server ships with a
run is neither fetched nor executed, and messages of another kind than train, evaluate and query are
refused. Nothing that an exception says leaves the site: only an error code with our own wording.
"""

import logging
import signal
import threading
import time
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from flwr.app import Context, Error, Message, RecordDict
from flwr.proto.message_pb2 import ObjectTree

from fedda import keys
from fedda.errors import Code, KeyFileError, code_of

from .failures import RunOver, SessionLost, Unreachable
from .fleet import Connection, Fleet
from .patience import OnEvent, join, persist

log = logging.getLogger("fedda.client")

KINDS = ("train", "evaluate", "query")
RUNS_KEPT = 8
OF_THE_CONNECTION = (RunOver, Unreachable, SessionLost, KeyFileError)
IDLE_POLL_S = 0.5
BUSY_FOR_S = 10.0
PATIENCE_S = 120.0

Value = bool | int | float | str
App = Callable[[Message, Context], Message]


class Stopped(BaseException):
    """A signal asked this process to end. No `except Exception` may take it for a failure."""


class Resident:
    """Turns messages into replies; keeps one Context per run, so data and state stay in memory."""

    def __init__(self, app: App, node_config: Mapping[str, Value], on_event: OnEvent) -> None:
        self.app = app
        self.node_config = dict(node_config)
        self.tell = on_event
        self.contexts: OrderedDict[int, Context] = OrderedDict()

    def answer(
        self, head: Message, fetch: Callable[[], Message], node_id: int, now: float | None = None
    ) -> Message:
        """Reply to one message; its content is fetched only if it is to be computed.

        Args:
            head: the message's metadata.
            fetch: gets the whole message.
            node_id: this node's id at the server.
            now: seconds since the epoch, by default the clock's.
        """
        meta = head.metadata
        kind = meta.message_type.split(".")[0]
        if kind not in KINDS:
            self.tell("refused", f"a message of the kind {kind!r}; this node serves {list(KINDS)}")
            return failure(Code.WIRE, head)
        late = (time.time() if now is None else now) - meta.created_at - meta.ttl
        if late > 0:
            self.tell("refused", f"a {kind} request that expired {late:.1f} s ago")
            return failure(Code.EXPIRED, head)
        try:
            message = fetch()
        except OF_THE_CONNECTION:
            raise
        except Exception:
            log.exception("a %s request cannot be read (run %d)", kind, meta.run_id)
            self.tell("failed", f"{kind}: {Code.WIRE.public}")
            return failure(Code.WIRE, head)
        try:
            reply = self.app(message, self._context(meta.run_id, node_id))
        except (Exception, SystemExit) as error:
            log.exception("%s failed (run %d)", kind, meta.run_id)
            code = code_of(error)
            self.tell("failed", f"{kind}: {code.public}")
            return failure(code, head)
        return self._checked(reply, head, kind)

    def _context(self, run_id: int, node_id: int) -> Context:
        context = self.contexts.get(run_id)
        if context is None or context.node_id != node_id:
            state = RecordDict() if context is None else context.state
            context = Context(
                run_id=run_id,
                node_id=node_id,
                node_config=dict(self.node_config),
                state=state,
                run_config={},
            )
            self.contexts[run_id] = context
        self.contexts.move_to_end(run_id)
        while len(self.contexts) > RUNS_KEPT:
            self.contexts.popitem(last=False)
        return context

    def _checked(self, reply: object, head: Message, kind: str) -> Message:
        """The reply if it is one; an error only with a code of ours, in our own words."""
        if not isinstance(reply, Message) or reply.has_content() == reply.has_error():
            log.error("%s returned %s, which is no reply", kind, type(reply).__name__)
            self.tell("failed", f"{kind}: {Code.INTERNAL.public}")
            return failure(Code.INTERNAL, head)
        if reply.has_error():
            code = _known(reply.error.code)
            if reply.error.reason != code.public:
                log.error("%s answered with error %s", kind, reply.error)
            self.tell("failed", f"{kind}: {code.public}")
            return failure(code, head)
        return reply


def failure(code: Code, reply_to: Message) -> Message:
    """An error reply that carries the code and its public wording, and nothing else."""
    return Message(Error(code=int(code), reason=code.public), reply_to=reply_to)


def serve(
    app: App,
    *,
    superlink: str,
    node_config: Mapping[str, Value],
    root_certificates: Path | None = None,
    key: Path | None = None,
    insecure: bool = False,
    poll: float = 0.05,
    on_event: OnEvent | None = None,
    state: Path | None = None,
    patience: float = PATIENCE_S,
) -> None:
    """Answer messages until SIGINT or SIGTERM; reconnect by itself whenever the server goes away.

    Args:
        app: the ClientApp, called as app(message, context).
        superlink: host:port of the server's public listener.
        node_config: what the app is told about this site; it never leaves the site.
        root_certificates: the authority's ca.crt; None means the system's authorities.
        key: the site's private key; None joins without, where the server allows it.
        insecure: plain HTTP, for development on one machine.
        poll: seconds between two questions for work while a run is going on.
        on_event: told (kind, sentence) of whatever a user may want to see.
        state: a folder of this node alone. With it a node that was killed can take up its session
            at once; without it the server refuses the key until the old session has timed out.
        patience: seconds to go on trying while the server refuses the key.

    Raises:
        KeyFileError: the key or a certificate is missing, wrong, expired, revoked or unregistered.
    """
    tell = on_event or (lambda kind, text: log.info("%s: %s", kind, text))
    resident = Resident(app, node_config, tell)
    root = None
    if insecure:
        key = None
    elif root_certificates is not None:
        keys.check_certificate(root_certificates)
        root = root_certificates.read_bytes()
    private = None if key is None else keys.load_node_key(key)
    memory = None if state is None or key is None else state / "node-id"

    def connect() -> Fleet:
        return Fleet(
            superlink,
            insecure=insecure,
            root_certificates=root,
            key=private,
            known_as=_recall(memory),
        )

    with _signals():
        try:
            while True:
                connection = join(connect, superlink, tell, patience)
                try:
                    if memory is not None:
                        memory.write_text(str(connection.node_id))
                    tell("connected", f"to {superlink} as node {connection.node_id}")
                    work(resident, connection, poll)
                except SessionLost:
                    tell("lost", f"{superlink} does not know this session any more; joining again")
                finally:
                    connection.close()
        except Stopped:
            tell("stopped", "left the server on request")


def work(resident: Resident, connection: Connection, poll: float) -> None:
    """Pull, answer and push, for ever.

    Raises:
        SessionLost: the server forgot this node.
    """
    last = time.monotonic()
    while True:
        asked = time.monotonic()
        got = persist(connection.receive, resident.tell)
        if got is None:
            now = time.monotonic()
            # A slow answer means a busy server: a node never takes more than a third of its time.
            pause = max(poll, 2 * (now - asked))
            time.sleep(pause if now - last < BUSY_FOR_S else max(pause, IDLE_POLL_S))
            continue
        _exchange(resident, connection, *got)
        last = time.monotonic()


def _exchange(resident: Resident, connection: Connection, head: Message, tree: ObjectTree) -> None:
    meta = head.metadata
    ends = time.monotonic() + max(0.0, meta.created_at + meta.ttl - time.time())
    began = time.monotonic()
    resident.tell("work", f"{meta.message_type} for run {meta.run_id}")
    try:
        reply = resident.answer(
            head,
            lambda: persist(lambda: connection.fetch(head, tree), resident.tell, ends),
            connection.node_id,
        )
        seconds = time.monotonic() - began
        try:
            persist(lambda: connection.send(reply, seconds), resident.tell, ends)
        except OF_THE_CONNECTION:
            raise
        except Exception:
            log.exception("the reply to %s cannot be sent", meta.message_type)
            sorry = failure(Code.INTERNAL, head)
            persist(lambda: connection.send(sorry, seconds), resident.tell, ends)
        resident.tell("done", f"{meta.message_type} for run {meta.run_id} in {seconds:.2f} s")
    except (RunOver, Unreachable):
        resident.tell("dropped", f"{meta.message_type}: run {meta.run_id} no longer waits for it")


@contextmanager
def _signals() -> Iterator[None]:
    """Turn the first SIGINT or SIGTERM into Stopped; a second ends the process at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}

    def stop(number: int, frame: types.FrameType | None) -> None:
        for each in before:
            signal.signal(each, signal.SIG_DFL)
        raise Stopped

    for each in before:
        signal.signal(each, stop)
    try:
        yield
    finally:
        for each, handler in before.items():
            signal.signal(each, handler)


def _recall(memory: Path | None) -> int | None:
    if memory is None:
        return None
    try:
        return int(memory.read_text())
    except (OSError, ValueError):
        return None


def _known(code: int) -> Code:
    try:
        return Code(code)
    except ValueError:
        return Code.INTERNAL
