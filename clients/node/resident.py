"""The resident node: one process that holds a site's data and answers the requests of runs.

It runs only the ClientApp that the site installed itself. A program that the server sends with a
run is neither fetched nor executed. Other kinds of requests than train, evaluate and query are
refused. The text of an exception never leaves the site, only an error code with its fixed wording.
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
from fedda.errors import Code, code_of
from fedda.lane.parcels import Incoming
from fedda.ops import certificate, keys, refusal
from fedda.ops.allocator import one_pool

from .failures import Away, RunOver, SessionLost
from .fleet import Fleet
from .interrupt import Interrupt
from .lanes import Lanes, MostBytes
from .patience import OnEvent, join

log = logging.getLogger("fedda.client")

KINDS = ("train", "evaluate", "query")
RUNS_KEPT = 8
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
            self.tell("refused", f"a request to {kind} that expired {late:.1f} s ago")
            return self._refused(Code.EXPIRED, head)
        try:
            message = fetch()
        except (Away, RunOver):
            raise
        except Exception:
            log.exception("a %s request cannot be read (run %d)", kind, meta.run_id)
            self._told(kind, Code.WIRE)
            return self._refused(Code.WIRE, head)
        try:
            reply = self.app(message, self._context(meta.run_id, node_id))
        except (Exception, SystemExit) as error:
            log.exception("%s failed (run %d)", kind, meta.run_id)
            code = code_of(error)
            self._told(kind, code)
            return failure(code, head)
        return self._checked(reply, head, kind)

    def _told(self, kind: str, code: Code) -> None:
        """Say that a request failed, without advice that is meant for the server's operator."""
        self.tell("failed", f"{kind}: {code.public.partition(';')[0]}; see above")

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
            self._told(kind, Code.INTERNAL)
            return failure(Code.INTERNAL, head)
        if reply.has_error():
            code = _known(reply.error.code)
            if reply.error.reason != code.public:
                log.error("%s answered with error %s", kind, reply.error)
            self._told(kind, code)
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

    one_pool(large=2**26, spare=2**28)
    lanes = Lanes(superlink, tell, most_bytes)
    with _signals(), Interrupt() as interrupt:
        try:
            while True:
                session = join(connect, superlink, tell, patience, again, proxy)
                try:
                    known_as, again = session.node_id, True
                    if id_file is not None:
                        id_file.write_text(str(session.node_id))
                    tell("connected", f"to {superlink} as node {session.node_id}")
                    lanes.over(session)
                    work(resident, lanes, interrupt)
                except SessionLost:
                    tell("lost", f"{superlink} does not know this session any more; joining again")
                finally:
                    session.close()
        except Stopped:
            tell("stopped", "left the server on request")
        finally:
            lanes.close()


def work(resident: Resident, lanes: Lanes, interrupt: Interrupt | None = None) -> None:
    """Take requests, answer them and send the replies, without end.

    Args:
        resident: answers the requests.
        lanes: bring them.
        interrupt: ends the work when the session is lost.

    Raises:
        SessionLost: the server forgot this node.
    """
    interrupt = interrupt or Interrupt()
    while True:
        if (received := lanes.receive()) is None:
            continue
        with interrupt.working():
            _exchange(resident, lanes, *received)


def _exchange(resident: Resident, lanes: Lanes, head: Message, incoming: Incoming) -> None:
    """Answer one request and send the reply; give up when the run stops waiting."""
    meta = head.metadata
    began = time.monotonic()
    resident.tell("work", f"{meta.message_type} for run {meta.run_id}")
    try:
        reply = resident.answer(head, lambda: lanes.fetch(incoming), lanes.node_id)
        seconds = time.monotonic() - began
        try:
            lanes.send(reply)
        except RunOver:
            raise
        except Exception:
            log.exception("the reply to %s cannot be sent", meta.message_type)
            lanes.send(failure(Code.INTERNAL, head))
        resident.tell("done", f"{meta.message_type} for run {meta.run_id} in {seconds:.2f} s")
    except RunOver:
        resident.tell("dropped", f"{meta.message_type}: run {meta.run_id} no longer waits for it")
    except Away:
        resident.tell("put off", f"{meta.message_type}: run {meta.run_id} cannot be reached")


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
