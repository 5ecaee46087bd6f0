"""Robust means of models: against the papers' rules in plain Python, and in runs with liars."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Error, Message
from hypothesis import given
from hypothesis import strategies as st

from clients.site.memory import resident
from fedda import records, wire
from fedda.errors import Code, ConfigError, QuorumError
from fedda.maths import robust
from fedda.maths.bounds import too_long
from fedda.maths.robust import RobustMean, least_for, liars_of
from fedda.settings import RunConfig
from fedda.wire import Arrays, Kind
from server import run as server_run
from server.journal import Journal
from server.simulation import rehearse
from strategies.sites.lengths import Lengths
from tests.local_grid import (
    FAST,
    SETTINGS,
    SOURCES,
    Bench,
    Node,
    ScriptedGrid,
    changed,
    make_domains,
    never,
    reshaped,
    run,
)
from tests.reference import robust as twin

IMAGES = {"model__name": "digit-cnn", "model__hidden": "", "train__lr": 0.01}  # with BatchNorm
SHAPES = {"encoder.weight": (3, 4), "encoder.running_mean": (5,), "head.bias": ()}
RULES = ("bounded", "median", "trimmed", "krum")


@pytest.fixture(scope="module")
def domains(tmp_path_factory: pytest.TempPathFactory) -> list[Node]:
    return make_domains(tmp_path_factory.mktemp("domains"))


def model(seed: int, counter: int = 0) -> Arrays:
    rng = np.random.default_rng(seed)
    made: Arrays = {n: np.asarray(rng.normal(size=s), np.float32) for n, s in SHAPES.items()}
    return made | {"encoder.batches": np.array(counter)}


def flat(arrays: Arrays) -> list[float]:
    return [float(v) for n, a in arrays.items() if a.dtype.kind == "f" for v in a.ravel()]


def gathered(rule: Any, models: list[Arrays], w: list[float], liars: float) -> RobustMean:
    mean = RobustMean(model(99), rule, liars)
    for place in np.random.default_rng(len(models)).permutation(len(models)):
        mean.add(models[place], w[place], f"site-{place}")
    return mean


@pytest.mark.parametrize(("K", "liars", "f"), [(5, 0.2, 1), (8, 0.2, 2), (9, 0.3, 3)])
@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_the_papers(rule: Any, K: int, liars: float, f: int) -> None:
    models = [model(seed, counter=seed) for seed in range(K)]
    w = [1.0 + place for place in range(K)]
    mean = gathered(rule, models, w, liars)
    found, rows = mean.result(), [flat(m) for m in models]
    if rule == "krum":
        kept = sorted(twin.krum(rows, f))
        wanted = twin.mean([rows[k] for k in kept], [1.0] * len(kept))
        assert {name for name, share in mean.shares.items() if share} == {f"site-{k}" for k in kept}
    elif rule == "bounded":
        wanted = twin.bounded(flat(model(99)), rows, w)
    else:
        columns = list(zip(*rows, strict=True))
        wanted = [twin.median(c) if rule == "median" else twin.trimmed(c, f) for c in columns]
    np.testing.assert_allclose(flat(found), wanted, rtol=1e-5, atol=1e-6)
    assert found["encoder.batches"] == K - 1  # BatchNorm's counter: the largest
    assert {n: (a.shape, a.dtype) for n, a in found.items()} == {
        n: (a.shape, a.dtype) for n, a in models[0].items()
    }
    assert sum(mean.shares.values()) == pytest.approx(1)


def test_by_hand() -> None:
    """Five sites that agree on 1 but for one, with values 2 and 100, and what each rule makes."""
    values = np.array([[1.0, 0.0], [2.0, 0.0], [3.0, 0.0], [4.0, 0.0], [100.0, 8.0]])
    middle, shares = robust.median(values)
    assert middle.tolist() == [3.0, 0.0] and shares[4] == 0
    trimmed, shares = robust.trimmed_mean(values, 1)
    assert trimmed.tolist() == [3.0, 0.0] and shares[4] == 0
    assert robust.bounds([1.0, 2.0, 3.0, 4.0, 100.0]) == [1, 1, 1, 0.75, 0.03]
    squared = ((values[:, None] - values[None]) ** 2).sum(axis=2)
    assert robust.krum(squared, 1) == [0, 1, 2, 3]
    # Two nearest of four others: scores 17, 10, 10, 5, 13; of three, the last would be left out.
    on_a_line = np.array([0.0, 1.0, 4.0, 5.0, 7.0])
    assert robust.krum((on_a_line[:, None] - on_a_line) ** 2, 1) == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="5 are needed"):
        robust.krum(squared[:4, :4], 1)
    with pytest.raises(ValueError, match="over none"):
        robust.trimmed_mean(values[:2], 1)


def test_no_order_of_arrival_changes_a_bit() -> None:
    models, w = [model(seed) for seed in range(7)], [0.3, 0.1, 0.1, 0.2, 0.1, 0.1, 0.1]
    for rule in RULES:
        made = []
        for order in (range(7), reversed(range(7))):
            mean = RobustMean(model(99), rule, 0.25)  # type: ignore[arg-type]
            for place in order:
                mean.add(models[place], w[place], f"site-{place}")
            made.append(mean.result())
        assert all(np.array_equal(made[0][name], made[1][name]) for name in made[0])


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("lie", [-10.0, 1000.0])
def test_one_liar_of_five_cannot_move_the_mean_far(rule: str, lie: float) -> None:
    """The weighted mean it moves by a fifth of its lie; these by less than honest sites differ."""
    start, honest = model(99), [model(99) for _ in range(5)]
    for place, one in enumerate(honest):
        for name, array in one.items():
            if array.dtype.kind == "f":
                noise = np.random.default_rng(place).normal(0, 0.01, array.shape)
                one[name] = (array + 0.1 + noise).astype(np.float32)
    lying = {n: a + np.float32(lie) if a.dtype.kind == "f" else a for n, a in start.items()}
    models, w = [*honest[:4], lying], [0.1, 0.1, 0.1, 0.1, 0.6]
    truth = np.mean([flat(m) for m in honest], axis=0)
    moved = np.abs(np.array(flat(gathered(rule, models, w, 0.2).result())) - truth).max()
    assert moved < (0.15 if rule == "bounded" else 0.03)
    plain = np.abs(np.array(twin.mean([flat(m) for m in models], w)) - truth).max()
    assert plain > 0.5 * abs(lie)


def test_how_many_sites_a_rule_needs() -> None:
    assert [liars_of(0.2, K) for K in (3, 5, 6, 10)] == [1, 1, 2, 2]
    assert liars_of(0.1, 10) == 1  # though 0.1 * 10 may be more than 1 in floats
    assert least_for("weighted", 0.2) == 1 and least_for("median", 0.2) == 3
    assert least_for("krum", 0.2) == 5 and least_for("trimmed", 0.2) == 3
    for rule in ("krum", "trimmed"):
        for share in (0.05, 0.2, 0.33, 0.49):
            least = least_for(rule, share)  # type: ignore[arg-type]
            mean = RobustMean(model(99), rule, share)  # type: ignore[arg-type]
            for seed in range(least):
                mean.add(model(seed), 1.0, f"site-{seed}")
            assert mean.result().keys() == model(99).keys()
    with pytest.raises(ValueError, match="krum needs 5"):
        gathered("krum", [model(seed) for seed in range(4)], [1.0] * 4, 0.2).result()


# ---- in runs ------------------------------------------------------------------------------------


def shifted(by: float) -> Any:
    """Return a script: a site's reply has a model that lies far away."""

    def script(request: Any, reply: Any) -> list[Any]:
        trained = records.read(reply.content)[0]["model"].unpack()
        draws = np.random.default_rng(0)
        lie = {n: by * draws.standard_normal(a.shape).astype(a.dtype) for n, a in trained.items()}
        far = {n: a + np.abs(lie[n]) if a.dtype.kind == "f" else a for n, a in trained.items()}
        return [changed(request, reply, arrays={"model": wire.pack(far, Kind.MODEL)})]

    return script


LIED = {"guard.max-change": 0, "run.baseline": "", "guard.max-statistics": 0}


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "fdann", "mdan"])
def test_a_run_with_a_liar_keeps_its_course(
    domains: list[Node], tmp_path: Path, method: str
) -> None:
    """`carl` has most examples; its weight in the median is next to nothing."""

    def outcome(rule: str, lies: bool) -> dict[str, Any]:
        place = {"run.dir": str(tmp_path), "run.name": f"{method}-{rule}-{lies}"}
        script = {"carl": shifted(3.0)} if lies else None
        settings = SETTINGS.get(method, {}) | LIED | place
        results, _ = run(
            domains, settings | {"method": method, "guard.mean": rule, "rounds": 2}, script=script
        )
        (training,) = results["trainings"][method]
        return training["rounds"][-1]

    assert outcome("median", True)["weights"]["carl"] < 0.02
    assert outcome("weighted", True)["weights"]["carl"] > 0.2
    honest = outcome("median", False)["weights"]
    assert min(honest[source] for source in SOURCES) > 0.1
    assert sum(honest.values()) == pytest.approx(1)


def test_too_few_sources_and_methods_with_a_mean_of_their_own_are_refused(
    domains: list[Node], tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=r"kd3a combines .* or choose one of .*fedavg"):
        RunConfig.parse({"method": "kd3a", "guard.mean": "median"})
    place = {"run.dir": str(tmp_path), "method": "fedavg"}
    krum = RunConfig.parse(FAST | place | {"guard.mean": "krum"})
    with pytest.raises(ConfigError, match=r"krum and guard.liars 0.2, which needs 5 .* are 3"):
        rehearse(krum, domains)
    with pytest.raises(ConfigError, match="needs 5 sources"):
        server_run.execute(krum, ScriptedGrid(domains), Journal())
    few = RunConfig.parse(
        FAST | place | {"guard.mean": "median", "sources-per-round": 2, "wait.min-sources": 1}
    )
    with pytest.raises(ConfigError, match="median, which needs 3 sources in a round"):
        rehearse(few, domains)


def test_a_round_waits_for_as_many_sources_as_the_rule_needs(
    domains: list[Node], tmp_path: Path
) -> None:
    place = {"run.dir": str(tmp_path), "method": "fedavg", "run.baseline": ""}
    settings = place | {"guard.mean": "median", "wait.tries": 1, "wait.train": 0.5}
    with pytest.raises(QuorumError, match="2 sources are left in this round"):
        run(domains, settings, script={"anna": never})


# ---- updates that are too long -------------------------------------------------------------------


def test_an_update_is_too_long_beside_the_others_alone() -> None:
    assert too_long({"a": 1, "b": 1, "c": 2, "d": 8}, 5) == {"d": 8}
    assert too_long({"a": 1, "b": 1, "c": 2, "d": 5}, 5) == {}
    assert too_long({"a": 1, "b": 1, "d": 8}, 5) == {}  # of two others one may lie
    assert too_long({"a": 0, "b": 0, "c": 0, "d": 8}, 5) == {}
    assert too_long({"a": 1, "b": 1, "c": 2, "d": math.inf}, 5) == {"d": math.inf}
    assert too_long({"a": 1, "b": 1, "c": 2, "d": 8}, 0) == {}


def judged(lengths: list[float], asked: int = 0) -> tuple[list[str], list[str], list[int]]:
    """Judge updates as they arrive -> who counts, who does not, how many were held each time."""
    judge = Lengths(5.0, asked or len(lengths))
    counted, held = [], []
    for number, length in enumerate(lengths):
        reply: Any = SimpleNamespace(node=SimpleNamespace(name=str(number)))
        packed = wire.pack({"w": np.zeros(10, np.float32)}, Kind.MODEL)
        counted += judge.add(reply, packed, length)
        held.append(len(judge._held))
    kept, odd = judge.rest()
    return [r.node.name for r in (*counted, *kept)], [*odd], held


def test_replies_are_held_back_until_nothing_can_make_them_too_long() -> None:
    assert judged([1.0] * 6) == ([*"012345"], [], [1, 2, 3, 0, 0, 0])
    assert judged([9.0, 1, 1, 1, 1]) == ([*"1234"], ["0"], [1, 2, 1, 1, 1])
    assert judged([9.0, 9, 1, 1, 1, 1, 1]) == ([*"23456"], ["0", "1"], [1, 2, 3, 2, 2, 2, 2])
    assert judged([1.0, 1, 9], asked=5) == ([*"012"], [], [1, 2, 1])  # two never came
    assert judged([9.0, 1, 1]) == ([*"012"], [], [0, 0, 0])


@given(st.lists(st.floats(0, 100), min_size=1, max_size=12), st.integers(0, 3))
def test_what_is_handed_on_early_would_count_in_the_end(lengths: list[float], more: int) -> None:
    counted, odd, _ = judged(lengths, len(lengths) + more)
    assert set(odd) == {*too_long({str(n): v for n, v in enumerate(lengths)}, 5)}
    assert sorted([*counted, *odd]) == sorted(str(n) for n in range(len(lengths)))


def test_a_bounded_number_of_bytes_is_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strategies.sites.lengths.MOST_HELD", 100)  # two models of 40 bytes
    counted, odd, held = judged([9.0, 1, 1, 1, 1, 1, 1])
    assert max(held) == 2 and odd == ["0"] and len(counted) == 6


def five(nodes: list[Node]) -> list[Node]:
    """Five sources and the target."""
    return [*nodes, *(nodes[n] | {"name": name} for n, name in enumerate(("dora", "emil")))]


@pytest.mark.parametrize("method", ["fedavg", "fedprox", "adabn", "kd3a", "autodial"])
@pytest.mark.parametrize("by", [-10.0, 10.0])
def test_a_long_update_costs_no_more_than_its_sites_absence(
    domains: list[Node], method: str, by: float
) -> None:
    def scaled(request: Message, reply: Message) -> list[Message]:
        sent = records.read(request.content)[0]["model"].unpack()

        def lie(model: Arrays) -> Arrays:
            return {
                n: (sent[n] + by * (a - sent[n])).astype(a.dtype) if "running" not in n else a
                for n, a in model.items()
            }

        return [*reshaped(lie)(request, reply)]

    def fails(request: Message, reply: Message) -> list[Message]:
        return [Message(Error(int(Code.RESTARTED), "gone"), reply_to=request)]

    images = IMAGES if method in ("adabn", "autodial") else {}
    models = []
    for script in ({"anna": scaled}, {"anna": fails}):
        resident.cache_clear()
        made = Bench(five(domains), method, script, run__expect=6, guard__max_change=0.0, **images)
        models.append(made.round()[0])
    assert all(np.array_equal(models[0][n], models[1][n]) for n in models[0])
    lied = Bench(five(domains), method, {"anna": scaled}, run__expect=6, **images)
    lied.round()
    said = [text for what, site, text in lied.notices if (what, site) == ("refused", "anna")]
    assert len(said) == 1 and "guard.max-update is 5; left out of this round" in said[0]


@pytest.mark.parametrize("method", ["fedavg", "kd3a"])
def test_without_a_long_update_nothing_differs(domains: list[Node], method: str) -> None:
    models = []
    for times in (0.0, 5.0):
        resident.cache_clear()
        made = Bench(five(domains), method, run__expect=6, guard__max_update=times)
        models.append(made.round()[0])
        assert not made.notices
    assert all(np.array_equal(models[0][n], models[1][n]) for n in models[0])
