"""Short runs of the benchmarks: they work and print the keys that they promise."""

import ast
import csv
import importlib
import json
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedda import halves, models, plugins
from fedda.choose.decision import Trained
from fedda.errors import DataError, RunError
from fedda.maths.accountant import epsilon
from fedda.ops.spawn import LOOPBACK
from fedda.settings import RunConfig, presets
from fedda.wire import Kind, pack

FOLDER = Path(__file__).parents[1] / "examples" / "benchmarks"

# Arguments of each benchmark's short run; HERE stands for a temporary folder of this file.
ROTATIONS = ("--table", "rotations", "--target", "30", "--seeds", "0", "--images", "300")
ROTATIONS += ("-c", "rounds=2", "-c", "dils.pretrain=1", "--out", "HERE", "--results", "HERE/made")
LAZY = ("--table", "lazy", "--images", "256", "--delay", "30", "--repeats", "1")
LAZY += ("-c", "rounds=2", "-c", "dils.pretrain=1", "--out", "HERE")
ACCURACY = ("--data", "HERE/data", "--out", "HERE/accuracy", "--jobs", "1", "--set", "digits")
ACCURACY += ("--table", "control", "--images", "100", "--epochs", "1", "--target", "usps")
ACCURACY += ("--seeds", "0,1", "--results", "HERE/made")
DICTIONARY = ("--data", "HERE/data", "--out", "HERE/dictionary", "--set", "googlenet")
DICTIONARY += ("--target", "webcam", "--seeds", "0", "--results", "HERE/made")
DICTIONARY += ("-c", "samples=30", "-c", "batch-size=30")
CENTRAL = ("--data", "HERE/data/digits", "--target", "usps", "--seeds", "0", "-c", "rounds=2")
CENTRAL += ("-c", "model.name=mlp", "-c", "model.sizes=16", "-c", "train.batch-size=32")
CENTRAL += ("-c", "exchange.min-examples=16")
CENTRAL += ("-c", "exchange.expose-features=true", "-c", "fdan.scale=1", "-c", "dils.pretrain=1")
CHAIN = ("--table", "pens", "--images", "256", "--seeds", "0", "--jobs", "2", "--out", "HERE/chain")
CHAIN += ("-c", "model.name=mlp", "-c", "model.sizes=16", "-c", "rounds=3", "-c", "pretrain=1")
CHAIN += ("-c", "epochs=1", "-c", "measure.steps=2", "--results", "HERE/made")
CANDIDATES = ("--data", "HERE/data/digits", "--images", "100", "--seeds", "0", "--repeats", "1")
CANDIDATES += ("-c", "model.name=mlp", "-c", "model.sizes=16", "-c", "rounds=3", "--jobs", "2")
CANDIDATES += ("-c", "pretrain=1", "-c", "epochs=1", "-c", "measure.steps=2")
CANDIDATES += ("-c", "exchange.min-examples=32", "-c", "exchange.expose-features=true")
CANDIDATES += ("--out", "HERE/candidates", "--results", "HERE/made")
FEWER = ("--data", "HERE/data/digits", "--target", "usps", "--seeds", "0", "--images", "100")
FEWER += ("-c", "model.name=mlp", "-c", "model.sizes=16", "-c", "rounds=2")
FEWER += ("-c", "fruda.pretrain=1", "-c", "fruda.measure.steps=2", "--out", "HERE/fewer")
FEWER += ("-c", "exchange.min-examples=32", "-c", "exchange.expose-features=true")
FEWER += ("--results", "HERE/made")
PRIVACY = ("--images", "60", "--rounds", "1", "--epsilon", "8", "--seeds", "0", "--jobs", "1")
PRIVACY += ("--out", "HERE/privacy", "--results", "HERE/made")
ROBUST = ("--images", "700", "--seeds", "0", "--row", "FedAvg", "--row", "median", "--jobs", "1")
ROBUST += ("--lie", "flipped", "--lie", "scaled", "-c", "rounds=2", "-c", "model.sizes=16")
ROBUST += ("--out", "HERE/robust", "--results", "HERE/made")
CHOOSE = ("--data", "HERE/data", "--set", "googlenet", "--target", "webcam", "--rounds", "4")
CHOOSE += ("--seeds", "0", "--jobs", "1", "--out", "HERE/choose", "--results", "HERE/made")
GRAND = ("--data", "HERE/data", "--set", "googlenet", "--target", "webcam", "--rounds", "2")
GRAND += ("--method", "fedavg", "--method", "adabn", "--method", "kd3a", "--method", "fdann")
GRAND += ("--seeds", "0", "--jobs", "1", "--out", "HERE/grand", "--results", "HERE/made")
EXCHANGE = ("--syncs", "200", "--large-syncs", "20", "--repeats", "1", "--memory-syncs", "2000")
METHODS = ("--table", "methods", "--repeats", "1", "--rounds", "2", "--images", "256")
METHODS += ("--shape", "64", "--network", "mlp", "--sources", "2", "-c", "model.sizes=16")
PHOTOS = ("--data", "HERE/data", "--table", "googlenet", "--out", "HERE/photos", "--jobs", "1")
PHOTOS += ("--target", "webcam", "--rounds", "2", "--seeds", "0", "--results", "HERE/made")
ROUNDS = ("--sources", "1", "--rounds", "2", "--mb", "1", "--mb-rounds", "1", "--stock-rounds", "0")
ROUNDS += ("--frozen-rounds", "1")
VALIDATORS = ("--data", "HERE/data/digits", "--out", "HERE/validators", "--target", "usps")
VALIDATORS += ("--seeds", "0,1", "--method", "fedavg", "--method", "kd3a", "-c", "rounds=2")
VALIDATORS += ("-c", "model.name=mlp", "-c", "model.sizes=16", "-c", "train.lr=0.1")
SMALL: dict[str, tuple[str, ...]] = {
    "accuracy": ACCURACY,
    "adversarial": ROTATIONS,
    "breakdown": ("--images", "60", "--rounds", "1", "--no-live"),
    "cache": ("--images", "60", "--size", "32"),
    "candidates": CANDIDATES,
    "central": CENTRAL,
    "chain": CHAIN,
    "choose": CHOOSE,
    "dictionary": DICTIONARY,
    "exchange": (*EXCHANGE, "--skip-flower"),
    "feddadil": (
        "--batch",
        "60",
        "--width",
        "64",
        "--repeats",
        "2",
        "--atoms",
        "3",
        "--atoms",
        "8",
    ),
    "fewer": FEWER,
    "grand": GRAND,
    "lazy": LAZY,
    "methods": METHODS,
    "photos": PHOTOS,
    "memory": ("--mb", "45", "--sources", "", "--kd3a", "2", "--rounds", "1"),
    "overhead": ("--images", "400", "--rounds", "2", "--repeats", "3"),
    "privacy": PRIVACY,
    "robust": ROBUST,
    "rounds": ROUNDS,
    "scale": ("--sites", "3", "--mb", "0.01", "--rounds", "2"),
    "secure": ("--sources", "3", "--rounds", "1", "--mb", "1"),
    "soak": (
        *("--minutes", "0", "--sites", "2", "--rounds", "2", "--warm-up", "0"),
        *("--mb", "0.01", "--every", "0.5"),
    ),
    "training": (
        *("--network", "lenet", "--size", "16", "--images", "96", "--repeats", "1"),
        *("--frozen-size", "32", "--frozen-images", "40", "--frozen-epochs", "1"),
    ),
    "validators": VALIDATORS,
    "vote": ("--images", "500", "--teachers", "3", "--classes", "7", "--many", "4"),
}
# A table that is tested by itself -> the program that makes it.
PROGRAM_OF = {"lazy": "adversarial", "methods": "exchange"}
# What --table methods prints, apart from the load.
OF_METHODS = {f"{method}_over_central" for method in ("dils", "fdann", "mdan", "fada")}
OF_METHODS |= {
    "fada_steps_over_central",
    "round_s",
    "central_s",
    "central_threads",
    "attention_s",
    "sums",
}
OF_METHODS |= {"message_s", "messages_s"}
# Promised keys that are missing because the short run leaves out a part.
LEFT_OUT: dict[str, set[str]] = {
    "accuracy": {"main", "ablation", "rounds", "malicious"},
    "adversarial": {"mnist-rotations", "digits", "lazy"},
    "breakdown": {"flower_s"},
    "candidates": {"time", "lies"},
    "chain": {"mnist", "mnist-same"},
    "exchange": {"resident_per_s", "stock_per_s"} | OF_METHODS,
    "lazy": {"mnist-rotations", "digits", "rotations"},
    "memory": {"models_above_idle_N", "models_above_start_N"},
    "photos": {"frozen", "finetuned", "dils", "adversarial", "fada", "source-free"},
    "overhead": {"live_client_cpu_ratio"},
    "robust": {"noise_N"},
    "rounds": {"stock_tiny_s", "stock_tiny_wave_s"},
}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with four tiny domains of noise, and three small ones of vectors."""
    folder = tmp_path_factory.mktemp("benchmarks")
    digits = folder / "data" / "digits"
    digits.mkdir(parents=True)
    draw = np.random.default_rng(0)
    for name in ("mnist", "mnistm", "svhn", "usps"):
        found = {
            "x_train": draw.integers(0, 256, (200, 8, 8), dtype=np.uint8),
            "y_train": np.arange(200) % 10,
            "x_test": draw.integers(0, 256, (20, 8, 8), dtype=np.uint8),
            "y_test": np.arange(20) % 10,
        }
        np.savez(digits / f"{name}.npz", **found)
    vectors = folder / "data" / "office_caltech10_googlenet1024"
    vectors.mkdir()
    draw = np.random.default_rng(0)
    centre = draw.normal(size=(10, 12))
    for name in ("amazon", "dslr", "webcam"):
        y = np.arange(80) % 10
        x = centre[y] + 0.5 * draw.normal(size=(80, 12)) + 0.3 * draw.normal(size=12)
        np.savez(vectors / f"{name}.npz", x=x.astype(np.float16), y=y)
    return folder


def printed(name: str, here: Path) -> dict[str, Any]:
    """Run a benchmark in small -> the JSON object on the last line, with every promised key."""
    program = PROGRAM_OF.get(name, name)
    words = [word.replace("HERE", str(here)) for word in SMALL[name]]
    command = [sys.executable, str(FOLDER / f"{program}.py"), *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    names = set(keys(figures))
    names |= {re.sub(r"_\d+(?=_|$)", "_N", key) for key in names}
    left_out = LEFT_OUT.get(name, set())
    if name == "methods":
        left_out = promised(program) - OF_METHODS - {"load_before"}
    assert promised(program) - names == left_out
    return figures


def keys(figures: Any) -> Iterator[str]:
    """Yield the keys of an object and of all objects in it."""
    for value in figures.values() if isinstance(figures, dict) else figures:
        if isinstance(value, dict | list):
            yield from keys(value)
    yield from figures if isinstance(figures, dict) else ()


def promised(program: str) -> set[str]:
    """Return the keys that a benchmark's docstring lists; N stands for a number."""
    text = ast.get_docstring(ast.parse((FOLDER / f"{program}.py").read_text()))
    return set(re.findall(r"^    ([\w-]+)  +\S", text or "", re.MULTILINE))


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that imports a benchmark as the other benchmarks do."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module


@pytest.mark.slow
def test_the_chain_in_small(here: Path, load: Any) -> None:
    found = printed("chain", here)["pens"]
    rows = ("no adaptation", "source", "all", "random", "pad", "ocs", "oracle")
    assert all(0 < found[row][0] < 100 and found[row][1] == 0 for row in rows)
    assert found["best_of_chance"] == round((1 / 2 + 1 / 3 + 1 / 4 + 1 / 5) / 4, 3)
    assert 0 <= found["best"] <= 1 and -1 <= found["correlation"] <= 1 and 0 <= found["kept"] <= 1
    text = (here / "made" / "chain-pens.md").read_text()
    assert text.count(" <- ") == 6  # the heading's and one per target
    chain, pens = load("chain"), here / "chain" / "pens"
    known = chain.before(pens / "runs", pens / "rotated", "oracle", 0)
    for target, training in chain.chain(pens / "runs", "oracle", 0).items():
        chosen = known[target][training["selection"]["collaborator"]]
        assert chosen == max(known[target].values())


@pytest.mark.slow
def test_accuracy_against_epsilon_in_small(here: Path) -> None:
    pytest.importorskip("opacus")
    found = printed("privacy", here)["demo"]
    noise = found.pop("noise")["8"]
    assert set(found) == {"FedAvg (source-only)", "KD3A", "FedAvg, epsilon 8", "KD3A, epsilon 8"}
    # 60 images a site in one batch of 128: one step over all of them.
    assert 7.9 < epsilon([(noise, 1.0, 1)], 1e-5) <= 8
    assert f"`privacy.noise` is {noise:g}" in (here / "made" / "privacy-demo.md").read_text()


@pytest.mark.slow
def test_candidates_that_lie_in_small(here: Path) -> None:
    found = printed("candidates", here)
    assert set(found["wall_s"]) == {"1", "5", "20"}
    assert 0 < found["target_cpu_s"]["1"] < found["target_cpu_s"]["20"] < found["wall_s"]["20"]
    assert found["chosen"]["eps"] == found["chosen"]["distance"] == ["150"]
    assert found["accuracy"]["honest"] and found["accuracy"]["leaves"] is None


@pytest.mark.slow
def test_fewer_sources_in_small(here: Path) -> None:
    found = printed("fewer", here)
    assert found["mdan"].keys() == found["fedavg"].keys() == {"1", "2", "3"}
    assert 0 < found["megabytes"]["1"] < found["megabytes"]["2"] < found["megabytes"]["3"]
    ranked = (here / "made" / "fewer.md").read_text().splitlines()[-1]
    assert set(ranked.removeprefix("- usps: ").split(", ")) == {"mnist", "mnistm", "svhn"}


@pytest.mark.slow
def test_one_server_and_light_sites_in_small(here: Path) -> None:
    found = printed("scale", here)
    assert found.pop("load_before") >= 0
    of = {figure: value.get("3 sites, 0.01 MB") for figure, value in found.items()}
    assert of["errors"] == 0 and 0 < of["run_ms"] + of["superlink_ms"] <= of["cpu_ms"] + 0.01
    # Of a source at least: 1 to ask for work, 1 to confirm, 6 to fetch it, 6 to send the model.
    assert of["requests"] > 8 and 0.01 < of["wire_mb"] < 0.1
    assert found["run_models"] == {}


@pytest.mark.slow
def test_a_soak_in_small(here: Path) -> None:
    found = printed("soak", here)
    assert (found["runs"], found["rounds"], found["errors"]) == (1, 2, 0)
    for name in ("superlink", "client", "run"):
        assert found[name]["first_mb"] > 50 and found[name]["first_files"] > 2


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


@pytest.mark.slow
def test_lies_and_means_in_small(here: Path) -> None:
    """Ten runs; in the median two liars of twenty have a fraction of what they have honestly."""
    found = printed("robust", here)
    assert found.keys() == {"FedAvg", "median"}
    assert found["FedAvg"].keys() == {"none", "flipped_10", "flipped_40", "scaled_10", "scaled_40"}
    assert all(0 <= found[row]["none"][0] <= 100 for row in found)
    runs = here / "robust" / "runs"
    assert len(list(runs.iterdir())) == 10

    def weights(run: str) -> dict[str, float]:
        results = json.loads((runs / run / "results.json").read_text())
        return results["trainings"]["fedavg"][0]["rounds"][-1]["weights"]

    told, honest = weights("2-scaled-2-of-20-0"), weights("2-none-0-of-20-0")
    assert sum(share < 0.5 * honest[site] for site, share in told.items()) == 2


def test_liars_of_one_run_do_not_lie_in_the_next(
    load: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    simulation, robust = halves.load("server", "simulation"), load("robust")
    honest = simulation.LocalGrid
    for lie in ("noise", "scaled"):  # each run puts its own grid where the server takes it
        monkeypatch.setattr(simulation, "LocalGrid", robust.lying_grid([], lie, 0))
    assert simulation.LocalGrid.__bases__ == (honest,)


def test_the_choice_in_small(here: Path) -> None:
    found = printed("choose", here)
    assert found["targets"] == 1
    regrets = [v for k, v in found.items() if k.startswith("regret_always") or "points" in k]
    assert all(0 <= value <= 100 for value in regrets)
    # 80 vectors are too few for f-DANN and MDAN, so FedAvg stands for both.
    assert found["regret_always_fdann"] == found["regret_always_fedavg"]
    text = (here / "made" / "choose.md").read_text()
    assert "googlenet, webcam" in text and "rank correlation" in text


def test_the_grand_table_in_small(here: Path) -> None:
    found = printed("grand", here)
    assert (found["tasks"], found["seeds"]) == (1, 1)
    assert set(found["gain_points"]) == {"FedAvg", "AdaBN", "KD3A", "f-DANN"}
    assert found["gain_points"]["FedAvg"] == 0
    # 80 vectors are too few for f-DANN, so FedAvg stands for it.
    assert found["gain_points"]["f-DANN"] == 0
    assert found["mean_rank"]["f-DANN"] == found["mean_rank"]["FedAvg"]
    assert min(found["regret_always_points"].values()) == 0
    text = (here / "made" / "grand.md").read_text()
    assert "- f-DANN: " in text and "chosen without labels" in text
    assert (here / "made" / "grand.png").read_bytes().startswith(b"\x89PNG")


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


def test_choices_are_judged_by_hand(load: Any) -> None:
    """FedAvg has 60 %, KD3A 80 %, KD3A's drawn settings 70 %; the latter were chosen."""
    choose = load("choose")
    fedavg, kd3a, drawn = (
        choose.Variant("fedavg"),
        choose.Variant("kd3a"),
        choose.Variant("kd3a", settings={"kd3a.mixup": 0.0}),
    )

    def one(variant: Any, estimate: float, infomax: float) -> Any:
        told = {"accuracy": estimate, "same_model": True, "low": 0.5, "high": 0.9}
        said = {"infomax": infomax, "bnm": 0.5, "snd": 0.5, "ami": 0.5, "largest": 0.2}
        trained = Trained({"estimate": told, "validators": said}, 10)
        return choose.Candidate(variant, {0: trained})

    full = [one(fedavg, 0.7, 2.0), one(kd3a, 0.9, 1.0)]
    judged = choose.Judged(
        "a, b",
        choose.decide([full[0], one(drawn, 0.9, 3.0)]),
        choose.decide(full),
        {fedavg: 0.6, kd3a: 0.8, drawn: 0.7},
        full,
        7.0,
    )
    found = choose.figures([judged])
    assert (found["targets"], found["seconds"]) == (1, 7)
    assert found["regret_points"] == pytest.approx(10)
    assert found["regret_rule_points"] == pytest.approx(20)  # a vote each way: FedAvg
    assert found["regret_always_fedavg"] == pytest.approx(20)
    assert found["regret_always_kd3a"] == 0
    assert found["regret_always_mdan"] == pytest.approx(20)  # it does not fit: FedAvg
    assert found["regret_alone"]["estimate"] == 0
    assert found["regret_alone"]["infomax"] == pytest.approx(20)
    assert found["correlation"]["estimate"] == 1 and found["correlation"]["infomax"] == -1
    assert found["estimate_error_points"] == pytest.approx(10)


def test_the_validators_in_small(here: Path) -> None:
    found = printed("validators", here)
    names = {"infomax", "bnm", "snd", "ami", "estimate"}
    assert found["trainings"] == 4
    assert set(found["regret_points"]) == set(found["correlation"]) == names
    assert all(0 <= value <= 100 for value in found["regret_points"].values())
    assert 0 <= found["covered"] <= 1 and found["estimate_error_points"] >= 0


def test_validators_are_judged_by_hand(load: Any) -> None:
    """Infomax ranks as the truth does, BNM the other way round; the rest say nothing."""
    validators = load("validators")

    def one(method: str, truth: float, infomax: float, estimate: float) -> dict[str, Any]:
        said = {"infomax": infomax, "bnm": -infomax, "snd": 0.5, "ami": 0.5, "largest": 0.2}
        told = {"accuracy": estimate, "low": 0.5, "high": 0.75, "same_model": True}
        entry = {"method": method, "seed": 0, "final_accuracy": truth, "estimate": told}
        return entry | {"validators": said}

    trainings = [
        one("fedavg", 0.6, 2.0, 0.7),
        one("kd3a", 0.8, 3.0, 0.8),
        one("mdan", 0.5, 1.0, 0.55),
    ]
    found = validators.figures({"town": trainings})
    assert found["trainings"] == 3
    assert found["correlation"] == {
        "infomax": 1,
        "bnm": -1,
        "snd": None,
        "ami": None,
        "estimate": 1,
    }
    assert found["regret_points"]["infomax"] == 0
    assert found["regret_points"]["bnm"] == pytest.approx(30)
    assert found["regret_points"]["snd"] == pytest.approx(16.667)  # all alike: at random
    assert found["random_points"] == pytest.approx(16.667)
    assert found["fedavg_points"] == pytest.approx(20)
    assert found["estimate_error_points"] == pytest.approx(5)
    assert found["estimate_bias_points"] == pytest.approx(5)
    assert found["covered"] == pytest.approx(2 / 3, abs=1e-3)
    # MDAN is worse by estimate, infomax falls and BNM rises: FedAvg's model, 10 points better.
    assert found["kept_points"] == pytest.approx(5)


@pytest.mark.slow
def test_the_vote_in_small(here: Path) -> None:
    found = printed("vote", here)
    assert found["seconds"] > 0
    assert 0 < found["kept"] <= 1
    assert sum(found["alpha"]) == pytest.approx(1, abs=1e-3)


@pytest.mark.slow
def test_the_training_in_small(here: Path) -> None:
    found = printed("training", here)
    assert found["ratio_float32"] > 0
    assert found["bfloat16_speedup"] > 0.05
    arms = {f"{arm}_{p}" for arm in ("site", "plain") for p in ("float32", "bfloat16")}
    assert set(found["images_per_s"]) == arms and min(found["images_per_s"].values()) > 0
    assert found["frozen_speedup"] > 0 and found["frozen_bytes_share"] < 0.1
    accuracy = found["frozen_accuracy"]
    assert accuracy["kept"] == pytest.approx(accuracy["recomputed"], abs=5)  # two of 40 images


@pytest.mark.slow
def test_the_overhead_in_small(here: Path) -> None:
    found = printed("overhead", here)
    assert found["cpu_ratio"] > 0


@pytest.mark.slow
def test_the_breakdown_in_small(here: Path) -> None:
    found = printed("breakdown", here)
    parts = ("training", "teaching", "voting", "loading", "packing", "averaging", "testing")
    assert all(found[f"{part}_s"] > 0 for part in parts)


@pytest.mark.slow
def test_the_rounds_in_small(here: Path) -> None:
    found = printed("rounds", here)
    assert found["resident_tiny_s"] > 0
    assert found["model_mb"] == pytest.approx(1, rel=0.05)
    assert set(found["resident_45mb_wave_s"]) == {"train", "evaluate"}
    assert found["resident_45mb_s"] == max(found["resident_45mb_wave_s"].values())
    assert found["resident_frozen_s"] > 0
    assert found["frozen_mb"] == pytest.approx(0.5, rel=0.1) and found["frozen_whole_mb"] > 40


@pytest.mark.slow
def test_the_secure_sums_in_small(here: Path) -> None:
    found = printed("secure", here)
    for method, (plain, hidden), more in (
        ("fedavg", ("none", "sum"), 2.0),  # sums cross as 8 bytes a value
        ("kd3a", ("open", "sealed"), 1.0),
    ):
        one, other = (f"{method}, 3 sources, 1 MB, {value}" for value in (plain, hidden))
        assert found["mb_from"][other] / found["mb_from"][one] == pytest.approx(more, rel=0.05)
        assert found["mb_to"][other] == pytest.approx(found["mb_to"][one], rel=0.05)
        assert found["seconds"][other] > 0
        assert 0 <= found["apart"][other] < 1e-6


@pytest.mark.slow
def test_the_exchange_in_small(here: Path) -> None:
    found = printed("exchange", here)
    for size in ("1kb", "1mb"):
        for name in ("syncs_per_s", "share_of_echo", "share_of_two_echoes"):
            assert found[f"{name}_{size}"] > 0
    for name in ("syncs_per_s_1kb_8", "share_of_8_echoes_1kb", "slowdown_8_over_2"):
        assert found[name] > 0
    assert found["memory_growth_mb"] < 20


@pytest.mark.slow
def test_the_rounds_of_methods_in_small(here: Path) -> None:
    found = printed("methods", here)
    # 256 images are 4 batches and one sum; DILS's rounds have three times the steps.
    assert found["sums"] == {"dils": 3, "fdann": 1, "mdan": 1, "fada": 1}
    for method, count in found["sums"].items():
        assert found["messages_s"][method] == pytest.approx(count * found["message_s"], abs=0.01)
        ratio = found["round_s"][method] / found["central_s"][method]
        assert found[f"{method}_over_central"] == pytest.approx(ratio, rel=0.05)
    assert 0 < found["attention_s"] < found["round_s"]["fada"]
    assert 0 < found["fada_steps_over_central"] < found["fada_over_central"]


@pytest.mark.slow
def test_the_memory_in_small(here: Path) -> None:
    found = printed("memory", here)
    # In units of one model: the models of two sources and the target, and their mean. With smaller
    # models, threads and connections alone would take several units.
    assert 2 < found["kd3a_models_above_idle_2"] < 6


@pytest.mark.slow
def test_the_cache_in_small(here: Path) -> None:
    """Small images show that it works; only large sets show what memory it saves."""
    figures = printed("cache", here)
    assert figures["equal"] is True
    assert figures["decoded_mb"] == 0 and figures["resident_mb"] > figures["base_mb"] > 0
    assert {"first_epoch_s", "second_epoch_s"} <= set(figures)


def test_the_accuracy_in_small(here: Path) -> None:
    """Each cell is trained once; tables and JSON agree."""
    found = printed("accuracy", here)
    table = found["digits"]["control"]
    assert set(table) == {"FedAvg (source-only)", "AdaBN", "KD3A paper"}
    text = (here / "made" / "digits-100-control.md").read_text()
    assert "--images 100 --epochs 1 --target usps --seeds 0,1\n" in text
    for row in table.values():
        mean, std = row["usps"]
        assert 0 <= mean <= 1
        assert f"{100 * mean:.1f} ± {100 * std:.1f}" in text
    with np.load(here / "accuracy" / "digits-100" / "data" / "usps.npz") as drawn:
        assert len(drawn["y_train"]) == 100
    begun = sorted((here / "accuracy").rglob("journal.jsonl"))
    times = [path.stat().st_mtime_ns for path in begun]
    assert printed("accuracy", here) == found
    assert [path.stat().st_mtime_ns for path in begun] == times  # no cell was trained again
    assert len(begun) == 6


@pytest.mark.slow
def test_the_photos_in_small(here: Path) -> None:
    """Every method is in the table that has them all, and the controls are below it."""
    found = printed("photos", here)["googlenet"]
    assert {"FedAvg (source-only)", "KD3A official", "FedDaDiL-E", "pooled", "oracle"} <= set(found)
    text = (here / "made" / "photos-googlenet.md").read_text()
    assert "--table googlenet --target webcam --rounds 2 --seeds 0\n" in text
    for row in found.values():
        mean, _ = row["webcam"]
        assert 0 <= mean <= 1
    assert all(name in text for name in found) and "not finished" not in text


def test_every_table_of_photos_has_valid_settings(load: Any) -> None:
    photos = load("photos")
    for _, preset, changes, variants, baseline in photos.TABLES.values():
        assert baseline in {v.name for v in variants}
        given = presets.for_all(preset, plugins.methods())
        shared = {k: v.value for k, v in given.items()} | changes
        for variant in variants:
            config = RunConfig.parse({**shared, **variant.flat()})
            assert config.method == variant.method and config.model.bottleneck == 256


@pytest.mark.slow
def test_the_adversarial_methods_in_small(here: Path) -> None:
    """One short training of each method on the pen digits; tables and JSON agree."""
    found = printed("adversarial", here)["rotations"]["from 0 degrees"]
    stem = "adversarial-rotations-images-300-c-rounds-2-c-dils.pretrain-1"
    text = (here / "made" / f"{stem}.md").read_text()
    assert {"FedAvg (source-only)", "DILS cada", "f-DANN", "f-WDGRL", "f-DAN"} <= set(found)
    assert "not finished" not in text
    for name, row in found.items():
        mean, _ = row["30"]
        assert any(name in line and f"{100 * mean:.1f}" in line for line in text.splitlines())


@pytest.mark.slow
def test_the_central_loop_in_small(here: Path) -> None:
    found = printed("central", here)
    assert set(found) == {"fdann", "fwdgrl", "fdan", "mdan", "fada", "dils"}
    for row in found.values():
        assert row["difference"] == pytest.approx(row["federated"][0] - row["central"][0], abs=0.2)


# What is trained so that one loop must give the federation's weights: every step has its own sum,
# and, where models are averaged, every round has one step.
EXACT = ("rounds=4", "model.name=mlp", "model.sizes=16,8", "train.lr=0.05", "exchange.clip=1e6")
SGD = ("discriminator.optimizer=sgd", "discriminator.lr=0.5")
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


@pytest.mark.slow
def test_lazy_synchronisation_in_small(here: Path) -> None:
    """An exchange every fourth step sends a quarter of the bytes; a delay changes no result."""
    found = printed("lazy", here)["lazy"]
    rows = {(row["p"], row["batch"], row["delay_ms"]): row for row in found}
    near, often = rows[4, 64, 0], rows[1, 64, 0]
    assert often["gradient_mb"] == pytest.approx(4 * near["gradient_mb"], rel=0.1)
    assert near["gradient_mb"] > 0
    assert rows[4, 64, 30]["accuracy"] == near["accuracy"]


def test_the_relay_of_lazy_delays_every_byte_both_ways(load: Any) -> None:
    lazy = load("lazy")

    def round_trip(port: int) -> float:
        with socket.create_connection((lazy.ANNOUNCED, port)) as site:
            began = time.monotonic()
            site.sendall(b"gradient")
            assert site.recv(8, socket.MSG_WAITALL) == b"gradient"
            return time.monotonic() - began

    with socket.create_server((LOOPBACK, 0)) as server:

        def echo() -> None:
            end, _ = server.accept()
            with end:
                end.sendall(end.recv(8, socket.MSG_WAITALL))

        threading.Thread(target=echo, daemon=True).start()
        port = server.getsockname()[1]
        with lazy.Delay(port, 0.1):
            assert round_trip(port) >= 0.2


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


@pytest.mark.slow
def test_a_step_of_feddadil_in_small(here: Path) -> None:
    found = printed("feddadil", here)
    assert found["max_abs_difference"] < 1e-5
    assert found["speedup"] > 1
    assert {row["atoms"] for row in found["steps"]} == {"aligned", "shuffled"}
    assert {row["K"] for row in found["steps"]} == {3, 8}


@pytest.mark.slow
def test_the_dictionary_in_small(here: Path) -> None:
    """All four tables exist as JSON, Markdown and CSV, and no cell is trained twice."""
    found = printed("dictionary", here)
    assert set(found) == {"heads", "parallel", "distil", "memory"}
    heads, distil = (found[table]["googlenet"] for table in ("heads", "distil"))
    assert heads["FedDaDiL-R"]["webcam"][0] > 0.5
    assert heads["largest coordinate, any site"]["webcam"][0] <= 1
    assert distil["distilled"]["SPC 1"][0] > 0.3
    every = "control: a head on all points of the sources, pooled, each source weighing the same"
    assert (
        distil[every]["all"] == heads["control: the same, each source weighing the same"]["webcam"]
    )
    assert 0 <= found["memory"]["googlenet"]["amazon"]["AUC"][0] <= 1
    parallel = found["parallel"]["googlenet"]
    # Atoms go to and from three sites. A layer goes to and from two sources; the target gets theirs
    # and, once, the average, and returns one.
    sent = {
        "FedDaDiL": 4 * 3 * 30 * (12 + 10) * (3 + 3),
        "KD3A": 4 * (12 + 1) * 10 * (2 + 2 + 3 + 1),
    }
    for method, count in sent.items():
        row = parallel[f"bytes of a round, {method}"]
        assert {value[0] for value in row.values()} == {count}
    for table, figures in found.items():
        stem = here / "made" / f"dictionary-googlenet-{table}-samples-30-batch-size-30"
        with stem.with_suffix(".csv").open() as file:
            lines = list(csv.DictReader(file))
        told = {(line["row"], line["column"]): float(line["value"]) for line in lines}
        assert {line["seed"] for line in lines} == {"0"}
        for row, columns in figures["googlenet"].items():
            for column, (mean, _) in columns.items():
                assert told[row, column] == pytest.approx(mean, abs=1e-4)
        text = stem.with_suffix(".md").read_text()
        assert "--target webcam --seeds 0 -c samples=30 -c batch-size=30\n" in text
        assert f"{100 * heads['FedDaDiL-R']['webcam'][0]:.1f}" in text or table != "heads"
    begun = [
        path.stat().st_mtime_ns for path in sorted((here / "dictionary").rglob("results.json"))
    ]
    assert printed("dictionary", here) == found
    again = [
        path.stat().st_mtime_ns for path in sorted((here / "dictionary").rglob("results.json"))
    ]
    assert again == begun


@pytest.mark.slow
def test_the_example_of_feddadil_in_small(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER.parent / "feddadil.py"), "--rounds", "2"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=280, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-2000:]
    *heads, _, last = done.stdout.splitlines()
    assert {line.split()[0] for line in heads} == {"reconstruction", "ensemble", "encoder"}
    page = tmp_path / "runs" / "feddadil-example" / "feddadil" / "report.html"
    assert last == f"page: {page}"
    assert page.is_file()


def test_every_adversarial_variant_has_valid_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    made = benchmark_module("adversaries", monkeypatch)
    some = (made.BASELINE, made.BEGIN, *made.CONTROL, *made.DILS, *made.EVERY_STEP, *made.JOINT)
    some = (*some, *made.FADA)
    for variant in some:
        assert RunConfig.parse({**made.SETTINGS, **variant.flat()}).method == variant.method
    assert RunConfig.parse(made.LIVE).rounds > int(made.LIVE["dils.pretrain"])


# ---- what they print and store -----------------------------------------------------------------


def test_every_benchmark_is_run_in_small() -> None:
    programs = {p.stem for p in FOLDER.glob("*.py") if "ArgumentParser" in p.read_text()}
    assert {PROGRAM_OF.get(name, name) for name in SMALL} == programs
    assert all(promised(program) for program in programs)
    here = Path(__file__).read_text()
    assert set(re.findall(r'= printed\("([a-z]+)", here\)', here)) == set(SMALL)


def test_samples_of_another_size_are_not_reused(load: Any, here: Path, tmp_path: Path) -> None:
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

    def measure(folder: Path, files: Any, settings: Any, delay: float, repeats: int) -> list[Any]:
        calls.append((folder.name, settings["rounds"], delay, repeats))
        folder.mkdir(parents=True)
        return [{"number": len(calls)}]

    monkeypatch.setattr(lazy, "measure", measure)
    monkeypatch.setattr(lazy, "report", lambda found, settings, heading, command: command)
    monkeypatch.setattr(adversarial, "pens", lambda out, images: out)
    found = []
    for more in ([], ["-c", "rounds=4"], ["--delay", "3", "--repeats", "1"], ["--delay", "10"]):
        adversarial.main(["--table", "lazy", "--out", str(tmp_path), *more])
        *_, command, answer = capsys.readouterr().out.strip().splitlines()
        assert command.endswith(" ".join(["--table lazy", *more]).removesuffix(" --delay 10"))
        found.append(json.loads(answer)["lazy"][0]["number"])
    assert found == [1, 2, 3, 1]  # 10 is the default, so nothing is measured again
    assert calls == [
        ("lazy", 5, 0.01, 3),
        ("lazy-c-rounds-4", 4, 0.01, 3),
        ("lazy-delay-3-repeats-1", 5, 0.003, 1),
    ]


def test_a_wrong_data_folder_leaves_no_files(load: Any, here: Path, tmp_path: Path) -> None:
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
