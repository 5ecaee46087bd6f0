"""What attacks recovered, from the findings of `fedda audit`: a section, and a page of its own.

The page is evidence before export: what crossed, which attacks were tried, and what is not
protected. Pictures never reach a page: they show images of the site.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from fedda.contrib.audit.finding import FORMS, HEADS, Audits, Finding, parse
from fedda.results import read
from fedda.results.read import counted, human

from .document import document
from .html import Html, e, grid, note, section, table
from .line import Curve, Scale, chart

TITLE = "Audit"
# Colours and dashes of the forms of a gradient. `fixed` is in the table of the numbers alone,
# because its curve would nearly be that of another form.
CURVES = {"bare": "k1", "fixed": "", "moving": "k3 d2", "sent": "k2", "what-if": "k2"}


def section_of(found: Audits) -> Html | None:
    """Make the section; None if no attack was tried."""
    if found.problem:
        return section("audit", TITLE, note(f"Left out: {found.problem}."))
    if not found.audits:
        return None
    rows = [finding for audit in found.audits for finding in audit.findings]
    data = ", ".join(dict.fromkeys(audit.settings["data"] for audit in found.audits))
    words = (
        f"Attacks on {data}, tried at the site; none of its examples are on this page. The figures "
        "are lower bounds: better attacks recover more."
    )
    return section(
        "audit",
        TITLE,
        e("p", words),
        table(HEADS, (row.cells() for row in rows), left=4, wrap=(0, 1, 2, 3), label=TITLE),
        _curves([row for row in rows if row.attack == "gradients"]),
        *(note(line) for audit in found.audits for line in audit.remarks()),
    )


def _curves(rows: Sequence[Finding]) -> Html | None:
    sizes = [row.examples for row in rows]
    if not sizes:
        return None
    places, guess = range(1, len(sizes) + 1), rows[0].guess["cosine"]
    others = Curve("best of other features", "k7 d1", {"": dict.fromkeys(places, guess)})

    def curve(form: str, end: str = "") -> Curve:
        of = {
            i: r.recovered[form + end] for i, r in enumerate(rows, 1) if form + end in r.recovered
        }
        ring = {"": min(of)} if of and form in ("sent", "what-if") else {}
        return Curve(FORMS[form], CURVES[form], {"": of}, ring, drawn=form != "fixed")

    said = "A ring marks the smallest window that is sent."
    draw = partial(chart, rounds=len(sizes), over=("examples", sizes), remark=said)
    percent = Scale("% of a window's examples", read.percent, 100, 0, 100)
    cosine = Scale("1: the feature itself", "{:.3f}".format, high=1)
    return grid(
        draw("Features recovered", [curve(form) for form in CURVES], percent),
        draw("Best cosine, mean", [*(curve(f, "-cosine") for f in CURVES), others], cosine),
    )


MEANING = {
    "images": "images recovered from a step over the site's least images or more",
    "membership": "members found, at one in a thousand others taken for members",
    "shares": "class shares told: 0 as by guesses, 1 all of them",
}
ATTACKS = ("update", "membership", "shares", "properties")
RARE = "tpr@0.001"  # of one in a thousand others taken for members
ALONE = ("step", "first", "last", "moments", "vote", "coordinates")  # of a single site


def figures(found: Sequence[Finding], least: int) -> dict[str, float | None]:
    """The worst of each kind -> shares from 0 to 1; None if the attack was not tried.

    Args:
        found: what the attacks found.
        least: images over which this site takes a step, at least.
    """
    images = [f for f in found if f.attack == "update"]
    largest = max((f.examples for f in images), default=0)  # no more could be tried on these data
    most = {
        "images": [f.recovered["images"] for f in images if f.examples >= min(least, largest)],
        "membership": [f.recovered[RARE] for f in found if f.on in ("model", "confidence")],
        "shares": [_told(f) for f in found if "error" in f.recovered and f.on in ALONE],
    }
    return {name: max(values, default=None) for name, values in most.items()}


def above(found: Mapping[str, float | None], most: Mapping[str, float | None]) -> list[str]:
    """The figures that are above their thresholds; one that was not measured is above any."""
    odd = []
    for name, limit in most.items():
        value = found.get(name)
        if limit is not None and (value is None or value > limit):
            odd.append(name)
    return odd


def open_risks(
    config: Mapping[str, Any],
    crosses: Sequence[str],
    found: Sequence[Finding],
    options: Mapping[str, Any],
) -> list[str]:
    """What is not protected in a run with these settings, in whole sentences.

    Args:
        config: the run's settings.
        crosses: the kinds of what crossed.
        found: what the attacks found.
        options: the attacks' settings.
    """
    risks = [
        "All figures are lower bounds, by these attacks on these data; better ones recover more.",
        "They hold for honest weights: a server that makes up the weights it sends can recover "
        "more than is measured here.",
    ]
    if any(kind.startswith("from source model") for kind in crosses):
        risks.append("The server saw the model of each single source: no sums, and none sealed.")
    sealed = any("sealed" in kind for kind in crosses)
    if sealed:
        risks.append("The target saw the model of each single source, which the server relayed.")
    elif any(kind.startswith("from target model") for kind in crosses):
        risks.append("The server saw the model that the target sent.")
    if not config.get("privacy.noise"):
        risks.append("No example is protected by differential privacy (privacy.noise is 0).")
    if config.get("model.norm", "batch") == "batch":
        risks.append("BatchNorm's moments, if the network has such layers, tell class shares.")
    if any("gradient" in kind for kind in crosses):
        risks.append("Gradients crossed; `fedda audit gradients` attacks them, and not this page.")
    epochs, made = options.get("epochs", 0), options.get("epochs-of-the-run", 0)
    if epochs < made:
        risks.append(
            f"Membership was measured on models of {counted(epochs, 'epoch')}, and the run made "
            f"{made}: its own models may tell more."
        )
    missing = [name for name in ATTACKS if name not in {f.attack for f in found}]
    if missing:
        risks.append(f"Not tried: {', '.join(missing)}.")
    return [*risks, "All that take part know the mean model; the server knows numbers of tests."]


def page(about: Mapping[str, Any]) -> str:
    """Return the whole document.

    Args:
        about: what `fedda audit all --evidence` writes as JSON.
    """
    title = f"Evidence before export: {about['run']}"
    limits = [limit for limit in about["thresholds"].values() if limit is not None]
    said = "The policy, if any was given, has no thresholds: nobody has judged the figures."
    if limits:
        said = f"No figure is above a threshold; the policy has {len(limits)} of {len(MEANING)}."
    if about["above"]:
        said = f"Above the policy's threshold: {', '.join(about['above'])}."
    facts = [(name, str(about[name])) for name in ("made", "fedda", "run", "data", "model")]
    return document(
        title,
        e("h1", title),
        e("p", said, class_="strong"),
        table(("what", "is"), facts, left=2, wrap=(1,), label="What was attacked"),
        _judged(about),
        section_of(Audits(parse(about["attacks"]))),
        _crossed(about["crosses"]),
        section("risks", "Not protected", e("ul", *(e("li", risk) for risk in about["risks"]))),
        _settings("options", "Settings of the attacks", about["options"]),
        _settings("settings", "Settings of the run", about["config"]),
        note("The file .json beside this page has all figures."),
    )


def _judged(about: Mapping[str, Any]) -> Html:
    rows = []
    for name, value in about["figures"].items():
        limit = about["thresholds"].get(name)
        rows.append(
            (
                f"{name}: {MEANING[name]}",
                "not tried" if value is None else f"{value:.4f}",
                "any" if limit is None else f"{limit:g}",
                "above" if name in about["above"] else "",
            )
        )
    head = ("figure", "worst", "allowed", "")
    return section("judged", "Figures", table(head, rows, left=1, wrap=(0,), label="Figures"))


def _crossed(crosses: Mapping[str, Mapping[str, int]]) -> Html:
    rows = [
        (method, key, f"{size:,}", human(size))
        for method, sizes in crosses.items()
        for key, size in sorted(sizes.items())
    ]
    head = ("method", "what, by direction and role", "bytes", "")
    return section("crossed", "What crossed", table(head, rows, left=2, label="What crossed"))


def _settings(anchor: str, title: str, values: Mapping[str, Any]) -> Html:
    rows = [(key, str(value)) for key, value in sorted(values.items())]
    return section(anchor, title, table(("setting", "value"), rows, left=2, wrap=(1,), label=title))


def _told(finding: Finding) -> float:
    error, guess = finding.recovered["error"], finding.guess["error"]
    return max(0.0, 1 - error / guess) if guess else 1.0
