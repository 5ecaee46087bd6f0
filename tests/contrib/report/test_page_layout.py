"""Where things are on the page: nothing is wider than it, and tables fit on a phone."""

from pathlib import Path
from xml.etree import ElementTree

import pytest

from fedda.contrib.report.page import page
from fedda.contrib.report.page.noted import Noted, collect
from tests.browser import CHROMIUM, Tab, browser
from tests.contrib.report.test_page import results, write_notes
from tests.patience import wait_until

NAMES = ["laptop_computer", "mobile_phone", "file_cabinet", "headphones", "desk_lamp", "WWWWWWWW"]


BYTES = "document.querySelector('#bytes .scroll')"


def layout(tab: Tab, file: Path, width: int) -> None:
    tab.open(file.as_uri(), width)
    tab.wait("document.readyState === 'complete' && !!document.querySelector('#bytes')")
    assert tab.ask("document.documentElement.scrollWidth") <= width
    assert tab.ask(f"{BYTES}.scrollWidth <= {BYTES}.clientWidth")
    assert tab.errors == []


@pytest.mark.parametrize(
    "pixels",
    [
        pytest.param(400, marks=pytest.mark.slow, id="phone"),
        pytest.param(1400, marks=pytest.mark.nightly("fedda/contrib/report/page"), id="desk"),
    ],
)
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_nothing_is_cut_or_covered_in_a_browser(tmp_path: Path, pixels: int) -> None:
    run = results(classes=NAMES)
    for entry in (r for ts in run["trainings"].values() for t in ts for r in t["rounds"]):
        entry["bytes"] = {"to source model": 987_654_321, "from source scalars": 7}
    write_notes(tmp_path / "sites", run, classes=len(NAMES))
    file = tmp_path / "report.html"
    file.write_text(page(run, collect(run, tmp_path)))
    with browser(tmp_path / "browser") as tab:
        layout(tab, file, pixels)


HOVERED = """(() => {
  const hit = document.querySelectorAll('#accuracy .hit')[1], r = hit.getBoundingClientRect();
  hit.dispatchEvent(new PointerEvent('pointermove', {bubbles: true, clientX: r.left + 5}));
  const tip = document.querySelector('.tip'), t = tip.getBoundingClientRect();
  return [tip.hidden, t.left >= 0 && t.right <= innerWidth, tip.textContent];
})()"""
ENLARGED = """(() => {
  const figure = document.querySelector('#accuracy figure');
  const width = figure.getBoundingClientRect().width;
  figure.querySelector('.tools button').click();
  return figure.getBoundingClientRect().width / width;
})()"""


@pytest.mark.nightly("fedda/contrib/report")
@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
def test_figures_show_values_and_can_be_taken_along(tmp_path: Path) -> None:
    run = results()
    bad = "=HYPERLINK(1)"  # a site's name that a spreadsheet would take for a formula
    for entry in (r for ts in run["trainings"].values() for t in ts for r in t["rounds"]):
        entry["weights"] = {bad if k == "clp" else k: v for k, v in entry["weights"].items()}
    file, out = tmp_path / "report.html", tmp_path / "out"
    file.write_text(page(run, Noted()))
    with browser(tmp_path / "browser") as tab:
        tab.open(file.as_uri(), 1400)
        tab.wait("document.readyState === 'complete' && !!document.querySelector('.tools')")
        hidden, inside, words = tab.ask(HOVERED)
        assert not hidden and inside
        assert words.splitlines()[:2] == ["round 2", "KD3A: 82.5"]
        assert tab.ask(ENLARGED) > 1.5
        csv = tab.ask("csv(document.querySelector('#bytes figure'))")
        assert csv.splitlines()[1] == "1,1000,1000,1000,7,7,7"  # bytes, not kB; mean and two seeds
        seconds = tab.ask("csv(document.querySelector('#time figure'))")
        assert all(map(float, seconds.splitlines()[1].split(",")))  # and no texts such as 0.20 s
        weights = tab.ask("csv(document.querySelectorAll('#accuracy figure')[1])")
        assert f"'{bad}" in weights and not weights.startswith("=") and f",{bad}" not in weights
        tab.call("Page.setDownloadBehavior", behavior="allow", downloadPath=str(out))
        tab.ask("[...document.querySelectorAll('#accuracy button')][2].click()")
        wait_until(lambda: (out / "Accuracy-on-tgt.svg").exists(), "the drawing is not saved")
        drawing = ElementTree.parse(out / "Accuracy-on-tgt.svg").getroot()
        said = {
            "".join(text.itertext()) for text in drawing.iter("{http://www.w3.org/2000/svg}text")
        }
        assert {"Accuracy on tgt", "KD3A", "FedAvg", "82.5", "round", "1", "2"} <= said
        assert tab.errors == []
