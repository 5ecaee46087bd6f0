"""The benchmarks in a small form: they run, and print the keys that they promise."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedda.config import RunConfig

FOLDER = Path(__file__).parents[1] / "examples" / "benchmarks"


def measured(name: str, *options: str) -> dict[str, Any]:
    """The JSON object on the last line of what a benchmark prints."""
    command = [sys.executable, str(FOLDER / f"{name}.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.slow
def test_the_vote_in_small():
    found = measured("vote", "--images", "500", "--teachers", "3", "--classes", "7", "--many", "4")
    assert found["seconds"] > 0
    assert 0 < found["kept"] <= 1
    assert sum(found["alpha"]) == pytest.approx(1, abs=1e-3)


@pytest.mark.slow
def test_the_overhead_in_small():
    found = measured("overhead", "--images", "100", "--rounds", "1", "--repeats", "1")
    # Both do the same training, so anything far from 1 means that they do not.
    assert 0.5 < found["cpu_ratio"] < 2


@pytest.mark.slow
def test_the_breakdown_in_small():
    found = measured("breakdown", "--images", "60", "--rounds", "1", "--no-live")
    parts = {"training", "teaching", "voting", "loading", "packing", "averaging", "testing"}
    assert {f"{part}_s" for part in parts} <= set(found)
    assert all(found[f"{part}_s"] > 0 for part in parts)


@pytest.mark.slow
def test_the_rounds_in_small():
    options = ("--sources", "1", "--rounds", "2", "--mb", "1", "--mb-rounds", "1")
    found = measured("rounds", *options, "--stock-rounds", "0")
    assert 0 < found["resident_tiny_s"] < 30
    assert found["model_mb"] == pytest.approx(1, rel=0.05)
    assert set(found["resident_45mb_wave_s"]) == {"train", "evaluate"}
    assert found["resident_45mb_s"] == max(found["resident_45mb_wave_s"].values())


@pytest.mark.slow
def test_the_exchange_in_small():
    options = ("--syncs", "200", "--large-syncs", "20", "--repeats", "1")
    found = measured("exchange", *options, "--memory-syncs", "2000", "--skip-flower")
    for size in ("1kb", "1mb"):
        assert found[f"syncs_per_s_{size}"] > 5
        assert 0.05 < found[f"share_of_echo_{size}"] < 5
    assert 0.5 < found["slowdown_8_over_2"] < 50
    assert found["memory_growth_mb"] < 20


@pytest.mark.slow
def test_the_memory_in_small():
    found = measured("memory", "--mb", "20", "--sources", "2", "--kd3a", "2", "--rounds", "1")
    # Sums in float64 and a reply; the models of two sources and the target, and their mean. What
    # threads and connections take, some 40 MB, is two models of this size.
    assert 2 < found["models_above_idle_2"] < 6.5
    assert 2 < found["kd3a_models_above_idle_2"] < 7.5


@pytest.mark.slow
def test_the_accuracy_in_small(tmp_path: Path) -> None:
    """On four tiny domains of noise: every cell is trained once, tables and JSON agree."""
    data = tmp_path / "data" / "digits"
    data.mkdir(parents=True)
    draw = np.random.default_rng(0)
    for name in ("mnist", "mnistm", "svhn", "usps"):
        found = {
            "x_train": draw.integers(0, 256, (200, 8, 8), dtype=np.uint8),
            "y_train": np.arange(200) % 10,
            "x_test": draw.integers(0, 256, (20, 8, 8), dtype=np.uint8),
            "y_test": np.arange(20) % 10,
        }
        np.savez(data / f"{name}.npz", **found)
    options = ["--data", str(data.parent), "--out", str(tmp_path / "out"), "--jobs", "1"]
    options += ["--set", "digits", "--table", "control", "--images", "100", "--epochs", "1"]
    options += ["--target", "usps", "--seeds", "0,1", "--results", str(tmp_path / "results")]
    found = measured("accuracy", *options)
    table = found["digits"]["control"]
    assert set(table) == {"FedAvg (source-only)", "AdaBN", "KD3A paper"}
    text = (tmp_path / "results" / "digits-100-control.md").read_text()
    for row in table.values():
        mean, std = row["usps"]
        assert 0 <= mean <= 1
        assert f"{100 * mean:.1f} ± {100 * std:.1f}" in text
    with np.load(tmp_path / "out" / "digits-100" / "data" / "usps.npz") as drawn:
        assert len(drawn["y_train"]) == 100
    begun = sorted((tmp_path / "out").rglob("journal.jsonl"))
    times = [path.stat().st_mtime_ns for path in begun]
    assert measured("accuracy", *options) == found
    assert [path.stat().st_mtime_ns for path in begun] == times  # nothing was trained again
    assert len(begun) == 6


@pytest.mark.slow
def test_the_adversarial_methods_in_small(tmp_path: Path) -> None:
    """One short training of each on the pen digits; the tables say what the JSON says."""
    options = ["--table", "rotations", "--target", "30", "--seeds", "0", "--images", "300"]
    options += ["-c", "rounds=2", "-c", "dils.pretrain=1", "--out", str(tmp_path)]
    options += ["--results", str(tmp_path / "results")]
    found = measured("adversarial", *options)["rotations"]["from 0 degrees"]
    text = (tmp_path / "results" / "adversarial-rotations.md").read_text()
    assert {"FedAvg (source-only)", "DILS cada", "f-DANN", "f-WDGRL", "f-DAN"} <= set(found)
    assert "not finished" not in text
    for name, row in found.items():
        mean, _ = row["30"]
        assert any(name in line and f"{100 * mean:.1f}" in line for line in text.splitlines())


@pytest.mark.slow
def test_lazy_synchronisation_in_small(tmp_path: Path) -> None:
    """Every fourth step exchanged sends a quarter."""
    options = ["--table", "lazy", "--images", "256", "--delay", "0", "--repeats", "1"]
    options += ["--out", str(tmp_path), "-c", "rounds=2", "-c", "dils.pretrain=1"]
    found = measured("adversarial", *options)["lazy"]
    rows = {(row["p"], row["batch"], row["delay_ms"]): row for row in found}
    near, often = rows[4, 64, 0], rows[1, 64, 0]
    assert often["gradient_mb"] == pytest.approx(4 * near["gradient_mb"], rel=0.1)
    assert near["gradient_mb"] > 0


@pytest.mark.parametrize("name", ["digits", "amazon", "office"])
def test_every_table_of_the_accuracy_is_a_run(name: str) -> None:
    from examples.benchmarks import accuracy  # imports torch and the like

    benchmark = accuracy.BENCHMARKS[name]
    for table in accuracy.TABLES.values():
        for variant in table(benchmark):
            settings = {"rounds": benchmark.epochs, **benchmark.settings, **variant.flat()}
            assert RunConfig.parse(settings).method == variant.method


@pytest.mark.slow
def test_a_step_of_feddadil_in_small():
    found = measured("feddadil", "--batch", "60", "--width", "64", "--repeats", "2")
    assert found["max_abs_difference"] < 1e-5
    assert found["speedup"] > 1
    assert {row["atoms"] for row in found["steps"]} == {"aligned", "shuffled"}


@pytest.mark.slow
def test_the_dictionary_in_small(tmp_path: Path) -> None:
    """On small domains of vectors: all four tables, and nothing is trained twice."""
    data = tmp_path / "data" / "office_caltech10_googlenet1024"
    data.mkdir(parents=True)
    draw = np.random.default_rng(0)
    centre = draw.normal(size=(10, 12))
    for name in ("amazon", "dslr", "webcam"):
        y = np.arange(80) % 10
        x = centre[y] + 0.5 * draw.normal(size=(80, 12)) + 0.3 * draw.normal(size=12)
        np.savez(data / f"{name}.npz", x=x.astype(np.float16), y=y)
    options = ["--data", str(data.parent), "--out", str(tmp_path / "out"), "--set", "googlenet"]
    options += ["--target", "webcam", "--seeds", "0", "-c", "samples=30", "-c", "batch-size=30"]
    found = measured("dictionary", *options)
    assert set(found) == {"heads", "parallel", "distil", "memory"}
    heads = found["heads"]["googlenet"]
    assert heads["FedDaDiL-R"]["webcam"][0] > 0.5
    assert heads["largest coordinate, any site"]["webcam"][0] <= 1
    assert found["distil"]["googlenet"]["distilled"]["SPC 1"][0] > 0.3
    assert 0 <= found["memory"]["googlenet"]["amazon"]["AUC"][0] <= 1
    sent = found["parallel"]["googlenet"]["bytes of a round, FedDaDiL"]
    assert {value[0] for value in sent.values()} == {4 * 3 * 30 * (12 + 10) * (3 + 3)}
    begun = [path.stat().st_mtime_ns for path in sorted((tmp_path / "out").rglob("results.json"))]
    assert measured("dictionary", *options) == found
    again = [path.stat().st_mtime_ns for path in sorted((tmp_path / "out").rglob("results.json"))]
    assert again == begun


@pytest.mark.slow
def test_the_example_of_feddadil_in_small(tmp_path: Path) -> None:
    options = ("--rounds", "2", "--out", str(tmp_path))
    command = [sys.executable, str(FOLDER.parent / "feddadil.py"), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert set(found) == {"reconstruction", "ensemble", "encoder"}
    assert (tmp_path / "feddadil" / "report.html").is_file()


def test_every_adversarial_variant_is_a_run() -> None:
    from examples.benchmarks import adversaries as made  # imports torch and the like

    some = (made.BASELINE, made.BEGIN, *made.CONTROL, *made.DILS, *made.EVERY_STEP, *made.JOINT)
    for variant in some:
        assert RunConfig.parse({**made.SETTINGS, **variant.flat()}).method == variant.method
    assert RunConfig.parse(made.LIVE).rounds > int(made.LIVE["dils.pretrain"])
