"""The resident node: what it answers, what it refuses to say, and how it waits for a server."""

import os
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Error, Message, Metadata, RecordDict
from typer.testing import CliRunner

from clients.node import fleet, patience, resident
from clients.node.failures import CLOSED, Refused, RunOver, SessionLost, Unreachable, ask
from clients.node.fleet import Fleet
from fedda.cli.client import _check_options, _exec_stock, _lock
from fedda.cli.client import app as client_command
from fedda.data import verify
from fedda.errors import Code, ConfigError, DataError, FeddaError, KeyFileError, WireError
from fedda.lane.parcels import Outgoing
from fedda.ops import certificate, keys
from fedda.ops.refusal import Refusal, offered, offers
from tests.patience import PATIENCE

SECRET = "patient-4711"
NODE = 7


def message(
    kind: str = "train",
    *,
    run_id: int = 3,
    age: float = 0.0,
    ttl: float = 60,
    held: RecordDict | None = None,
) -> Message:
    """A message as it comes from a server: sent some seconds ago by node 1."""
    held = held or RecordDict({"c": ConfigRecord({"x": 1})})
    metadata = Metadata(
        run_id=run_id,
        message_id="m",
        src_node_id=1,
        dst_node_id=NODE,
        reply_to_message_id="",
        group_id="",
        created_at=time.time() - age,
        ttl=ttl,
        message_type=kind,
    )
    return Message(content=held, metadata=metadata)  # pyright: ignore


def echo(received: Message, context: Context) -> Message:
    return Message(received.content, reply_to=received)


class FakeLanes:
    """Lanes in memory: hand out requests, keep replies, and forget the node at the end."""

    node_id = NODE

    def __init__(self, *inbox: Message) -> None:
        self.inbox = list(inbox)
        self.replies: list[Message] = []
        self.fetched = 0
        self.send_failures: Sequence[Exception] = []
        self.fetch_failure: Exception | None = None

    def over(self, session: object) -> None: ...

    def close(self) -> None: ...

    def receive(self) -> tuple[Message, Message] | None:
        if not self.inbox:
            raise SessionLost
        got = self.inbox.pop(0)
        return got, got

    def fetch(self, incoming: Message) -> Message:
        self.fetched += 1
        if self.fetch_failure is not None:
            raise self.fetch_failure
        return incoming

    def send(self, reply: Message) -> None:
        if self.send_failures:
            failure, *self.send_failures = self.send_failures
            raise failure
        self.replies.append(reply)


class Session:
    """A session at a server that hands out nothing."""

    node_id = NODE

    def __init__(self, *args: object, **more: object) -> None: ...

    def close(self) -> None: ...


class Clock:
    """Time that passes only where the program sleeps."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.slept: list[float] = []

    def monotonic(self) -> float:
        return self.now

    def time(self) -> float:
        return time.time()

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(resident, "time", made)
    monkeypatch.setattr(patience, "time", made)
    return made


def answer_all(app: resident.App, lanes: FakeLanes) -> list[tuple[str, str]]:
    """Let a node work until the server forgets it -> the events."""
    events: list[tuple[str, str]] = []
    node = resident.Resident(app, {"role": "source"}, lambda *event: events.append(event))
    with pytest.raises(SessionLost):
        resident.work(node, lanes)  # type: ignore[arg-type]
    return events


def everything(reply: Message) -> bytes:
    """Return all bytes that a reply puts on a lane."""
    made = Outgoing.of(reply, "m")
    return b"".join([made.head, *made.arrays])


@pytest.mark.parametrize("kind", ["train", "evaluate", "query", "train.special"])
def test_a_message_gets_the_apps_reply(clock: Clock, kind: str) -> None:
    lanes = FakeLanes(message(kind))
    answer_all(echo, lanes)
    (reply,) = lanes.replies
    assert reply.content["c"] == ConfigRecord({"x": 1})
    assert (reply.metadata.dst_node_id, reply.metadata.reply_to_message_id) == (1, "m")


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError(SECRET), Code.INTERNAL),
        (DataError(SECRET), Code.DATA),
        (ConfigError(SECRET), Code.CONFIG),
        (WireError(SECRET), Code.WIRE),
        (FeddaError(SECRET), Code.INTERNAL),
        (MemoryError(SECRET), Code.MEMORY),
        (SystemExit(SECRET), Code.INTERNAL),
    ],
)
def test_an_exception_is_sent_as_a_code_and_its_text_stays_in_the_local_log(
    clock: Clock, caplog: pytest.LogCaptureFixture, error: BaseException, code: Code
) -> None:
    def failing(received: Message, context: Context) -> Message:
        raise error

    lanes = FakeLanes(message(), message())
    events = answer_all(failing, lanes)
    assert [reply.error for reply in lanes.replies] == [Error(int(code), code.public)] * 2
    assert SECRET.encode() not in b"".join(map(everything, lanes.replies))
    assert SECRET in caplog.text
    assert SECRET not in str(events)


@pytest.mark.parametrize(("given", "code"), [(2, Code.INTERNAL), (int(Code.DATA), Code.DATA)])
def test_an_apps_own_error_text_is_not_sent(clock: Clock, given: int, code: Code) -> None:
    def talkative(received: Message, context: Context) -> Message:
        return Message(Error(code=given, reason=SECRET), reply_to=received)

    lanes = FakeLanes(message())
    answer_all(talkative, lanes)
    assert lanes.replies[0].error == Error(int(code), code.public)


@pytest.mark.parametrize("code", Code)
def test_a_sites_own_log_does_not_send_its_reader_to_itself(clock: Clock, code: Code) -> None:
    """The wording that the server's operator gets names the site's log and its operator."""

    def refusing(received: Message, context: Context) -> Message:
        return resident.failure(code, received)

    (text,) = [
        text for kind, text in answer_all(refusing, FakeLanes(message())) if kind == "failed"
    ]
    assert text == f"train: {code.public.split(';')[0]}; see above"
    assert "own log" not in text and "operator" not in text


@pytest.mark.parametrize("nonsense", [None, "text", RecordDict()])
def test_a_result_that_is_no_message_becomes_an_error(clock: Clock, nonsense: object) -> None:
    lanes = FakeLanes(message())
    answer_all(lambda received, context: nonsense, lanes)  # type: ignore[arg-type,return-value]
    assert lanes.replies[0].error.code == Code.INTERNAL


def test_an_expired_message_is_neither_fetched_nor_computed(clock: Clock) -> None:
    def never(received: Message, context: Context) -> Message:
        raise AssertionError("computed")

    lanes = FakeLanes(message(age=61.0, ttl=60.0))
    answer_all(never, lanes)
    assert lanes.fetched == 0
    assert lanes.replies[0].error == Error(int(Code.EXPIRED), Code.EXPIRED.public)


def test_a_message_just_in_time_is_computed(clock: Clock) -> None:
    lanes = FakeLanes(message(age=50.0, ttl=60.0))
    answer_all(echo, lanes)
    assert lanes.replies[0].has_content()


@pytest.mark.parametrize("kind", ["system", "get_properties", "reconnect"])
def test_other_kinds_of_messages_are_refused_unread(clock: Clock, kind: str) -> None:
    def never(received: Message, context: Context) -> Message:
        raise AssertionError("computed")

    head = message()
    head.metadata.__dict__["_message_type"] = kind
    lanes = FakeLanes(head)
    answer_all(never, lanes)
    assert lanes.fetched == 0
    assert lanes.replies[0].error.code == Code.WIRE


def test_a_run_keeps_its_context_and_old_runs_are_forgotten(clock: Clock) -> None:
    def counting(received: Message, context: Context) -> Message:
        count = context.state.get("n", ConfigRecord({"n": 0}))["n"]  # type: ignore[index]
        context.state["n"] = ConfigRecord({"n": int(count) + 1})  # type: ignore[call-overload]
        assert context.node_config == {"role": "source"}
        return Message(RecordDict({"n": context.state["n"]}), reply_to=received)

    runs = [1, 1, 2, 1, *range(10, 10 + resident.RUNS_KEPT), 1]
    lanes = FakeLanes(*(message(run_id=run) for run in runs))
    answer_all(counting, lanes)
    counts = [reply.content["n"]["n"] for reply in lanes.replies]  # type: ignore[index]
    assert counts == [1, 2, 1, 3] + [1] * resident.RUNS_KEPT + [1]


def test_what_cannot_be_read_or_serialised_is_answered_with_a_code(clock: Clock) -> None:
    unread, unwritten = FakeLanes(message()), FakeLanes(message())
    unread.fetch_failure, unwritten.send_failures = ValueError(SECRET), [TypeError(SECRET)]
    for lanes, code in ((unread, Code.WIRE), (unwritten, Code.INTERNAL)):
        answer_all(echo, lanes)
        assert lanes.replies[0].error == Error(int(code), code.public)


def test_a_call_is_repeated_until_the_server_comes_back(clock: Clock) -> None:
    failures = [Unreachable("x"), Unreachable("x"), Unreachable("x")]
    events: list[str] = []

    def call() -> str:
        if failures:
            raise failures.pop()
        return "answer"

    assert patience.persist(call, lambda kind, _: events.append(kind)) == "answer"
    assert clock.slept == [0.5, 1.0, 2.0] and events == ["waiting", "back"]


def test_a_reply_that_nobody_waits_for_any_more_is_dropped(clock: Clock) -> None:
    lanes = FakeLanes(message(), message())
    lanes.send_failures = [RunOver()]
    events = answer_all(echo, lanes)
    assert len(lanes.replies) == 1
    assert [kind for kind, _ in events].count("dropped") == 1


def test_a_node_whose_session_is_lost_stops_computing_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys.add(tmp_path, "a")
    asked: list[Callable[[], None]] = []

    class Lost(Session):
        def __init__(self, *args: object, on_lost: Callable[[], None], **more: object) -> None:
            if asked:
                raise Refused(definite=True)
            super().__init__()
            asked.append(on_lost)

    def endless(received: Message, context: Context) -> Message:
        threading.Thread(target=asked[0]).start()
        ends = time.monotonic() + PATIENCE
        while time.monotonic() < ends:
            time.sleep(0.01)
        raise AssertionError("went on computing")

    monkeypatch.setattr(resident, "Fleet", Lost)
    monkeypatch.setattr(resident, "Lanes", lambda *_: FakeLanes(message()))
    monkeypatch.setattr(patience, "UNKNOWN_KEY_S", 0.0)
    events: list[str] = []
    with pytest.raises(KeyFileError, match="any more: it was revoked"):
        resident.serve(
            endless,
            superlink="hub:1",
            node_config={},
            key=tmp_path / "nodes" / "a",
            on_event=lambda kind, text: events.append(kind),
        )
    assert events == ["connected", "work", "lost", "waiting"]


class Connects:
    """Opens a session: fails until a time has passed, then succeeds."""

    def __init__(self, clock: Clock, until: float, failure: Callable[[], Exception]) -> None:
        self.clock, self.until, self.failure = clock, until, failure

    def __call__(self) -> str:
        if self.clock.now < 1000 + self.until:
            raise self.failure()
        return "session"


def join(connect: Callable[[], object]) -> tuple[object, list[str]]:
    said: list[str] = []
    got = patience.join(connect, "hub:1", lambda kind, text: said.append(text), 120.0)  # type: ignore[arg-type]
    return got, said


def test_joining_waits_for_a_server_as_long_as_it_takes(clock: Clock) -> None:
    got, said = join(Connects(clock, 5000.0, lambda: Unreachable("ConnectError")))
    assert got == "session"
    text = "for hub:1, which does not answer yet: ConnectError"
    assert said[0] == text
    # And not silently: after a minute, then less and less often.
    assert 4 <= len(said) <= 8
    assert all(line.startswith("for ") and line.endswith(text) for line in said)
    assert clock.slept[:5] == [0.5, 1.0, 2.0, 4.0, 5.0]
    assert max(clock.slept) == 5.0


def test_a_proxy_that_gives_no_way_is_named(clock: Clock) -> None:
    said: list[str] = []
    connect = Connects(clock, 1.0, lambda: Unreachable(CLOSED))
    tell = lambda kind, text: said.append(text)  # noqa: E731
    patience.join(connect, "hub:1", tell, 120.0, proxy="http://proxy:1")  # type: ignore[arg-type]
    assert said == [
        "for hub:1, to which the proxy http://proxy:1 gives no way yet (nothing listens there): "
        "check the proxy, or name the server's host in NO_PROXY"
    ]


def test_a_refused_key_is_tried_until_the_old_session_has_timed_out(clock: Clock) -> None:
    got, said = join(Connects(clock, 60.0, lambda: Refused(definite=False)))
    assert got == "session"
    assert len(said) == 1
    assert "previous session" in said[0]


@pytest.mark.parametrize(("definite", "limit"), [(False, 120.0), (True, 5.0)])
def test_a_key_that_stays_refused_is_an_error(clock: Clock, definite: bool, limit: float) -> None:
    with pytest.raises(KeyFileError, match="not registered"):
        join(Connects(clock, 1e9, lambda: Refused(definite)))
    assert limit < clock.now - 1000 < limit + 6


@pytest.mark.parametrize("why", [Refusal("unknown"), Refusal("in-use")])
def test_the_reason_that_a_server_gives_is_said_while_waiting_and_in_the_end(
    clock: Clock, why: Refusal
) -> None:
    said: list[str] = []
    connect = Connects(clock, 1e9, lambda: Refused(why.code == "unknown", why))
    with pytest.raises(KeyFileError) as error:
        patience.join(connect, "hub:1", lambda kind, text: said.append(text), 120.0)  # type: ignore[arg-type]
    assert said[0] == f"for hub:1, which refuses this site: {why.at_site()}"
    assert str(error.value) == f"hub:1 does not accept this site's key: {why.at_site()}"


@pytest.mark.parametrize("code", ["role", "name", "version"])
def test_what_waiting_cannot_mend_is_an_error_at_once(clock: Clock, code: str) -> None:
    with pytest.raises(KeyFileError, match="hub:1 does not accept"):
        join(Connects(clock, 1e9, lambda: Refused(True, Refusal(code, "target"))))
    assert clock.slept == []


def test_a_wrong_clock_is_named_for_as_long_as_it_is_wrong(clock: Clock) -> None:
    """It is no matter of the key, so nobody is sent to the server's operator for one."""
    why = Refusal.read("clock -20")
    assert why is not None
    got, said = join(Connects(clock, 500.0, lambda: Unreachable(why.at_site(), why)))
    assert got == "session"
    assert all("this machine's clock is 20 s ahead of the server's" in text for text in said)


def test_a_refusal_says_nothing_but_its_code_and_a_word() -> None:
    whys = [Refusal("clock", "312"), Refusal("version", "0.1.0"), Refusal("unknown")]
    assert [Refusal.read(why.header) for why in whys] == whys
    for header in (None, "", "other", "role <b>", "clock 1\x1b", "version " + 65 * "1"):
        assert Refusal.read(header) is None
    named = {"role": "source", "name": "Süd; =ä", "fedda": "0.1.0"}
    assert offered(offers("source", "Süd; =ä", "0.1.0")) == named


def test_a_signature_that_stays_refused_is_an_error_that_names_the_clock(clock: Clock) -> None:
    """A server that is just starting does not know its sites yet, so it is asked for a while."""
    assert join(Connects(clock, 4.0, SessionLost))[0] == "session"
    with pytest.raises(KeyFileError, match=r"not registered, was revoked, or this machine's clock"):
        join(Connects(clock, 1e9, SessionLost))


@pytest.mark.parametrize(
    ("status", "meaning"),
    [
        *((401, SessionLost), (403, RunOver), (412, RunOver)),
        *((408, Unreachable), (429, Unreachable), (500, Unreachable), (503, Unreachable)),
    ],
)
def test_an_http_status_has_one_meaning(status: int, meaning: type[Exception]) -> None:
    def call(request: None) -> None:
        sent = httpx.Request("POST", "https://hub")
        raise httpx.HTTPStatusError("x", request=sent, response=httpx.Response(status))

    with pytest.raises(meaning):
        ask(call, None)


@pytest.mark.parametrize(
    ("error", "meaning", "text"),
    [
        (httpx.ConnectError("[Errno 5] else"), Unreachable, "ConnectError"),
        (httpx.ConnectError("[Errno 111] Connection refused"), Unreachable, "nothing listens"),
        (httpx.ConnectError("[Errno -2] Name or service not known"), Unreachable, "DNS"),
        (httpx.ConnectTimeout("timed out"), Unreachable, "firewall"),
        (httpx.ProxyError("407 Proxy Authentication Required"), Unreachable, "proxy .*407"),
        (httpx.ReadTimeout("x"), Unreachable, "ReadTimeout"),
        (ValueError("Invalid protobuf response payload"), Unreachable, "something else"),
        (httpx.ConnectError("CERTIFICATE_VERIFY_FAILED: self-signed"), KeyFileError, "ca.crt"),
        (httpx.ConnectError("certificate has expired"), KeyFileError, "keys renew"),
        (httpx.ConnectError("certificate is not yet valid"), KeyFileError, "clock"),
        (httpx.ConnectError("Hostname mismatch, certificate"), KeyFileError, "--host NAME"),
        (httpx.ConnectError("[SSL: WRONG_VERSION_NUMBER] wrong version"), KeyFileError, "TLS"),
    ],
)
def test_a_failed_call_has_one_meaning(
    error: Exception, meaning: type[Exception], text: str
) -> None:
    def call(request: None) -> None:
        raise error

    with pytest.raises(meaning, match=text):
        ask(call, None)


def test_a_server_that_refuses_to_hand_out_work_is_asked_again_later() -> None:
    """No run is concerned yet, and the session is not lost."""

    def refuse(*_: object, **__: object) -> None:
        sent = httpx.Request("POST", "https://hub")
        raise httpx.HTTPStatusError("x", request=sent, response=httpx.Response(403))

    node = Fleet.__new__(Fleet)
    node._lost, node._node = None, {"node_id": NODE}
    node._client = SimpleNamespace(post=refuse)  # type: ignore[assignment]
    with pytest.raises(Unreachable, match="403"):
        node.receive()


def test_a_heartbeat_that_is_not_answered_is_soon_sent_again() -> None:
    """The server calls a site dead that is not heard of for a minute."""
    node, waits = Fleet.__new__(Fleet), list[float]()
    node._node, node._lost, node._ended = {"node_id": NODE}, None, threading.Event()

    def post(*_: object, timeout: float, **__: object) -> None:
        waits.append(timeout)
        if len(waits) == 2:
            node._ended.set()
        raise httpx.ReadTimeout("timed out")

    node._client = SimpleNamespace(post=post)  # type: ignore[assignment]
    node._beat()
    assert waits == [5.0, 5.0] and node._lost is None


@pytest.mark.parametrize(
    ("took", "wanted"),
    [(0.01, (5.0, 5.0)), (1.0, (10.0, 5.0)), (5.0, (15.0, 10.0)), (75.0, (15.0, 20.0))],
)
def test_a_busy_server_gets_fewer_heartbeats(took: float, wanted: tuple[float, float]) -> None:
    """A thousand sites that each ask again while it is busy would keep it so for ever."""
    assert fleet.pace(took) == wanted
    pause, limit = wanted
    assert pause + limit + fleet.SOON_S + limit < 2 * fleet.HEARTBEAT_S, "it is called dead"


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_session_politely(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, number: int
) -> None:
    closed = []

    class Closed(Session):
        def close(self) -> None:
            closed.append(self)

    def interrupted(received: Message, context: Context) -> Message:
        os.kill(os.getpid(), number)
        time.sleep(PATIENCE)
        raise AssertionError("went on")

    monkeypatch.setattr(resident, "Fleet", Closed)
    monkeypatch.setattr(resident, "Lanes", lambda *_: FakeLanes(message()))
    before = signal.getsignal(number)
    events: list[str] = []
    resident.serve(
        interrupted,
        superlink="hub:1",
        node_config={},
        insecure=True,
        on_event=lambda kind, text: events.append(kind),
    )
    assert len(closed) == 1
    assert events == ["connected", "work", "stopped"]
    assert signal.getsignal(number) == before


def test_a_session_that_was_lost_is_opened_again_with_the_remembered_id(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys.add(tmp_path, "a")
    known: list[object] = []

    class Again(Session):
        def __init__(self, address: str, *, known_as: int | None, **options: object) -> None:
            super().__init__()
            known.append(known_as)
            self.node_id = 40 + len(known)
            if len(known) == 3:
                raise KeyFileError("enough")

    monkeypatch.setattr(resident, "Fleet", Again)
    monkeypatch.setattr(resident, "Lanes", lambda *_: FakeLanes())
    with pytest.raises(KeyFileError, match="enough"):
        resident.serve(
            echo,
            superlink="hub:1",
            node_config={},
            key=tmp_path / "nodes" / "a",
            state=tmp_path,
            on_event=lambda kind, text: None,
        )
    assert known == [None, 41, 42]


@pytest.mark.parametrize(
    ("options", "code", "text"),
    [
        (["--superlink", "ftp://hub:1", "--insecure"], 2, "not HOST:PORT"),
        (["--superlink", "hub:port", "--insecure"], 2, "not HOST:PORT"),
        (["--superlink", "127.0.0.1:99999", "--insecure"], 2, "has the port 99999"),
        (["--superlink", "::1:18443", "--insecure"], 2, "[::1]:18443"),
        (["--superlink", "hub:1", "--insecure", "--name", "a/b"], 2, "cannot be a site's name"),
        (["--superlink", "hub:1"], 3, "no --key was given"),
        (["--superlink", "hub:1", "--key", "/nothing"], 3, "cannot be read"),
        (["--superlink", "hub:1", "--ca", "/nothing"], 3, "cannot be read"),
        (["--superlink", "hub:1", "--insecure", "--key", "k"], 2, "contradicts"),
        (["--superlink", "hub:1", "--insecure", "--peers", __file__], 3, "a line with no name"),
        (["--superlink", "hub:1", "--insecure", "--data", "/nothing"], 1, "/nothing"),
        (["--superlink", "hub:1", "--insecure", "--device", "cuda:99"], 1, "cuda:99 is not there"),
    ],
)
def test_the_command_says_what_is_wrong_and_ends(
    tmp_path: Path, options: list[str], code: int, text: str
) -> None:
    basis = ["--role", "source", "--data", str(tmp_path), "--state-dir", str(tmp_path / "s")]
    done = CliRunner().invoke(client_command, basis + options)
    assert (done.exit_code, text in done.output) == (code, True), done.output


@pytest.mark.parametrize("option", ["--key", "--ca"])
def test_a_key_that_this_account_cannot_read_is_trouble_with_a_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    """And no wrong option, by the exit code."""
    (tmp_path / "file").touch()
    monkeypatch.setattr(os, "access", lambda path, _: Path(path).name != "file")
    words = ["--role", "source", "--data", str(tmp_path), "--superlink", "hub:1"]
    done = CliRunner().invoke(client_command, [*words, option, str(tmp_path / "file")])
    assert done.exit_code == 3, done.output


def test_a_new_state_folder_is_this_account_s_alone_and_nothing_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The notes of a first look at the data are the first file there."""
    state = tmp_path / "s"
    np.savez(tmp_path / "site.npz", x=np.zeros((4, 3), np.float32), y=np.arange(4) % 2)
    verify(tmp_path / "site.npz", "source", known=state / "verified")
    assert (state / "verified").exists()
    _lock(state).close()
    assert not state.stat().st_mode & 0o077 and capsys.readouterr().err == ""


def test_two_clients_cannot_share_a_state_folder(tmp_path: Path) -> None:
    with _lock(tmp_path), pytest.raises(ConfigError, match="--state-dir"):
        _lock(tmp_path)
    _lock(tmp_path).close()


@pytest.mark.parametrize("before", [None, 0o755, 0o2770, 0o700])
def test_only_this_account_can_enter_a_state_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], before: int | None
) -> None:
    """Notes of images lie there, and books, which other accounts could read."""
    state = tmp_path / "state"
    if before is not None:
        state.mkdir()
        state.chmod(before)
    _lock(state).close()
    assert state.stat().st_mode & 0o077 == 0
    assert ("was open to other accounts" in capsys.readouterr().err) == (
        before not in (None, 0o700)
    )


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, True), (0o622, True)])
def test_a_private_key_that_others_can_reach_is_told_and_left_as_it_is(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: int, warned: bool
) -> None:
    key = keys.add(tmp_path, "a")
    key.chmod(mode)
    _check_options(None, key, insecure=False)
    text = f"warning: {key} is open to other accounts, and it is private: `chmod 600 {key}`\n"
    assert capsys.readouterr().err == (text if warned else "")
    assert key.stat().st_mode & 0o777 == mode


def test_a_key_of_another_account_may_be_there_for_this_ones_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a cluster mounts its secrets."""
    key = keys.add(tmp_path, "a")
    monkeypatch.setattr(os, "geteuid", lambda: key.stat().st_uid + 1)
    for mode, warned in ((0o440, False), (0o444, True)):
        key.chmod(mode)
        assert bool(certificate.opened(key)) == warned


def test_flowers_own_node_gets_the_same_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What flwr reads back from the file is what the resident node would have been given."""
    from flwr.common.config import parse_config_args

    started: list[list[str]] = []
    monkeypatch.setattr(os, "execv", lambda program, command: started.append(command))
    for name in ("FLWR_HOME", "PATH"):
        monkeypatch.setenv(name, os.environ.get(name, ""))
    config = {"role": "source", "name": """an 'odd' "näme""", "data": "/a b/c=d", "poison": 0.5}
    with _lock(tmp_path) as lock:
        _exec_stock(config, "hub:1", tmp_path / "ca.crt", tmp_path / "key", tmp_path, lock)
    (command,) = started
    options = dict(zip(command[1::2], command[2::2], strict=True))
    assert parse_config_args([options["--node-config"]]) == config | {"forgetful": True}
    assert options["--superlink"] == "hub:1"
    assert options["--root-certificates"] == str(tmp_path / "ca.crt")
    assert options["--auth-supernode-private-key"] == str(tmp_path / "key")
