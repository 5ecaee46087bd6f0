"""The exchange over lanes: sums, broken connections, time limits, and what is refused."""

import contextlib
import itertools
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from grpc_tools import protoc
from hypothesis import given
from hypothesis import strategies as st

from fedda import exchange
from fedda.errors import ExchangeError
from fedda.exchange import Group, Host, Invitation, LocalHost, frames
from fedda.exchange.exchange_pb2 import Down, Gradient, Leave, Sum, Up
from fedda.exchange.host import RemoteSession
from fedda.lane import posts
from fedda.lane.dialer import Dialer
from fedda.lane.lane_end import LaneEnd
from fedda.lane.lane_host import LaneHost

from .patience import PATIENCE

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


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where lanes listen; a socket file's path may not be long."""
    return tmp_path_factory.mktemp("lanes")


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


class Opened:
    """A session, and a way to it."""

    def __init__(self, folder: Path, session: RemoteSession) -> None:
        self.session, self.at = session, f"unix:{folder}"
        self.invitations = session.invitations

    def connect(self, site: str, **changed: Any) -> exchange.Stream:
        return exchange.connect(replace(self.invitations[site], **changed), self.at)

    def cut(self, site: str) -> None:
        """Break the connection of a site."""
        self.session._lines[site].cut()

    def train(self, site: str, before: Callable[[int], None] = lambda _: None) -> list[bytes]:
        """Do all syncs of a site."""
        return train(self.invitations[site], before, self.at)


@contextmanager
def opened(
    folder: Path, groups: Sequence[Group] = (PAIR,), notices: Notices | None = None, **limits: Any
) -> Iterator[Opened]:
    host = Host(folder, notices or Notices())
    with host.open(groups, **{**LIMITS, **limits}) as session:
        yield Opened(folder, session)


def train(
    invitation: Invitation, before: Callable[[int], None] = lambda _: None, at: str = ""
) -> list[bytes]:
    """Do all syncs of a site; each sends to all groups at once -> the sums as bytes."""
    found = []
    with exchange.connect(invitation, at) as stream:
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
        works = [partial(train, session.invitations[s]) for s in sites]
        return {s: f.result() for s, f in zip(sites, together(*works), strict=True)}


def until(true: Callable[[], bool]) -> None:
    """Wait like `wait_until`, but look more often: a test may wait for many things."""
    ends = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < ends
        time.sleep(0.01)


def test_sums_equal_those_without_a_network(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="fedda.exchange")
    notices = Notices()
    with opened(folder, TRIO, notices) as there:
        session = there.session
        asked = {s: Invitation.parse(i.flat()) for s, i in session.invitations.items()}
        found = together(*(partial(train, i, at=there.at) for i in asked.values()))
        assert {s: f.result() for s, f in zip(asked, found, strict=True)} == local_sums(TRIO)
        assert not session.ended
        with LocalHost().open(TRIO, join=PATIENCE, wait=PATIENCE) as local:
            together(*(partial(train, i) for i in local.invitations.values()))
            for site, (to, back) in session.traffic().items():
                assert local.traffic()[site] == (to, back - len(frames.LEAVE))
        assert session.fewest() == {"a": 256, "b": 256, "c": 256}
    assert {what for what, *_ in notices.all} == {"joined", "left"}
    assert all(i.ticket not in caplog.text for i in asked.values())
    assert "a joined the exchange." in caplog.text


@pytest.mark.parametrize("cuts", [(1,), (0,), (6, 7, 8, 9), (2 * SYNCS - 3,)])
def test_a_broken_connection_changes_no_bit(folder: Path, cuts: tuple[int, ...]) -> None:
    with opened(folder, TRIO) as there:

        def cut(moment: int) -> None:
            if moment in cuts:
                there.cut("a")

        works = [partial(there.train, "a", cut), *(partial(there.train, s) for s in "bc")]
        found = together(*works)
        assert [f.result() for f in found] == [local_sums(TRIO)[s] for s in "abc"]
        assert there.session._lines["a"]._last > 1 == there.session._lines["b"]._last


def test_a_sum_that_was_made_while_a_connection_was_broken_comes_later(folder: Path) -> None:
    notices = Notices()
    with opened(folder, notices=notices) as there, there.connect("b") as b, there.connect("a") as a:
        a.send("pair", gradient("a", 0), 256)
        until(lambda: there.session._meeting.sums["pair"].taken("a") == 1)
        there.cut("a")
        total = b.swap("pair", gradient("b", 0), 256)
        assert a.receive("pair").tobytes() == total.tobytes()
        b.close()
        a.close()
    assert notices.kinds("b") == ["joined", "left"]


def test_the_server_may_close_right_after_the_last_sync(folder: Path) -> None:
    notices = Notices()
    session = Host(folder, notices).open([Group("pair", SIZE, 1, ("a", "b"))], **LIMITS)
    there = Opened(folder, session)
    with there.connect("a") as a, there.connect("b") as b:
        b.send("pair", gradient("b", 0), 256)
        total = a.swap("pair", gradient("a", 0), 256)
        session.close()
        assert np.array_equal(b.receive("pair"), total)  # the sum was already sent
        with pytest.raises(ExchangeError, match="All 1 syncs of group 'pair' are done"):
            a.send("pair", gradient("a", 1), 256)
    assert [what for what, *_ in notices.all] == ["joined", "joined"]


def test_with_rejoin_0_a_broken_connection_ends_the_session_for_all(folder: Path) -> None:
    with opened(folder, rejoin=0) as there, there.connect("b") as b, there.connect("a") as a:
        b.send("pair", gradient("b", 0), 256)
        until(lambda: there.session._meeting.is_connected("a"))
        there.cut("a")
        with pytest.raises(ExchangeError, match="connection of a to the exchange broke"):
            b.receive("pair")
        with pytest.raises(ExchangeError, match="broke"):
            a.swap("pair", gradient("a", 0), 256)


def test_a_site_that_does_not_reconnect_is_named_and_gets_the_reason(folder: Path) -> None:
    with opened(folder, rejoin=0.5) as there, there.connect("b") as b, there.connect("a") as a:
        b.send("pair", gradient("b", 0), 256)
        until(lambda: there.session._meeting.is_connected("a"))
        a._dialer._closing.set()  # type: ignore[attr-defined]
        there.cut("a")
        with pytest.raises(ExchangeError, match=r"a .* not made again within 0\.5 s"):
            b.receive("pair")
        with pytest.raises(ExchangeError, match=r"not be made again within 0\.5 s"):
            a.swap("pair", gradient("a", 0), 256)


def test_sites_that_do_not_join_or_send_are_named(folder: Path) -> None:
    late = rf"missing after {PATIENCE:g} s \(exchange\.join\): b\."
    with opened(folder) as there, there.connect("a") as a:
        there.session._meeting._join_by = 0.0  # the time is over, however long it took a to join
        with pytest.raises(ExchangeError, match=late):
            a.swap("pair", gradient("a", 0), 256)
        with there.connect("b") as b, pytest.raises(ExchangeError, match="missing after"):
            b.swap("pair", gradient("b", 0), 256)
    with opened(folder, wait=0.3) as there, there.connect("a") as a, there.connect("b") as b:
        with pytest.raises(ExchangeError, match=r"waited 0\.3 s \(exchange\.wait\) for b"):
            a.swap("pair", gradient("a", 0), 256)
        with pytest.raises(ExchangeError, match="for b"):
            b.swap("pair", gradient("b", 0), 256)


def test_a_site_that_leaves_early_is_named_and_closing_wakes_waiting_sites(folder: Path) -> None:
    with opened(folder) as there, there.connect("a") as a:
        there.connect("b").close()
        with pytest.raises(ExchangeError, match="b left the exchange after 0 of 12 syncs"):
            a.swap("pair", gradient("a", 0), 256)
    session = Host(folder).open([PAIR], **LIMITS)
    with Opened(folder, session).connect("a") as a:
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

    def __init__(self, there: Opened, site: str = "a", **changed: Any) -> None:
        asked = replace(there.invitations[site], **changed)
        self.notes: list[bytes] = []
        self._gone: Future[str] = Future()
        self._line = LaneEnd(noted=lambda note: self.notes.append(bytes(note)), most=2**20)
        gone = lambda why: self._gone.set_result(str(why))  # noqa: E731
        self._dialer = Dialer(self._line, asked.lane, there.at, gone, 0.0)

    def send(self, *sent: bytes) -> "Raw":
        for data in sent:
            self._line.post(data)
        return self

    def ended(self) -> str:
        """Return why the exchange ended the connection."""
        return self._gone.result(PATIENCE)


SECRET = 123.456
FINE = np.full(SIZE, SECRET, np.float32)


def sent(
    group: str = "pair", index: int = 0, examples: int = 256, values: np.ndarray = FINE
) -> bytes:
    return frames.gradient(group, index, examples, values)


def bad(value: float) -> np.ndarray:
    return np.concatenate([FINE[1:], np.array([value], np.float32)])


CASES: dict[str, tuple[list[bytes], str]] = {
    "again": ([sent(), sent()], "a sent group 'pair' its gradient for sync 1 again"),
    "too early": ([sent(), sent(index=1)], "for sync 2, but sync 1 is due"),
    "out of order": ([sent(index=7)], "for sync 8, but sync 1 is due"),
    "beyond the last": ([sent(index=SYNCS)], "for sync 13, but sync 1 is due"),
    "smaller": ([sent(values=FINE[1:])], "39 values, but its gradient has 40"),
    "larger": ([sent(values=np.resize(FINE, 99))], "99 values, but its gradient has 40"),
    "empty": ([sent(values=FINE[:0])], "0 values"),
    "nan": ([sent(values=bad(np.nan))], "not finite at sync 1"),
    "inf": ([sent(values=bad(-np.inf))], "not finite at sync 1"),
    "no examples": ([sent(examples=0)], "over no examples"),
    "unknown group": ([sent(group="no\nsuch")], "a group that does not exist"),
    "not a member": ([sent(group="others")], "of which it is not a member"),
    "nothing": ([Up(values=b"1234").SerializeToString()], "kind 'None', which is not due"),
    "no frame": ([b"\xff" * 20], "cannot be read"),
    "odd bytes": (
        [Up(gradient=Gradient(group="pair"), values=b"123").SerializeToString()],
        "cannot be read",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_an_unexpected_message_ends_the_session_with_a_clear_error_for_all(
    folder: Path, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    given, said = CASES[case]
    caplog.set_level(logging.DEBUG)
    notices = Notices()
    others = Group("others", SIZE, 1, ("b",))
    with opened(folder, [PAIR, others], notices) as there, there.connect("b") as b:
        assert said in Raw(there).send(*given).ended()
        with pytest.raises(ExchangeError) as caught:
            b.swap("pair", gradient("b", 0), 256)
        assert said in str(caught.value) and "\n" not in str(caught.value)
        assert said in Raw(there).send(sent()).ended()  # a later one gets the same reason
    refused = [(site, text) for what, site, text in notices.all if what == "refused"]
    assert refused[0][0] == "a" and said in refused[0][1]
    assert said in caplog.text
    for secret in (str(SECRET), FINE.tobytes()[:8].hex(), there.invitations["a"].ticket):
        assert secret not in caplog.text


def test_a_frame_above_the_size_limit_never_reaches_the_sums(folder: Path) -> None:
    with opened(folder, rejoin=0) as there, there.connect("b") as b:
        raw = Raw(there)
        until(lambda: there.session._meeting.is_connected("a"))
        raw.send(sent(values=np.zeros(100_000, np.float32)))
        with pytest.raises(ExchangeError, match="connection of a"):
            b.swap("pair", gradient("b", 0), 256)
        raw.ended()
        assert there.session.traffic()["a"] == (0, 0)


def test_a_stranger_is_refused_and_the_session_goes_on(folder: Path) -> None:
    with opened(folder) as there:
        with there.connect("a") as a, there.connect("b") as b:
            for ticket in ("f" * 64, "", "x" * 4000, "0" * 63):
                with pytest.raises(ExchangeError, match="knows no such ticket"):
                    there.connect("a", ticket=ticket)
            b.send("pair", gradient("b", 0), 256)
            total = a.swap("pair", gradient("a", 0), 256)
            assert np.array_equal(total, gradient("a", 0) + gradient("b", 0))
        # On a busy machine it may come before its own farewell; then it is a second program.
        with pytest.raises(ExchangeError, match=r"has left|again"):
            there.connect("a").swap("pair", gradient("a", 1), 256)
    with pytest.raises(ExchangeError, match="cannot connect"):
        there.connect("a", rejoin=0.0)


def test_a_second_program_with_the_ticket_ends_the_session(folder: Path) -> None:
    """Where a site's program was restarted within a round, nobody goes on with half of it."""
    with opened(folder) as there, there.connect("b") as b:
        Raw(there).send(sent())
        until(lambda: there.session._meeting.sums["pair"].taken("a") == 1)
        assert "again" in Raw(there).send(sent()).ended()
        with pytest.raises(ExchangeError, match="again"):
            b.swap("pair", gradient("b", 0), 256)


def test_a_server_with_another_certificate_is_refused(folder: Path) -> None:
    with opened(folder) as there, opened(folder) as other:
        certificate = other.invitations["a"].certificate
        with pytest.raises(ExchangeError, match="cannot connect"):
            there.connect("a", certificate=certificate, rejoin=0.0)


# ---- a server that breaks the protocol -----------------------------------------------------------


@contextmanager
def pretending(folder: Path, *answers: bytes) -> Iterator[tuple[Invitation, str]]:
    """A server that answers the first gradient with any bytes."""
    host = LaneHost(folder)

    def answer(note: bytes | memoryview) -> None:
        for each in answers:
            line.post(each)

    line = LaneEnd(noted=answer, most=2**20)
    host.invite("0" * 64, line, "a")
    try:
        asked = Invitation(host.name, host.certificate, "0" * 64, "a", (PAIR,), PATIENCE, 5.0)
        yield asked, f"unix:{folder}"
    finally:
        host.close()


@pytest.mark.parametrize(
    ("answers", "said"),
    [
        ([frames.total("pair", 0, FINE[1:])], "39 values instead of 40"),
        ([frames.total("pair", 0, bad(np.inf))], "not finite: it is not used"),
        ([frames.total("pair", 1, FINE)], "a sum that is not due"),
        ([frames.total("other", 0, FINE)], "a sum that is not due"),
        ([Up(leave=Leave()).SerializeToString()], "a frame that is not due"),
        ([b"\xff" * 9], "cannot be read"),
        ([Down(sum=Sum(group="pair"), values=b"123").SerializeToString()], "cannot be read"),
        ([b"1" * 100_000], "more than the"),
        ([], r"no answer within 0\.5 s"),
    ],
)
def test_a_site_refuses_invalid_answers_of_a_server(
    folder: Path, answers: list[bytes], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fedda.exchange.remote.LEAVE_S", 0.1)
    with pretending(folder, *answers) as asked, exchange.connect(*asked) as stream:
        stream.send("pair", FINE, 256)
        if not answers:
            monkeypatch.setattr(stream, "_patience", 0.5)
        with pytest.raises(ExchangeError, match=said) as caught:
            stream.receive("pair")
        assert len(str(caught.value)) <= 1000


def test_pieces_are_freed_also_where_no_note_comes_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(posts, "PIECE", 10)
    host, came = LaneHost(folder), list[bytes]()
    invited = host.invite("0" * 64, LaneEnd(noted=lambda n: came.append(bytes(n)), most=600), "a")
    line, gone = LaneEnd(), threading.Event()
    dialer = Dialer(line, invited, f"unix:{folder}", lambda _: gone.set(), 0.0)
    line.post(b"1" * 500)
    until(lambda: came == [b"1" * 500] and len(line._posts._open) < posts.UNTOLD)
    dialer.close()
    assert gone.wait(PATIENCE)
    host.close()


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
    whole = frames.gradient("pair", 1, 256, FINE)
    for read, changed in itertools.product(
        (frames.up, frames.down), (data, whole[: len(data)] + data)
    ):
        with contextlib.suppress(ExchangeError):
            assert read(changed)[1].nbytes <= len(changed)
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
