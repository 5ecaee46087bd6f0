"""The page as a whole."""

from collections.abc import Sequence
from pathlib import Path

from fedda.contrib.audit.finding import Audits
from fedda.contrib.audit.finding import collect as audits_of
from fedda.files import writing
from fedda.results.read import Results

from .conditions import collaborators, doubts, events, settings, sites
from .costs import costs
from .document import document
from .evidence import section_of
from .headline import numbers
from .html import Html, e
from .inside import inside
from .noted import Noted, collect
from .rounds import rounds
from .series import RunSeries

NONE = Audits()
PARTS = {
    "collaborators": "Collaborators",
    "accuracy": "Accuracy",
    "training": "Training",
    "inside": "Confusion and features",
    "audit": "Audit",
    "bytes": "Bytes",
    "time": "Time",
    "sites": "Sites",
    "events": "Troubles",
    "doubts": "Doubts",
    "settings": "Settings",
}


def write(results: Results, path: Path, run: Path, given: Sequence[Path] = ()) -> Path:
    """Write the page of a run.

    Args:
        results: results of the run.
        path: the file to write.
        run: the run's folder, which may hold notes of simulated sites and an audit.
        given: state directories of sites on this machine.

    Raises:
        RunError: a given directory holds no notes of this run, or the file cannot be written.
    """
    noted = collect(results, run, given)
    text = page(results, noted, audits_of(run))
    with writing(path, "give another file by --html") as part:
        part.write_text(text, encoding="utf-8")
    return path


def page(results: Results, noted: Noted, audited: Audits = NONE) -> str:
    """Return the whole document."""
    run = RunSeries(results)
    title = f"{run.short(run.own)} on {run.target}: {results['name']}"
    heading = e("h1", f"{run.title(run.own)} on {run.target}")
    return document(title, heading, numbers(run), *parts(run, noted, audited))


def parts(run: RunSeries, noted: Noted, audited: Audits = NONE) -> list[Html | None]:
    """Make everything below the headline: the links to the sections, and the sections."""
    audits, doubted = section_of(audited), doubts(run)
    chosen = collaborators(run)
    maybe = {"audit": audits, "doubts": doubted, "collaborators": chosen}
    absent = {anchor for anchor, part in maybe.items() if not part}
    links = [
        e("a", words, href=f"#{anchor}") for anchor, words in PARTS.items() if anchor not in absent
    ]
    return [
        e("nav", *links, aria_label="Parts of this page"),
        chosen,
        rounds(run),
        inside(run, noted),
        audits,
        costs(run),
        sites(run),
        events(run),
        doubted,
        settings(run),
    ]
