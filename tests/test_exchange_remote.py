"""The exchange over gRPC: sums, broken connections, time limits, and what is refused."""

import contextlib
import json
import logging
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_tools import protoc
from hypothesis import given
from hypothesis import strategies as st

from fedda import exchange
from fedda.errors import ExchangeError
from fedda.exchange import (
    Group,
    Host,
    Invitation,
    LocalHost,
    Session,
    connections,
    frames,
    tls,
)
from fedda.exchange.exchange_pb2 import Down, Gradient, Hello, Position, Sum, Up, Welcome
from fedda.exchange.tally import Tally
from fedda.ops.spawn import quiet_port

from .patience import PATIENCE
from .relay import Relay

ROOT = Path(__file__).parents[1]
SYNCS, SIZE = 12, 40
PAIR = Group("pair", SIZE, SYNCS, ("a", "b"))
# What no test waits for.
LIMITS: dict[str, Any] = {"join": PATIENCE, "wait": PATIENCE, "rejoin": PATIENCE}
TRIO = [PAIR, Group("trio", SIZE, SYNCS, ("c", "a", "b"))]


@pytest.fixture(autouse=True)
def no_thread_or_socket_is_left() -> Iterator[None]:
    """Check that a test leaves no thread and no socket open."""

    def sockets() -> int:
        links = (os.path.join("/proc/self/fd", fd) for fd in os.listdir("/proc/self/fd"))
        return sum(os.path.islink(x) and os.readlink(x).startswith("socket:") for x in links)

    before, open_before = set(threading.enumerate()), sockets()
    yield
    until(lambda: not set(threading.enumerate()) - before)  # gRPC needs a moment
    until(lambda: sockets() <= open_before)


def gradient(site: str, index: int) -> np.ndarray:
    return np.random.default_rng([ord(site), index]).normal(size=SIZE).astype(np.float32)


class Notices:
    """The notices of a host."""

    def __init__(self) -> None:
        self.all: list[tuple[str, str, str]] = []

    def __call__(self, *what: str) -> None:
        self.all.append((what[0], what[1], what[2]))

    def kinds(self, site: str) -> list[str]:
        return [what for what, of, _ in self.all if of == site]


@contextmanager
def opened(
    groups: Sequence[Group] = (PAIR,),
    notices: Notices | None = None,
    **limits: Any,
) -> Iterator[Session]:
    with Host(notice=notices or Notices()).open(groups, **{**LIMITS, **limits}) as session:
        yield session


def train(invitation: Invitation, before: Callable[[int], None] = lambda _: None) -> list[bytes]:
    """Do all syncs of a site; each sends to all groups at once -> the sums as bytes."""
    found = []
    with exchange.connect(invitation) as stream:
        for index in range(SYNCS):
            for number, group in enumerate(invitation.groups):
                before(2 * index)
                stream.send(group.name, gradient(invitation.node, index + 100 * number), 256)
            before(2 * index + 1)
            found += [stream.receive(group.name).tobytes() for group in invitation.groups]
    return found


def together(*works: Callable[[], Any]) -> list[Future[Any]]:
    """Run each function in a thread until all are done -> their futures."""
    with ThreadPoolExecutor(len(works)) as pool:
        return [pool.submit(work) for work in works]


def local_sums(groups: Sequence[Group]) -> dict[str, list[bytes]]:
    """Run the same session without a network -> the sums of each site."""
    with LocalHost().open(groups, join=PATIENCE, wait=PATIENCE) as session:
        sites = list(session.invitations)
        works = [lambda s=s: train(session.invitations[s]) for s in sites]
        return {s: f.result() for s, f in zip(sites, together(*works), strict=True)}


def test_sums_do_not_wait_for_the_hash_of_their_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    """The server hashes beside the exchange, and its tallies are complete when they are read."""
    hashing, hashed = threading.Event(), Tally.add

    def add(tally: Tally, frame: bytes) -> None:
        if threading.current_thread() in readers:
            assert hashing.wait(PATIENCE)
        hashed(tally, frame)

    readers: list[threading.Thread] = []
    read = connections.Connections._read

    def noted(self: Any, *args: Any) -> None:
        readers.append(threading.current_thread())
        read(self, *args)

    monkeypatch.setattr("fedda.exchange.remote.LEAVE_S", 0.1)  # nobody notes that they leave
    monkeypatch.setattr(Tally, "add", add)
    monkeypatch.setattr(connections.Connections, "_read", noted)
    one = replace(PAIR, syncs=1)

    def swap(invitation: Invitation) -> Any:
        with exchange.connect(invitation) as stream:
            total = stream.swap("pair", gradient(invitation.node, 0), 256)
            return total, stream.tallies["pair"].about()

    with opened([one]) as session, ThreadPoolExecutor(1) as pool:
        works = [lambda s=s: swap(session.invitations[s]) for s in one.members]
        ours = [future.result() for future in together(*works)]  # the hashes have not begun
        read_later = pool.submit(session.tallies)
        with pytest.raises(TimeoutError):
            read_later.result(0.2)
        hashing.set()
        theirs = read_later.result(PATIENCE)
        assert len(readers) == 2
    for site, (total, about) in zip(one.members, ours, strict=True):
        np.testing.assert_array_equal(total, gradient("a", 0) + gradient("b", 0))
        assert about["frames"] == 1 and theirs[site, "pair"].about() == about


def test_sums_equal_those_without_a_network(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="fedda.exchange")
    notices = Notices()
    with opened(TRIO, notices) as session:
        asked = {s: Invitation.parse(i.flat()) for s, i in session.invitations.items()}
        found = together(*(lambda i=i: train(i) for i in asked.values()))
        assert {s: f.result() for s, f in zip(asked, found, strict=True)} == local_sums(TRIO)
        assert not session.ended
        with LocalHost().open(TRIO, join=PATIENCE, wait=PATIENCE) as local:
            together(*(lambda i=i: train(i) for i in local.invitations.values()))
            for site, counts in session.traffic().items():
                for ours, theirs in zip(counts, local.traffic()[site], strict=True):
                    assert theirs <= ours <= theirs + 100  # messages to greet and to leave
        assert session.fewest() == {"a": 256, "b": 256, "c": 256}
    assert {what for what, *_ in notices.all} == {"joined", "left"}
    assert all(i.ticket not in caplog.text for i in asked.values())
    assert "a joined the exchange." in caplog.text


@pytest.mark.parametrize(
    "cuts",
    [
        (1,),
        *(
            pytest.param(cuts, marks=pytest.mark.slow)
            for cuts in ((0,), (6, 7, 8, 9), (2 * SYNCS - 3,))
        ),
    ],
)
def test_a_broken_connection_changes_no_bit(cuts: tuple[int, ...]) -> None:
    notices = Notices()
    with opened(TRIO, notices) as session, Relay(session.invitations["a"].port) as relay:
        asked = dict(session.invitations)
        asked["a"] = replace(asked["a"], port=relay.port)

        def cut(moment: int) -> None:
            if moment in cuts:
                relay.cut()

        def leave_alone(_: int) -> None:
            pass

        cutter = {"a": cut}
        works = [lambda i=i: train(i, cutter.get(i.node, leave_alone)) for i in asked.values()]
        found = together(*works)
        assert {s: f.result() for s, f in zip(asked, found, strict=True)} == local_sums(TRIO)
        assert relay.connections > 1
    assert notices.kinds("a").count("resumed") == notices.kinds("a").count("cut") >= 1
    assert notices.kinds("b") == ["joined", "left"]


def test_a_connection_may_break_while_the_site_computes() -> None:
    notices = Notices()
    with opened(notices=notices) as session, Relay(session.invitations["a"].port) as relay:
        a = exchange.connect(replace(session.invitations["a"], port=relay.port))
        with exchange.connect(session.invitations["b"]) as b, a:
            b.send("pair", gradient("b", 0), 256)
            relay.cut()
            until(lambda: "resumed" in notices.kinds("a"))  # although a sends nothing
            total = a.swap("pair", gradient("a", 0), 256)
            assert b.receive("pair").tobytes() == total.tobytes()


def test_a_site_reconnects_before_the_server_noticed_the_break() -> None:
    notices = Notices()
    with opened(notices=notices) as session, Relay(session.invitations["a"].port) as relay:
        a = exchange.connect(replace(session.invitations["a"], port=relay.port))
        with exchange.connect(session.invitations["b"]) as b, a:
            b.send("pair", gradient("b", 0), 256)
            until(lambda: session._meeting.is_connected("a"))
            relay.forget()
            until(lambda: "refused" in notices.kinds("a"))
            relay.remember()
            total = a.swap("pair", gradient("a", 0), 256)
            assert b.receive("pair").tobytes() == total.tobytes()
    assert notices.kinds("a")[-2:] == ["resumed", "left"]


def until(true: Callable[[], bool]) -> None:
    """Wait like `wait_until`, but look more often: a test may wait for many things."""
    ends = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.01)


DIES = """
import json, sys, time
import numpy as np
from fedda import exchange
invitation = exchange.Invitation.parse(json.loads(sys.argv[1]))
stream = exchange.connect(invitation)
for index in range(3):
    mine = np.random.default_rng([ord("a"), index]).normal(size=40).astype(np.float32)
    stream.send("pair", mine, 256)
    if index < 2:
        stream.receive("pair")
time.sleep(3600)
"""


@pytest.mark.slow
def test_a_site_whose_program_died_continues_with_its_ticket() -> None:
    notices = Notices()
    with opened(notices=notices) as session:
        asked = session.invitations

        def dies_and_goes_on() -> list[bytes]:
            command = [sys.executable, "-c", DIES, json.dumps(asked["a"].flat())]
            with subprocess.Popen(command, cwd=ROOT) as process:
                until(lambda: session._meeting.sums["pair"].taken("a") == 3)
                process.kill()
            until(lambda: "cut" in notices.kinds("a"))
            with exchange.connect(asked["a"]) as stream:
                assert stream.sent("pair") == 3
                with pytest.raises(ExchangeError, match="still owes the sum of sync 3"):
                    stream.send("pair", gradient("a", 3), 256)
                found = [stream.receive("pair").tobytes()]
                for index in range(3, SYNCS):
                    found.append(stream.swap("pair", gradient("a", index), 256).tobytes())
                return found

        a, b = together(dies_and_goes_on, lambda: train(asked["b"]))
        assert a.result() == b.result()[2:] == local_sums([PAIR])["a"][2:]


def test_a_sum_completed_during_a_reconnection_follows_the_welcome() -> None:
    notices = Notices()
    with opened(notices=notices) as session:
        first = Raw(session.invitations["a"]).send(HELLO, frames.gradient("pair", 0, 256, FINE))
        until(lambda: session._meeting.sums["pair"].taken("a") == 1)
        first.close()
        until(lambda: "cut" in notices.kinds("a"))
        again = Raw(session.invitations["a"])
        until(lambda: "resumed" in notices.kinds("a"))
        with exchange.connect(session.invitations["b"]) as b:
            b.swap("pair", FINE, 256)
        back = Up(hello=Hello(received=[Position(group="pair", count=0)]))
        again.send(back.SerializeToString(), frames.gradient("pair", 1, 256, FINE))
        assert again.kinds() == ["welcome", "sum", "ended"]  # the session ends because b has left


def test_the_server_may_close_right_after_the_last_sync() -> None:
    notices = Notices()
    host = Host(notice=notices)
    session = host.open([Group("pair", SIZE, 1, ("a", "b"))], **LIMITS)
    a, b = (exchange.connect(session.invitations[site]) for site in "ab")
    with a, b:
        b.send("pair", gradient("b", 0), 256)
        total = a.swap("pair", gradient("a", 0), 256)
        session.close()
        assert np.array_equal(b.receive("pair"), total)  # the sum was already sent
        with pytest.raises(ExchangeError, match="All 1 syncs of group 'pair' are done"):
            a.send("pair", gradient("a", 1), 256)
    assert [what for what, *_ in notices.all] == ["joined", "joined"]


def test_with_rejoin_0_a_broken_connection_ends_the_session_for_all() -> None:
    with opened(rejoin=0) as session, Relay(session.invitations["a"].port) as relay:
        a = exchange.connect(replace(session.invitations["a"], port=relay.port))
        with exchange.connect(session.invitations["b"]) as b, a:
            b.send("pair", gradient("b", 0), 256)
            relay.cut()
            with pytest.raises(ExchangeError, match="connection of a to the exchange broke"):
                b.receive("pair")
            with pytest.raises(ExchangeError, match="broke"):
                a.swap("pair", gradient("a", 0), 256)


@pytest.mark.slow
def test_a_site_that_does_not_reconnect_is_named_and_gets_the_reason() -> None:
    with opened(rejoin=0.5) as session, Relay(session.invitations["a"].port) as relay:
        a = exchange.connect(replace(session.invitations["a"], port=relay.port))
        with exchange.connect(session.invitations["b"]) as b, a:
            b.send("pair", gradient("b", 0), 256)
            relay.close()
            with pytest.raises(ExchangeError, match=r"a .* not made again within 0\.5 s"):
                b.receive("pair")
            with pytest.raises(ExchangeError, match=r"not be made again within 0\.5 s"):
                a.swap("pair", gradient("a", 0), 256)


@pytest.mark.slow
def test_a_silent_peer_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tls, "PING_MS", 200)
    monkeypatch.setattr(tls, "PONG_MS", 1000)
    notices = Notices()
    with (
        opened(notices=notices, rejoin=0.3) as session,
        Relay(session.invitations["a"].port) as relay,
    ):
        a = exchange.connect(replace(session.invitations["a"], port=relay.port))
        with exchange.connect(session.invitations["b"]) as b, a:
            b.send("pair", gradient("b", 0), 256)
            relay.fall_silent()
            with pytest.raises(ExchangeError, match="connection of a"):
                b.receive("pair")
    assert "cut" in notices.kinds("a")


@pytest.mark.slow
def test_sites_that_do_not_join_or_send_are_named() -> None:
    late = rf"missing after {PATIENCE:g} s \(exchange\.join\): b\."
    with opened() as session, exchange.connect(session.invitations["a"]) as a:
        session._meeting._join_by = 0.0  # the time is over, however long it took a to join
        with pytest.raises(ExchangeError, match=late):
            a.swap("pair", gradient("a", 0), 256)
        with pytest.raises(ExchangeError, match="missing after"):
            exchange.connect(session.invitations["b"])
    with opened(wait=0.3) as session:
        a, b = (exchange.connect(session.invitations[site]) for site in "ab")
        with a, b:
            with pytest.raises(ExchangeError, match=r"waited 0\.3 s \(exchange\.wait\) for b"):
                a.swap("pair", gradient("a", 0), 256)
            with pytest.raises(ExchangeError, match="for b"):
                b.swap("pair", gradient("b", 0), 256)


def test_a_site_that_leaves_early_is_named_and_closing_wakes_waiting_sites() -> None:
    with opened() as session, exchange.connect(session.invitations["a"]) as a:
        exchange.connect(session.invitations["b"]).close()
        with pytest.raises(ExchangeError, match="b left the exchange after 0 of 12 syncs"):
            a.swap("pair", gradient("a", 0), 256)
    session = Host().open([PAIR], **LIMITS)
    with exchange.connect(session.invitations["a"]) as a:
        a.send("pair", gradient("a", 0), 256)
        threading.Timer(0.1, session.close).start()
        with pytest.raises(ExchangeError, match="server closed the exchange before its last sync"):
            a.receive("pair")
        session.close()
    with pytest.raises(ExchangeError, match="server closed"):
        a.receive("pair")


# ---- what is refused ---------------------------------------------------------------------------


class Raw:
    """A participant that can send any bytes."""

    def __init__(self, invitation: Invitation, **changed: Any) -> None:
        asked = replace(invitation, **changed)
        self._out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        credentials = grpc.ssl_channel_credentials(asked.certificate.encode())
        options = [("grpc.ssl_target_name_override", tls.NAME)]
        self._channel = grpc.secure_channel(f"127.0.0.1:{asked.port}", credentials, options)
        self._call = self._channel.stream_stream(tls.PATH)(
            iter(self._out.get, None), metadata=((tls.TICKET, asked.ticket),)
        )

    def send(self, *sent: bytes) -> "Raw":
        for data in sent:
            self._out.put(data)
        return self

    def ended(self) -> str:
        """Return the reason in the last message of the exchange."""
        return self._heads()[-1].ended.reason

    def kinds(self) -> list[str | None]:
        """Return the kinds of all messages from the exchange."""
        return [head.WhichOneof("kind") for head in self._heads()]

    def _heads(self) -> list[Down]:
        heads = [frames.down(data)[0] for data in self._call]
        self.close()
        return heads

    def close(self) -> None:
        self._out.put(None)
        self._channel.close()


HELLO = Up(hello=Hello()).SerializeToString()
SECRET = 123.456
FINE = np.full(SIZE, SECRET, np.float32)


def sent(
    group: str = "pair", index: int = 0, examples: int = 256, values: np.ndarray = FINE
) -> bytes:
    return frames.gradient(group, index, examples, values)


def bad(value: float) -> np.ndarray:
    return np.concatenate([FINE[1:], np.array([value], np.float32)])


CASES: dict[str, tuple[list[bytes], str]] = {
    "again": ([HELLO, sent(), sent()], "a sent group 'pair' its gradient for sync 1 again"),
    "too early": ([HELLO, sent(), sent(index=1)], "for sync 2, but sync 1 is due"),
    "out of order": ([HELLO, sent(index=7)], "for sync 8, but sync 1 is due"),
    "beyond the last": ([HELLO, sent(index=SYNCS)], "for sync 13, but sync 1 is due"),
    "smaller": ([HELLO, sent(values=FINE[1:])], "39 values, but its gradient has 40"),
    "larger": ([HELLO, sent(values=np.resize(FINE, 99))], "99 values, but its gradient has 40"),
    "empty": ([HELLO, sent(values=FINE[:0])], "0 values"),
    "nan": ([HELLO, sent(values=bad(np.nan))], "not finite at sync 1"),
    "inf": ([HELLO, sent(values=bad(-np.inf))], "not finite at sync 1"),
    "no examples": ([HELLO, sent(examples=0)], "over no examples"),
    "unknown group": ([HELLO, sent(group="no\nsuch")], "a group that does not exist"),
    "not a member": ([HELLO, sent(group="others")], "of which it is not a member"),
    "no greeting": ([sent()], "kind 'gradient', which is not due"),
    "two greetings": ([HELLO, HELLO], "kind 'hello', which is not due"),
    "nothing": ([HELLO, b""], "kind 'None', which is not due"),
    "no frame": ([HELLO, b"\xff" * 20], "cannot be read"),
    "odd bytes": (
        [HELLO, Up(gradient=Gradient(group="pair"), values=b"123").SerializeToString()],
        "cannot be read",
    ),
    "claims sums": (
        [Up(hello=Hello(received=[Position(group="pair", count=5)])).SerializeToString()],
        "a came back to group 'pair' with 5 sums, but 0 of its gradients have come in",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_an_unexpected_message_ends_the_session_with_a_clear_error_for_all(
    case: str, caplog: pytest.LogCaptureFixture
) -> None:
    given, said = CASES[case]
    caplog.set_level(logging.DEBUG)
    notices = Notices()
    others = Group("others", SIZE, 1, ("b",))
    with (
        opened([PAIR, others], notices) as session,
        exchange.connect(session.invitations["b"]) as b,
    ):
        raw = Raw(session.invitations["a"]).send(*given)
        assert said in raw.ended()
        with pytest.raises(ExchangeError) as caught:
            b.swap("pair", gradient("b", 0), 256)
        assert said in str(caught.value) and "\n" not in str(caught.value)
        late = Raw(session.invitations["a"]).send(HELLO, sent())
        assert said in late.ended()  # a later connection gets the same reason
    refused = [(site, text) for what, site, text in notices.all if what == "refused"]
    assert refused[0][0] == "a" and said in refused[0][1]
    assert said in caplog.text
    for secret in (str(SECRET), FINE.tobytes()[:8].hex(), session.invitations["a"].ticket):
        assert secret not in caplog.text


@pytest.mark.slow
def test_a_frame_above_the_size_limit_never_reaches_the_sums() -> None:
    with opened(rejoin=0) as session, exchange.connect(session.invitations["b"]) as b:
        raw = Raw(session.invitations["a"]).send(HELLO, sent(values=np.zeros(100_000, np.float32)))
        with pytest.raises(ExchangeError, match="connection of a"):
            b.swap("pair", gradient("b", 0), 256)
        with pytest.raises(grpc.RpcError):
            raw.ended()
        raw.close()


def test_a_stranger_and_a_second_connection_are_refused_and_the_session_goes_on() -> None:
    notices = Notices()
    with opened(notices=notices) as session:
        asked = session.invitations
        with exchange.connect(asked["a"]) as a, exchange.connect(asked["b"]) as b:
            with pytest.raises(ExchangeError, match="ticket this session of the exchange does not"):
                exchange.connect(replace(asked["a"], ticket="f" * 64))
            with pytest.raises(ExchangeError, match="a takes part already"):
                exchange.connect(asked["a"])
            b.send("pair", gradient("b", 0), 256)
            total = a.swap("pair", gradient("a", 0), 256)
            assert np.array_equal(total, gradient("a", 0) + gradient("b", 0))
        assert [(w, s) for w, s, _ in notices.all if w == "refused"] == [
            ("refused", ""),
            ("refused", "a"),
        ]
        with pytest.raises(ExchangeError, match="a has left"):
            exchange.connect(asked["a"])


def test_strangers_cannot_fill_the_log() -> None:
    notices = Notices()
    with opened(notices=notices) as session:
        forged = replace(session.invitations["a"], ticket="f" * 64)
        for _ in range(12):
            assert "does not know" in Raw(forged).ended()
    texts = [text for what, _, text in notices.all if what == "refused"]
    assert len(texts) == 10 and texts[-1].endswith("further ones are not reported.")


def test_a_server_with_another_certificate_is_refused() -> None:
    with opened() as session, opened() as other:
        asked = session.invitations["a"]
        with pytest.raises(ExchangeError, match="cannot be reached"):
            exchange.connect(replace(asked, certificate=other.invitations["a"].certificate))


@pytest.mark.slow
def test_a_port_in_use_gives_one_clear_error() -> None:
    host = Host(port=(port := quiet_port()))
    taken = rf"cannot listen on 127\.0\.0\.1:{port}: wait for"
    with host.open([PAIR], **LIMITS), pytest.raises(ExchangeError, match=taken):
        host.open([PAIR], join=0.3, wait=1, rejoin=1)
    for _ in range(2):  # the port is free again at once
        with host.open([PAIR], **LIMITS) as session:
            exchange.connect(session.invitations["a"]).close()


@pytest.mark.slow
def test_a_session_waits_until_another_runs_session_frees_the_port() -> None:
    host = Host(port=quiet_port())
    with host.open([PAIR], **LIMITS) as session:
        threading.Timer(0.3, session.close).start()
        with host.open([PAIR], **LIMITS) as next_one:
            assert session.ended
            exchange.connect(next_one.invitations["a"]).close()


def test_an_address_of_another_machine_fails_without_waiting() -> None:
    """Waiting would take longer than the test may."""
    with pytest.raises(ExchangeError, match=r"cannot listen on 192\.0\.2\.1:"):
        Host("192.0.2.1", 18444).open([PAIR], join=3600, wait=1, rejoin=1)


def test_a_host_that_listens_everywhere_names_no_address() -> None:
    with Host("0.0.0.0").open([PAIR], **LIMITS) as session:
        asked = session.invitations["a"]
        assert asked.host == ""
        exchange.connect(asked, "127.0.0.1").close()


# ---- a server that breaks the protocol -----------------------------------------------------------


@contextmanager
def pretending(*answers: bytes) -> Iterator[Invitation]:
    """Start a server that sends any bytes after it was greeted, then waits."""
    over = threading.Event()

    def join(incoming: Iterator[bytes], _: grpc.ServicerContext) -> Iterator[bytes]:
        next(incoming)
        yield answers[0]
        next(incoming)
        yield from answers[1:]
        over.wait(PATIENCE)

    certificate, key = tls.fresh()
    pool = ThreadPoolExecutor(4)
    handler = grpc.stream_stream_rpc_method_handler(join)  # pyright: ignore
    server = grpc.server(pool, [grpc.method_handlers_generic_handler(SERVICE, {"Join": handler})])
    port = server.add_secure_port("127.0.0.1:0", grpc.ssl_server_credentials([(key, certificate)]))
    server.start()
    try:
        yield Invitation("127.0.0.1", port, certificate.decode(), "0" * 64, "a", (PAIR,), PATIENCE)
    finally:
        over.set()
        server.stop(0).wait()
        pool.shutdown()


SERVICE = tls.PATH.split("/")[1]
WELCOME = Down(welcome=Welcome(rejoin=5)).SerializeToString()


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([frames.total("pair", 0, FINE[1:])], "39 values instead of 40"),
        ([frames.total("pair", 0, bad(np.inf))], "not finite: it is not used"),
        ([frames.total("pair", 1, FINE)], "a sum that is not due"),
        ([frames.total("other", 0, FINE)], "a sum that is not due"),
        ([WELCOME], "a frame that is not due"),
        ([b"\xff" * 9], "cannot be read"),
        ([Down(sum=Sum(group="pair"), values=b"123").SerializeToString()], "cannot be read"),
        ([frames.ended("so\nthere" + 5000 * "!")], "so there!"),
        ([], r"no answer within 0\.5 s"),
    ],
)
def test_a_site_refuses_invalid_answers_of_a_server(
    answers: list[bytes], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedda.exchange.remote.LEAVE_S", 0.1)
    with pretending(WELCOME, *answers) as asked, exchange.connect(asked) as stream:
        stream.send("pair", FINE, 256)
        if not answers:
            monkeypatch.setattr(stream, "_patience", 0.5)
        with pytest.raises(ExchangeError, match=said) as caught:
            stream.receive("pair")
        assert len(str(caught.value)) <= 1000


def test_a_server_with_an_impossible_count_is_refused() -> None:
    taken = [Position(group="pair", count=SYNCS + 1)]
    welcome = Down(welcome=Welcome(taken=taken)).SerializeToString()
    with pretending(welcome) as asked, pytest.raises(ExchangeError, match="cannot be"):
        exchange.connect(asked)


# ---- frames ------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 31, 32, 33, 5000])
def test_frames_equal_those_of_protobuf(size: int) -> None:
    values = np.arange(size, dtype=np.float32)
    up = Up(gradient=Gradient(group="pair", index=300, examples=70_000), values=values.tobytes())
    assert frames.gradient("pair", 300, 70_000, values) == up.SerializeToString()
    down = Down(sum=Sum(group="pair", index=300), values=values.tobytes())
    assert frames.total("pair", 300, values) == down.SerializeToString()
    head, found = frames.up(up.SerializeToString())
    assert (head.gradient.index, head.gradient.examples) == (300, 70_000)
    assert np.array_equal(found, values) and not found.flags.writeable


@given(st.binary(max_size=60))
def test_any_bytes_are_parsed_or_refused(data: bytes) -> None:
    with contextlib.suppress(ExchangeError):
        frames.up(data)
    whole = frames.gradient("pair", 1, 256, FINE)
    with contextlib.suppress(ExchangeError):
        frames.up(whole[: len(data)] + data)
    for broken in (whole[:-1], whole + b"\0", whole + b"\x7a\x04abcd", whole + b"\x7a\xff"):
        with pytest.raises(ExchangeError, match="cannot be read"):
            frames.up(broken)


# ---- generated code ------------------------------------------------------------------------------


def test_the_generated_modules_are_current(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    proto = "fedda/exchange/exchange.proto"
    words = ["protoc", "-I.", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", proto]
    assert protoc.main(words) == 0
    for name in ("exchange_pb2.py", "exchange_pb2.pyi"):
        ours = (ROOT / "fedda/exchange" / name).read_text()
        assert ours == (tmp_path / "fedda/exchange" / name).read_text(), "run `make proto`"
