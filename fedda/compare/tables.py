"""A comparison as CSV, one line per training, and as Markdown for people."""

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from fedda.results import counted, printable

from .cells import Plan, Score
from .statistics import MEAN, Difference, Table, Values, by_target, difference, spread

T = TypeVar("T")

COLUMNS = (
    "variant",
    "target",
    "seed",
    "accuracy_last",
    "accuracy_selected",
    "selected_round",
    "seconds",
    "bytes",
    "weights",
)
NOTHING = "–"
SPREAD = (
    "Target accuracy in %, mean ± standard deviation over the seeds; in `mean` each seed's values "
    "are averaged over the targets first."
)
INTERVAL = (
    "Differences in points, seed by seed: their mean, and its 95 % confidence interval by "
    "Student's t over n pairs (n − 1 degrees of freedom; n is the number of seeds unless given). "
    "One interval each, not widened for the number of comparisons."
)
CHOSEN = (
    "No label takes part in choosing the round: it is the one with the highest infomax on the "
    "target's unlabelled training images."
)
UNTESTED = "no labelled tests there, hence no accuracy"


def header(plan: Plan, heading: str, command: str) -> str:
    """What was compared, and how to do it again; above the tables.

    Dates and versions are those of the trainings, not of the moment the text is made.
    """
    from .about import about  # reads every result

    lines = [f"## {heading}", "", f"    {command}", "", *about(plan)]
    return "\n".join(lines) + "\n\n"


def as_csv(scores: Sequence[Score]) -> str:
    """Every training on a line of its own, accuracies between 0 and 1."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for s in scores:
        weights = " ".join(f"{site}={weight:.6g}" for site, weight in s.weights.items())
        row = (s.variant, s.target, s.seed, s.last, s.selected, s.selected_round, s.seconds)
        writer.writerow(["" if v is None else v for v in (*row, s.bytes, weights)])
    return text.getvalue()


def as_markdown(scores: Sequence[Score], baseline: str, targets: Sequence[str] = ()) -> str:
    """Accuracies of the last round, of the round chosen without labels, and the differences.

    Args:
        scores: of the finished trainings.
        baseline: the variant that the others are measured against; none if it is not among them.
        targets: all there should be; by default those of the scores.
    """
    targets = list(dict.fromkeys([*targets, *(s.target for s in scores)]))
    if not scores:
        return "No training has finished, so there is nothing to show.\n"
    seeds = len({s.seed for s in scores})
    last, selected = (by_target(scores, which, targets) for which in ("last", "selected"))

    def text(values: Values) -> str:
        few = "" if len(values) == seeds else f" ({len(values)} of {counted(seeds, 'seed')})"
        return spread_text(values) + few

    def minus(found: Difference) -> str:
        return difference_text(found) + ("" if found.n == seeds else f" (n = {found.n})")

    parts = ["### Last round", ""]
    parts += [SPREAD, "", *_rows(last, text, targets)] if last else []
    parts += _untested(scores)
    if baseline in last and len(last) > 1:
        parts += ["", f"### Minus {_cell(baseline)}, paired by seed", "", INTERVAL, ""]
        parts += _rows(differences(last, baseline), minus, targets)
    if selected:
        parts += ["", "### Round chosen without labels (highest infomax)", "", CHOSEN, ""]
        parts += _rows(selected, text, targets)
    return "\n".join(parts) + "\n"


def _untested(scores: Sequence[Score]) -> list[str]:
    """A sentence on targets that brought no accuracy, so that no table is just empty."""
    tested = {s.target for s in scores if s.last is not None}
    without = [t for t in dict.fromkeys(s.target for s in scores) if t not in tested]
    return ["", f"{', '.join(map(_cell, without))}: {UNTESTED}."] if without else []


def differences(table: Table, baseline: str) -> dict[str, dict[str, Difference]]:
    """Every variant's difference from the baseline, by target; where they share a seed."""
    base = table[baseline]
    found: dict[str, dict[str, Difference]] = {}
    for name, row in table.items():
        if name != baseline:
            pairs = {t: difference(values, base.get(t, {})) for t, values in row.items()}
            found[name] = {t: d for t, d in pairs.items() if d is not None}
    return found


def spread_text(values: Values) -> str:
    """75.9 ± 0.8, in percent."""
    found = spread(values)
    return f"{100 * found.mean:.1f}" + ("" if found.std is None else f" ± {100 * found.std:.1f}")


def difference_text(found: Difference) -> str:
    """+9.4 [+5.1, +13.7], in points."""
    text = f"{100 * found.mean:+.1f}"
    if found.low is None or found.high is None:
        return text
    return f"{text} [{100 * found.low:+.1f}, {100 * found.high:+.1f}]"


def columns(table: Mapping[str, Mapping[str, object]], targets: Sequence[str] = ()) -> list[str]:
    """The targets in order, the mean over them last."""
    found = dict.fromkeys([*targets, *(t for row in table.values() for t in row)])
    mean = any(MEAN in row for row in table.values())
    return [t for t in found if t != MEAN] + [MEAN] * mean


def _rows(
    table: Mapping[str, Mapping[str, T]], text: Callable[[T], str], targets: Sequence[str]
) -> list[str]:
    heads = columns(table, targets)
    body = [
        [name, *(text(row[h]) if h in row else NOTHING for h in heads)]
        for name, row in table.items()
    ]
    return markdown(["", *heads], body)


def markdown(
    heads: Sequence[str], body: Sequence[Sequence[str]], numbers: bool = True
) -> list[str]:
    """A table whose source can be read too; columns after the first are numbers, or not."""
    rows = [[_cell(text) for text in row] for row in (heads, *body)]
    widths = [max(3, *(len(row[i]) for row in rows)) for i in range(len(heads))]

    def line(cells: Sequence[str]) -> str:
        sides = [str.ljust, *[str.rjust if numbers else str.ljust] * (len(widths) - 1)]
        padded = (side(c, w) for side, c, w in zip(sides, cells, widths, strict=True))
        return f"| {' | '.join(padded)} |"

    end = ":" if numbers else "-"
    rule = ["-" * widths[0], *("-" * (w - 1) + end for w in widths[1:])]
    return [line(rows[0]), line(rule), *map(line, rows[1:])]


def _cell(text: str) -> str:
    """A name as a table's cell takes it."""
    return printable(text).replace("|", "\\|")


__all__ = ["as_csv", "as_markdown", "header"]
