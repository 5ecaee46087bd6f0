"""The run's results: a few large numbers, and a table of them by seed."""

import math
import statistics
from typing import Any

from fedda.results import read
from fedda.results.remarks import remarks_on
from fedda.results.terminal import scores, tests, untested

from .html import Html, card, e, join, note, table
from .line import Scale
from .series import RunSeries

SCALES = {
    "accuracy": Scale("%", lambda v: f"{100 * v:.1f}", 100, span=10, inside=(0, 100)),
    "infomax": Scale("nats", lambda v: f"{v:.3f}", span=0.1),
    "loss": Scale("", lambda v: f"{v:.4g}"),
}
NAMES = {
    "accuracy": "accuracy on the target's labelled tests",
    "infomax": "infomax: no labelled tests",
    "loss": "training loss: nothing was tested",
}


def numbers(run: RunSeries) -> Html:
    """Make the cards, the table of targets or seeds, and remarks on how to read them."""
    scale = SCALES[run.measure]
    return join(
        e("p", _about(run), class_="sub"),
        e("div", *_cards(run, scale), class_="cards"),
        e("div", _table(run, scale), e("div", *map(note, _remarks(run))), class_="lead"),
    )


def _about(run: RunSeries) -> str:
    sources = run.sources
    names = ", ".join(sources) if len(sources) <= 6 else f"{len(sources)} sources"
    seconds = sum(sum(m["seconds"]) for m in run.summary["methods"].values())
    parts = [
        f"run {run.results['name']}",
        f"{names} → {run.target}" if sources else f"no sources → {run.target}",
        read.counted(run.rounds, "round"),
        read.counted(len(run.seeds), "seed"),
        f"{read.duration(seconds)} in all",
    ]
    return " · ".join(parts)


def _cards(run: RunSeries, scale: Scale) -> list[Html]:
    methods = run.summary["methods"]
    own = methods[run.own]
    unit = f" {scale.unit}" if scale.unit else ""

    def stat(stats: dict[str, Any]) -> Html:
        if stats["mean"] is None:
            return e("small", "not tested")
        spread = "" if stats["std"] is None else f" ± {scale.text(stats['std'])}"
        return join(scale.text(stats["mean"]), e("small", f"{unit}{spread}"))

    last = "last round" + (f", mean of {run.over}" if run.over else "")
    cards = [card(run.title(run.own), stat(own["last"]), last, "card main")]
    for method in run.methods[1:]:
        cards.append(card(run.title(method), stat(methods[method]["last"]), last))
    cards += [_difference(run, scale, other) for other in run.methods[1:2]]
    if own["refined"]["mean"] is not None:
        cards.append(card("Refined at the target", stat(own["refined"]), "by its last step"))
    if any(n is not None for n in own["selected_rounds"]):
        rounds = read.spans(n for n in own["selected_rounds"] if n is not None)
        plural = "s" if len(set(own["selected_rounds"])) > 1 else ""
        cards.append(
            card("Chosen without labels", stat(own["selected"]), f"round{plural} {rounds}")
        )
    cards.append(_troubles(run))
    return [c for c in cards if c]


def _difference(run: RunSeries, scale: Scale, other: str) -> Html | None:
    gains = _gains(run, other)
    if not gains:
        return None
    mean = statistics.fmean(gains)
    unit = "points" if run.measure == "accuracy" else scale.unit
    spread = f" ± {scale.text(statistics.stdev(gains))}" if len(gains) > 1 else ""
    better = (mean > 0) == (run.measure != "loss")
    big = e(
        "span",
        f"{'+' if mean >= 0 else '−'}{scale.text(abs(mean))}",
        e("small", f" {unit}{spread}"),
        class_="" if not mean else "good" if better else "bad",
    )
    by_seed = ", seed by seed" if len(gains) > 1 else ""
    return card("Difference", big, f"against {run.short(other)}{by_seed}")


def _gains(run: RunSeries, other: str) -> list[float]:
    """Return the method's measure minus the other's, for each seed where both were tested."""
    ours, theirs = (run.summary["methods"][m]["last"]["values"] for m in (run.own, other))
    return [a - b for a, b in zip(ours, theirs, strict=False) if a is not None and b is not None]


def _troubles(run: RunSeries) -> Html:
    events = run.results["events"]
    if not events:
        return card(
            "Troubles", e("span", "none", class_="good"), "every site answered in every round"
        )
    places = {event.get("site") for event in events if event.get("site")}
    link = e("a", "what happened", href="#events")
    where = join(f"at {read.counted(len(places), 'site')}: " if places else "", link)
    many = len(read.kinds(run.results))
    return card("Troubles", e("span", f"{many:,}", class_="bad"), where)


def _table(run: RunSeries, scale: Scale) -> Html:
    rows, styles = [], []
    for method in run.methods:  # one row for all, then one per target or seed
        lines = list(scores(run.summary, method, scale.text))
        rows += [[*cells, read.duration(seconds)] for *cells, seconds in lines]
        styles += ["strong", *["faint"] * (len(lines) - 1)]
    unit = f" ({scale.unit})" if scale.unit else ""
    head = ["method", f"last round{unit}", f"refined{unit}", f"chosen without labels{unit}", "time"]
    return table(head, rows, styles=styles, label=NAMES[run.measure])


def _remarks(run: RunSeries) -> list[str]:
    remarks = []
    if run.measure == "accuracy":
        tested = tests(run.results)
        counts = {t: read.counted(tests(run.results, t), "labelled test") for t in run.targets}
        where = " and ".join(f"{count} at {target}" for target, count in counts.items())
        words = f"Accuracy on {where}, whose labels no training sees"
        mean = run.summary["methods"][run.own]["last"]["mean"]
        if tested and mean is not None and len(run.targets) == 1:
            error = 100 * math.sqrt(max(mean * (1 - mean), 0) / tested)
            words += f"; so many tests alone leave a standard error of {error:.1f} points"
        remarks.append(words + ".")
    else:
        shown = {
            "infomax": "Infomax (nats, higher is better) needs no labels.",
            "loss": "The page shows the mean training loss of the sources.",
        }
        remarks.append(f"No accuracy: {run.target} {untested(run.results)}. {shown[run.measure]}")
    remarks += [f"{text[0].upper()}{text[1:]}." for text in remarks_on(run.results)]
    if len(run.seeds) > 1:
        of_targets = ", of the mean over the targets" * (len(run.targets) > 1)
        remarks.append(f"Mean ± standard deviation over {len(run.seeds)} seeds{of_targets}.")
    if any(n is not None for m in run.summary["methods"].values() for n in m["selected_rounds"]):
        by = run.results.get("selected_by", "highest infomax")
        remarks.append(
            f"Chosen without labels: the round with the {by}. The best test round is never "
            "reported: nobody without labels could have picked it."
        )
    return remarks
