"""The live page: what it says of a run so far, and a browser that follows it."""

import base64
import hashlib
import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from fedda.contrib.report.page.live_page import SCRIPT, page
from fedda.results.snapshot import RunNow, SiteNow, Snapshot
from server.watching.live import PAGE
from tests.browser import CHROMIUM, browser
from tests.contrib.report.test_page import EVIL, Read
from tests.test_story import events
from tests.watched import run, serving, sites

__all__ = ["run"]  # a fixture


def test_the_page_says_who_is_there_and_who_trains(run: RunNow) -> None:
    read = Read(page(sites(run), "", "v1"))
    assert read.tables["Sites now"][1:] == [
        ["a", "source", "yes", "yes", "trains", "1"],
        ["t", "target", "no", "yes", "–", "0"],
    ]
    assert "Training fedavg, seed 0, training 1 of 4: round 2 of 4." in read.words
    assert "0:56" in read.words and "3.8 kB" in read.words
    assert read.paths("m k1")  # the curve so far
    assert ("a", {"href": "/live?run=3"}) in read.elements


def test_each_other_run_has_one_link(run: RunNow) -> None:
    others = tuple(replace(run, number=number, name=f"n{number}") for number in (3, 4))
    read = Read(page(Snapshot((), (run, *others)), "", "v1"))
    links = [about["href"] for name, about in read.elements if name == "a" and "href" in about]
    assert [link for link in links if link.startswith("/live")] == ["/live?run=3", "/live?run=4"]


def test_only_the_pages_own_script_may_run(run: RunNow) -> None:
    text = page(sites(run), "", "v1")
    assert re.findall(r"<script>(.*?)</script>", text, re.DOTALL) == [SCRIPT]
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = next(a["content"] for t, a in Read(text).elements if "http-equiv" in a)
    assert f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy
    assert not re.findall(r"(?:src|href)=\"(?!#|/live|\?)", text)


def test_what_sites_say_is_escaped(run: RunNow) -> None:
    spoilt = json.dumps(events()[8] | {"text": EVIL, "site": EVIL, "what": EVIL})
    joined = json.dumps(events()[1] | {"site": EVIL, "role": EVIL})
    with (run.path / "journal.jsonl").open("a") as file:
        file.write(f"{spoilt}\n{joined}\n")
    snapshot = Snapshot((SiteNow(1, EVIL, EVIL, True, EVIL, 7),), (replace(run, name=EVIL),))
    text = page(snapshot, EVIL, "v1")
    assert "alert" in Read(text).words
    assert text.count("<script") == 1


def test_without_a_run_the_page_shows_the_sites() -> None:
    snapshot = Snapshot((SiteNow(1, "", "", True),), ())
    read = Read(page(snapshot, "", "v1"))
    assert "No run has begun" in read.words
    assert read.tables["Sites now"][1][0] == "node 1"
    assert "knows no run x" in Read(page(snapshot, "x", "v1")).words


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
@pytest.mark.parametrize("width", [1400, 400])
def test_a_browser_follows_a_run(run: RunNow, tmp_path: Path, width: int) -> None:
    journal = run.path / "journal.jsonl"
    with serving(lambda: sites(run)) as address, browser(tmp_path / "browser") as tab:
        tab.open(f"{address}{PAGE}", width)
        tab.wait("document.body?.innerText.includes('round 2 of 4')")
        tab.wait("document.getElementById('lost').hidden")
        tab.ask("document.querySelector('#accuracy details').open = true")
        tab.ask("document.querySelector('#accuracy .tools button').click()")
        with journal.open("a") as file:
            file.write(json.dumps(events()[-1] | {"round": 3, "accuracy": 0.75}) + "\n")
        tab.wait("document.body.innerText.includes('round 3 of 4')")
        assert tab.ask("document.body.innerText").count("75.0") >= 2  # the card and the results
        assert tab.ask("document.querySelector('#accuracy details').open")
        assert tab.ask("document.querySelectorAll('#accuracy .big').length") == 1
        assert tab.ask("document.querySelector('#accuracy .tools').innerText").startswith("reduce")
        assert tab.ask("document.documentElement.scrollWidth") <= width
        assert tab.errors == []
