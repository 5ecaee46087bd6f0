"""Comparisons: trainings, their files, resumed runs, the tables, and what the command refuses."""

import csv
import io
import json
import logging
import multiprocessing
import os
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from scipy.stats import ttest_rel

from fedda import plugins
from fedda.config.sections import Flat
from fedda.contrib.lab.comparing import train
from fedda.contrib.lab.comparison import Cell, Plan, Score, Variant, parse, workers
from fedda.contrib.lab.comparison.about import about, without_folders
from fedda.contrib.lab.comparison.figure import draw
from fedda.contrib.lab.comparison.headway import CellsDisplay
from fedda.contrib.lab.comparison.options import variants_of
from fedda.contrib.lab.comparison.plan import WITHOUT
from fedda.contrib.lab.comparison.statistics import MEAN, by_target, difference
from fedda.contrib.lab.comparison.tables import COLUMNS, as_csv, as_markdown
from fedda.contrib.lab.comparison.variants import oracle
from fedda.errors import ConfigError, DataError, FeddaError, RunError
from fedda.ops import lock
from fedda.ops.federation import PROGRAM
from fedda.ops.spawn import Process
from fedda.results.card import CARD
from fedda.settings import RunConfig
from server import simulation
from server.journal import Journal
from tests.command_lines import call
from tests.local_grid import EXAMPLES, Node
from tests.patience import PATIENCE, wait_until
from tests.processes import alive, below, kill

pytestmark = pytest.mark.usefixtures("signal_handlers")

TINY: Flat = {"rounds": 2, "model.name": "mlp", "model.hidden": "16", "train.batch-size": 16}
OPTIONS = [word for k, v in TINY.items() for word in ("-c", f"{k}={v}")]
Notices = list[tuple[str, str, Any]]


@pytest.fixture(scope="module")
def root(domains: list[Node], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make a folder of domains that can all be sources; anna has no test images."""
    folder = tmp_path_factory.mktemp("domains-of-all")
    for node in domains:
        with np.load(node["data"]) as found:
            arrays = {"y_train": np.arange(EXAMPLES[node["name"]]) % 4, **found}
        if node["name"] == "anna":
            arrays = {k: v for k, v in arrays.items() if "test" not in k}
        np.savez(folder / f"{node['name']}.npz", **arrays)
    return folder


@pytest.fixture(scope="module")
def done(root: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Plan, Notices]:
    """Run a comparison to its end -> its plan, and its notifications."""
    made = plan(root, tmp_path_factory.mktemp("done"))
    notices: Notices = []
    assert made.run(1, note(notices)) == {}
    return made, notices


def plan(root: Path, out: Path, **other: Any) -> Plan:
    made: dict[str, Any] = {"variants": parse(["fedavg", "fedprox,mu=0.5"]), "settings": TINY}
    made |= {"targets": ["town", "carl"], "seeds": [0, 1]}
    return Plan(root, out, **(made | other))


def note(notices: Notices) -> workers.Notify:
    return lambda what, cell, value: notices.append((what, cell.name, value))


def ignore(what: str, cell: Cell, value: Any) -> None:
    """Ignore a notification."""


def test_a_text_to_share_has_values_as_given_and_no_folders(tmp_path: Path) -> None:
    for value in ("input.categories=sex=F/female|M/male", "input.window=age=54/9,chol=240/50"):
        assert without_folders(value) == value
    assert without_folders(f"model.weights={tmp_path}/a.pt") == "model.weights=a.pt"
    assert without_folders(f"kd3a,x={tmp_path},y=2") == f"kd3a,x={tmp_path.name},y=2"


def test_a_comparisons_head_has_the_settings_of_what_it_trains(root: Path, tmp_path: Path) -> None:
    settings = {"kd3a.vote": "hard", "fedprox.mu": 0.7, "input.categories": "sex=F/female|M/male"}
    facts = "\n".join(about(plan(root, tmp_path, settings=TINY | settings)))
    assert "fedprox.mu=0.7" in facts and "input.categories=sex=F/female|M/male" in facts
    assert "kd3a" not in facts


def score(variant: str, target: str, seed: int, last: float | None, selected: Any = None) -> Score:
    return Score(variant, target, seed, last, selected, None, 1.5, 10, {"a": 0.25, "b": 0.75})


@pytest.fixture
def mixed(tmp_path: Path) -> Path:
    """Make two domains with gray images and one with colour images."""
    draw = np.random.default_rng(0)
    for name, shape in (("a", (24, 8, 8)), ("b", (24, 8, 8)), ("c", (24, 8, 8, 3))):
        x = draw.integers(0, 256, shape, dtype=np.uint8)
        y = np.arange(24) % 3
        (tmp_path / "mixed").mkdir(exist_ok=True)
        place = tmp_path / "mixed" / f"{name}.npz"
        np.savez(place, x_train=x, y_train=y, x_test=x, y_test=y)
    return tmp_path / "mixed"


def test_domains_that_do_not_fit_together_are_refused_before_training(
    mixed: Path, tmp_path: Path
) -> None:
    made = plan(mixed, tmp_path / "out", targets=["a"], seeds=[0])
    notices: Notices = []
    with pytest.raises(FeddaError, match=r"input\.channels"):
        made.run(1, note(notices))
    assert notices == []
    right = replace(made, settings=TINY | {"input.channels": 1})  # in the same output folder
    assert right.run(1, ignore) == {}


def test_the_interval_by_hand() -> None:
    """Differences 1, 2, 3: mean 2, standard deviation 1, and t is 4.302653 for 95 % and n = 3."""
    found = difference({0: 11.0, 1: 22.0, 2: 33.0}, {0: 10.0, 1: 20.0, 2: 30.0})
    assert found is not None
    assert found.mean == pytest.approx(2)
    assert found.low == pytest.approx(2 - 4.302653 / 3**0.5)
    assert found.high == pytest.approx(2 + 4.302653 / 3**0.5)
    assert found.n == 3


accuracies = st.dictionaries(st.integers(0, 12), st.floats(0, 1), min_size=1, max_size=10)


@given(accuracies, accuracies, st.sampled_from([0.8, 0.95, 0.99]))
def test_the_interval_matches_the_paired_t_test(
    mine: dict[int, float], base: dict[int, float], level: float
) -> None:
    found = difference(mine, base, level)
    shared = [s for s in mine if s in base]
    if not shared:
        assert found is None
        return
    assert found is not None and found.n == len(shared)
    assert found.mean == pytest.approx(np.mean([mine[s] - base[s] for s in shared]))
    if len(shared) == 1:
        assert found.low is None and found.high is None
    elif np.ptp([mine[s] - base[s] for s in shared]) > 1e-9:  # below, scipy warns of cancellation
        tested = ttest_rel([mine[s] for s in shared], [base[s] for s in shared])
        low, high = tested.confidence_interval(level)
        assert (found.low, found.high) == (pytest.approx(low), pytest.approx(high))


def test_a_mean_needs_all_targets() -> None:
    scores = [
        score("A", "x", 0, 0.5), score("A", "y", 0, 0.7), score("A", "x", 1, 0.9),
        score("B", "x", 0, 0.1), score("B", "y", 1, 0.2),
    ]  # fmt: skip
    table = by_target(scores)
    assert table["A"][MEAN] == {0: pytest.approx(0.6)}
    assert table["A"]["x"] == {0: 0.5, 1: 0.9}
    assert MEAN not in table["B"]
    assert MEAN not in by_target(scores, targets=["x", "y", "z"])["A"]  # z has no result yet
    assert MEAN not in by_target(scores[:1])["A"]  # a single target has no mean


def test_valid_variants_are_parsed() -> None:
    found = parse(["kd3a:official,vote=hard", "fedavg", "fedavg,model.hidden=20,10,kd3a"])
    assert [(v.method, v.preset, v.settings) for v in found] == [
        ("kd3a", "official", {"kd3a.vote": "hard"}),
        ("fedavg", "", {}),
        ("fedavg", "", {"model.hidden": "20,10"}),
        ("kd3a", "", {}),
    ]
    assert found[0].name == "KD3A official, vote=hard"
    assert found[0].flat()["kd3a.vote"] == "hard"
    assert found[0].flat()["kd3a.teacher-batchnorm"]  # from the preset


@pytest.mark.parametrize(
    ("words", "part"),
    [
        ("", "Say which methods"),
        ("kd4a", "no method 'kd4a'"),
        ("vote=hard", "setting of no method"),
        ("kd3a:nature", "no preset 'nature'"),
        ("kd3a,votes=hard", "did you mean vote"),
        ("kd3a,kd3a", "given twice"),
        ("kd3a,run.seeds=3", "not taken here"),
        ("kd3a,method=fedavg", "not taken here"),
    ],
)
def test_invalid_variants_are_refused(words: str, part: str) -> None:
    with pytest.raises(ConfigError, match=part):
        parse([words])


def test_methods_of_one_title_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    """A package may call its method as fedda calls its own, and compares just these two."""
    real = plugins.method
    monkeypatch.setattr(plugins, "method", lambda name: replace(real(name), title="FedBN (theirs)"))
    variants, base = variants_of(["fedbn", "fedprox"], "fedprox")
    assert [v.name for v in variants] == ["FedBN (fedbn)", "FedBN (fedprox)"]
    assert base == "FedBN (fedprox)"


def test_folder_names_are_stable_and_distinct() -> None:
    """Otherwise an unfinished comparison would train its cells again."""
    assert [v.slug for v in parse(["fedavg", "kd3a"])] == ["fedavg-94633fd2", "kd3a-cd5abd1f"]
    alike = [
        Variant("kd3a"),
        Variant("kd3a", "paper"),
        Variant("kd3a", settings={"kd3a.vote": "hard"}),
        Variant("kd3a", poison={"a": 30.0}),
        Variant("kd3a", without=("a",)),
    ]
    assert len({v.slug for v in alike}) == len(set(alike)) == len(alike)
    assert Cell(alike[0], "mnist-m", 3).name == "kd3a-cd5abd1f.mnist-m.3"
    odd = [Cell(alike[0], name, 3).name for name in ("ward 1", "ward-1", "ward/1")]
    assert len(set(odd)) == 3 and all(" " not in n and "/" not in n for n in odd)


def test_every_cell_is_trained_once(done: tuple[Plan, Notices]) -> None:
    made, notices = done
    cells = made.cells()
    assert len(cells) == 2 * 2 * 2
    assert [cell.seed for cell in cells] == 4 * [0] + 4 * [1]
    each = [("begin", 0), ("round", 1), ("round", 2), ("done", None)]
    order = sorted(cells, key=lambda cell: cell.variant.method != "fedavg")  # others need its model
    assert notices == [(what, cell.name, value) for cell in order for what, value in each]
    again: Notices = []
    assert made.run(1, note(again)) == {} and again == []
    left = {path.name for path in made.folder(cells[0]).iterdir()} - {".lock"}
    kept = {"cell.json", "config.json", "journal.jsonl", "roster.json"}
    made_last = {"about.json", "model.safetensors", "results.json", CARD, "sites"}
    assert left == kept | made_last  # but no checkpoint
    ours = [p for p in (made.folder(cells[0]) / "sites").rglob("*") if not p.is_dir()]
    assert all(p.name.endswith(".fedavg-0.refined.safetensors") for p in ours) and len(ours) == 1


def test_files_that_are_no_sites_are_said_and_of_data_refused(done: tuple[Plan, Notices]) -> None:
    plan, said = done[0], list[str]()
    papers, stray = plan.data / "notes.txt", plan.data / "west.csv"
    papers.touch()
    train(plan, 1, quiet=True, say=said.append)
    papers.unlink()
    assert "passed over: notes.txt" in said[0]
    stray.write_text("age,Label\n1,a\n2,b\n")
    with pytest.raises(DataError, match=r"west\.csv has the column Label"):
        train(plan, 1, quiet=True)
    stray.unlink()


def test_csv_has_the_results_of_the_trainings(done: tuple[Plan, Notices]) -> None:
    made, _ = done
    rows = list(csv.DictReader(io.StringIO(as_csv(made.scores()))))
    assert list(rows[0]) == list(COLUMNS)
    assert len(rows) == len(made.cells())
    for row, cell in zip(rows, made.cells(), strict=True):
        results = json.loads((made.folder(cell) / "results.json").read_text())
        (training,) = results["trainings"][cell.variant.method]
        assert (row["variant"], row["target"]) == (cell.variant.name, cell.target)
        assert int(row["seed"]) == cell.seed == training["seed"]
        assert float(row["accuracy_last"]) == training["rounds"][-1]["accuracy"]
        chosen = max(reversed(training["rounds"]), key=lambda entry: entry["infomax"])
        assert float(row["accuracy_selected"]) == chosen["accuracy"]
        assert int(row["selected_round"]) == chosen["round"]
        assert float(row["seconds"]) == training["seconds"]
        assert int(row["bytes"]) == sum(training["bytes"].values())
        weights = dict(pair.split("=") for pair in row["weights"].split())
        assert {k: float(v) for k, v in weights.items()} == pytest.approx(
            training["rounds"][-1]["weights"], rel=1e-5
        )


def cells_of(text: str, heading: str) -> dict[str, dict[str, str]]:
    """Read the Markdown table below a heading -> row -> column -> text."""
    lines = text.partition(f"### {heading}")[2].partition("###")[0].splitlines()
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in lines if line[:1] == "|"]
    return {row[0]: dict(zip(rows[0][1:], row[1:], strict=True)) for row in rows[2:]}


def test_markdown_has_the_results_of_the_trainings(done: tuple[Plan, Notices]) -> None:
    made, _ = done
    text = as_markdown(made.scores(), "FedAvg")
    last = {(s.variant, s.target, s.seed): 100 * (s.last or 0) for s in made.scores()}
    shown = cells_of(text, "Last round")
    minus = cells_of(text, "Minus FedAvg")
    for name in ("FedAvg", "FEDPROX, mu=0.5"):
        name = next(n for n in shown if n.lower() == name.lower())
        columns = {t: [last[name, t, s] for s in (0, 1)] for t in made.targets}
        columns["mean"] = list(np.mean(list(columns.values()), axis=0))
        base = {t: [last["FedAvg", t, s] for s in (0, 1)] for t in made.targets}
        base["mean"] = list(np.mean(list(base.values()), axis=0))
        assert list(shown[name]) == ["town", "carl", "mean"]
        for target, values in columns.items():
            assert shown[name][target] == f"{np.mean(values):.1f} ± {np.std(values, ddof=1):.1f}"
            if name != "FedAvg":
                pairs = np.subtract(values, base[target])
                half = 12.7062047 * np.std(pairs, ddof=1) / 2**0.5  # t for 95 % and n = 2
                low, high = np.mean(pairs) - half, np.mean(pairs) + half
                assert minus[name][target] == f"{np.mean(pairs):+.1f} [{low:+.1f}, {high:+.1f}]"
    assert "FedAvg" not in minus
    assert "without labels" in text and "Student's t" in text


def test_rows_that_train_on_the_tested_images_are_marked(
    root: Path, done: tuple[Plan, Notices], tmp_path: Path
) -> None:
    assert "†" not in as_markdown(done[0].scores(), "FedAvg")
    marked = replace(score("KD3A", "x", 0, 0.7), transductive=True)
    text = as_markdown([score("FedAvg", "x", 0, 0.5), marked], "FedAvg")
    assert list(cells_of(text, "Last round")) == ["FedAvg", "KD3A †"]
    assert cells_of(text, "Minus FedAvg") == {"KD3A †": {"x": "+20.0"}}
    assert text.count("† transductive") == 1
    text = as_markdown([score("FedAvg", "x", 0, 0.5), marked], "KD3A")
    assert cells_of(text, "Minus KD3A †") == {"FedAvg": {"x": "-20.0"}}
    rows = list(csv.DictReader(io.StringIO(as_csv([score("FedAvg", "x", 0, 0.5), marked]))))
    assert [row["transductive"] for row in rows] == ["no", "yes"]


def test_an_interrupted_training_resumes_with_the_same_result(
    root: Path, done: tuple[Plan, Notices], tmp_path: Path
) -> None:
    made = plan(root, tmp_path, seeds=[0], targets=["town"])
    notices: Notices = []

    def interrupt(what: str, cell: Cell, value: Any) -> None:
        notices.append((what, cell.name, value))
        if what == "round" and cell.variant.method == "fedprox":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made.run(1, interrupt)
    assert notices[-1] == ("round", made.cells()[1].name, 1)
    assert [s.variant for s in made.scores()] == ["FedAvg"]
    notices.clear()
    assert made.run(1, note(notices)) == {}
    told = [(what, value) for what, _, value in notices]
    assert told == [("begin", 1), ("round", 2), ("done", None)]
    theirs = {(s.variant, s.target, s.seed): s.last for s in done[0].scores()}
    for mine in made.scores():
        assert mine.last == theirs[mine.variant, mine.target, mine.seed]


def test_changed_settings_or_data_are_refused(done: tuple[Plan, Notices], tmp_path: Path) -> None:
    made, _ = done
    cases: list[tuple[dict[str, Any], str]] = [
        ({"settings": TINY | {"train.lr": 0.5}}, "with train.lr 0.02, not 0.5; choose another"),
        ({"poison": {"bert": 30.0}}, "with poison {}, not {'bert': 30.0}"),
        ({"data": tmp_path}, "no domain"),
    ]
    for change, part in cases:
        changed = replace(made, **change)
        with pytest.raises(RunError, match=part):
            changed.run(1, ignore)
    for name in ("town", "carl"):
        (tmp_path / f"{name}.npz").write_bytes((made.data / f"{name}.npz").read_bytes())
    with pytest.raises(RunError, match="with sites"):
        replace(made, data=tmp_path).run(1, ignore)
    shutil.copytree(made.data, tmp_path / "same")
    same = replace(made, data=tmp_path / "same")
    same.check()
    with np.load(same.data / "bert.npz") as file:
        np.savez(same.data / "bert.npz", **{k: file[k][::-1] for k in file})
    with pytest.raises(RunError, match="data of bert have changed since"):
        same.check()
    more = replace(made, settings=TINY | {"kd3a.vote": "hard", "wait.sites": 9.0})
    notices: Notices = []
    # Neither setting affects these methods.
    assert more.run(1, note(notices)) == {} and notices == []
    with pytest.raises(RunError, match="--jobs 1"):
        replace(made, engine="ray").run(2, ignore)
    twins = [Variant("fedavg", label="A"), Variant("fedprox", label="A")]
    with pytest.raises(RunError, match="called 'A'"):
        replace(made, variants=twins).run(1, ignore)


def test_a_failed_training_does_not_end_the_others(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = simulation.simulate

    def simulate(config: Any, *rest: Any) -> Any:
        if config.method == failing:
            raise ZeroDivisionError("by nought")
        return true(config, *rest)

    monkeypatch.setattr(simulation, "simulate", simulate)
    made = plan(root, tmp_path, seeds=[0], targets=["town"])
    base, other = made.cells()
    failing = "fedavg"
    assert made.run(1, ignore) == {base: "ZeroDivisionError: by nought", other: WITHOUT}
    failing = "fedprox"
    failed = made.run(1, ignore)
    good, bad = base, other
    assert failed == {bad: "ZeroDivisionError: by nought"}
    assert "by nought" in (made.folder(bad) / workers.ERROR).read_text()
    assert [s.variant for s in made.scores()] == [good.variant.name]
    monkeypatch.undo()
    assert made.run(1, ignore) == {}
    assert len(made.scores()) == 2
    assert not (made.folder(bad) / workers.ERROR).exists()


@pytest.mark.parametrize(("variants", "targets", "seeds"), [(1, 1, 1), (8, 2, 2)])
def test_the_plot_is_written(tmp_path: Path, variants: int, targets: int, seeds: int) -> None:
    scores = [
        score(f"${v} named at great length, so that it is wrapped", f"$t{t}", s, 0.1 * v + 0.01 * s)
        for v in range(variants) for t in range(targets) for s in range(seeds)
    ]  # fmt: skip
    path = tmp_path / "a.png"
    assert draw(scores, scores[0].variant, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert not draw([score("A", "x", 0, None)], "A", tmp_path / "b.png")
    assert not (tmp_path / "b.png").exists()
    with pytest.raises(RunError, match="cannot be written"):
        draw(scores[:1], "", tmp_path / "no" / "c.png")


def test_the_command_adds_the_baseline_and_writes_everything(root: Path, tmp_path: Path) -> None:
    words = ("compare", "fedprox", "--data", root, "--target", "town", "--seeds", 1, "--jobs", 1)
    words += ("--out", tmp_path / "out", *OPTIONS)
    ended = call(*words)
    assert "2/2" in ended.output and "Minus FedAvg, paired by seed" in ended.output
    out = tmp_path / "out"
    text = (out / "comparison.md").read_text()
    assert next(iter(cells_of(text, "Last round"))) == "FedAvg"
    assert "fedda compare fedprox --data " + root.name in text and str(root) not in text
    assert "--out out" in text and str(tmp_path) not in text
    assert len((out / "comparison.csv").read_text().splitlines()) == 3
    assert (out / "comparison.png").is_file()
    assert "2 of them done before" in call(*words).output
    assert (out / "comparison.md").read_text() == text
    other = call(*words, "--rounds", 3, "-c", "rounds=4", code=1)
    assert "with rounds 2, not 4" in other.output


def test_the_oracle_is_a_training_on_the_targets_own_labels(root: Path, tmp_path: Path) -> None:
    """Its numbers are those of FedAvg over two sites with the same files, one of them a source."""
    words = ("compare", "adabn", "--data", root, "--target", "town", "--seeds", 1, "--jobs", 1)
    call(*words, "--out", tmp_path / "out", *OPTIONS, "-c", "model.bottleneck=4", "--oracle")
    text = (tmp_path / "out" / "comparison.md").read_text()
    assert [*cells_of(text, "Last round")] == ["FedAvg", "AdaBN", "Oracle"]
    assert "a bound to compare with, and no method" in text
    assert "trained on the target's labels" in text and "--oracle\n" in text
    table = io.StringIO((tmp_path / "out" / "comparison.csv").read_text())
    rows = {r["variant"]: r for r in csv.DictReader(table)}

    data = {"data": str(root / "town.npz"), "threads": 1}
    sites = [{"role": "source", "name": "target-labels"} | data]
    sites += [{"role": "target", "name": "town"} | data]
    settings = TINY | {"method": "fedavg", "model.bottleneck": 4, "run.baseline": ""}
    settings |= {"run.dir": str(tmp_path / "alone"), "track.tensorboard": False}
    same = simulation.simulate(RunConfig.parse(settings), sites, Journal(None), "process")
    (training,) = same["trainings"]["fedavg"]
    assert float(rows["Oracle"]["accuracy_last"]) == training["final_accuracy"]
    assert rows["Oracle"]["weights"] == "target-labels=1"


def test_an_oracle_needs_labels_and_images_that_it_has_not_learnt(
    root: Path, domains: list[Node], tmp_path: Path
) -> None:
    unlabelled = Path(domains[0]["data"]).parent  # town has no labels to train on
    found = plan(unlabelled, tmp_path, variants=[oracle()], targets=["town"])
    with pytest.raises(RunError, match="--oracle trains on the labels of the target's training"):
        found.run(1, ignore)
    (tmp_path / "data").mkdir()
    for file in root.glob("*.npz"):
        (tmp_path / "data" / file.name).symlink_to(file)
    (tmp_path / "data" / "benchmark.json").write_text('{"options": {"transductive": true}}')
    found = plan(tmp_path / "data", tmp_path / "out", variants=[oracle()], targets=["town"])
    with pytest.raises(RunError, match="leave out --oracle"):
        found.run(1, ignore)


REFUSED = [
    ("kd4a --data R", "no method 'kd4a'"),
    ("fedavg --data nowhere", "nowhere is not a folder"),
    ("fedavg --data ONE", "holds town; a comparison needs"),
    ("fedavg --data R --target mars", "no domain 'mars', it has anna, bert, carl, town"),
    ("fedavg --data R --target ,", "no domain ''"),
    ("fedavg --data R --target town,town", "twice"),
    ("fedavg --data R --seeds x", "--seeds 'x' is not valid"),
    ("fedavg --data R --seeds 0", "--seeds '0' is not valid"),
    ("fedavg --data R --seeds 5,5", "--seeds '5,5' is not valid"),
    ("fedavg --data R --seeds -3", "--seeds '-3' is not valid"),
    ("fedavg --data R --poison bert", "NAME=PERCENT"),
    ("fedavg --data R --poison bert=200", "NAME=PERCENT"),
    ("fedavg --data R --poison mars=20", "no such domain"),
    ("fedavg --data R --target town --poison town=20", "it is the target"),
    ("fedavg --data R --jobs 2 --engine ray", "--engine ray"),
    ("fedavg --data R -c run.evaluate=false", "-c run.evaluate= is not taken here"),
    ("fedavg --data R -c rounds=many", "must be a whole number"),
    ("fedavg --data R -c gate.low=1", "no setting 'gate.low'; did you mean kd3a.gate.low"),
    ("fedavg --data R --preset official", "goes with it, as in kd3a:paper"),
    ("fedavg --data R --baseline fedavg,kd3a", "more than one method"),
    ("fedavg --data R --baseline kd4a", "no method 'kd4a'"),
    ("oracle --data R", "no method 'oracle'"),
]


@pytest.mark.parametrize(("words", "part"), REFUSED)
def test_what_the_command_refuses(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: str, part: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "ONE").mkdir()
    (tmp_path / "ONE" / "town.npz").touch()
    (tmp_path / "R").symlink_to(root)
    ended = call("compare", *words.split(), code=1)
    assert ended.output.count("error: ") == 1 and part in ended.output, ended.output
    assert not (tmp_path / "comparison").exists()


@pytest.mark.parametrize(
    ("trouble", "code", "part"),
    [
        (KeyboardInterrupt, 130, "the same command goes on"),
        (FeddaError("no luck"), 1, "FedAvg → town, seed 0; FedAvg → town, seed 1: no luck"),
    ],
)
def test_exit_codes_and_messages_of_the_command(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: Any, code: int, part: str
) -> None:
    def simulate(*_: Any) -> None:
        raise trouble

    monkeypatch.setattr(simulation, "simulate", simulate)
    words = ("compare", "fedavg", "--data", root, "--target", "town", "--seeds", 2, "--jobs", 1)
    ended = call(*words, "--out", tmp_path, *OPTIONS, code=code)
    assert part in ended.output
    if code == 1:
        assert f"traceback: {tmp_path / 'cells'}" in ended.output


def accuracies_of(made: Plan) -> list[tuple[str, str, int, float | None]]:
    return [(s.variant, s.target, s.seed, s.last) for s in made.scores()]


@pytest.mark.nightly("fedda/contrib/lab")
def test_two_jobs_give_the_same_results(
    root: Path, done: tuple[Plan, Notices], tmp_path: Path
) -> None:
    made = plan(root, tmp_path, seeds=[0])
    notices: Notices = []
    others = {*multiprocessing.active_children()}  # of other tests
    assert made.run(2, note(notices)) == {}
    theirs = {entry[:3]: entry for entry in accuracies_of(done[0])}
    assert accuracies_of(made) == [theirs[entry[:3]] for entry in accuracies_of(made)]
    assert len(accuracies_of(made)) == len(made.cells()) == 4
    names = {cell.name for cell in made.cells()}
    assert sorted(name for what, name, _ in notices if what == "done") == sorted(names)
    assert all(value is None for what, _, value in notices if what == "done")
    assert {*multiprocessing.active_children()} <= others


@pytest.mark.usefixtures("signal_handlers")
def test_long_work_before_a_training_is_told_from_its_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cell, (ours, theirs) = Cell(Variant("kd3a"), "town", 0), multiprocessing.Pipe()

    def train(_plan: Any, cell: Cell, notify: workers.Notify) -> None:
        logging.getLogger("fedda.progress").info("%d of %d features are computed", 9, 90)
        notify("done", cell, None)

    monkeypatch.setattr(workers, "train", train)
    ours.send(cell)
    ours.send(None)
    workers._work(cast(Any, None), theirs)
    ready, line, done = (ours.recv() for _ in range(3))
    assert (ready, done) == (workers.READY, ("done", cell, None))
    assert line == ("line", cell, "9 of 90 features are computed")
    output = io.StringIO()
    with CellsDisplay({cell: 2}, [], 2, None, Console(file=output)) as display:
        display(*line)
    assert "town, seed 0: 9 of 90 features are computed" in output.getvalue()


def test_the_time_left_counts_how_long_trainings_take_to_start(root: Path, tmp_path: Path) -> None:
    cells = plan(root, tmp_path, variants=parse(["fedavg"]), targets=["town"], seeds=[0, 1, 2])
    every = cells.cells()
    output, now = io.StringIO(), [0.0]
    rounds, written = dict.fromkeys(every, 2), Console(file=output)
    with CellsDisplay(rounds, [], 1, None, written, lambda: now[0]) as display:
        for cell in every[:2]:  # 10 s and a second, then 5 s after the last round
            for what, value, took in (("begin", 0, 7), ("round", 1, 3), ("round", 2, 1)):
                now[0] += took
                display(what, cell, value)
            now[0] += 5
            display("done", cell, None)
    assert "0:09, about 0:22 left" in output.getvalue()  # from the start of a training alone
    assert "0:09, about 0:14 left" in output.getvalue()  # (10 + 15) / 2, and a second


@pytest.mark.nightly("fedda/contrib/lab")
def test_a_killed_process_fails_only_its_training(root: Path, tmp_path: Path) -> None:
    """The first of two trainings would take minutes, so its process is killed within it."""
    variants = parse(["fedavg,rounds=20000", "fedavg"])
    made = plan(root, tmp_path, variants=variants, targets=["town"], seeds=[0])
    long, short = made.cells()
    pids: list[int] = []
    notices: Notices = []

    def kill_once(what: str, cell: Cell, value: Any) -> None:
        note(notices)(what, cell, value)
        if cell == long and what == "round" and not pids:
            holder = lock.holder(made.folder(cell))
            assert holder is not None
            pids.append(holder.pid)
            os.kill(holder.pid, signal.SIGKILL)

    workers.in_parallel(made, [long, short], 1, kill_once)
    assert os.getpid() not in pids
    failed = {name: value for what, name, value in notices if what == "done"}
    assert "killed (exit code -9)" in failed[long.name] and failed[short.name] is None
    assert [each.variant for each in made.scores()] == [short.variant.name]

    again: Notices = []

    def end(what: str, cell: Cell, value: Any) -> None:
        note(again)(what, cell, value)
        if what == "round":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        made.run(1, end)
    (_, _, begun), (_, _, following) = again
    assert {name for _, name, _ in again} == {long.name}
    assert begun >= 1 and following == begun + 1  # it goes on where it was


@pytest.mark.nightly("fedda/contrib/lab")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL, signal.SIGTERM])
def test_whatever_ends_the_command_leaves_no_process(
    root: Path, tmp_path: Path, number: int
) -> None:
    words = [*PROGRAM, "compare", "fedavg", "fedprox", "--data", root, "--target", "town"]
    words += ["--jobs", "2", "--out", tmp_path / "out", *OPTIONS, "-c", "rounds=100000"]
    started = Process("compare", [*map(str, words)], tmp_path / "log", os.environ)
    members = below(started.popen.pid)
    try:
        journals = "out/cells/*/journal.jsonl"
        wait_until(lambda: len(list(tmp_path.glob(journals))) == 2, "no two trainings begin")
        members = below(started.popen.pid)
        assert len(members) > 2
        if number == signal.SIGINT:
            os.killpg(started.popen.pid, number)  # as a terminal sends it, to the whole group
        else:
            started.popen.send_signal(number)
        assert started.popen.wait(PATIENCE) == (-9 if number == signal.SIGKILL else 130)
        members |= below(started.popen.pid)  # those of its session, too
        wait_until(lambda: not alive(members), "processes are left")
    finally:
        kill(members | below(started.popen.pid))
    if number != signal.SIGKILL:
        assert "the same command goes on" in started.text() and "Traceback" not in started.text()
