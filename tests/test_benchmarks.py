"""The benchmarks: their formulas by hand, their settings, and one of them run in small.

The short runs of all others are in test_benchmark_runs.py.
"""

import importlib
import json
import subprocess
import sys
from argparse import ArgumentParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedda import exchange, halves, models, plugins
from fedda.errors import DataError, RunError
from fedda.exchange import Group, LocalHost
from fedda.exchange.in_process import LocalStream
from fedda.packing import Kind, pack
from fedda.settings import RunConfig, presets
from strategies.sites.roster import OFFER, Node
from tests.small_benchmarks import (
    FOLDER,
    PROGRAM_OF,
    SMALL,
    check_promised,
    make_data,
    promised,
    words,
)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that imports a benchmark as the other benchmarks do."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module


@pytest.mark.slow
def test_light_sites_need_no_torch() -> None:
    program = "import sys, light; assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", program], cwd=FOLDER, check=False)
    assert done.returncode == 0


def test_light_sites_change_models_and_do_not_let_them_drift(load: Any) -> None:
    light = load("light")
    sent = pack({"w": np.ones(3, np.float32), "n": np.ones(1, np.int64)}, Kind.MODEL)
    models = [light.changed(sent, f"source-{n:03}", r).unpack() for n in range(40) for r in (1, 2)]
    values = [float(model["w"][0]) for model in models]
    assert len({*values}) > 40 and max(abs(v - 1) for v in values) < 1.1 * light.CHANGE
    assert abs(np.mean(values) - 1) < light.CHANGE / 5
    assert all(model["n"] == 1 for model in models)


def test_growth_by_hand(load: Any) -> None:
    soak, processes = load("soak"), load("processes")
    samples = [
        (float(t), processes.Usage(0, 10**8 + 10**6 * t, 0, 5 + t // 90)) for t in range(101)
    ]
    found = soak.grown(samples, 2000)
    # Medians of the seconds 0 to 25 and 75 to 100; 1,500 rounds lie between their middles.
    assert (found["first_mb"], found["last_mb"]) == (112.5, 187.5)
    assert found["growth"] == 66.67 and found["per_1000"] == 44.44
    assert (found["first_files"], found["last_files"]) == (5, 5)
    still = found | {"growth": -1.0}
    assert soak.beyond({"superlink": found, "client": still, "run": still}, 66.0) == ["superlink"]
    assert not soak.beyond({"superlink": found, "client": still, "run": still}, 67.0)


def test_liars_of_one_run_do_not_lie_in_the_next(
    load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation, robust = halves.load("server", "simulation"), load("robust")
    honest = simulation.LocalGrid
    for lie in ("noise", "scaled"):  # each run puts its own grid where the server takes it
        monkeypatch.setattr(simulation, "LocalGrid", robust.lying_grid([], lie, 0))
    assert simulation.LocalGrid.__bases__ == (honest,)


@pytest.mark.parametrize(("lie", "by"), [("tenfold", 10), ("against", -4), ("", 1)])
def test_liars_in_sums_send_false_gradients_past_their_own_checks(
    load: Any, monkeypatch: pytest.MonkeyPatch, lie: str, by: float
) -> None:
    robust = load("robust")
    monkeypatch.setattr(LocalStream, "_push", LocalStream._push)  # to be put back
    robust.lie_in_sums([{"name": "a", "lies": True}, {"name": "b", "lies": False}], lie)
    pair = Group("pair", 2, 1, ("a", "b"))
    with LocalHost().open([pair], join=5, wait=5) as session:
        a, b = (exchange.connect(session.invitations[site]) for site in "ab")
        for site in (a, b):
            site.send("pair", np.array([1, 2], np.float32), 256)
        assert b.receive("pair").tolist() == [1 + by, 2 + 2 * by]
    for row in robust.SUM_ROWS.values():
        assert RunConfig.parse(robust.SETTINGS | row).method in ("fada", "fdann")


@pytest.mark.slow
def test_the_grand_table_in_small(
    load: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It stands for all programs that compare methods: most of them share its parts."""
    make_data(tmp_path)
    load("grand").main(words("grand", tmp_path))
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    check_promised("grand", found)
    assert (found["tasks"], found["seeds"]) == (1, 1)
    assert set(found["gain_points"]) == {"FedAvg", "AdaBN", "KD3A", "f-DANN"}
    assert found["gain_points"]["FedAvg"] == 0
    # 80 vectors are too few for f-DANN, so FedAvg stands for it.
    assert found["gain_points"]["f-DANN"] == 0
    assert found["mean_rank"]["f-DANN"] == found["mean_rank"]["FedAvg"]
    assert min(found["regret_always_points"].values()) == 0
    text = (tmp_path / "made" / "grand.md").read_text()
    assert "- f-DANN: " in text
    assert (tmp_path / "made" / "grand.png").read_bytes().startswith(b"\x89PNG")


def test_mean_ranks_by_hand(load: Any) -> None:
    """Demsar's example of ten classifiers has q = 3.164; here ranks, ties, and the cliques."""
    ranks = load("ranks")
    scores = np.array([[0.9, 0.8, 0.7], [0.5, 0.5, 0.1]])
    assert ranks.ranks(scores).tolist() == [[1, 2, 3], [1.5, 1.5, 3]]
    # section 3.2.2: four classifiers, 14 sets: CD = 2.569 sqrt(4 * 5 / (6 * 14)) = 1.25
    assert ranks.critical_difference(4, 14) == pytest.approx(1.25, abs=0.005)
    assert ranks.critical_difference(10, 1) == pytest.approx(3.164 * (110 / 6) ** 0.5, abs=0.01)
    assert ranks.cliques([1.0, 1.5, 2.4, 4.0], 1.0) == [(0, 1), (1, 2)]
    assert ranks.cliques([1.0, 3.0], 1.0) == []
    # Friedman's chi2 by its formula: 12 * 4 / (3 * 4) * (1 + 4 + 9 - 12) = 8, exp(-8 / 2)
    same = np.array([[0.9, 0.8, 0.7]] * 4)
    assert ranks.friedman(same) == pytest.approx(np.exp(-4.0))


def test_every_table_of_photos_has_valid_settings(load: Any) -> None:
    photos = load("photos")
    for _, preset, changes, variants, baseline in photos.TABLES.values():
        assert baseline in {v.name for v in variants}
        given = presets.for_all(preset, plugins.methods())
        shared = {k: v.value for k, v in given.items()} | changes
        for variant in variants:
            config = RunConfig.parse({**shared, **variant.flat()})
            assert config.method == variant.method and config.model.bottleneck == 256


# What is trained so that one loop must give the federation's weights: every step has its own sum,
# and, where models are averaged, every round has one step.
EXACT = ("rounds=4", "model.name=mlp", "model.hidden=16,8", "train.lr=0.05", "exchange.clip=1e6")
SGD = ("discriminator.optimizer=sgd", "discriminator.lr=0.5")
EXACT += ("model.dropout=0", "train.steps=0", "train.carry-momentum=false", "train.weight-decay=0")
EXACT += ("exchange.p=1", "exchange.min-examples=32", "exchange.expose-features=true")


@pytest.mark.parametrize(
    ("method", "changes"),
    [
        ("fdann", ()),
        ("fdann", ("pairs=true", "reversal.loss=reversal", *SGD)),
        ("fwdgrl", ()),
        ("fdan", ("fdan.scale=1",)),
        # equal weights of the sources in all rounds
        ("mdan", ("gamma=1e-9", "weighting=uniform", "mu=0.5", *SGD)),
        ("fada", ("weights.alignment=1", *SGD)),
        ("dils", ("pretrain=2", "loss=adda")),
        ("dils", ("pretrain=2", "loss=grl", *SGD)),
    ],
)
def test_a_loop_gives_the_weights_of_a_federation(
    load: Any, tmp_path: Path, method: str, changes: tuple[str, ...]
) -> None:
    central, draw = load("central"), np.random.default_rng(0)
    centre, nodes = draw.normal(size=(4, 12)), []
    for name, images in (("one", 96), ("other", 64), ("target", 96)):
        y = np.arange(images) % 4
        noise = draw.normal(size=(images, 12)) + draw.normal(size=12)
        x = (centre[y] + noise / 2).astype(np.float32)
        path = tmp_path / f"{name}.npz"
        np.savez(path, x_train=x, y_train=y, x_test=x, y_test=y)
        role = "target" if name == "target" else "source"
        nodes.append({"role": role, "name": name, "data": str(path), "threads": 1})
    batch = "train.batch-size=32" if method == "dils" else "train.batch-size=96"
    config = central.configured(method, [], [*EXACT, batch, "train.momentum=0", *changes])
    sites = central.taking_part(config, nodes)
    central.federated(config, sites, 0, tmp_path / "runs")
    folder = tmp_path / "runs" / "run"
    # DILS's target keeps its model at its site.
    at_target = folder / "sites" / "target" / "run.dils-0.model.safetensors"
    model, _ = models.load(at_target if method == "dils" else folder / "model.safetensors")
    ours = central.loop(config, sites, 0)
    begun = {name: tensor.clone() for name, tensor in ours.model.state_dict().items()}
    ours.run()
    theirs = model.state_dict()
    for name, tensor in ours.model.state_dict().items():
        if name.endswith("num_batches_tracked"):
            continue
        torch.testing.assert_close(theirs[name], tensor, atol=1e-6, rtol=1e-5)
        assert (tensor - begun[name]).abs().max() > 1e-4 or name.endswith(("1.bias", "4.bias"))


def benchmark_module(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Import a benchmark as its script does; installed packages have a folder `examples`, too."""
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module(name)


@pytest.mark.parametrize("name", ["digits", "amazon", "office"])
def test_every_table_of_the_accuracy_benchmark_has_valid_settings(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    accuracy = benchmark_module("accuracy", monkeypatch)

    benchmark = accuracy.BENCHMARKS[name]
    for table in accuracy.TABLES.values():
        for variant in table(benchmark):
            settings = {"rounds": benchmark.epochs, **benchmark.settings, **variant.flat()}
            assert RunConfig.parse(settings).method == variant.method


def test_every_adversarial_variant_has_valid_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    made = benchmark_module("adversaries", monkeypatch)
    some = (made.BASELINE, made.BEGIN, *made.CONTROL, *made.DILS, *made.EVERY_STEP, *made.JOINT)
    some = (*some, *made.FADA)
    for variant in some:
        assert RunConfig.parse({**made.SETTINGS, **variant.flat()}).method == variant.method
    assert RunConfig.parse(made.LIVE).rounds > int(made.LIVE["dils.pretrain"])


# ---- what they print and store -----------------------------------------------------------------


PROGRAMS = {p.stem for p in FOLDER.glob("*.py") if "ArgumentParser(" in p.read_text()}


def test_every_benchmark_is_run_in_small() -> None:
    assert {PROGRAM_OF.get(name, name) for name in SMALL} == PROGRAMS
    assert all(promised(program) for program in PROGRAMS)


class Parsed(Exception):
    """A program has read its arguments."""


@pytest.mark.parametrize("name", SMALL)
def test_every_benchmark_takes_the_arguments_of_its_short_run(
    name: str, load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parse = ArgumentParser.parse_args

    def parse_alone(parser: ArgumentParser, given: Any = None) -> None:
        raise Parsed(parse(parser, given))

    monkeypatch.setattr(ArgumentParser, "parse_args", parse_alone)
    monkeypatch.setattr(sys, "argv", [name, *words(name, tmp_path)])
    with pytest.raises(Parsed):
        load(PROGRAM_OF.get(name, name)).main()


def test_samples_of_another_size_are_not_reused(load: Any, tmp_path: Path) -> None:
    make_data(here := tmp_path / "here")
    accuracy, adversarial = load("accuracy"), load("adversarial")
    data = here / "data" / "digits"

    def count(folder: Path) -> tuple[int, int]:
        with np.load(folder / "usps.npz") as found:
            return len(found["y_train"]), len(found["y_test"])

    few, fewer = (adversarial.drawn(data, tmp_path, n) for n in (20, 10))
    assert (count(few), count(fewer)) == ((20, 20), (10, 20))
    assert adversarial.drawn(data, tmp_path, adversarial.IMAGES).name == "drawn"
    accuracy.prepare(data, tmp_path / "drawn-20", 20, adversarial.TESTS)  # exists already and fits
    before = (few / "usps.npz").read_bytes()
    for images, tests in ((10, 500), (20, 5)):
        with pytest.raises(RunError, match="other images of it; choose another --out"):
            accuracy.prepare(data, few, images, tests)
    assert (few / "usps.npz").read_bytes() == before
    with pytest.raises(DataError, match="files; give their folder"):
        accuracy.prepare(tmp_path, tmp_path / "none", 10, 10)
    assert not (tmp_path / "none").exists()


@pytest.mark.slow
def test_rotated_digits_of_another_size_are_drawn_anew(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    adversarial, counts = load("adversarial"), {}
    monkeypatch.setattr(adversarial, "TESTS", 10)
    for images in (20, 10):
        rotated = adversarial.pens(tmp_path, images)
        with np.load(rotated / "30" / "data.npz") as found:
            counts[images] = len(found["y_train"])
    assert counts == {20: 20, 10: 10}


def test_other_settings_of_lazy_are_measured_anew(
    load: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    adversarial, lazy, calls = load("adversarial"), load("lazy"), []

    def measure(folder: Path, files: Any, settings: Any, repeats: int) -> list[Any]:
        calls.append((folder.name, settings["rounds"], repeats))
        folder.mkdir(parents=True)
        return [{"number": len(calls)}]

    monkeypatch.setattr(lazy, "measure", measure)
    monkeypatch.setattr(lazy, "report", lambda found, settings, heading, command: command)
    monkeypatch.setattr(adversarial, "pens", lambda out, images: out)
    found = []
    for more in ([], ["-c", "rounds=4"], ["--repeats", "1"], ["--repeats", "3"]):
        adversarial.main(["--table", "lazy", "--out", str(tmp_path), *more])
        *_, command, answer = capsys.readouterr().out.strip().splitlines()
        assert command.endswith(" ".join(["--table lazy", *more]).removesuffix(" --repeats 3"))
        found.append(json.loads(answer)["lazy"][0]["number"])
    assert found == [1, 2, 3, 1]  # 3 is the default, so nothing is measured again
    assert calls == [
        ("lazy", 5, 3),
        ("lazy-c-rounds-4", 4, 3),
        ("lazy-repeats-1", 5, 1),
    ]


def test_a_wrong_data_folder_leaves_no_files(load: Any, tmp_path: Path) -> None:
    make_data(here := tmp_path / "here")
    dictionary = load("dictionary")
    cell = dictionary.Cell("feddadil", "googlenet", "webcam", 0, {})
    with pytest.raises(DataError, match="files; give their folder"):
        dictionary.Bench(tmp_path, tmp_path / "out")._prepared(cell)
    assert not (tmp_path / "out").exists()
    made = dictionary.Bench(here / "data", tmp_path / "out")._prepared(cell)
    assert {path.stem for path in made.iterdir()} == {"amazon", "dslr", "webcam"}
    with pytest.raises(SystemExit):  # the argument parser has printed the reason
        dictionary.main(["--set", "surf", "--out", str(tmp_path / "other")])
    assert not (tmp_path / "other").exists()


def test_samples_come_from_the_sources_in_turn(load: Any) -> None:
    dictionary = load("dictionary")
    # A point's values are its source and its class; the last source has one point, of class 1.
    sizes = {0: (50, 9), 1: (4, 9), 2: (0, 1)}
    sources = []
    for s, counts in sizes.items():
        y = torch.tensor([c for c, n in enumerate(counts) for _ in range(n)])
        sources.append((torch.stack([torch.full_like(y, s), y], dim=1).float(), y))
    z, y = dictionary.some(sources, 2, 6, torch.Generator().manual_seed(0))
    assert y.argmax(dim=1).tolist() == z[:, 1].tolist() == [0] * 6 + [1] * 6
    drawn = [(z[z[:, 1] == c, 0] == s).sum().item() for c in (0, 1) for s in sizes]
    assert drawn[:3] == [3, 3, 0]
    assert drawn[5] == 1 and sorted(drawn[3:5]) == [2, 3]
    firsts = {
        dictionary.some(sources, 2, 1, torch.Generator().manual_seed(k))[0][1, 0].item()
        for k in range(20)
    }
    assert firsts == {0, 1, 2}


def test_light_sites_offer_what_sites_offer(load: Any) -> None:
    """Else a server that takes no such offer would wait for them until its patience ends."""
    offered = load("light").offer("source-000")
    assert Node.read(1, offered).columns == () and set(offered) == OFFER


def test_combat_by_hand(load: Any) -> None:
    """A site's location goes to the columns' mean as far as its few values leave it open."""
    combat = load("harmonise").combat
    z = np.random.default_rng(0).normal(size=(8, 40)) + np.linspace(-1, 1, 40)
    gamma, delta = z.mean(axis=0), z.var(axis=0, ddof=1)
    location, scale = combat(z)
    for before, after in ((gamma, location), (delta, scale)):
        towards = (after - before) * (before.mean() - before)
        far = np.abs(before - before.mean()) > before.std()
        assert (towards[far] > 0).all() and after.std() < before.std()
    many = np.tile(z, (500, 1))  # of many values the prior counts nothing
    drawn = combat(many)
    np.testing.assert_allclose(drawn[0], many.mean(axis=0), atol=2e-3)
    np.testing.assert_allclose(drawn[1], many.var(axis=0), rtol=2e-2)
