"""The exchange without a network: invitations, sums, time limits, and turns."""

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedda import exchange
from fedda.errors import ExchangeError, NotFiniteError, WireError
from fedda.exchange import Group, Invitation, LocalHost, Turns
from fedda.exchange.groups import MAX_WAIT
from fedda.exchange.meeting import Meeting
from fedda.exchange.sums import Sums

PAIR = Group("pair", 3, 2, ("a", "b"))
ABC = ("a", "b", "c")


def vector(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


# ---- invitations -------------------------------------------------------------------------------


def invitation(**changed: Any) -> Invitation:
    fields = {"name": "", "certificate": "", "ticket": "0" * 64, "node": "a"}
    return Invitation(**{**fields, "groups": (PAIR,), "wait": 5.0, **changed})


NAME = "lane-" + "0" * 32
PEM = "-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n"


@pytest.mark.parametrize("lane", [{}, {"name": NAME, "certificate": PEM}], ids=["here", "lane"])
def test_an_invitation_is_the_same_after_the_wire(lane: dict[str, str]) -> None:
    sent = invitation(groups=(PAIR, Group("all", 7, 9, ABC)), **lane)
    assert all(type(value) in (str, int, float) for value in sent.flat().values())
    assert Invitation.parse(sent.flat()) == sent


@pytest.mark.parametrize(
    "changed",
    [
        {"name": NAME},  # lanes without a certificate
        {"certificate": PEM},  # a certificate without lanes
        {"name": NAME, "certificate": "-----BEGIN CERTIFICATE-----"},
        {"name": NAME, "certificate": PEM.encode()},
        {"name": "../" + NAME, "certificate": PEM},
        {"name": 7, "certificate": PEM},
        {"ticket": "0" * 63},
        {"ticket": "g" * 64},
        {"ticket": b"0" * 64},
        {"node": "c"},  # a site in no group
        {"node": ["a"]},
        {"wait": 0.0},
        {"wait": float("nan")},
        {"wait": float("inf")},
        {"wait": "5"},
        {"rejoin": -1.0},
        {"rejoin": float("inf")},
        {"rejoin": None},
        {"port": -1},
        {"port": "8444"},
        {"groups": "["},
        {"groups": "[" * 100_000},
        {"groups": "[]"},
        {"groups": json.dumps([["pair", 3, 2, ["a", "b"]]] * 2)},
        {"groups": json.dumps([["pair", 3, 2, ["a", "a"]]])},
        {"groups": json.dumps([["pair", 3, 2, "ab"]])},
        {"groups": json.dumps([["pair", 3, 2, ["a", ["b"]]]])},
        {"groups": json.dumps([["pair", 3.0, 2, ["a"]]])},
        {"groups": json.dumps([["pair", 2**28 + 1, 2, ["a"]]])},
        {"groups": json.dumps([["pair", 3, 0, ["a"]]])},
        {"groups": json.dumps([["", 3, 2, ["a"]]])},
        {"groups": json.dumps([["a\nb", 3, 2, ["a"]]])},
        {"groups": json.dumps([[["pair"], 3, 2, ["a"]]])},
        {"groups": json.dumps([["pair", 3, 2]])},
        {"extra": 1},
    ],
)
def test_an_invalid_invitation_is_refused(changed: dict[str, Any]) -> None:
    Invitation.parse(invitation().flat())
    with pytest.raises(WireError, match="cannot be read"):
        Invitation.parse({**invitation().flat(), **changed})


def test_a_site_accepts_the_longest_time_limits() -> None:
    with LocalHost().open([PAIR], join=60, wait=MAX_WAIT, rejoin=MAX_WAIT) as session:
        assert Invitation.parse(session.invitations["a"].flat()).wait == MAX_WAIT


def test_a_ticket_is_not_shown() -> None:
    assert "000" not in repr(invitation()) and "BEGIN" not in repr(invitation(certificate=PEM))


def test_an_invalid_group_is_refused_with_a_reason() -> None:
    with pytest.raises(ExchangeError, match="size=0"):
        Group("g", 0, 1, ("a",))
    with pytest.raises(ExchangeError, match="2 members, of which 1 differ"):
        Group("g", 1, 1, ("a", "a"))
    with pytest.raises(ExchangeError, match="needs 1 to"):
        LocalHost().open([], join=1, wait=1)


# ---- sums --------------------------------------------------------------------------------------


def test_a_sum_by_hand() -> None:
    sums = Sums(PAIR)
    assert sums.add("b", 0, vector(1, 2, 3)) is None
    assert sums.begun and sums.missing() == ["a"]
    total = sums.add("a", 0, vector(10, 20, 30))
    assert total is not None and total.tolist() == [11, 22, 33]
    assert (sums.index, sums.taken("a"), sums.begun) == (1, 1, False)


@given(st.permutations(range(5)), st.integers(0, 2**32 - 1))
def test_sums_do_not_depend_on_the_order_of_arrival(order: Sequence[int], seed: int) -> None:
    members = tuple("abcde")
    values = np.random.default_rng(seed).normal(size=(5, 8)).astype(np.float32)
    values *= np.array([1e8, 1, 1e-8, -1e8, 1], np.float32)[:, None]
    naive = values[0].copy()
    for row in values[1:]:
        naive = naive + row
    sums = Sums(Group("g", 8, 1, members))
    found = [sums.add(members[i], 0, values[i]) for i in order]
    assert all(each is None for each in found[:-1])
    assert found[-1] is not None and found[-1].tobytes() == naive.tobytes()


def test_only_one_sum_is_kept() -> None:
    sums = Sums(Group("g", 3, 100, ABC))
    for index in range(50):
        for member in "cba":
            sums.add(member, index, vector(index, 0, 0))
        assert not sums._early and sums._total is None
        assert sums.last is not None and sums.last[0] == 3 * index


def test_more_syncs_than_agreed_are_refused() -> None:
    sums = Sums(Group("g", 1, 1, ("a",)))
    sums.add("a", 0, vector(1))
    assert sums.over and sums.missing() == []
    with pytest.raises(ExchangeError, match="more gradients than the 1 agreed on"):
        sums.add("a", 1, vector(1))


# ---- time limits, with a clock that the test moves -----------------------------------------------


class Watched:
    """A meeting of a and b, its notices, and a clock that the test moves."""

    def __init__(self, rejoin: float = 5.0, groups: Sequence[Group] = (PAIR,)) -> None:
        self.notices: list[tuple[str, str]] = []
        self.now = 100.0
        self.meeting = Meeting(
            groups,
            join=60,
            wait=20,
            rejoin=rejoin,
            notice=lambda what, site, _: self.notices.append((what, site)),
            clock=lambda: self.now,
        )

    def arrive(self, *sites: str) -> Meeting:
        for site in sites:
            self.meeting.arrive(site)
        return self.meeting

    def after(self, seconds: float) -> str:
        self.now += seconds
        self.meeting.tick()
        return self.meeting.ended

    def add(self, site: str, index: int = 0, group: str = "pair") -> Any:
        return [s.last for s in self.meeting.add(site, group, index, 256, vector(1, 2, 3))]


def test_the_limit_does_not_run_while_all_sites_compute() -> None:
    watched = Watched()
    watched.arrive("a", "b")
    assert not watched.after(1000)
    watched.add("a")
    assert not watched.after(19.9)
    watched.add("b")
    assert not watched.after(1000)
    watched.add("b", 1)
    assert "for a" in watched.after(20.1)


def test_a_site_that_reconnects_gets_the_full_time_again() -> None:
    watched = Watched()
    watched.arrive("a", "b")
    watched.add("a")
    watched.after(19)
    watched.meeting.lose("b")
    assert not watched.after(4)
    watched.arrive("b")
    assert watched.notices[-1] == ("resumed", "b")
    assert not watched.after(19.9)
    (total,) = watched.add("b")
    assert total.tolist() == [2, 4, 6]


def test_a_connection_may_break_after_the_last_sync() -> None:
    watched = Watched(rejoin=0, groups=(PAIR, Group("other", 3, 2, ("a", "c"))))
    watched.arrive(*ABC)
    for index in range(2):
        watched.add("a", index)
        watched.add("b", index)
    watched.meeting.lose("b")
    assert not watched.after(1000)
    watched.add("a", 0, "other")
    assert "for c" in watched.after(20.1)  # the limits still hold for the other sites


def test_a_site_reconnects_to_receive_the_last_sum() -> None:
    watched = Watched(rejoin=0)
    watched.arrive("a", "b")
    for index in range(2):
        watched.add("a", index)
        watched.add("b", index)
    watched.meeting.lose("b")
    watched.arrive("b")
    assert watched.notices[-2:] == [("cut", "b"), ("resumed", "b")]


def test_a_site_that_left_ends_the_session_once_its_gradient_is_needed() -> None:
    watched = Watched(groups=(PAIR, Group("other", 3, 2, ("b", "c"))))
    watched.arrive("a", "b", "c")
    watched.add("b")
    watched.add("a")
    watched.meeting.leave("a")
    watched.add("c", group="other")
    watched.add("b", group="other")
    assert not watched.meeting.ended
    watched.add("b", 1)
    assert "a left the exchange after 1 of 2 syncs of group 'pair'" in watched.meeting.ended
    with pytest.raises(ExchangeError, match="a left"):
        watched.add("c", 1, "other")
    with pytest.raises(ExchangeError, match="a left"):
        watched.arrive("c")


def test_a_ticket_is_valid_for_one_connection() -> None:
    watched = Watched()
    watched.arrive("a")
    with pytest.raises(ExchangeError, match="takes part already"):
        watched.arrive("a")
    assert not watched.meeting.ended
    watched.meeting.leave("a")
    with pytest.raises(ExchangeError, match="has left"):
        watched.arrive("a")


# ---- in one process ------------------------------------------------------------------------------


def test_a_sent_gradient_may_be_overwritten() -> None:
    with LocalHost().open([PAIR], join=5, wait=5) as session:
        a, b = (exchange.connect(session.invitations[site]) for site in "ab")
        mine = vector(1, 2, 3)
        b.send("pair", mine, 256)
        mine[:] = 100
        assert a.swap("pair", vector(0, 0, 0), 256).tolist() == [1, 2, 3]
        total = b.receive("pair")
        total[:] = 0  # the total is the caller's own copy
        assert a.sent("pair") == 1


def test_a_stream_refuses_to_send_what_was_not_agreed_on() -> None:
    with LocalHost().open([PAIR], join=5, wait=5) as session:
        stream = exchange.connect(session.invitations["a"])
        wrong: list[tuple[Any, str]] = [
            (vector(1, 2), r"shape \(2,\)"),
            (np.zeros(3), "float64"),
            (np.zeros((3, 1), np.float32), "shape"),
        ]
        for values, said in wrong:
            with pytest.raises(ExchangeError, match=said):
                stream.send("pair", values, 256)
        with pytest.raises(NotFiniteError):
            stream.send("pair", vector(1, 2, np.nan), 256)
        with pytest.raises(ExchangeError, match="0 examples"):
            stream.send("pair", vector(1, 2, 3), 0)
        with pytest.raises(ExchangeError, match="in no group 'other'"):
            stream.send("other", vector(1, 2, 3), 256)
        with pytest.raises(ExchangeError, match="owes no sum"):
            stream.receive("pair")
        assert session.traffic() == {"a": (0, 0), "b": (0, 0)}
        stream.send("pair", vector(1, 2, 3), 256)
        with pytest.raises(ExchangeError, match="still owes the sum of sync 1"):
            stream.send("pair", vector(1, 2, 3), 256)


def test_values_with_which_a_sum_may_overflow_end_the_session_and_their_site_is_blamed() -> None:
    """Else the others would refuse the sum, and one of them would seem to have ended it."""
    with LocalHost().open([PAIR], join=5, wait=5) as session:
        a, b = (exchange.connect(session.invitations[site]) for site in "ab")
        b.send("pair", vector(1e38, 0, 0), 256)
        with pytest.raises(ExchangeError, match="a sent group 'pair' values that no sum can hold"):
            a.swap("pair", vector(0, -3e38, 0), 256)
        assert session.blamed == ("a",)


def test_a_local_session_ends_with_a_clear_error_for_all() -> None:
    notices: list[str] = []
    host = LocalHost(lambda what, *_: notices.append(what))
    with host.open([PAIR], join=0.2, wait=5) as session:
        a = exchange.connect(session.invitations["a"])
        with pytest.raises(ExchangeError, match=r"missing after 0\.2 s .*: b"):
            a.swap("pair", vector(1, 2, 3), 256)
        with pytest.raises(ExchangeError, match="missing"):
            exchange.connect(session.invitations["b"])
    assert notices == ["joined", "ended"]
    with pytest.raises(ExchangeError, match="one that is over"):
        exchange.connect(session.invitations["b"])


def test_closing_wakes_waiting_sites() -> None:
    session = LocalHost().open([PAIR], join=60, wait=60)
    a = exchange.connect(session.invitations["a"])
    threading.Timer(0.1, session.close).start()
    began = time.monotonic()
    with pytest.raises(ExchangeError, match="server closed the exchange before its last sync"):
        a.swap("pair", vector(1, 2, 3), 256)
    assert time.monotonic() - began < 5


def test_a_forged_invitation_is_refused() -> None:
    with LocalHost().open([PAIR], join=5, wait=5) as session:
        forged = replace(session.invitations["a"], ticket="f" * 64)
        with pytest.raises(ExchangeError, match="another process"):
            exchange.connect(forged)


# ---- turns -------------------------------------------------------------------------------------


def played(seed: int, delays: dict[str, float]) -> tuple[list[str], dict[str, list[float]]]:
    """Run three sites that draw numbers and sum -> the order of computing, each site's numbers."""
    torch.manual_seed(seed)
    order: list[str] = []
    turns = Turns(ABC)
    groups = [Group("all", 1, 3, ABC), Group("ab", 1, 3, ("a", "b"))]
    with LocalHost().open(groups, join=5, wait=5) as session:

        def work(site: str) -> list[float]:
            seen = []
            with exchange.connect(session.invitations[site]) as stream:
                for _ in range(3):
                    order.append(site)
                    time.sleep(delays[site])
                    mine = float(torch.randn(1))
                    seen.append(mine)
                    stream.send("all", vector(mine), 256)
                    if site != "c":
                        order.append(site)
                        seen.append(float(stream.swap("ab", vector(float(torch.rand(1))), 256)[0]))
                    seen.append(float(stream.receive("all")[0]))
            return seen

        done = turns.together({site: lambda s=site: work(s) for site in ABC})
    return order, {site: future.result() for site, future in done.items()}


def test_turns_make_threads_repeatable() -> None:
    before = torch.get_rng_state()
    first = played(0, {"a": 0.0, "b": 0.004, "c": 0.008})
    after = torch.rand(1)
    again = played(0, {"a": 0.008, "b": 0.0, "c": 0.004})
    assert first == again
    assert torch.rand(1) == after  # the caller's random numbers continue as before
    order, seen = first
    # Each site computes until it needs another one; c sends the last gradient, so it does not wait.
    assert order[:7] == ["a", "a", "b", "b", "c", "c", "a"]
    torch.manual_seed(0)
    alone = [float(torch.randn(1)), float(torch.rand(1))]
    assert seen["a"][0] == seen["b"][0] == seen["c"][0] == alone[0]
    assert seen["a"][1] == float(vector(alone[1])[0] * 2)
    torch.set_rng_state(before)


def test_a_site_that_fails_passes_the_turn_on() -> None:
    turns = Turns(ABC)
    with LocalHost().open([Group("g", 1, 5, ABC)], join=5, wait=5) as session:

        def work(site: str) -> float:
            with exchange.connect(session.invitations[site]) as stream:
                if site == "b":
                    raise ValueError("no data")
                return float(stream.swap("g", vector(1), 256)[0])

        done = turns.together({site: lambda s=site: work(s) for site in ABC})
    assert isinstance(done["b"].exception(), ValueError)
    for site in "ac":
        with pytest.raises(ExchangeError, match="b left the exchange after 0 of 5 syncs"):
            done[site].result()


def test_waiting_for_a_turn_does_not_count_as_late() -> None:
    """Three sites compute .15 s each, one after the other; the limits to join and send are .2 s."""
    turns = Turns(ABC)
    with LocalHost().open([Group("g", 1, 2, ABC)], join=0.2, wait=0.2) as session:

        def work(site: str) -> float:
            time.sleep(0.15)
            with exchange.connect(session.invitations[site]) as stream:
                stream.swap("g", vector(1), 256)
                time.sleep(0.15)
                return float(stream.swap("g", vector(1), 256)[0])

        done = turns.together({site: lambda s=site: work(s) for site in ABC})
    assert [done[site].result() for site in ABC] == [3.0] * 3


def test_turns_wait_for_a_missing_sum_until_the_limit() -> None:
    turns = Turns(("a", "b"))
    with LocalHost().open([PAIR], join=5, wait=0.2) as session:

        def work(site: str) -> None:
            stream = exchange.connect(session.invitations[site])  # b's stream is never closed
            if site == "a":
                stream.swap("pair", vector(1, 2, 3), 256)

        done = turns.together({site: lambda s=site: work(s) for site in "ab"})
    with pytest.raises(ExchangeError, match=r"waited 0\.2 s .* for b"):
        done["a"].result()
    done["b"].result()


def test_an_interrupted_wait_stops_all_sites(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = Turns(("a", "b"))

    def interrupt(*_: object) -> None:
        time.sleep(0.05)
        raise KeyboardInterrupt

    monkeypatch.setattr("fedda.exchange.turn_lock.wait", interrupt)
    with LocalHost().open([PAIR], join=60, wait=60) as session:
        stream = exchange.connect(session.invitations["a"])
        began = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            turns.together({"a": lambda: stream.swap("pair", vector(1, 2, 3), 256)})
    assert time.monotonic() - began < 5
