"""Robust means of models: against the papers' rules in plain Python, and in runs with liars."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedda import records, wire
from fedda.errors import ConfigError, QuorumError
from fedda.maths import robust
from fedda.maths.robust import RobustMean, least_for, liars_of
from fedda.settings import RunConfig
from fedda.wire import Arrays, Kind
from server import run as server_run
from server.journal import Journal
from server.simulation import rehearse
from tests.local_grid import (
    FAST,
    SETTINGS,
    SOURCES,
    Node,
    ScriptedGrid,
    changed,
    make_domains,
    never,
    run,
)
from tests.reference import robust as twin

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
        wanted = twin.mean([rows[k] for k in kept], [w[k] for k in kept])
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
