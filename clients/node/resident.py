"""The resident node: one process that holds a site's data and answers a SuperLink's messages.

It runs only the ClientApp that the site installed itself. A program that the server sends with a
run is neither fetched nor executed. Only the server's own requests are served: messages of other
nodes are dropped, and other kinds than train, evaluate and query are refused. The text of an
exception never leaves the site, only an error code with its fixed wording.
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

from fedda import __version__
from fedda.errors import Code, KeyFileError, code_of
from fedda.flower import SUPERLINK_NODE_ID, ObjectTree
from fedda.ops import certificate, keys, refusal

from .failures import RunOver, SessionLost, Unreachable
from .fleet import Fleet, FleetConnection, MostBytes
from .interrupt import Interrupt
from .lanes import Lanes
from .patience import OnEvent, join, persist
from .unfinished import Unfinished

log = logging.getLogger("fedda.client")

KINDS = ("train", "evaluate", "query")
RUNS_KEPT = 8
CONNECTION_ERRORS = (RunOver, Unreachable, SessionLost, KeyFileError)
IDLE_POLL_S = 0.5
BUSY_FOR_S = 10.0
PATIENCE_S = 120.0

Value = bool | int | float | str
App = Callable[[Message, Context], Message]
OnRefusal = Callable[[Message, Message], None]


class Stopped(BaseException):
    """A signal asked this process to end. No `except Exception` may take it for a failure."""


class Resident:
    """Turns messages into replies; keeps one Context per run, so data and state stay in memory."""

    def __init__(
        self,
        app: App,
        node_config: Mapping[str, Value],
        on_event: OnEvent,
        on_refusal: OnRefusal | None = None,
    ) -> None:
        self.app = app
        self.note = on_refusal
        self.node_config = dict(node_config)
        self.tell = on_event
        self.contexts: OrderedDict[int, Context] = OrderedDict()

    def answer(
        self, head: Message, fetch: Callable[[], Message], node_id: int, now: float | None = None
    ) -> Message:
        """Reply to one message; fetch its content only if this node is going to work on it.

        Args:
            head: the message's metadata.
            fetch: gets the whole message.
            node_id: this node's id at the server.
            now: the time in seconds since 1970, by default the clock's.
        """
        meta = head.metadata
        kind = meta.message_type.split(".")[0]
        if kind not in KINDS:
            self.tell("refused", f"a message of the kind {kind!r}; this node serves {list(KINDS)}")
            return self._refused(Code.WIRE, head)
        late = (time.time() if now is None else now) - meta.created_at - meta.ttl
        if late > 0:
            self.tell("refused", f"a {kind} request that expired {late:.1f} s ago")
            return self._refused(Code.EXPIRED, head)
        try:
            message = fetch()
        except CONNECTION_ERRORS:
            raise
        except Exception:
            log.exception("a %s request cannot be read (run %d)", kind, meta.run_id)
            self.tell("failed", f"{kind}: {Code.WIRE.public}")
            return self._refused(Code.WIRE, head)
        try:
            reply = self.app(message, self._context(meta.run_id, node_id))
        except (Exception, SystemExit) as error:
            log.exception("%s failed (run %d)", kind, meta.run_id)
            code = code_of(error)
            self.tell("failed", f"{kind}: {code.public}")
            return failure(code, head)
        return self._checked(reply, head, kind)

    def _refused(self, code: Code, head: Message) -> Message:
        """Refuse a message that the app never sees, and let that be noted."""
        reply = failure(code, head)
        if self.note is not None:
            self.note(head, reply)
        return reply

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
        """Return the app's reply if it is valid; reduce an error to its code and fixed wording."""
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
    """An error reply with the code and its public wording, and nothing else."""
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
    on_refusal: OnRefusal | None = None,
    state: Path | None = None,
    patience: float = PATIENCE_S,
    proxy: str = "",
    most_bytes: MostBytes | None = None,
) -> None:
    """Answer messages until SIGINT or SIGTERM; reconnect whenever the connection is lost.

    Args:
        app: the ClientApp, called as app(message, context).
        superlink: host:port of the server's public listener.
        node_config: the settings of this site for the app; they never leave the site.
        root_certificates: the authority's ca.crt; None means the system's authorities.
        key: the site's private key; None joins without a key, if the server allows that.
        insecure: plain HTTP, for development on one machine.
        poll: seconds between two requests for messages while a run is going on.
        on_event: called with (kind, sentence) for everything that a user may want to see.
        on_refusal: called with each message that is refused without the app, and with the refusal.
        state: a folder of this node alone. With it a node that was killed can join again at once;
            without it the server refuses the key until the old session has timed out.
        patience: seconds to keep trying while the server refuses the key.
        proxy: the one that the environment names for this server, for what is told.
        most_bytes: how many bytes the arrays of a request may have, by all else that it says.

    Raises:
        KeyFileError: the key or a certificate is missing, wrong, expired, revoked or unregistered.
    """
    tell = on_event or (lambda kind, text: log.info("%s: %s", kind, text))
    resident = Resident(app, node_config, tell, on_refusal)
    root = None
    if insecure:
        key = None
    elif root_certificates is not None:
        certificate.check_certificate(root_certificates)
        root = certificate.pem(root_certificates)
    private = None if key is None else keys.load_node_key(key)
    remembers = state is not None and key is not None
    id_file = state / "node-id" if state is not None and remembers else None
    unfinished = Unfinished(state / "unfinished" if state is not None and remembers else None)
    known_as, again = _read_id(id_file), False
    named = {key: str(node_config.get(key, "")) for key in ("role", "name")}
    offers = refusal.offers(**named, version=__version__) if named["role"] else ""

    def connect() -> Fleet:
        return Fleet(
            superlink,
            insecure=insecure,
            root_certificates=root,
            key=private,
            known_as=known_as,
            on_lost=interrupt.ask,
            offers=offers,
        )

    lanes = Lanes(superlink, private, tell, most_bytes)
    with _signals(), Interrupt() as interrupt:
        try:
            while True:
                session = join(connect, superlink, tell, patience, again, proxy)
                connection = lanes.over(session)
                try:
                    known_as, again = connection.node_id, True
                    if id_file is not None:
                        id_file.write_text(str(connection.node_id))
                    tell("connected", f"to {superlink} as node {connection.node_id}")
                    excuse(unfinished, connection, tell, on_refusal)
                    work(resident, connection, poll, unfinished, interrupt)
                except SessionLost:
                    tell("lost", f"{superlink} does not know this session any more; joining again")
                finally:
                    session.close()
        except Stopped:
            tell("stopped", "left the server on request")
        finally:
            lanes.close()


def excuse(
    unfinished: Unfinished,
    connection: FleetConnection,
    tell: OnEvent,
    on_refusal: OnRefusal | None = None,
) -> None:
    """Tell the server about a request that an earlier process or session did not answer.

    Raises:
        SessionLost: the server forgot this node.
    """
    head = unfinished.head()
    if head is not None and head.metadata.dst_node_id == connection.node_id:
        meta = head.metadata
        ends = time.monotonic() + max(0.0, meta.created_at + meta.ttl - time.time())
        reply = failure(Code.RESTARTED, head)
        if on_refusal is not None:
            on_refusal(head, reply)
        try:
            persist(lambda: connection.send(reply), tell, ends)
            tell("failed", f"{meta.message_type} for run {meta.run_id}: {Code.RESTARTED.public}")
        except (RunOver, Unreachable):
            pass  # the run has ended, the request has expired, or it was answered after all
    unfinished.end()


def work(
    resident: Resident,
    connection: FleetConnection,
    poll: float,
    unfinished: Unfinished | None = None,
    interrupt: Interrupt | None = None,
) -> None:
    """Pull messages, answer them and push the replies, without end.

    Args:
        resident: answers the messages.
        connection: the session at the server.
        poll: seconds between two requests for messages while a run is going on.
        unfinished: remembers the request that is being worked on.
        interrupt: ends the work when the session is lost.

    Raises:
        SessionLost: the server forgot this node.
    """
    unfinished, interrupt = unfinished or Unfinished(), interrupt or Interrupt()
    last_message = time.monotonic()

    while True:
        asked = time.monotonic()
        received = persist(connection.receive, resident.tell)
        if received is None:
            now = time.monotonic()
            # A slow answer means a busy server, unless it only held the request: a node keeps it
            # busy at most a third of the time.
            pause = max(poll, 2 * (now - asked - connection.waited))
            # There is no need to ask less often when idle if the server holds requests.
            busy = connection.waited > 0 or now - last_message < BUSY_FOR_S
            time.sleep(pause if busy else max(pause, IDLE_POLL_S))
            continue
        last_message = time.monotonic()
        head, tree = received
        meta = head.metadata
        if meta.src_node_id != SUPERLINK_NODE_ID or meta.reply_to_message_id:
            resident.tell("refused", f"a message of node {meta.src_node_id}, not of the server")
            continue
        unfinished.begin(head)
        with interrupt.working():
            _exchange(resident, connection, head, tree)
        unfinished.end()
        last_message = time.monotonic()


def _exchange(
    resident: Resident, connection: FleetConnection, head: Message, tree: ObjectTree
) -> None:
    """Fetch one message, answer it and send the reply; give up when the server stops waiting."""
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
            persist(lambda: connection.send(reply), resident.tell, ends)
        except CONNECTION_ERRORS:
            raise
        except Exception:
            log.exception("the reply to %s cannot be sent", meta.message_type)
            error = failure(Code.INTERNAL, head)
            persist(lambda: connection.send(error), resident.tell, ends)
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


def _read_id(file: Path | None) -> int | None:
    """The node id that an earlier process of this node had, if it is known."""
    if file is None:
        return None
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _known(code: int) -> Code:
    try:
        return Code(code)
    except ValueError:
        return Code.INTERNAL
