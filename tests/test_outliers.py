"""Gradients that are much longer than the other sites' are scaled down in their sums."""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from fedda import exchange
from fedda.config import GuardConfig
from fedda.errors import ExchangeError, QuorumError
from fedda.exchange import Group, LocalHost, Outliers
from fedda.exchange.groups import Invitation
from fedda.exchange.in_process import LocalStream
from fedda.exchange.meeting import Meeting
from fedda.exchange.outliers import Excess
from fedda.maths.bounds import Peers
from tests.adversarial_runs import run
from tests.local_grid import Node
from tests.sockets import AT, remote

SIZE, SYNCS, TIMES = 20, 3, 2.0
GUARD = GuardConfig(max_update=TIMES)
SOURCES = ("anna", "bert", "carl", "dora", "emil")
LIAR = "emil"
ONE = [Group("all", SIZE, SYNCS, (*SOURCES, "town"))]
PAIRS = [Group(f"pair/{s}", SIZE, SYNCS, (s, "town")) for s in SOURCES]
LONG = [10.0, -100.0]
NUMBERLESS = [1e30, math.inf, math.nan]  # the square of the first is infinite
Lie = Callable[[np.ndarray], np.ndarray]


def gradient(site: str, index: int) -> np.ndarray:
    draws = np.random.default_rng([*site.encode(), index])
    return draws.normal(size=SIZE).astype(np.float32)


# ---- the longest of the others -------------------------------------------------------------------


@given(
    st.lists(st.sampled_from([0.0, 1, 2, 3, 9, 50, math.inf]), min_size=1, max_size=9),
    st.integers(0, 4),
    st.sampled_from([0.0, 1.0, 5.0]),
    st.sampled_from([0.01, 0.2, 0.4]),
)
def test_a_verdict_is_that_of_the_naive_rule_whatever_is_still_to_come(
    lengths: list[float], missing: int, times: float, share: float
) -> None:
    K = len(lengths) + missing
    peers, f = Peers(times, share, K), math.ceil(round(share * K, 6))
    for place, length in enumerate(lengths):
        peers.add(str(place), length)
    for place, length in enumerate(lengths):
        others = lengths[:place] + lengths[place + 1 :]
        least = [*sorted([*others, *missing * [0.0]], reverse=True), 0.0][f - 1]
        few = not times or K < 3
        if few or 0 < length <= times * least:
            wanted = 1.0
        elif missing:
            wanted = None
        else:
            wanted = times * least / length if 0 < times * least < length else 1.0
        assert peers.factor(str(place)) == wanted


# ---- sums over the exchange ----------------------------------------------------------------------


def falsify(stream: Any, lie: Lie) -> None:
    """Let a site send something else, past its own checks."""
    push = stream._push
    stream._push = lambda group, index, values, n: push(group, index, lie(values), n)


def sums(
    host: Any, groups: Sequence[Group], lie: Lie | None, times: float = TIMES
) -> tuple[dict[str, list[np.ndarray]], Mapping[str, Excess]]:
    """Run a session with a liar -> the sums of each group, and what was found in gradients."""

    def part(invitation: Invitation) -> dict[str, list[np.ndarray]]:
        names, node = [group.name for group in invitation.groups], invitation.node
        found: dict[str, list[np.ndarray]] = {name: [] for name in names}
        with exchange.connect(invitation, AT) as stream:
            if lie and node == LIAR:
                falsify(stream, lie)
            for index in range(SYNCS):
                for name in names:
                    stream.send(name, gradient(node, index), 256)
                for name in names:
                    found[name].append(stream.receive(name))
        return found

    limits = {"join": 30, "wait": 30, "rejoin": 0}
    outliers = Outliers(GuardConfig(max_update=times), SOURCES) if times else None
    with host().open(groups, **limits, outliers=outliers) as session:
        with ThreadPoolExecutor(len(session.invitations)) as pool:
            done = {n: pool.submit(part, i) for n, i in session.invitations.items()}
        return done["town"].result(), session.outliers()


def length(site: str, index: int) -> float:
    return float(np.linalg.norm(gradient(site, index)))


def clipped(by: float, index: int) -> np.ndarray:
    """The liar's gradient, as it counts: in its direction, as long as the bound."""
    most = TIMES * max(length(s, index) for s in SOURCES if s != LIAR)
    return np.sign(by) * gradient(LIAR, index) * most / length(LIAR, index)


@pytest.mark.parametrize("groups", [ONE, PAIRS], ids=["one", "pairs"])
@pytest.mark.parametrize("host", [LocalHost, remote])
@pytest.mark.parametrize("by", LONG)
def test_a_long_gradient_counts_as_long_as_the_bound(
    host: Any, by: float, groups: list[Group]
) -> None:
    found, odd = sums(host, groups, lambda g: np.float32(by) * g)
    for group in groups:
        for index, total in enumerate(found[group.name]):
            every = [clipped(by, index) if m == LIAR else gradient(m, index) for m in group.members]
            np.testing.assert_allclose(total, sum(every), rtol=1e-4, atol=1e-5)
    ((site, about),) = odd.items()
    assert (site, about.clipped, about.numberless) == (LIAR, SYNCS, 0)
    assert TIMES < about.longest < 2 * abs(by)


@pytest.mark.parametrize("host", [LocalHost, remote])
@pytest.mark.parametrize("by", NUMBERLESS)
def test_a_gradient_without_numbers_is_left_out_of_its_sum(host: Any, by: float) -> None:
    found, odd = sums(host, ONE, lambda g: np.float32(by) * g)
    for index, total in enumerate(found["all"]):
        kept = sum(gradient(s, index) for s in SOURCES if s != LIAR)
        wanted = kept * np.float32(5 / 4) + gradient("town", index)  # a mean over four sources
        np.testing.assert_array_equal(total, wanted)
    assert odd == {LIAR: Excess(numberless=SYNCS)}
    found, odd = sums(host, PAIRS, lambda g: np.float32(by) * g)
    for name, totals in found.items():
        source = name.removeprefix("pair/")
        for index, total in enumerate(totals):
            honest = gradient(source, index) + gradient("town", index)
            np.testing.assert_array_equal(total, 0 * honest if source == LIAR else honest)
    assert odd == {LIAR: Excess(numberless=SYNCS)}


@pytest.mark.parametrize("groups", [ONE, PAIRS])
def test_without_a_long_gradient_every_bit_is_as_without_the_bound(groups: list[Group]) -> None:
    bounded, odd = sums(LocalHost, groups, None)
    plain, _ = sums(LocalHost, groups, None, times=0)
    assert not odd
    assert all(np.array_equal(bounded[name], plain[name]) for name in plain)


@pytest.mark.parametrize("groups", [ONE, PAIRS])
@given(order=st.permutations(range(10)), seed=st.integers(0, 2**32 - 1))
def test_verdicts_and_sums_do_not_depend_on_the_order_of_arrival(
    groups: list[Group], order: Sequence[int], seed: int
) -> None:
    draws = np.random.default_rng(seed)
    sites = [*SOURCES, "town"]
    lengths = dict(zip(sites, draws.lognormal(0, 2, 6), strict=True))
    frames = [(m, g.name) for g in groups for m in g.members]

    def totals(arrival: Sequence[tuple[str, str]]) -> tuple[dict[str, list[float]], Any]:
        outliers = Outliers(GUARD, SOURCES)
        meeting = opened(groups, outliers)
        found: dict[str, list[float]] = {}
        for member, group in arrival:
            values = np.float32(lengths[member]) * gradient(member, 0)
            for done in meeting.add(member, group, 0, 256, values):
                assert done.last is not None and done.group.name not in found
                found[done.group.name] = done.last.tolist()
        return found, outliers.found

    shuffled = [frames[i] for i in order if i < len(frames)]
    first, again = totals(frames), totals(shuffled)
    assert first == again and first[0].keys() == {g.name for g in groups}


def opened(groups: Sequence[Group], outliers: Outliers, clock: Any = lambda: 0.0) -> Meeting:
    """A session that all sites have joined."""
    limits = {"join": 60.0, "wait": 20.0, "rejoin": 5.0}
    meeting = Meeting(groups, **limits, notice=lambda *_: None, outliers=outliers, clock=clock)
    for site in meeting.sites:
        meeting.arrive(site)
    return meeting


def sent(meeting: Meeting, sites: Sequence[str], index: int = 0) -> list[str]:
    """Let sources send, each to its pair -> the groups whose sums are complete by it."""
    done = (meeting.add(s, f"pair/{s}", index, 256, gradient(s, index)) for s in sites)
    return [sums.group.name for complete in done for sums in complete]


def test_no_pair_waits_for_more_than_the_second_source() -> None:
    meeting = opened(PAIRS, Outliers(GUARD, SOURCES))
    for group in PAIRS:
        assert not meeting.add("town", group.name, 0, 256, gradient("town", 0))
    assert sent(meeting, SOURCES[:1]) == []  # the others may still send 0
    assert sent(meeting, SOURCES[1:2]) == ["pair/bert", "pair/anna"]
    assert sent(meeting, SOURCES[:1], 1) == []  # goes on to the next sync, while three are missing
    assert sent(meeting, SOURCES[2:]) == ["pair/carl", "pair/dora", "pair/emil"]


def test_a_site_is_named_that_others_groups_wait_for() -> None:
    now = [0.0]
    meeting = opened(PAIRS, Outliers(GUARD, SOURCES), lambda: now[0])
    meeting.add("town", "pair/anna", 0, 256, gradient("town", 0))
    sent(meeting, SOURCES[:1])
    now[0] = 20.5
    meeting.tick()
    assert "of group 'pair/anna' waited 20 s (exchange.wait) for bert, carl, dora and emil" in (
        meeting.ended
    )
    assert meeting.blamed == SOURCES[1:]


def test_a_site_that_leaves_while_others_groups_wait_for_it_ends_the_session() -> None:
    meeting = opened(PAIRS, Outliers(GUARD, SOURCES))
    meeting.leave(LIAR)
    meeting.add("town", "pair/anna", 0, 256, gradient("town", 0))
    assert not meeting.ended
    sent(meeting, ["anna"])
    assert "emil left the exchange after 0 of 3 syncs of group 'pair/anna'" in meeting.ended


def test_the_target_is_not_judged_and_still_may_send_no_nan() -> None:
    meeting = opened(ONE, Outliers(GUARD, SOURCES))
    with pytest.raises(ExchangeError, match="town sent group 'all' values that are not finite"):
        meeting.add("town", "all", 0, 256, np.full(SIZE, np.nan, np.float32))


# ---- runs ----------------------------------------------------------------------------------------


@pytest.fixture
def liar(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """What one site multiplies its gradients by, past its own checks: change the only entry."""
    factor, push = [1.0], LocalStream._push

    def lies(self: Any, group: str, index: int, values: np.ndarray, examples: int) -> None:
        by = np.float32(factor[0] if self.node == LIAR else 1)
        push(self, group, index, by * values, examples)

    monkeypatch.setattr(LocalStream, "_push", lies)
    return factor


@pytest.fixture
def five(domains: list[Node]) -> list[Node]:
    """Five sources and the target."""
    return [*domains, *(domains[n] | {"name": name} for n, name in enumerate(SOURCES[3:]))]


SUMS = pytest.mark.nightly("fedda/exchange", "fedda/adversarial", "clients/shared", "strategies")


@pytest.mark.parametrize(
    "method", ["fdann", *(pytest.param(m, marks=SUMS) for m in ("fwdgrl", "fdan", "fada", "mdan"))]
)
def test_one_source_decides_no_training_by_long_gradients_and_is_named(
    five: list[Node], tmp_path: Path, liar: list[float], method: str
) -> None:
    """However long they are, the run's model is the same but for rounding."""
    models = []
    for by in (100.0, 1e6):
        liar[0], events = by, []
        found = run(five, tmp_path / str(by), method, events.append, **SHORT)
        models.append(load_file(found["model"]))
        (first,) = [e for e in events if e.get("what") == "clipped" and e["site"] == LIAR]
        said = (
            r"(\d+) of its \1 gradients were up to \S+ times as long as the longest of the others'"
        )
        assert first["event"] == "trouble" and re.match(said, first["text"])
        later = [e for e in events if e["event"] == "clipped" and e["site"] == LIAR]
        assert len(later) == len(found["rounds"]) - 1
    for name, values in models[0].items():
        np.testing.assert_allclose(models[1][name], values, rtol=0.02, atol=0.01)


def test_gradients_without_numbers_are_left_out_and_their_site_is_named(
    five: list[Node], tmp_path: Path, liar: list[float]
) -> None:
    liar[0], events = math.nan, []
    found = run(five, tmp_path, "fdann", events.append, **SHORT)
    named = [e for e in events if e.get("what") == "refused"]
    assert {e["site"] for e in named} == {LIAR} and len(named) == len(found["rounds"])
    said = r"(\d+) of its \1 gradients were no numbers; left out of their sums"
    assert all(re.match(said, e["text"]) for e in named)


SHORT: dict[str, Any] = {"fada.discriminator.sizes": "8", "mdan.discriminator.sizes": "8"}
SHORT |= {"guard.max-update": TIMES}


def test_of_two_sources_none_is_judged(
    domains: list[Node], tmp_path: Path, liar: list[float]
) -> None:
    two = [n | {"name": LIAR} if n["name"] == "carl" else n for n in domains if n["name"] != "bert"]
    events: list[dict[str, Any]] = []
    liar[0] = 100.0
    run(two, tmp_path / "long", "fdann", events.append)
    assert not [e for e in events if e["event"] == "trouble"]
    liar[0] = math.nan
    with pytest.raises(QuorumError):
        run(two, tmp_path / "nan", "fdann", events.append, **{"wait.tries": 1})
    assert any("emil sent group 'gradient' values" in e.get("text", "") for e in events)


def test_the_distances_of_fruda_are_each_candidates_own(
    five: list[Node], tmp_path: Path, liar: list[float]
) -> None:
    """They are about models of their own, so that honest gradients may differ by any factor."""
    liar[0], events = 100.0, []
    some = {"rounds": 3, "fruda.pretrain": 1, "fruda.measure.steps": 2}
    found = run(five, tmp_path, "fruda", events.append, **some)
    assert len(found["selection"]["candidates"]) == len(SOURCES)
    assert not [e for e in events if "guard.max-update" in e.get("text", "")]
