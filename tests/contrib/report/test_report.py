"""What people see of a run: its progress, its tables, its picture; numbers checked by hand."""

import io
import json
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from rich.console import Console

from fedda.contrib.report.picture import plot
from fedda.errors import RunError
from fedda.results.progress import Display, follow
from fedda.results.read import load, spans, summary
from fedda.results.terminal import table
from fedda.settings import RunConfig
from tests.command_lines import call
from tests.finished import SITES, results


def without(run: dict[str, Any], *keys: str) -> dict[str, Any]:
    """Return the results as if no round had ever had these numbers."""
    for trainings in run["trainings"].values():
        for one in trainings:
            one["rounds"] = [{k: v for k, v in r.items() if k not in keys} for r in one["rounds"]]
            if "infomax" in keys:
                one["selected_round"] = None
    return run


def first(run: dict[str, Any], seeds: int, rounds: int) -> dict[str, Any]:
    for method, trainings in run["trainings"].items():
        run["trainings"][method] = trainings[:seeds]
        for one in trainings:
            one["rounds"] = one["rounds"][:rounds]
    return run | {"seeds": run["seeds"][:seeds]}


def printed(run: dict[str, Any]) -> str:
    console = Console(file=io.StringIO(), width=80)
    console.print(table(run))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def cells(text: str, start: str) -> list[str]:
    """Return the cells of the first line with this start; two blanks separate cells."""
    line = next(line for line in text.splitlines() if line.strip().startswith(start))
    return [cell.strip() for cell in line.split("  ") if cell.strip()]


def test_scores_are_means_and_deviations_of_the_last_and_the_selected_round() -> None:
    text = printed(results())
    # KD3A: last 80 and 70, selected 90 and 70; a deviation of two numbers is their gap / sqrt(2).
    assert cells(text, "KD3A") == ["KD3A", "75.0 ± 7.1", "–", "80.0 ± 14.1", "3.0 s"]
    row = ["FedAvg (source-only)", "50.0 ± 0.0", "–", "50.0 ± 0.0", "3.0 s"]
    assert cells(text, "FedAvg (s") == row
    after = text[text.index("KD3A") :]
    assert cells(after, "seed 0") == ["seed 0", "80.0", "–", "90.0 (round 1)", "1.5 s"]
    assert cells(after, "seed 1") == ["seed 1", "70.0", "–", "70.0 (round 2)", "1.5 s"]
    assert "90 labelled tests at tgt, whose labels no training sees" in text
    assert "no troubles" in text


def test_weights_are_means_of_the_last_round_and_zero_for_a_site_left_out() -> None:
    text = printed(results())
    assert cells(text, "clp") == ["clp", "source", "1,200", "0.600", "0.300"]
    assert cells(text, "bus") == ["bus", "source", "800", "0.400", "0.500"]
    assert cells(text, "tgt") == ["tgt", "target", "500", "–", "0.200"]
    left_out = results()
    left_out["trainings"]["kd3a"][0]["rounds"][-1]["weights"] = {"bus": 1.0}
    weights = summary(left_out)["methods"]["kd3a"]["weights"]
    assert weights == pytest.approx({"bus": 0.7, "clp": 0.2, "tgt": 0.1})


def test_bytes_are_exact_sums_over_the_seeds() -> None:
    run = results()
    run["trainings"]["kd3a"][0]["bytes"]["to target atoms"] = 1
    text = printed(run)
    both = ["2,000,000", "2 MB", "2,000,000", "2 MB"]
    assert cells(text, "model to source") == ["model to source", *both]
    both = ["469,134", "469 kB", "469,134", "469 kB"]
    assert cells(text, "model from source") == ["model from source", *both]
    assert cells(text, "atoms to target") == ["atoms to target", "–", "1", "1 B"]
    assert cells(text, "in all") == ["in all", "2,469,134", "2.47 MB", "2,469,135", "2.47 MB"]
    assert cells(text, "a round") == ["a round", "617,284", "617 kB", "617,284", "617 kB"]


def test_only_real_sites_are_said_to_count_in_tens() -> None:
    run = results(classes=["cat", "dog"])
    table = {"counts": [[9, 2], [0, 10]], "tests": [11, 10]}  # of a simulation
    run["trainings"]["kd3a"][0]["answers"] = {"last": table}
    run["trainings"]["kd3a"][0]["rounds"][-1]["tested"] = 21
    text = printed(run)
    assert "count in tens" not in text
    assert cells(text, "cat")[1] == "82" and cells(text, "dog")[1] == "100"
    # 9 of 10 tests or 9 of 19 may have been right: none is not what is known
    few = {"counts": [[0, 0], [10, 20]], "tests": [10, 30]}
    run["trainings"]["kd3a"][0]["answers"]["last"] = few
    text = printed(run)
    assert "by class real sites count in tens" in text
    assert cells(text, "cat")[1] == "0–90" and cells(text, "dog")[1] == "51–97"


def test_without_tests_the_report_says_so_and_shows_infomax_then_the_loss() -> None:
    untested = [*SITES[:2], SITES[2] | {"tested": 0}]
    text = printed(without(results(sites=untested), "accuracy"))
    assert "no accuracy: tgt brought no labelled tests" in text
    assert cells(text, "KD3A")[1] == "0.300 ± 0.141"
    text = printed(without(results(config={"run.evaluate": False}), "accuracy", "infomax"))
    assert "no accuracy: tgt was not asked for it" in text
    assert cells(text, "KD3A")[1:3] == ["1.000 ± 0.000", "–"]
    assert "selected:" not in text


def test_troubles_are_gathered_by_round_and_cannot_write_to_the_terminal() -> None:
    silent = {"what": "silent", "site": "clp", "text": "no reply", "method": "kd3a", "seed": 1}
    events = [silent | {"round": r} for r in (7, 3, 4, 5)]
    events.append({"what": "no offer", "site": "node 1", "text": "a \x1b[31mred\nline [bold]"})
    text = printed(results(events=events))
    assert "troubles (2)" in text
    assert "KD3A, seed 1, rounds 3-5, 7: clp: no reply" in text
    assert "node 1: a  [31mred line [bold]" in text
    assert "\x1b" not in text
    assert spans([1]) == "1"
    assert spans([9, 2, 1, 2, 10]) == "1-2, 9-10"


@pytest.mark.parametrize(
    "run",
    [
        results(),
        first(results(), seeds=1, rounds=1),
        without(results(), "accuracy"),
        without(results(), "accuracy", "infomax", "weights"),
        results(sites=[s | {"name": f"_${s['name']}^$日"} for s in SITES]),
    ],
    ids=["full", "one round", "no accuracy", "nothing", "odd names"],
)
def test_the_picture_is_drawn_from_any_results(tmp_path: Path, run: dict[str, Any]) -> None:
    path = plot(run, tmp_path / "report.png")
    with Image.open(path) as image:
        assert image.size == (1650, 720)
        colours = image.convert("RGB").getcolors(1 << 20)
    assert colours is not None
    seen = {colour for count, colour in colours if count > 20}  # a dot of 3.5 points has more
    assert {(0x00, 0x72, 0xB2), (0x77, 0x77, 0x77)} <= seen  # both methods
    with pytest.raises(RunError, match=r"cannot be written .*--png"):
        plot(run, tmp_path / "missing" / "report.png")


def test_load_says_what_is_missing(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no such folder"):
        load(tmp_path / "nowhere")
    with pytest.raises(RunError, match="give the folder of a finished run"):
        load(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "config.json").touch()
    with pytest.raises(RunError, match=r"has not finished.*--resume"):
        load(tmp_path / "a")
    file = tmp_path / "a" / "results.json"
    for text, why in (
        ("{}\n{}", r"cannot be read \(it is no results.json\)"),
        ("[]", "no 'trainings'"),
        ("{}", "no 'events'"),
    ):
        file.write_text(text)
        with pytest.raises(RunError, match=why):
            load(tmp_path / "a")
    with pytest.raises(RunError, match=r"one run, such as .*a"):
        load(tmp_path)
    file.write_text(json.dumps(results()))
    assert load(tmp_path / "a") == load(file) == results()


@pytest.mark.nightly("fedda/contrib/report")
def test_the_command_prints_and_draws(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(json.dumps(results()))
    assert "75.0 ± 7.1" in call("report", tmp_path).stdout
    assert (tmp_path / "report.png").stat().st_size > 10_000
    png = tmp_path / "other.png"
    shown = call("report", tmp_path, "--json", "--png", png)
    assert json.loads(shown.stdout)["methods"]["kd3a"]["last"]["mean"] == pytest.approx(0.75)
    assert png.is_file()
    assert call("report", tmp_path / "nowhere", code=1).stderr[:7] == "error: "


def script(rounds: int = 12) -> list[dict[str, Any]]:
    """Return the events of two trainings of one seed; the second stops a round before its end."""
    begun = {"event": "training", "seed": 4, "round": 0, "rounds": rounds, "time": 0.0}
    one = {"event": "round", "seed": 4, "loss": 0.5, "seconds": 2.0, "time": 1.0}
    return [
        {"event": "started", "run": 1},
        {"event": "waiting", "sources": 0, "targets": 0, "enough": False},
        {"event": "joined", "site": "clp", "role": "source", "text": "clp: source, 3 examples"},
        {"event": "waiting", "sources": 1, "targets": 0, "enough": False},
        {"event": "roster", "sites": [], "shape": [1, 8, 8], "classes": ["a", "b"]},
        begun | {"method": "fedavg"},
        *(one | {"method": "fedavg", "round": r + 1, "accuracy": 0.25} for r in range(rounds)),
        begun | {"method": "kd3a", "round": rounds - 2},
        {"event": "trouble", "what": "silent", "site": "clp", "text": "no reply", "round": 11},
        one | {"method": "kd3a", "round": rounds - 1, "infomax": 1.5, "seconds": 6.0, "time": 99.0},
        {"event": "trouble", "what": "no offer", "site": "node 2", "text": "\x1b[2Jbad"},
        {"event": "done", "results": "x"},
    ]


def shown(display: Display, events: list[dict[str, Any]]) -> list[str]:
    with display:
        for event in events:
            display(event)
    assert isinstance(display.console.file, io.StringIO)
    return display.console.file.getvalue().splitlines()


def test_progress_is_plain_lines_where_there_is_no_terminal() -> None:
    config = RunConfig.parse({"rounds": 12, "run.seeds": "3,4", "run.baseline": "fedavg"})
    lines = shown(Display(config, Console(file=io.StringIO(), width=40)), script())
    # Until KD3A begins, its rounds count as FedAvg's: 4 trainings, 12 rounds each, 2 s a round.
    assert lines == [
        "waiting for sites to join",
        "joined: clp: source, 3 examples",
        "FedAvg (source-only), seed 4 (2 of 2): 12 rounds",
        "  round 1/12: loss 0.500, accuracy 25.0 %, 2.0 s per round, 1:34 left",
        "  round 10/12: loss 0.500, accuracy 25.0 %, 2.0 s per round, 1:16 left",
        "  round 12/12: loss 0.500, accuracy 25.0 %, 2.0 s per round, 1:12 left",
        "KD3A, seed 4 (2 of 2): going on after round 10 of 12",
        "round 11: clp: no reply",
        "  round 11/12: loss 0.500, infomax 1.500, 6.0 s per round, 1:42 left",
        "node 2:  [2Jbad",
    ]


def test_progress_on_a_terminal_is_a_bar_that_leaves_the_lines_that_matter() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    text = "\n".join(shown(Display(console=console), script()))
    assert "FedAvg (source-only), seed 4: loss 0.500, accuracy 25.0 % after 12 rounds\n" in text
    assert "round 11: clp: no reply\n" in text
    assert "━" in text
    assert "\x1b[2Jbad" not in text


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


@pytest.mark.slow
def test_follow_reads_a_growing_file_once_and_ends_with_the_run(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"

    def write() -> None:
        time.sleep(0.1)
        append(path, '{"event": "star')
        time.sleep(0.3)
        append(path, 'ted"}\n{"event": "roun{"cut": "short"}\n{"event": "round", "round": 1}\n')
        append(path, '{"event": "done"}\n{"event": "after"}\n')

    writer = threading.Thread(target=write)
    writer.start()
    read_events = [event["event"] for event in follow(path, lambda: False)]
    writer.join()
    assert read_events == ["started", "round", "done"]


def test_the_runs_of_a_folder_are_listed(tmp_path: Path) -> None:
    for name in ("done", "begun"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "journal.jsonl").touch()
    (tmp_path / "done" / "results.json").write_text(json.dumps(results() | {"final_accuracy": 0.5}))
    started = {"target": "east", "settings": {"method": "shot"}}
    (tmp_path / "begun" / "launch.json").write_text(json.dumps(started))
    (tmp_path / "joined").mkdir()  # at a server the targets are known by who joined
    (tmp_path / "joined" / "journal.jsonl").touch()
    nodes = [{"name": "north", "role": "target"}, {"name": "south", "role": "source"}]
    (tmp_path / "joined" / "roster.json").write_text(json.dumps({"nodes": nodes}))
    said = call("runs", "--dir", tmp_path, "--json").stdout
    found = {each["name"]: each for each in json.loads(said)["runs"]}
    assert (found["done"]["state"], found["done"]["accuracy"]) == ("finished", 0.5)
    assert found["begun"]["state"] == "not begun"
    assert (found["begun"]["method"], found["begun"]["target"]) == ("shot", "east")
    assert (found["joined"]["target"], found["joined"]["state"]) == ("north", "stopped")
