"""The page of a run: loads nothing, runs its own script only, and says what results.json says."""

import base64
import hashlib
import json
import re
from collections.abc import Callable
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedda.contrib.report.page import page, write
from fedda.contrib.report.page.document import SCRIPT
from fedda.contrib.report.page.html import e, text
from fedda.contrib.report.page.noted import Noted, collect
from fedda.errors import RunError
from fedda.results.read import load
from tests.command_lines import call
from tests.contrib.report.test_report import first, without
from tests.finished import SITES, training

EVIL = "<script>alert('x')<\"&script>"


class Read(HTMLParser):
    """A page's elements, its text, its tables by name, and whether every element is closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.text: list[str] = []
        self.tables: dict[str, list[list[str]]] = {}
        self._open: list[str] = []
        self._rows: list[list[str]] = []
        self.feed(page)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        attributes = {k: v or "" for k, v in attrs}
        self.elements.append((tag, attributes))
        if tag == "table":
            self._rows = self.tables.setdefault(attributes.get("aria-label", ""), [])
        elif tag == "tr":
            self._rows.append([])
        elif tag in ("td", "th"):
            self._rows[-1].append("")
        if tag != "meta":
            self._open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {k: v or "" for k, v in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"style", "script"} & set(self._open):
            self.text.append(data)
        if {"td", "th"} & set(self._open):
            self._rows[-1][-1] += data

    @property
    def words(self) -> str:
        return " ".join(self.text)

    def paths(self, css: str) -> list[str]:
        return [a["d"] for tag, a in self.elements if tag == "path" and a.get("class") == css]


def results(**others: Any) -> dict[str, Any]:
    """Two methods, two seeds, two rounds, with everything that a round may say."""

    def each(r: int, seed: int, kd3a: bool) -> dict[str, Any]:
        x = 0.1 * r + 0.05 * seed + 0.3 * kd3a
        weights = {"tgt": 0.2, "clp": 0.3 + x / 10, "bus": 0.5 - x / 10}
        return {
            "loss": 2.123456 - x,
            "infomax": 0.1 + x,
            "accuracy": 0.3 + x,
            "tested": 90,
            "test_loss": 1.5 - x,
            **({"distillation": 0.7 + x, "kept": 0.25 * r} if kd3a else {}),
            "weights": weights if kd3a else {"clp": 0.6, "bus": 0.4},
            "bytes": {"to source model": 1000 * r, "from source scalars": 7},
            "phases": {"waiting": 0.0, "train": 1.0 + x, "test": 0.25, "checkpoint": 0.125},
            "site_seconds": {"clp": 0.5 + x, "bus": 0.75},
        }

    def all_(kd3a: bool) -> list[dict[str, Any]]:
        return [training(s, [each(r, s, kd3a) for r in (1, 2)], 1 + s) for s in (0, 1)]

    return {
        "name": "demo",
        "method": "kd3a",
        "titles": {"fedavg": "FedAvg (source-only)", "kd3a": "KD3A"},
        "config": {"rounds": 2, "run.evaluate": True, "train.lr": 0.0125}
        | {"kd3a.gate.low": 0.8, "kd3a.gate.high": 0.95, "of.another.version": 3},
        "seeds": [0, 1],
        "versions": {"fedda": "0.1.0", "torch": "2.9"},
        "sites": [dict(site) for site in SITES],
        "shape": [1, 16, 16],
        "classes": ["cat", "dog"],
        "selected_by": "highest infomax",
        "trainings": {"fedavg": all_(False), "kd3a": all_(True)},
        "events": [],
    } | others


def read(run: dict[str, Any], noted: Noted | None = None) -> Read:
    made = page(run, noted or Noted())
    assert not re.search(r"\b(NaN|nan|inf)\b|>None<|\bNone ", made)
    return Read(made)


def column(run: dict[str, Any], method: str, key: str) -> dict[int, list[Any]]:
    """Return one number of the rounds: the values of all seeds, by round."""
    return {r: [t["rounds"][r - 1][key] for t in run["trainings"][method]] for r in (1, 2)}


def chain(**of_last: Any) -> dict[str, Any]:
    """A chain: `b` has learned from `a`, and `c` from `b`; `a` is the source."""

    def chosen(name: str, of: list[str], **after: Any) -> dict[str, Any]:
        rows = [
            {"name": n, "labelled": n == "a", "eps": 0.25, "theta": 0.5, "w1": 1.5,
             "w1-error": 0.1, "bound": 2.5, "chosen": n == name}
            for n in of
        ]  # fmt: skip
        found = {"w1": 0.5, "w1-error": 0.1, "eps": 0.75, "infomax-before": 1.0,
                 "infomax-after": 1.5, "kept": "after"}  # fmt: skip
        choice = {"selector": "ocs", "collaborator": name, "candidates": rows}
        return {"selection": choice | {"after": found | after}}

    rounds = [{"accuracy": 0.5, "infomax": 0.1, "weights": {"a": 1.0}}]
    trainings = [
        training(0, rounds, 1) | {"target": "b", "final_accuracy": 0.5} | chosen("a", ["a"]),
        training(0, rounds, 1) | {"target": "c", "final_accuracy": None}
        | chosen("b", ["a", "b"], **of_last),
    ]  # fmt: skip
    sites = [
        {"name": n, "role": "source" if n == "a" else "target", "examples": 9, "tested": 9}
        for n in "abc"
    ]
    return results(
        method="fruda", titles={"fruda": "FRUDA"}, sites=sites, seeds=[0],
        trainings={"fruda": trainings}, targets={"b": {}, "c": {}},
    )  # fmt: skip


def test_the_tree_says_who_learned_from_whom() -> None:
    words = re.sub(r"\s+", " ", read(chain()).words)
    assert "a (source) b : accuracy 50.0 % c : error at most 0.750" in words
    assert "negative transfer" not in words
    depth = [tag for tag, _ in read(chain()).elements if tag in ("ul", "li")]
    assert depth[:6] == ["ul", "li", "ul", "li", "ul", "li"]


def test_the_page_loads_nothing_and_runs_its_own_script_only() -> None:
    whole = page(results(), Noted())
    assert re.findall(r"<script>(.*?)</script>", whole, re.DOTALL) == [SCRIPT]
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}';" in unescape(whole)
    assert not re.search(r"fetch|XMLHttp|WebSocket|EventSource|import|eval|innerHTML", SCRIPT)
    made = whole.replace(f"<script>{SCRIPT}</script>", "")
    shown = Read(made)
    tags = {tag for tag, _ in shown.elements}
    assert not tags & {"script", "link", "img", "iframe", "object", "embed", "base", "form", "use"}
    for tag, attributes in shown.elements:
        assert not [k for k in attributes if k.startswith("on") or k in ("src", "srcset", "action")]
        for key in ("href", "xlink:href"):
            assert attributes.get(key, "#").startswith("#"), tag
    assert not re.search(r"https?:|url\(|@import|//[a-z]", made)
    policy = next(a["content"] for _, a in shown.elements if "http-equiv" in a)
    assert policy.startswith("default-src 'none'")
    inner = {a["href"] for tag, a in shown.elements if tag == "a"}
    assert inner <= {f"#{a['id']}" for _, a in shown.elements if "id" in a}


def test_every_text_is_escaped() -> None:
    run = results(name=EVIL, classes=[EVIL, "dog"], versions={EVIL: EVIL}, selected_by=EVIL)
    run["config"] |= {"model.weights": EVIL, EVIL: EVIL}
    run["sites"][0]["name"] = run["sites"][2]["name"] = EVIL
    event = {"what": EVIL, "site": EVIL, "text": f"{EVIL}\x1b[2J\u202e", "round": 1}
    run["events"] = [event | {"method": EVIL, "seed": EVIL}]
    for trainings in run["trainings"].values():
        for entry in (r for t in trainings for r in t["rounds"]):
            for table in ("weights", "site_seconds"):
                entry[table] = {EVIL if k == "clp" else k: v for k, v in entry[table].items()}
            entry["phases"][EVIL] = 1.0
            entry["bytes"][f"to {EVIL} {EVIL}"] = 5
            entry[EVIL] = 1.0
    made = page(run, Noted()).replace(f"<script>{SCRIPT}</script>", "")
    shown = Read(made)
    assert "<script" not in made and "\x1b" not in made and "\u202e" not in made
    assert EVIL in shown.words  # as it is, for people to read
    assert EVIL in [row[0] for row in shown.tables["Sites"]]
    assert any(EVIL in a.get("aria-label", "") for _, a in shown.elements)
    assert e("p", "<b>", title='"') == '<p title="&quot;">&lt;b&gt;</p>'
    assert text("a\nb") == "a b"


def test_the_headline_says_what_the_results_say() -> None:
    run = results()
    for each, accuracy in zip(run["trainings"]["kd3a"], (0.9, 0.85), strict=True):
        each["model"] = f"runs/fedda/kd3a-{each['seed']}/model.safetensors"
        each["refined"] = {"accuracy": accuracy, "changed": 0.1, "agreed": 0.7}
    shown = read(run)
    # Last round: KD3A 80 and 85, refined 90 and 85, FedAvg 50 and 55.
    # Chosen: KD3A 70 (round 1) and 85 (round 2).
    rows = shown.tables["accuracy on the target's labelled tests"]
    assert [row[:4] for row in rows[1:]] == [
        ["KD3A", "82.5 ± 3.5", "87.5 ± 3.5", "77.5 ± 10.6"],
        ["seed 0", "80.0", "90.0", "70.0 (round 1)"],
        ["seed 1", "85.0", "85.0", "85.0 (round 2)"],
        ["FedAvg (source-only)", "52.5 ± 3.5", "–", "47.5 ± 10.6"],
        ["seed 0", "50.0", "–", "40.0 (round 1)"],
        ["seed 1", "55.0", "–", "55.0 (round 2)"],
    ]
    assert "tgt's last step changed 10.0 % of KD3A's answers there" in shown.words
    assert "+30.0 points ± 0.0" in shown.words.replace("  ", " ")
    # sqrt(0.825 * 0.175 / 90)
    assert "90 labelled tests at tgt, whose labels no training sees" in shown.words
    assert "standard error of 4.0 points" in shown.words


CURVES: list[tuple[str, str, str, Callable[[float], str]]] = [
    ("Accuracy on tgt", "kd3a", "accuracy", lambda v: f"{100 * v:.1f}"),
    ("Accuracy on tgt", "fedavg", "accuracy", lambda v: f"{100 * v:.1f}"),
    ("Training loss, mean over the sources", "kd3a", "loss", lambda v: f"{v:.4g}"),
    ("Test loss on the target", "fedavg", "test_loss", lambda v: f"{v:.4g}"),
    ("Infomax on the target's training examples", "kd3a", "infomax", lambda v: f"{v:.4g}"),
    ("Distillation loss at the target", "kd3a", "distillation", lambda v: f"{v:.4g}"),
    ("Gate, and examples that pass it", "kd3a", "kept", lambda v: f"{100 * v:.1f}"),
]


@pytest.mark.parametrize(("name", "method", "key", "form"), CURVES, ids=lambda v: str(v)[:20])
def test_curves_have_the_numbers_in_a_table(
    name: str, method: str, key: str, form: Callable[[float], str]
) -> None:
    run = results()
    rows = read(run).tables[name]
    start = {"kd3a": "KD3A", "fedavg": "FedAvg"}[method] + (": examples kept" * (key == "kept"))
    at = rows[0].index(f"{start}, mean")
    assert rows[0][at : at + 3] == [f"{start}, mean", f"{start}, seed 0", f"{start}, seed 1"]
    for row in rows[1:]:
        zero, one = column(run, method, key)[int(row[0])]
        assert row[at : at + 3] == [form((zero + one) / 2), form(zero), form(one)]
    assert len(rows) == 3


def test_a_number_that_never_changes_is_a_sentence_and_no_figure() -> None:
    run, name = results(), "Classes that the model gives at the target"
    entries = [entry for each in run["trainings"].values() for t in each for entry in t["rounds"]]
    for entry in entries:
        entry["predicted"] = 3
    shown = read(run)
    assert f"{name} (classes), in every round: 3 (KD3A, FedAvg)." in shown.words
    assert name not in shown.tables
    entries[-1]["predicted"] = 2
    assert name in read(run).tables


def test_troubles_are_gathered_and_marked() -> None:
    silent = {"what": "silent", "site": "clp", "text": "no reply", "method": "kd3a", "seed": 1}
    events = [silent | {"round": r} for r in (1, 2)]
    events.append({"what": "bounded", "site": "bus", "text": "claims more"})
    shown = read(results(events=events))
    assert shown.tables["Troubles"][1:] == [
        ["1-2", "KD3A, seed 1", "clp", "no reply", "no reply", "2"],
        ["–", "–", "bus", "counts for fewer examples", "claims more", "1"],
    ]
    assert shown.paths("trouble") == ["M250 1000h0M750 1000h0"]
    counted = {row[0]: row[-1] for row in shown.tables["Sites"][1:]}
    assert counted == {"clp": "2", "bus": "1", "tgt": "0"}


def old() -> dict[str, Any]:
    """Return results of an old version: without phases, configuration and more."""
    run = without(results(), "phases", "site_seconds", "test_loss", "bytes")
    for key in ("config", "versions", "shape", "classes", "selected_by"):
        del run[key]
    return run


def large() -> dict[str, Any]:
    run = results()
    names = [f"site {i}" for i in range(40)]
    run["sites"] = [SITES[0] | {"name": n} for n in names] + [SITES[2]]
    for trainings in run["trainings"].values():
        for one in trainings:
            last = one["rounds"][-1]
            shares = dict.fromkeys(names, 1 / 40)
            one["rounds"] = [last | {"round": r, "weights": shares} for r in range(1, 201)]
    return run


def absent() -> dict[str, Any]:
    run = results()
    for entry in run["trainings"]["kd3a"][0]["rounds"]:
        del entry["weights"]["clp"], entry["site_seconds"]["clp"]
    run["sites"].append(SITES[0] | {"name": "never there"})
    return run


def resumed() -> dict[str, Any]:
    """Return results in which a round has no checkpoint's time and another has no test."""
    run = results()
    entry = run["trainings"]["kd3a"][0]["rounds"][0]
    del entry["phases"]["checkpoint"]
    del run["trainings"]["kd3a"][1]["rounds"][-1]["accuracy"]
    return run


ODD = {
    "old": old,
    "large": large,
    "absent": absent,
    "resumed": resumed,
    "untested": lambda: without(results(), "accuracy", "test_loss", "tested"),
    "nothing tested": lambda: without(results(), "accuracy", "infomax", "test_loss", "tested"),
    "one seed, one round": lambda: first(results(), seeds=1, rounds=1),
    "no baseline": lambda: results(trainings={"kd3a": results()["trainings"]["kd3a"]}),
    "no weights": lambda: without(results(), "weights"),
}


@pytest.mark.parametrize("name", ODD)
def test_any_run_has_a_page(name: str) -> None:
    shown = read(ODD[name]())
    assert {"accuracy", "bytes", "time", "sites", "events", "settings"} <= {
        a["id"] for _, a in shown.elements if "id" in a
    }
    assert "KD3A on tgt" in shown.words
    assert "never leave a site" in shown.words and "fedda report RUN --site DIR" in shown.words


def write_notes(folder: Path, run: dict[str, Any], tgt: str = "tgt", classes: int = 2) -> None:
    """Write notes of two seeds as clients do."""
    rng = np.random.default_rng(0)
    for method in run["trainings"]:
        for seed in (0, 1):
            for site in ("clp", "bus", tgt):
                place = folder / site / "notes" / f"demo.{method}-{seed}"
                place.mkdir(parents=True)
                z = rng.normal(size=(9, 5)).astype(np.float16)
                facts: dict[str, Any] = {"features": z, "round": 2}
                own: dict[str, Any] = {"labels": np.arange(9) % classes}
                if site == tgt:
                    counts = {"classes": ["cat", "dog"], "counts": [[40 + seed, 5], [3, 42]]}
                    (place / "confusion.json").write_text(json.dumps(counts))
                    own = {"test_features": z + 1, "test_labels": np.arange(9) % classes}
                np.savez(place / "last.npz", model="received", **facts, **own)


@pytest.mark.parametrize("tested", [80, 93])
def test_only_counts_that_were_rounded_are_called_tens(tested: int) -> None:
    run = results(classes=["cat", "dog"])
    table = {"counts": [[40, 0], [0, 40]], "tests": [40, 40]}
    for each in run["trainings"]["kd3a"]:
        each["answers"] = {"last": table}
        each["rounds"][-1]["tested"] = tested
    words = read(run).words
    assert "correct" in words and ("Counts are in tens" in words) == (tested > 80)


def test_confusion_and_features_are_shown(tmp_path: Path) -> None:
    run = results()
    write_notes(tmp_path / "sites", run)
    shown = read(run, collect(run, tmp_path))
    rows = shown.tables["Counts by class and prediction"]
    assert rows[:3] == [["class", "cat", "dog"], ["cat", "40.5", "5"], ["dog", "3", "42"]]
    assert "mean of seeds 0, 1" in shown.words
    assert "91.2 % of 90.5 correct" in shown.words  # 82.5 / 90.5
    assert "cat as dog (5), dog as cat (3)" in shown.words
    assert "FedAvg (source-only), last round, by domain" in shown.words
    titles = [t for t in shown.text if t.endswith(" examples")]
    assert titles.count("tgt (target): 18 examples") == 2  # before and after
    assert titles.count("target, training examples without labels: 9 examples") == 2
    assert titles.count("cat: 15 examples") == 2  # five of nine at each source, five of the tests


@pytest.mark.slow
def test_the_command_writes_the_page(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text(json.dumps(results()))
    write_notes(tmp_path / "elsewhere", results())
    shown = call("report", tmp_path)
    assert f"page: {tmp_path / 'report.html'}" in shown.stdout.replace("\n", "")
    assert (tmp_path / "report.html").read_text() == page(load(tmp_path), Noted())
    other = tmp_path / "other.html"
    call("report", tmp_path, "--html", other, "--site", tmp_path / "elsewhere")
    assert "tgt (target): 18 examples" in other.read_text()
    assert call("report", tmp_path, "--site", tmp_path, code=1).stderr[:7] == "error: "
    with pytest.raises(RunError, match=r"cannot be written .*--html"):
        write(results(), tmp_path / "missing" / "report.html", tmp_path)
