"""Robust means of models: against the papers' rules in plain Python, and in runs with liars."""

import math
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Message
from hypothesis import given
from hypothesis import strategies as st

from clients.site.memory import resident
from fedda import records
from fedda.config import GuardConfig
from fedda.errors import ConfigError, QuorumError
from fedda.maths import average
from fedda.maths.average import RobustMean, least_for, liars_of
from fedda.maths.bounds import scaled, too_long
from fedda.settings import RunConfig
from fedda.wire import packing
from fedda.wire.packing import Arrays, Kind
from server import run as server_run
from server.journal import Journal
from server.simulation import rehearse
from strategies.sites.replies import Lengths, Reply
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
    median, shares = average.middle(values, 2)
    assert median.tolist() == [3.0, 0.0] and shares[4] == 0
    trimmed, shares = average.middle(values, 1)
    assert trimmed.tolist() == [3.0, 0.0] and shares[4] == 0
    assert average.factors([1.0, 2.0, 3.0, 4.0, 100.0]) == [1, 1, 1, 0.75, 0.03]
    squared = ((values[:, None] - values[None]) ** 2).sum(axis=2)
    assert average.krum(squared, 1) == [0, 1, 2, 3]
    # Two nearest of four others: scores 17, 10, 10, 5, 13; of three, the last would be left out.
    on_a_line = np.array([0.0, 1.0, 4.0, 5.0, 7.0])
    assert average.krum((on_a_line[:, None] - on_a_line) ** 2, 1) == [1, 2, 3, 4]
    with pytest.raises(ValueError, match="5 are needed"):
        average.krum(squared[:4, :4], 1)


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
        return [changed(request, reply, arrays={"model": packing.pack(far, Kind.MODEL)})]

    return script


LIED = {"guard.max-change": 0, "guard.max-update": 0, "guard.max-statistics": 0, "run.baseline": ""}


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
    settings = place | {"guard.mean": "median", "wait.tries": 1, "wait.train": 3}
    with pytest.raises(QuorumError, match=r"2 sources are left .* guard\.mean=median needs 3"):
        run(domains, settings, script={"anna": never})


# ---- updates that are too long -------------------------------------------------------------------


def test_an_update_is_too_long_beside_the_others_alone() -> None:
    def found(times: float, *lengths: float, liars: float = 0.2) -> dict[str, Any]:
        return too_long(dict(zip("abcdef", lengths, strict=False)), times, liars)

    assert found(2, 1, 1, 2, 8) == {"d": (4, 0.5)}
    assert found(2, 1, 1, 2, 4) == {}
    assert found(2, 1, 3, 12) == {"c": (4, 0.5)}
    assert found(2, 1, 8) == {}  # of two either may lie
    assert found(2, 0, 0, 0, 8) == {}
    assert found(2, 1, 1, 2, math.inf) == {"d": (math.inf, 0)}
    assert found(0, 1, 1, 2, 8) == {}
    assert found(2, 0, 0, 1, 10, 15) == {}  # two hard domains beside three that hardly move
    assert found(2, 1, 1, 1, 1, 10, liars=0.4) == {"e": (10, 0.2)}
    assert found(2, 1, 1, 1, 1, 10, 16, liars=0.2) == {"e": (10, 0.2), "f": (16, 0.125)}  # f is 2
    assert found(2, 1, 1, 1, 1, 10, 16, liars=0.1) == {}  # f is 1, but two lie


def test_an_update_is_scaled_with_its_statistics_and_without_its_counters() -> None:
    sent: Arrays = {"w": np.array([1.0, 0.0]), "bn.running_var": np.array([2.0])}
    sent |= {"b": np.array(3e38, np.float32), "bn.batches": np.array(4)}
    came: Arrays = {"w": np.array([9.0, -4.0]), "bn.running_var": np.array([0.0])}
    came |= {"b": np.array(-3e38, np.float32), "bn.batches": np.array(7)}
    found = scaled(came, sent, 0.25)
    assert found["w"].tolist() == [3.0, -1.0] and found["bn.running_var"].tolist() == [1.5]
    assert found["bn.batches"] == 7
    assert found["b"] == pytest.approx(1.5e38)  # though the update is more than a float can hold
    assert found["b"].dtype == np.float32
    assert scaled(came, sent, 0.0)["w"].tolist() == [1.0, 0.0]


def bounded(
    lengths: list[float], asked: int = 0, times: float = 5.0
) -> tuple[list[str], dict[str, float], list[int]]:
    """Bound updates as they arrive -> who counts, by how much less, how many were held each time.

    Each model is one number, that was 0 when it was sent.
    """
    judge, sent = (
        Lengths(GuardConfig(max_update=times), asked or len(lengths)),
        packing.pack({"w": np.zeros(1)}, Kind.MODEL),
    )
    counted, factors, held = [], {}, []
    for number, length in enumerate(lengths):
        packed = packing.pack({"w": np.array([length], float)}, Kind.MODEL, "float64")
        node: Any = SimpleNamespace(name=str(number))
        counted += judge.add(Reply(node, {"model": packed}, {}), sent, length)
        held.append(len(judge._held))
    for reply, _, factor in judge.rest():
        counted.append(reply)
        factors |= {reply.node.name: factor} if factor < 1 else {}
    for reply in counted:
        name, length = reply.node.name, reply.model().unpack()["w"].item()
        assert length == pytest.approx(factors.get(name, 1.0) * lengths[int(name)], rel=1e-6)
    return [r.node.name for r in counted], factors, held


def test_replies_are_held_back_until_nothing_can_make_them_too_long() -> None:
    assert bounded([1.0] * 5) == ([*"01234"], {}, [1, 0, 0, 0, 0])
    assert bounded([10.0, 1, 1, 1, 1]) == ([*"12340"], {"0": 0.5}, [1, 1, 1, 1, 1])
    assert bounded([1.0] * 6) == ([*"012345"], {}, [1, 2, 0, 0, 0, 0])  # two of six may lie
    names, factors, held = bounded([10.0, 10, 1, 1, 1, 1, 1])
    assert (names, factors, held) == ([*"2345601"], {"0": 0.5, "1": 0.5}, [1, 2, 2, 2, 2, 2, 2])
    assert bounded([1.0, 1, 10], asked=5) == ([*"012"], {"2": 0.5}, [1, 0, 1])  # two never came
    assert bounded([10.0, 1, 1]) == ([*"120"], {"0": 0.5}, [1, 1, 1])
    assert bounded([10.0, 1]) == ([*"01"], {}, [0, 0])


lengths_of_sites = st.lists(
    st.sampled_from([0.0, 0.01, 1, 2, 3, 4, 9, 50, 1e6]), min_size=1, max_size=12
)


@given(lengths_of_sites, st.integers(0, 3), st.sampled_from([1.0, 2.0, 5.0]))
def test_what_counts_in_the_end_is_no_longer_than_the_naive_bound(
    lengths: list[float], more: int, times: float
) -> None:
    """In whatever order they come: each is heard, with its own length or the bound's."""
    counted, factors, _ = bounded(lengths, len(lengths) + more, times)
    wanted = twin.clipped([0.0], [[length] for length in lengths], times, 0.2)
    assert sorted(counted) == sorted(str(n) for n in range(len(lengths)))
    for number, length in enumerate(lengths):
        found = length * factors.get(str(number), 1.0)
        assert found == pytest.approx(wanted[number][0], rel=1e-9)


def test_a_bounded_number_of_bytes_is_held_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("strategies.sites.replies.MOST_HELD", 8)  # one model
    counted, factors, held = bounded([10.0, 1, 1, 1, 1, 1, 1])
    assert max(held) == 1 and factors == {"0": 0.5} and len(counted) == 7


def five(nodes: list[Node]) -> list[Node]:
    """Five sources and the target."""
    return [*nodes, *(nodes[n] | {"name": name} for n, name in enumerate(("dora", "emil")))]


def lengthened(by: float) -> Any:
    """Return a script: a site sends so many times its update."""

    def script(request: Message, reply: Message) -> list[Message]:
        sent = records.read(request.content)[0]["model"].unpack()

        def lie(model: Arrays) -> Arrays:
            return {
                n: (sent[n] + by * (a - sent[n])).astype(a.dtype) if "running" not in n else a
                for n, a in model.items()
            }

        return [*reshaped(lie)(request, reply)]

    return script


def trained(arrays: Arrays) -> list[float]:
    """A model's numbers but BatchNorm's statistics, which no length is about."""
    return flat({n: a for n, a in arrays.items() if "running" not in n})


@pytest.mark.parametrize("by", [20.0, -10.0])
def test_a_site_whose_updates_are_always_too_long_is_always_heard(
    domains: list[Node], by: float
) -> None:
    """An honest hard domain, or a liar: its update counts in each round, as long as the bound."""
    limits: dict[str, Any] = {"guard__max_change": 0.0, "guard__max_update": 2.0, "rounds": 4}
    made = Bench(five(domains), "fedavg", {"anna": lengthened(by)}, run__expect=6, **limits)
    for number in (1, 2, 3, 4):
        start, first = trained(made.model), len(made.grid.replies)
        found, _ = made.round(number)
        sent = made.grid.replies[first:]
        models = [trained(records.read(reply.content)[0]["model"].unpack()) for reply in sent]
        w = [made.strategy.weights[made.grid.nodes[r.metadata.src_node_id]["name"]] for r in sent]
        clipped = twin.clipped(start, models, 2.0, 0.2)
        np.testing.assert_allclose(trained(found), twin.mean(clipped, w), rtol=1e-4, atol=1e-6)
        others = [twin.distance(m, start) for m in models[1:]]
        assert twin.distance(clipped[0], start) == pytest.approx(2 * max(others))
    texts = [text for what, site, text in made.notices if (what, site) == ("clipped", "anna")]
    assert len(texts) == 4 and all(what == "clipped" for what, _, _ in made.notices)
    assert re.search(r"scaled by 0\.\d+, as guard\.max-update is 2$", texts[0])


OTHERS = pytest.mark.nightly("strategies", "fedda/maths/bounds.py")


@pytest.mark.parametrize(
    "method",
    ["fedavg", "kd3a", *(pytest.param(m, marks=OTHERS) for m in ("fedprox", "adabn", "autodial"))],
)
def test_however_long_a_lie_is_it_counts_as_the_bound(domains: list[Node], method: str) -> None:
    images = IMAGES if method in ("adabn", "autodial") else {}
    models = []
    for by in (-10.0, -1000.0):
        resident.cache_clear()
        script = {"anna": lengthened(by)}
        limits = {"guard__max_change": 0.0, "guard__max_update": 1.5} | images
        made = Bench(five(domains), method, script, run__expect=6, **limits)
        models.append(made.round()[0])
    for name in (n for n in models[0] if "running" not in n):
        np.testing.assert_allclose(models[0][name], models[1][name], rtol=1e-2, atol=2e-3)


def test_a_site_is_named_once_in_a_run_whose_updates_are_all_scaled(
    domains: list[Node], tmp_path: Path
) -> None:
    limits = {"guard.max-change": 0.0, "run.baseline": "", "rounds": 3, "method": "fedavg"}
    limits |= {"guard.max-update": 1.5}
    script = {"anna": lengthened(50.0)}
    results, events = run(domains, limits | {"run.dir": str(tmp_path)}, script=script)
    (trouble,) = results["events"]
    assert (trouble["what"], trouble["site"], trouble["round"]) == ("clipped", "anna", 1)
    later = [e for e in events if e["event"] == "clipped"]
    assert [(e["site"], e["round"]) for e in later] == [("anna", 2), ("anna", 3)]
