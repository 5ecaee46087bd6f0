"""What attacks recovered, from the findings.json of `fedda audit`: one table, and curves.

Pictures never reach the page: they show images of the site.
"""

from collections.abc import Sequence
from functools import partial

from fedda.contrib.audit.finding import FORMS, HEADS, Audits, Finding
from fedda.results import read

from .html import Html, e
from .line import Curve, Scale, chart
from .parts import grid, note, section, table

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
