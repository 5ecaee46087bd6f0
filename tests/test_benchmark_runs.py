"""Short runs of every benchmark's program: they work and print the keys that they promise.

Each runs when the program has changed, or one of the modules that it imports from its folder. In
test_benchmarks.py one of them stands for all, and all programs read their arguments.
"""

import csv
import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedda.secure.accountant import epsilon
from tests.small_benchmarks import FOLDER, PROGRAM_OF, check_promised, files, make_data, words


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the small data."""
    folder = tmp_path_factory.mktemp("benchmarks")
    make_data(folder)
    return folder


def printed(name: str, here: Path) -> dict[str, Any]:
    """Run a benchmark in small -> the JSON object on the last line, with every promised key."""
    command = [sys.executable, str(FOLDER / f"{PROGRAM_OF.get(name, name)}.py"), *words(name, here)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    check_promised(name, figures)
    return figures


def of(*programs: str) -> pytest.MarkDecorator:
    """A nightly test of programs: it is about them and what they import from their folder."""
    return pytest.mark.nightly(*sorted({file for name in programs for file in files(name)}))


@of("alignments")
def test_closed_forms_in_small(here: Path) -> None:
    """Classes far apart in vectors that differ by a constant: own means leave hardly an error."""
    found = printed("alignments", here)["googlenet"]
    assert found["own-means"] > 99 and all(0 <= percent <= 100 for percent in found.values())
    text = (here / "made" / "alignments.md").read_text()
    assert all(f"| {name} " in text for name in found)


@of("apart")
def test_parts_are_probed_in_small(here: Path) -> None:
    """The identifier that learns ahead leaves less in f_ds for a new classifier."""
    found = printed("apart", here)
    assert {*found} == {"defaults", "apart"}
    for row in found.values():
        for name in ("identifier", "probe_specific", "probe_invariant", "accuracy"):
            assert 0 <= row[name] <= 1
        assert 0 < row["confusion"] <= np.log(10) + 1e-3 and 0 < row["left"] < 5
    assert found["apart"]["probe_specific"] < found["defaults"]["probe_specific"]


@of("chain")
def test_the_chain_in_small(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = printed("chain", here)["pens"]
    rows = ("no adaptation", "source", "all", "random", "pad", "ocs", "oracle")
    assert all(0 < found[row][0] < 100 and found[row][1] == 0 for row in rows)
    assert found["best_of_chance"] == round((1 / 2 + 1 / 3 + 1 / 4 + 1 / 5) / 4, 3)
    assert 0 <= found["best"] <= 1 and -1 <= found["correlation"] <= 1 and 0 <= found["kept"] <= 1
    text = (here / "made" / "chain-pens.md").read_text()
    assert text.count(" <- ") == 6  # the heading's and one per target
    monkeypatch.syspath_prepend(FOLDER)
    chain, pens = importlib.import_module("chain"), here / "chain" / "pens"
    known = chain.before(pens / "runs", pens / "rotated", "oracle", 0)
    for target, training in chain.chain(pens / "runs", "oracle", 0).items():
        chosen = known[target][training["selection"]["collaborator"]]
        assert chosen == max(known[target].values())


@of("turned")
def test_turned_digits_in_small(here: Path) -> None:
    """With as many images of each class, matching class by class is no shorter than over all."""
    found = printed("turned", here)["mnist"]
    told = found.pop("told")
    assert {*found} == {str(angle) for angle in range(30, 360, 30)}
    assert all(0 < row["w1"] <= row["classes"] + 1e-3 for row in found.values())
    for measure, more in (("w1", -1), ("pad", -1), ("right", 1)):
        assert told[measure] == int(more * (found["30"][measure] - found["180"][measure]) > 0)
    assert (here / "made" / "turned.md").read_text().count("\n| ") == len(found) + 3


@of("privacy")
def test_accuracy_against_epsilon_in_small(here: Path) -> None:
    pytest.importorskip("opacus")
    found = printed("privacy", here)["demo"]
    noise = found.pop("noise")["8"]
    assert set(found) == {"FedAvg (source-only)", "KD3A", "FedAvg, epsilon 8", "KD3A, epsilon 8"}
    # 60 images a site in one batch of 128: one step over all of them.
    assert 7.9 < epsilon([(noise, 1.0, 1)], 1e-5) <= 8
    assert f"`privacy.noise` is {noise:g}" in (here / "made" / "privacy-demo.md").read_text()


@of("digit_five")
def test_digit_five_in_small(here: Path) -> None:
    found = printed("digit_five", here)
    assert set(found["last"]) == {"FedAvg"} and 0 <= found["last"]["FedAvg"]["usps"][0] <= 1
    text = (here / "made" / "digit-five-small.md").read_text()
    assert "| KD3A, published" in text and "| FedAvg, refined" in text
    assert (here / "five" / "data" / "syn.npz").is_file()


@of("candidates")
def test_candidates_that_lie_in_small(here: Path) -> None:
    found = printed("candidates", here)
    assert set(found["wall_s"]) == {"1", "5", "20"}
    assert 0 < found["target_cpu_s"]["1"] < found["target_cpu_s"]["20"] < found["wall_s"]["20"]
    assert found["chosen"]["eps"] == found["chosen"]["distance"] == ["150"]
    assert found["accuracy"]["honest"] and found["accuracy"]["leaves"] is None


@of("fewer")
def test_fewer_sources_in_small(here: Path) -> None:
    found = printed("fewer", here)
    assert found["mdan"].keys() == found["fedavg"].keys() == {"1", "2", "3"}
    assert 0 < found["megabytes"]["1"] < found["megabytes"]["2"] < found["megabytes"]["3"]
    ranked = (here / "made" / "fewer.md").read_text().splitlines()[-1]
    assert set(ranked.removeprefix("- usps: ").split(", ")) == {"mnist", "mnistm", "svhn"}


@of("scale")
def test_one_server_and_light_sites_in_small(here: Path) -> None:
    found = printed("scale", here)
    assert found.pop("load_before") >= 0
    of = {figure: value.get("3 sites, 0.01 MB") for figure, value in found.items()}
    assert of["errors"] == 0 and 0 < of["run_ms"] + of["superlink_ms"] <= of["cpu_ms"] + 0.01
    # Of a source at least: to ask for work, fetch it, confirm it, announce a reply, send it.
    assert of["requests"] >= 5 and 0.01 < of["wire_mb"] < 0.1
    assert found["run_models"] == {}


@of("sources")
def test_few_and_more_sources_in_small(here: Path) -> None:
    """With one source its weight is all there is; of five the four nearest have less."""
    found = printed("sources", here)
    assert {*found["accuracy"]} == {"1", "5"} and {*found["accuracy"]["5"]} == {"FedAvg", "KD3A"}
    assert found["nearest"]["1"]["KD3A"] == 1 and 0 < found["nearest"]["5"]["KD3A"] < 1
    assert found["nearest"]["5"]["FedAvg"] == pytest.approx(4 / 5, abs=0.01)
    assert found["gain_points"]["1"]["FedAvg"] == 0
    assert "FedAvg" in (here / "made" / "sources.md").read_text()


@of("soak")
def test_a_soak_in_small(here: Path) -> None:
    found = printed("soak", here)
    assert (found["runs"], found["rounds"], found["errors"]) == (1, 2, 0)
    for name in ("superlink", "client", "run"):
        assert found[name]["first_mb"] > 50 and found[name]["first_files"] > 2


@of("robust")
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


@of("vote")
def test_the_vote_in_small(here: Path) -> None:
    found = printed("vote", here)
    assert found["seconds"] > 0
    assert 0 < found["kept"] <= 1
    assert sum(found["alpha"]) == pytest.approx(1, abs=1e-3)


@of("training")
def test_the_training_in_small(here: Path) -> None:
    found = printed("training", here)
    assert found["ratio_float32"] > 0
    assert found["bfloat16_speedup"] > 0.05
    arms = {f"{arm}_{p}" for arm in ("site", "plain") for p in ("float32", "bfloat16")}
    assert (
        set(found["images_per_s"]) == {*arms, "predicted"}
        and min(found["images_per_s"].values()) > 0
    )
    assert found["frozen_speedup"] > 0 and found["frozen_bytes_share"] < 0.1
    accuracy = found["frozen_accuracy"]
    assert accuracy["kept"] == pytest.approx(accuracy["recomputed"], abs=5)  # two of 40 images


@of("overhead")
def test_the_overhead_in_small(here: Path) -> None:
    found = printed("overhead", here)
    assert found["cpu_ratio"] > 0


@of("breakdown")
def test_the_breakdown_in_small(here: Path) -> None:
    found = printed("breakdown", here)
    parts = ("training", "teaching", "voting", "loading", "packing", "averaging", "testing")
    assert all(found[f"{part}_s"] > 0 for part in parts)


@of("rounds")
def test_the_rounds_in_small(here: Path) -> None:
    found = printed("rounds", here)
    assert found["resident_tiny_s"] > 0
    assert found["model_mb"] == pytest.approx(1, rel=0.05)
    assert set(found["resident_45mb_wave_s"]) == {"train", "evaluate"}
    assert found["resident_45mb_s"] == max(found["resident_45mb_wave_s"].values())
    assert found["resident_frozen_s"] > 0
    assert found["frozen_mb"] == pytest.approx(0.5, rel=0.1) and found["frozen_whole_mb"] > 40


@of("peers")
def test_the_peers_in_small(here: Path) -> None:
    """Both without FLARE, which would have to be downloaded."""
    found = printed("peers", here)
    rows = {f"{peer}, 2 clients, 0.01 MB" for peer in ("fedda", "flower")}
    for figure in ("round_s", "first_round_s", "sites_cpu_s"):
        assert set(found[figure]) == rows and min(found[figure].values()) > 0


@of("peers_simulation")
def test_the_simulated_peers_in_small(here: Path) -> None:
    """Both without fluke, which would have to be downloaded; a client that fails ends the run."""
    pytest.importorskip("ray")
    found = printed("peers_simulation", here)
    for figure in ("round_s", "first_round_s", "whole_s", "cpu_s", "accuracy"):
        assert set(found[figure]) == {"fedda, 2", "flower, 2"} and min(found[figure].values()) > 0
        assert found["over_fluke"] == {}


@of("secure")
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


@of("exchange")
def test_the_exchange_in_small(here: Path) -> None:
    found = printed("exchange", here)
    for size in ("1kb", "1mb"):
        for name in ("syncs_per_s", "share_of_echo", "share_of_two_echoes"):
            assert found[f"{name}_{size}"] > 0
    for name in ("syncs_per_s_1kb_8", "share_of_8_echoes_1kb", "slowdown_8_over_2"):
        assert found[name] > 0
    assert found["memory_growth_mb"] < 20


@of("exchange")
def test_the_rounds_of_methods_in_small(here: Path) -> None:
    found = printed("methods", here)
    # 256 images are 4 batches and one sum; DILS's rounds have three times the steps.
    assert found["sums"] == {"dils": 3, "fdann": 1, "mdan": 1, "fada": 1}
    for method, count in found["sums"].items():
        assert found["messages_s"][method] == pytest.approx(count * found["message_s"], abs=0.01)
        ratio = found["round_s"][method] / found["central_s"][method]
        assert found[f"{method}_over_central"] == pytest.approx(ratio, rel=0.05)
        assert found["cpu_over_central"][method] > 0 and found["cpu_s"][method] > 0
    assert 0 < found["attention_s"] < found["round_s"]["fada"]
    assert 0 < found["fada_steps_over_central"] < found["fada_over_central"]


@of("memory")
def test_the_memory_in_small(here: Path) -> None:
    found = printed("memory", here)
    # In units of one model: the models of two sources and the target, and their mean. With smaller
    # models, threads and connections alone would take several units.
    assert 2 < found["kd3a_models_above_idle_2"] < 6
    # Sites also hold gradients, momentum, and what models came in.
    assert 3 < found["kd3a_sites_2"]["source"] < 12
    assert 5 < found["kd3a_sites_2"]["target"] < 20


@of("cache")
def test_the_cache_in_small(here: Path) -> None:
    """Small images show that it works; only large sets show what memory it saves."""
    figures = printed("cache", here)
    assert figures["equal"] is True
    assert figures["decoded_mb"] == 0 and figures["resident_mb"] > figures["base_mb"] > 0
    assert {"first_epoch_s", "second_epoch_s"} <= set(figures)


@of("accuracy")
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


@of("photos")
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


@of("adversarial")
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


@of("central")
def test_the_central_loop_in_small(here: Path) -> None:
    found = printed("central", here)
    assert set(found) == {"fdann", "fwdgrl", "fdan", "mdan", "fada", "dils"}
    for row in found.values():
        assert row["difference"] == pytest.approx(row["federated"][0] - row["central"][0], abs=0.2)


@of("adversarial")
def test_lazy_synchronisation_in_small(here: Path) -> None:
    """An exchange every fourth step sends a quarter of the bytes; a delay changes no result."""
    found = printed("lazy", here)["lazy"]
    rows = {(row["p"], row["batch"], row["delay_ms"]): row for row in found}
    near, often = rows[4, 64, 0], rows[1, 64, 0]
    assert often["gradient_mb"] == pytest.approx(4 * near["gradient_mb"], rel=0.1)
    assert near["gradient_mb"] > 0
    assert rows[4, 64, 30]["accuracy"] == near["accuracy"]


@of("feddadil")
def test_a_step_of_feddadil_in_small(here: Path) -> None:
    found = printed("feddadil", here)
    assert found["max_abs_difference"] < 1e-5
    assert found["speedup"] > 1
    assert {row["atoms"] for row in found["steps"]} == {"aligned", "shuffled"}
    assert {row["K"] for row in found["steps"]} == {3, 8}


@of("dictionary")
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
        "FedDaDiL": 4 * 3 * 64 * (12 + 10) * (3 + 3),
        "KD3A": 4 * (12 + 1) * 10 * (2 + 2 + 3 + 1),
    }
    for method, count in sent.items():
        row = parallel[f"bytes of a round, {method}"]
        assert {value[0] for value in row.values()} == {count}
    for table, figures in found.items():
        stem = here / "made" / f"dictionary-googlenet-{table}-samples-64-batch-size-64"
        with stem.with_suffix(".csv").open() as file:
            lines = list(csv.DictReader(file))
        told = {(line["row"], line["column"]): float(line["value"]) for line in lines}
        assert {line["seed"] for line in lines} == {"0"}
        for row, columns in figures["googlenet"].items():
            for column, (mean, _) in columns.items():
                assert told[row, column] == pytest.approx(mean, abs=1e-4)
        text = stem.with_suffix(".md").read_text()
        assert "--target webcam --seeds 0 -c samples=64 -c batch-size=64\n" in text
        assert f"{100 * heads['FedDaDiL-R']['webcam'][0]:.1f}" in text or table != "heads"
    begun = [
        path.stat().st_mtime_ns for path in sorted((here / "dictionary").rglob("results.json"))
    ]
    assert printed("dictionary", here) == found
    again = [
        path.stat().st_mtime_ns for path in sorted((here / "dictionary").rglob("results.json"))
    ]
    assert again == begun


@pytest.mark.nightly("examples/feddadil.py")
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


@of("teacher")
def test_teachers_in_small(here: Path) -> None:
    """A poor teacher knows less than the old one, and FedAvg itself hears none."""
    found = printed("teacher", here)["digits"]
    alone = found["alone"]["usps"]
    assert set(alone) == {"old", "poor", "random"}
    assert max(alone["poor"], alone["random"]) <= alone["old"]
    for method in ("fedavg", "kd3a", "shot", "decision"):
        assert found[method]["none"][1] == found[f"{method} refined"]["none"][1] == 0
    assert len({mean for mean, _ in found["fedavg"].values()}) == 1
    assert "| kd3a" in (here / "made" / "teacher-digits.md").read_text()


@of("refine")
def test_the_last_step_in_small(here: Path) -> None:
    found = printed("refine", here)
    assert found["trainings"] == 1 and set(found["sets"]) == {"googlenet"}
    gains = found["mean_gain"]
    assert set(gains) >= {"AdaBN", "KD3A", "FedAvg refined", "KD3A refined"}
    for name, gain in gains.items():  # of one target and seed, so the mean is the worst
        assert found["subsets"]["all images"][name][0] == gain
        assert found["worst_gain"][name] == pytest.approx(gain, abs=0.051)
    assert "all images" in (here / "made" / "refine.md").read_text()


@of("shares", "label_shift")
def test_uneven_targets_in_small(here: Path) -> None:
    found = printed("shares", here)["googlenet"]
    assert found["trainings"] == 1
    assert set(found["gain"]) == {"SHOT, even", "SHOT, estimated", "FedAvg, refined"}
    assert found["correction"].keys() - found["distance"].keys() == {"true"}
    with np.load(here / "shares" / "googlenet-webcam-0" / "data" / "webcam.npz") as file:
        counts = np.bincount(file["y_train"], minlength=10)
    assert (counts == 8).sum() == 5 and (counts < 8).sum() == 5  # of 8 of each class
    assert "total variation" in (here / "made" / "shares.md").read_text()


@of("harmonise")
def test_hospitals_on_one_scale_in_small(here: Path) -> None:
    found = printed("harmonise", here)
    assert 0 < found["location"] < 1 and 0 < found["scale"] < 1
    text = (here / "made" / "harmonise.md").read_text()
    ways = ("none", "site", "combat", "pooled", "one", "coded")
    assert all(
        text.count(f"{method}, {way} ") == 3 for method in ("FedAvg", "KD3A") for way in ways
    )


@of("fuzz_inputs")
def test_the_fuzzed_inputs_in_small(here: Path) -> None:
    found = printed("fuzz_inputs", here)
    assert found["cases"] == found["right"] + found["refused"] + found["wrong"] == 60
    assert found["right"] > 40
