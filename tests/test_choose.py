"""`fedda choose`: the formulas, the rule, the search, and that no label takes part."""

import json
import shlex
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fedda import models, plugins
from fedda.choose import agreement, decision
from fedda.choose.candidates import candidates, methods_of, obstacle
from fedda.choose.decision import Candidate, Trained, decide
from fedda.choose.search import Outcome, Search, going_on, ranked
from fedda.choose.verdict import Choice, paragraph, sureness
from fedda.cli import app
from fedda.comparison import Cell, Plan, Variant
from fedda.config import Flat, ModelConfig
from fedda.data.form import AS_IT_IS
from fedda.errors import ConfigError, RunError
from fedda.maths import choice
from fedda.results.read import MODEL
from tests.local_grid import EXAMPLES, Node
from tests.reference import choice as twin

pytestmark = pytest.mark.usefixtures("signal_handlers")

TINY: Flat = {
    "rounds": 4,
    "model.name": "mlp",
    "model.hidden": "16",
    "train.batch-size": 16,
    "exchange.min-examples": 16,
    "exchange.expose-features": True,
}
OPTIONS = [word for k, v in TINY.items() for word in ("-c", f"{k}={str(v).lower()}")]


# ---- the formulas ------------------------------------------------------------------------------


def drawn(seed: int, M: int) -> dict[str, list[float | None]]:
    """Evidence on M models, in steps of half a point, so that there are draws, and some unknown."""
    draw = np.random.default_rng(seed)
    found: dict[str, list[float | None]] = {}
    for kind in ("estimate", "infomax", "bnm", "snd", "ami", "agreement"):
        values = [*(draw.integers(0, 8, M) / 200).tolist()]
        found[kind] = [None if draw.random() < 0.2 else v for v in values]
    return found


@pytest.mark.parametrize("seed", range(8))
def test_standings_are_those_of_the_twin(seed: int) -> None:
    evidence = drawn(seed, 5)
    models = [{kind: values[i] for kind, values in evidence.items()} for i in range(5)]
    found = choice.standing(evidence, 5)
    assert found == pytest.approx(twin.standing(models))
    assert sum(found) == pytest.approx(5 / 2)  # what one is ahead of, another is behind


def test_a_standing_by_hand() -> None:
    """Ahead by estimate, behind by infomax alone, a draw by BNM and agreement: (1 - .5 + 0) / 3."""
    evidence = {
        "estimate": [0.8, 0.7],
        "infomax": [1.0, 1.1],
        "bnm": [0.5, 0.505],
        "agreement": [0.9, 0.9],
        "snd": [0.1, 0.9],  # has no vote
    }
    assert choice.duel(evidence, 0, 1) == pytest.approx(1 / 6)
    assert choice.standing(evidence, 2) == pytest.approx([7 / 12, 5 / 12])
    assert choice.standing({"estimate": [None, 0.7]}, 2) == [0.5, 0.5]
    assert choice.standing({"estimate": [0.7]}, 1) == [0.5]


def test_a_step_is_a_draw_and_more_is_not() -> None:
    assert choice.lead(0.71, 0.70) == 0 and choice.lead(0.711, 0.70) == 1
    assert choice.lead(0.70, 0.711) == -1 and choice.lead(None, 0.7) is None


@pytest.mark.parametrize("seed", range(6))
def test_agreement_is_that_of_the_twin(seed: int) -> None:
    draw = np.random.default_rng(seed)
    p, group = draw.dirichlet(np.full(3, 0.5), (6, 20)), ["a", "b", "b", "c", "d", "d"]
    voting = [bool(v) for v in draw.integers(0, 2, 6)] if seed else [False] * 6
    mean = choice.ensemble(torch.tensor(p), group, voting)
    rows = twin.ensemble(p.tolist(), group, voting)
    assert mean.tolist() == [pytest.approx(row) for row in rows]
    agreed = choice.agreement(torch.tensor(p), mean).tolist()
    assert agreed == [pytest.approx(twin.agree(twin.largest(x), twin.largest(rows))) for x in p]
    some = [None if draw.random() < 0.2 else float(a) for a in draw.random(6)]
    assert choice.apart(some, group) == twin.apart(some, group)


def test_the_one_with_permuted_classes_stands_apart_by_hand() -> None:
    """Three sure models agree but for one image each; the fourth has all classes permuted."""
    label = torch.tensor([[0, 1, 2, 0], [0, 1, 2, 1], [0, 1, 1, 0], [1, 2, 0, 1]])
    p = torch.nn.functional.one_hot(label, 3).double()
    names = ["fedavg", "adabn", "kd3a", "fdann"]
    mean = choice.ensemble(p, names, [True] * 4)
    assert mean[0].tolist() == [0.75, 0.25, 0] and mean[2].tolist() == [0.25, 0.25, 0.5]
    mean[3] = torch.tensor([0.6, 0.4, 0])  # two against two: a draw
    agreed = choice.agreement(p, mean).tolist()
    assert agreed == [1, 0.75, 0.75, 0]
    assert choice.apart(agreed, names) == [False, False, False, True]
    # Two settings of one method count once: three votes of a method do not outvote two others.
    q = torch.tensor([[[0.9, 0.1]]] * 3 + [[[0.3, 0.7]]] * 2).double()
    three = ["kd3a", "kd3a", "kd3a", "adabn", "fedavg"]
    assert choice.ensemble(q, three, [True] * 5)[0].tolist() == pytest.approx([0.5, 0.5])
    assert choice.ensemble(q, three, [False] * 3 + [True] * 2)[0].tolist() == pytest.approx(
        [0.3, 0.7]
    )
    assert choice.apart([1.0, 0.1], ["fedavg", "fdann"]) == [False, False]


# ---- the rule ----------------------------------------------------------------------------------


def trained(
    estimate: float | None = 0.7,
    up: float = 0.0,
    agrees: float | None = 0.8,
    apart: bool = False,
    size: int = 100,
    largest: float = 0.2,
) -> Trained:
    """A training whose validators are so much above the usual ones."""
    validators = {"infomax": 1.0 + up, "bnm": 0.5 + up, "snd": 0.5 - up, "ami": 0.4 + up}
    told = {"accuracy": estimate, "low": 0.5, "high": 0.9, "same_model": True}
    worth = {
        "validators": validators | {"largest": largest},
        "estimate": None if estimate is None else told,
        "rounds": [{"round": 1}],
    }
    return Trained(worth, size, agrees, apart)


def candidate(method: str, *trainings: Trained, **settings: Any) -> Candidate:
    return Candidate(Variant(method, settings=settings), dict(enumerate(trainings)))


FEDAVG = candidate("fedavg", trained(), trained(), trained())


def test_the_better_one_is_taken() -> None:
    better = candidate("kd3a", *[trained(0.8, 0.1)] * 3)
    worse = candidate("fdann", *[trained(0.72, 0.02)] * 3)
    found = decide([FEDAVG, worse, better])
    assert (found.chosen, found.leader) == (better.variant, better.variant)
    assert found.seeds == (3, 3) and found.pieces == (12, 0, 15)
    assert found.alone["estimate"] == better.variant and found.alone["snd"] == FEDAVG.variant
    assert sureness(found) == "clear"


def test_without_evidence_fedavg_is_taken() -> None:
    same = candidate("adabn", trained(), trained(), trained())
    found = decide([FEDAVG, same])
    assert found.chosen == FEDAVG.variant and found.pieces == (0, 0, 15)
    lower = decide([FEDAVG, candidate("adabn", *[trained(0.6, 0.1)] * 3)])
    assert lower.chosen != FEDAVG.variant  # estimate below, validators above: 2 votes to 1
    out = decide([FEDAVG, candidate("adabn", *[trained(0.6, -0.1)] * 3)])
    assert out.chosen == FEDAVG.variant and "worse than FedAvg" in next(iter(out.out.values()))


def test_what_differs_between_seeds_is_no_clear_lead() -> None:
    shaky = candidate("kd3a", trained(0.8, 0.1), trained(0.8, 0.1), trained(0.71, -0.005))
    assert decide([FEDAVG, shaky]).chosen == shaky.variant  # ahead by 1, 1 and a draw
    shakier = candidate("kd3a", trained(0.8, 0.1), trained(0.68, 0.1), trained(0.6, -0.1, 0.7))
    found = decide([FEDAVG, shakier])
    assert found.chosen == FEDAVG.variant and not found.out
    assert decision.clear([1.0, 1.0, 0.0]) and not decision.clear([0.75, 0.25, -1.0])
    assert decision.clear([0.25]) and not decision.clear([0.24])


def test_of_equals_the_one_that_sends_less_is_taken() -> None:
    dear = candidate("fdann", *[trained(0.8, 0.1, size=900)] * 3)
    cheap = candidate("adabn", *[trained(0.8, 0.1, size=110)] * 3)
    own = candidate("adabn", *[trained(0.8, 0.1, size=110)] * 3, **{"adabn.x": 1})
    assert decide([FEDAVG, dear, own, cheap]).chosen == cheap.variant
    assert {v.method for v in decide([FEDAVG, dear, cheap]).alike} == {"fdann"}


def test_a_model_that_calls_everything_one_class_is_out() -> None:
    collapsed = trained(0.95, 0.5, agrees=0.2, largest=0.97)
    good = candidate("kd3a", *[trained(0.75, 0.05)] * 3)
    found = decide([FEDAVG, candidate("fdann", *[collapsed] * 3), good])
    assert found.chosen == good.variant
    assert [*found.out] == [Variant("fdann")]


def test_a_sure_model_with_permuted_classes_is_out() -> None:
    """It is ahead by all that looks at one model alone; the others' predictions tell."""
    wrong = trained(0.97, 0.6, agrees=0.05, apart=True)
    good = candidate("kd3a", *[trained(0.75, 0.05)] * 3)
    permuted = candidate("fdann", *[wrong] * 3)
    found = decide([FEDAVG, permuted, good])
    assert found.alone["estimate"] == found.alone["infomax"] == permuted.variant
    assert found.chosen == good.variant and "apart" in found.out[permuted.variant]
    # With one other method nobody can tell who is right: the text of the choice says so.
    unseen = candidate("fdann", *[trained(0.97, 0.6, agrees=None)] * 3)
    assert decide([FEDAVG, unseen]).chosen == unseen.variant


def test_a_candidate_without_estimate_or_agreement_is_judged_by_the_rest() -> None:
    partly = candidate("fada", *[trained(None, 0.1, None)] * 3)
    found = decide([FEDAVG, partly])
    assert found.chosen == partly.variant and found.pieces == (9, 0, 9)
    rough = trained(0.9, 0.1)
    rough.worth["estimate"]["same_model"] = False
    assert rough.values["estimate"] is None


def test_infomax_is_no_evidence_for_a_method_that_maximises_it() -> None:
    """SHOT's models are sure because they are trained to be; agreement says that they are worse."""
    usual = trained(None, 0.0, 0.7)
    validators = usual.worth["validators"] | {"infomax": 2.0, "bnm": 0.9}
    sure = [replace(usual, worth={**usual.worth, "validators": validators})] * 3
    found = decide([FEDAVG, candidate("shot", *sure)])
    assert found.chosen == FEDAVG.variant and found.standing[Variant("shot")] < 0.5
    assert found.alone["infomax"] == found.alone["bnm"] == FEDAVG.variant
    other = decide([FEDAVG, candidate("fact", *sure)])
    assert other.alone["infomax"] == Variant("fact") and other.standing[Variant("fact")] >= 0.5


def test_of_a_method_that_sharpens_its_predictions_only_agreement_is_evidence() -> None:
    """Estimate, infomax and clusters are high by SHOT's training, whatever its answers are."""
    good = candidate("kd3a", *[trained(0.75, 0.05)] * 3)
    for name in ("shot", "decision", "autodial"):
        sure = candidate(name, *[trained(0.99, 0.5, 0.99)] * 3)
        found = decide([FEDAVG, sure, good])
        assert found.chosen == good.variant
        assert found.out[sure.variant].startswith("only one of four witnesses (agreement)")


def test_labels_decide_where_they_tell_two_candidates_apart() -> None:
    def with_labels(c: Candidate, *right: bool) -> Candidate:
        return replace(c, trained={s: replace(t, right=right) for s, t in c.trained.items()})

    good, shot = (candidate(n, *[trained(0.8, 0.1, 0.9)] * 3) for n in ("kd3a", "shot"))
    # Three more of ten: McNemar's p is .25; one more: p is 1, and the evidence decides.
    for more, chosen in ((3, shot), (1, good)):
        right = [True] * more + [False] * (10 - more)
        others = [with_labels(c, *[False] * 10) for c in (FEDAVG, good)]
        found = decide([*others, with_labels(shot, *right)])
        assert found.chosen == chosen.variant and found.unlabelled == good.variant
        assert found.labels[shot.variant] == (more, 10) and found.labels[good.variant] == (0, 10)
    assert decide([FEDAVG, good]).labels == {}


def test_one_seed_is_never_clear() -> None:
    better = candidate("kd3a", trained(0.8, 0.1, 0.9))
    found = decide([candidate("fedavg", trained()), better])
    assert found.chosen == better.variant and sureness(found) == "likely"


def test_those_that_are_out_are_ranked_last() -> None:
    out = candidate("fdann", trained(0.97, 0.6, 0.1, apart=True))
    low, high = candidate("adabn", trained(0.71)), candidate("kd3a", trained(0.8, 0.1))
    order = ranked([candidate("fedavg", trained()), out, low, high])
    assert order == [high.variant, low.variant, out.variant]


# ---- candidates and rungs ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def root(domains: list[Node], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder of domains that can all be sources."""
    folder = tmp_path_factory.mktemp("domains-to-choose")
    for node in domains:
        with np.load(node["data"]) as found:
            arrays = {"y_train": np.arange(EXAMPLES[node["name"]]) % 4, **found}
        np.savez(folder / f"{node['name']}.npz", **arrays)
    return folder


def plan(root: Path, out: Path, *methods: str, **more: Any) -> Plan:
    variants = [Variant(m) for m in ("fedavg", *methods)]
    return Plan(root, out, variants, ["town"], [0], TINY | more)


def test_every_method_that_searches_has_its_settings_in_its_config() -> None:
    searched = [m for m in plugins.own_methods() if plugins.method(m).search]
    assert {"kd3a", "fdann", "mdan"} <= {*searched}
    for name in searched:
        for key, values in plugins.method(name).search.items():
            for value in values:
                Variant(name, settings={plugins.full_key(name, key): value})
                flat: Flat = {"method": name, plugins.full_key(name, key): value}
                assert replace(plan(Path(), Path()), variants=[Variant(name)]).config(
                    Cell(Variant(name, settings=flat), "town", 0)
                )


def test_settings_are_drawn_once_and_the_default_is_always_there() -> None:
    found = candidates(["fedavg", "fdann", "kd3a"], 2, {}, 0)
    assert [v.method for v in found] == ["fedavg", "fdann", "kd3a", "fdann", "fdann", *["kd3a"] * 2]
    assert not any(v.settings for v in found[:3]) and all(v.settings for v in found[3:])
    assert len({v.slug for v in found}) == len(found)
    assert candidates(["fedavg", "kd3a"], 2, {}, 0)[2:] == found[5:]  # whatever else is tried
    every = candidates(["fedavg", "fdann"], 99, {}, 0)
    # The default, .1, is among the three of its search, so two remain.
    assert sorted(v.settings["fdann.reversal.strength"] for v in every[2:]) == [0.01, 1.0]
    shared = candidates(["fedavg", "fdann"], 99, {"fdann.reversal.strength": 1.0}, 0)
    assert sorted(v.settings["fdann.reversal.strength"] for v in shared[2:]) == [0.01, 0.1]


def test_methods_that_do_not_fit_are_left_out(root: Path, tmp_path: Path) -> None:
    def found(names: list[str], **more: Any) -> tuple[list[str], dict[str, str]]:
        made = plan(root, tmp_path, **more)
        return methods_of(names, lambda name: obstacle(name, made))

    methods, left_out = found([])
    assert methods == ["fedavg", "adabn", "kd3a", "fdann", "mdan"]
    assert "fada" in left_out
    methods, left_out = found([], **{"model.name": "lenet", "model.hidden": "", "input.size": 16})
    assert "adabn" not in methods and "BatchNorm" in left_out["adabn"]
    methods, left_out = found([], **{"exchange.min-examples": 5000})
    assert methods == ["fedavg", "adabn", "kd3a"] and "5000" in left_out["fdann"]
    assert found(["fdan", "fedavg"]) == (["fedavg", "fdan"], {})
    with pytest.raises(ConfigError, match="chain"):
        found(["fruda"])


def test_a_shorter_rung_ends_settings_and_no_method() -> None:
    a, b, c, d = (Variant("kd3a", settings={"kd3a.gate.low": x}) for x in (0.1, 0.2, 0.3, 0.4))
    mdan, adabn = Variant("mdan"), Variant("adabn")
    assert going_on([a, b, c, mdan, d, adabn], 4) == {a, mdan, adabn, b}
    assert going_on([a, b, c, mdan, d, adabn], 1) == {a, mdan, adabn}


def test_rungs_halve_candidates_and_double_rounds(tmp_path: Path) -> None:
    many = replace(plan(tmp_path, tmp_path), seeds=[3, 4])

    def rungs(count: int, rounds: int = 20) -> list[tuple[int, int, int]]:
        made = [Variant("kd3a", settings={"kd3a.mixup": float(i)}) for i in range(count)]
        settings = {**TINY, "rounds": rounds}
        whole = replace(many, variants=[Variant("fedavg"), *made], settings=settings)
        return [(r.rounds, r.width, len(r.seeds)) for r in Search(whole).rungs]

    assert rungs(10) == [(5, 10, 1), (10, 5, 1), (20, 3, 2)]
    assert rungs(6) == [(10, 6, 1), (20, 3, 2)]
    assert rungs(3) == [(20, 3, 2)]
    assert rungs(24, 2) == [(1, 24, 1), (1, 12, 1), (2, 6, 2)]


def quiet(plan: Plan, cells: Any) -> Any:
    return nullcontext(lambda *event: None)


def test_a_budget_cuts_and_says_so(root: Path, tmp_path: Path) -> None:
    """FedAvg is trained whatever it takes; with more minutes the others follow."""
    search = Search(plan(root, tmp_path, "kd3a", "fedprox"), budget=1e-6)
    found = search.run(quiet)
    assert [c.variant.method for c in found.candidates] == ["fedavg"]
    assert len(found.untried) == 2 and "KD3A" in found.untried[0]
    assert decide(found.candidates).chosen == Variant("fedavg")
    more = replace(search, budget=60.0).run(quiet)
    assert len(more.candidates) == 3 and not more.untried


def test_a_full_rung_without_candidates_falls_back_to_the_one_before(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = replace(
        plan(root, tmp_path, "kd3a", "fedprox"),
        variants=[Variant("fedavg")]
        + [Variant("fedprox", settings={"fedprox.mu": m}) for m in (0.1, 0.2, 0.3, 0.4)],
    )
    monkeypatch.setattr(
        Search, "_fits", lambda self, rung, cells: rung is not self.rungs[-1], raising=True
    )
    found = Search(made, budget=1.0).run(quiet)
    assert found.rung.number == 1 and len(found.candidates) == 5
    assert "rung 1" in found.untried[-1]


def test_a_search_without_fedavg_says_so(root: Path, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("fedda.choose.search._run", lambda plan, cells, jobs, watch: {})
    with pytest.raises(RunError, match="FedAvg could not be trained"):
        Search(plan(root, tmp_path, "kd3a")).run(quiet)


def test_predictions_are_of_unlabelled_images_alone(root: Path, tmp_path: Path) -> None:
    made = plan(root, tmp_path)
    assert made.run(1, lambda *event: None) == {}
    folder = made.folder(made.cells()[0])
    images = agreement.Images(root / "town.npz", AS_IT_IS)
    p = agreement.predicted(folder, False, images)
    network, _ = models.load(folder / MODEL)
    with np.load(root / "town.npz") as town:
        x = torch.tensor(town["x_train"])
    assert p is not None and torch.equal(p, models.predict(network, x.unsqueeze(1)))
    # The last folder holds no model, so it takes no part.
    folders = [(folder, False), (folder, False), (tmp_path, False)]
    agreed = agreement.here(folders, ["fedavg", "kd3a", "mdan"], images)
    assert agreed == [1, 1, None]


def test_a_model_that_stays_at_the_target_is_compared_where_it_lies(
    root: Path, tmp_path: Path
) -> None:
    made = plan(root, tmp_path, "shot")
    assert made.run(1, lambda *event: None) == {}
    cell = next(c for c in made.cells() if c.variant.method == "shot")
    images = agreement.Images(root / "town.npz", AS_IT_IS)
    (made.folder(cell) / MODEL).unlink()  # it has not adapted
    adapted = agreement.predicted(made.folder(cell), True, images)
    (kept,) = (made.folder(cell) / "sites").rglob("*.model.safetensors")
    network, _ = models.load(kept)
    with np.load(root / "town.npz") as town:
        x = torch.tensor(town["x_train"]).unsqueeze(1)
    assert adapted is not None
    assert torch.equal(adapted, models.predict(network, x))
    (candidate,) = [c for c in Search(made).evidence(made) if c.variant.method == "shot"]
    assert candidate.trained[made.seeds[0]].agreement is not None


def test_a_frozen_part_computes_once_and_predicts_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lite = ModelConfig(name="efficientnet-lite0", weights="package", train="bottleneck")
    shape, config = (3, 32, 32), lite.model_copy(update={"bottleneck": 8})
    model = models.build(config, shape, 4, seed=0).attach(models.backbone(config, shape))
    models.save(tmp_path / MODEL, model, config=config, shape=shape, classes=tuple("abcd"))
    x = np.random.default_rng(0).integers(0, 256, (12, 32, 32, 3), dtype=np.uint8)
    np.savez(tmp_path / "town.npz", x_train=x)
    images = agreement.Images(tmp_path / "town.npz", AS_IT_IS)
    p = agreement.predicted(tmp_path, False, images)
    whole = models.predict(model, torch.tensor(x).permute(0, 3, 1, 2))
    assert p is not None
    torch.testing.assert_close(p, whole)
    monkeypatch.setattr(agreement, "_outputs", None)
    again = agreement.predicted(tmp_path, False, images)
    assert again is not None and torch.equal(again, p)


# ---- the command -------------------------------------------------------------------------------


def call(root: Path, out: Path, *more: str) -> Any:
    words = ["choose", "--data", str(root), "--target", "town", "--out", str(out), "--jobs", "1"]
    return CliRunner().invoke(app, [*words, "--seeds", "2", *OPTIONS, *more])


@pytest.fixture(scope="module")
def chosen(root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    out = tmp_path_factory.mktemp("chosen") / "out"
    return out, call(root, out, "--method", "adabn,kd3a,fdann", "--settings", "1")


@pytest.mark.slow
def test_the_command_chooses(chosen: tuple[Path, Any], root: Path) -> None:
    out, result = chosen
    assert result.exit_code == 0, result.output
    made = json.loads((out / "choice.json").read_text())
    decided = made["decision"]
    assert decided["method"] in ("fedavg", "adabn", "kd3a", "fdann")
    assert decided["seeds"] == [0, 1] and decided["rounds"] == 4
    assert len(decided["candidates"]) == 4 and len(decided["dropped"]) == 2
    assert {c["method"] for c in decided["candidates"]} >= {"fedavg"}
    assert set(decided["alone"]) == {"estimate", "infomax", "bnm", "snd", "ami", "agreement"}
    assert all(0 <= c["agreement"] <= 1 for c in decided["candidates"])
    assert [Path(f).is_dir() for f in made["folders"]] == [True, True]
    truth = made["truth"]
    taken = truth["refined"][decided["name"]]
    shown = [*truth["accuracy"].values(), *truth["refined"].values()]
    # Over all that was trained, also by shorter rungs that dropped it.
    assert truth["regret_points"] >= 100 * (max(shown) - taken) - 1e-3
    assert truth["best"] in (out / "choice.md").read_text()
    text = (out / "choice.md").read_text()
    assert f"Take {decided['name']}." in text and text in result.output.replace("\n\n\n", "\n\n")
    assert "accuracy" not in text.split("###")[0].split("| candidate")[1]
    words = shlex.split(decided["command"])
    assert words[:3] == ["fedda", "run", decided["method"]]


@pytest.mark.slow
def test_the_same_command_trains_nothing_again(chosen: tuple[Path, Any], root: Path) -> None:
    out, _ = chosen
    before = {p: p.stat().st_mtime_ns for p in out.rglob("results.json")}
    first = json.loads((out / "choice.json").read_text())
    again = call(root, out, "--method", "adabn,kd3a,fdann", "--settings", "1")
    assert again.exit_code == 0, again.output
    assert {p: p.stat().st_mtime_ns for p in out.rglob("results.json")} == before
    assert json.loads((out / "choice.json").read_text()) == first


@pytest.mark.slow
def test_labels_of_the_target_change_nothing_of_the_decision(
    chosen: tuple[Path, Any], root: Path, tmp_path: Path
) -> None:
    permuted = tmp_path / root.name
    permuted.mkdir()
    for path in root.iterdir():
        with np.load(path) as found:
            arrays = dict(found)
        if path.stem == "town":
            arrays["y_test"] = (arrays["y_test"] + 1) % 4
            arrays.pop("y_train", None)
        np.savez(permuted / path.name, **arrays)
    out, _ = chosen
    result = call(permuted, tmp_path / "out", "--method", "adabn,kd3a,fdann", "--settings", "1")
    assert result.exit_code == 0, result.output
    ours, theirs = (
        json.loads((folder / "choice.json").read_text()) for folder in (out, tmp_path / "out")
    )
    for each in (ours, theirs):
        each["decision"].pop("command")  # it names the folder of the data
    assert ours["decision"] == theirs["decision"]
    assert ours["truth"] != theirs["truth"]


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--target", "carl,town"], "one"),
        (["--target", "nowhere"], "no domain"),
        (["--method", "fruda"], "chain"),
        (["--method", "nothing"], "There is no method"),
        (["-c", "run.name=x"], "not taken here"),
        (["--seeds", "0"], "not valid"),
    ],
)
def test_what_makes_no_sense_is_refused(
    root: Path, tmp_path: Path, more: list[str], said: str
) -> None:
    result = call(root, tmp_path / "out", *more)
    assert result.exit_code == 1
    assert said in result.stderr and result.stderr.count("\n") == 1


@pytest.mark.slow
def test_a_candidate_that_fails_is_named_and_the_others_are_judged(
    root: Path, tmp_path: Path
) -> None:
    lenet = ["-c", "model.name=lenet", "-c", "model.hidden=", "-c", "input.size=16"]
    result = call(root, tmp_path / "out", "--method", "adabn,kd3a", "--settings", "0", *lenet)
    assert result.exit_code == 1, result.output
    made = json.loads((tmp_path / "out" / "choice.json").read_text())
    assert {c["method"] for c in made["decision"]["candidates"]} == {"fedavg", "kd3a"}
    text = (tmp_path / "out" / "choice.md").read_text()
    assert "failed: AdaBN" in text and "no BatchNorm layer" in text


def test_the_paragraph_names_a_simpler_choice_and_short_trainings(tmp_path: Path) -> None:
    search = Search(replace(plan(tmp_path, tmp_path, *["kd3a"]), seeds=[0, 1, 2]))
    dear = candidate("fdann", *[trained(0.8, 0.1, size=900)] * 3)
    cheap = candidate("adabn", *[trained(0.8, 0.1, size=110)] * 3)
    found = [FEDAVG, dear, cheap]
    rung = replace(search.rungs[-1], number=1, rounds=1)
    made = Choice(search, Outcome(rung, search.plan, found), decide(found), [], {})
    said = paragraph(made)
    assert said.startswith("Take AdaBN.") and "1 of 4 rounds" in said and "is weak" in said
    assert "12 are above FedAvg's and 0 below" in said
    worse = [FEDAVG, candidate("fdann", *[trained(0.6, -0.1)] * 3)]
    made = Choice(search, Outcome(rung, search.plan, worse), decide(worse), [], {})
    assert "not worth it" in paragraph(made)


def test_settings_of_other_methods_are_not_in_the_command(tmp_path: Path) -> None:
    search = Search(plan(tmp_path, tmp_path, "kd3a"))
    found = [FEDAVG, candidate("kd3a", *[trained(0.8, 0.1)] * 3, **{"kd3a.mixup": 0.0})]
    options = ["--preset", "vectors", "-c", "fdann.pairs=true", "-c", "kd3a.vote=hard"]
    made = Choice(search, Outcome(search.rungs[-1], search.plan, found), decide(found), options, {})
    own = shlex.split(made.command)[7:]
    assert own == ["--preset", "vectors", "-c", "kd3a.vote=hard", "-c", "kd3a.mixup=0.0"]


def test_a_few_labels_take_part_in_the_choice(root: Path, tmp_path: Path) -> None:
    labels, town = tmp_path / "labels", str(root / "town.npz")
    drew = CliRunner().invoke(app, ["label", "--target", town, "--n", "20", "--out", str(labels)])
    assert drew.exit_code == 0, drew.output
    rows = (labels / "labels.csv").read_text().splitlines()
    filled = [f"{row}{int(row.split('/')[1].rstrip(',')) % 4}" for row in rows[1:]]  # by row
    (labels / "labels.csv").write_text("\n".join([rows[0], *filled]) + "\n")
    result = call(root, tmp_path / "out", "--method", "kd3a", "--labels", str(labels))
    assert result.exit_code == 0, result.output
    assert "Of 20 labelled images the refined models have right: " in result.output
    made = json.loads((tmp_path / "out" / "choice.json").read_text())["decision"]
    assert {told["of"] for told in made["labels"].values()} == {20} and len(made["labels"]) > 1
    assert json.loads((labels / "about.json").read_text())["looks"] == 1
    other = ["--labels", str(tmp_path)]
    refused = call(root, tmp_path / "more", "--method", "kd3a", *other)
    assert refused.exit_code == 1 and "no images that fedda label has drawn" in refused.stderr
