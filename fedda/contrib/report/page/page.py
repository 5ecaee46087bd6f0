"""The page as a whole."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedda.contrib.audit.finding import Audits
from fedda.contrib.audit.finding import collect as audits_of
from fedda.files import writing
from fedda.results.read import Results

from .collaborators import collaborators
from .conditions import doubts, events, settings, sites
from .confusion import confusions
from .costs import costs
from .features import dictionary, features, last_step
from .headline import headline
from .html import Html, e
from .noted import Noted, collect
from .parts import note, section
from .recovered import section_of
from .rounds import rounds
from .script import SCRIPT, allowed
from .series import RunSeries
from .style import CSS

# Nothing may be loaded, and only the page's own script may run, even if something slipped through
# the escaping.
POLICY = (
    f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed(SCRIPT)}; "
    "base-uri 'none'; form-action 'none'"
)
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
    return document(title, headline(run), *parts(run, noted, audited))


def document(title: str, *content: Any, policy: str = POLICY, script: str = SCRIPT) -> str:
    """Return a document.

    Args:
        title: for the browser's tab.
        content: of the page.
        policy: what the browser may load and run.
        script: the text of the page's only script; the policy has to allow it.
    """
    head = e(
        "head",
        e("meta", charset="utf-8"),
        e("meta", name="viewport", content="width=device-width,initial-scale=1"),
        e("meta", http_equiv="Content-Security-Policy", content=policy),
        e("meta", name="color-scheme", content="light dark"),
        e("title", title),
        e("style", Html(CSS)),
    )
    body = e("body", e("main", *content), e("script", Html(script)))
    return f"<!doctype html>\n{e('html', head, body, lang='en')}\n"


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


def inside(run: RunSeries, noted: Noted) -> Html:
    """Make the section of what never leaves a site, from the notes that are on this machine."""
    matrices, clouds = confusions(run, noted), features(run, noted)
    explained = dictionary(run, noted)
    missing = None
    if not (matrices or clouds):
        missing = note(
            "Not shown, because features and exact confusion matrices never leave a site. Each "
            "site writes its own under its --state-dir; on a machine that holds such a folder, "
            "add it with fedda report RUN --site DIR."
        )
    elif not matrices:
        missing = note(
            "No confusion matrix: it is in the target's notes, if it has labelled tests."
        )
    elif not clouds:
        missing = note("No features: the notes have no features of the last round.")
    problems = [note(f"Left out: {problem}.") for problem in dict.fromkeys(noted.problems)]
    parts = [matrices, clouds, last_step(run, noted), explained, missing, *problems]
    return section("inside", "Confusion and features", *parts)
