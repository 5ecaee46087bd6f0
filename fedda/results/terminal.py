"""A run's results as tables for a terminal."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fedda.results import read
from fedda.results.remarks import doubted, remarks_on

NOTHING = "–"

# What can be shown, the most useful first: key in a round's entry, heading, format.
_MEASURES = {
    "accuracy": ("accuracy in %", lambda value: f"{100 * value:.1f}"),
    "infomax": ("infomax in nats", lambda value: f"{value:.3f}"),
    "loss": ("training loss", lambda value: f"{value:.3f}"),
}
_MOST_EVENTS = 20


def table(results: read.Results) -> RenderableType:
    """All tables and notes about a run, for a rich console."""
    report = read.summary(results)
    parts: list[RenderableType] = [_scores(report), *map(Text, _notes(report, results))]
    parts += _by_class(results)
    if any(m["weights"] for m in report["methods"].values()):
        parts += ["", _weights(report, results["sites"])]
    parts += ["", _bytes(report), "", *_events(report), *_doubts(results)]
    return Group(*parts)


def scores(
    report: dict[str, Any], method: str, number: Callable[[float], str]
) -> Iterator[tuple[str, str, str, str, float]]:
    """Yield a row for a method, then one per target, or per seed, if there are several.

    A row is a name, the scores of the last round, of that refined at the target, and of the
    selected round, and seconds.
    """

    def text(value: float | None) -> str:
        return NOTHING if value is None else number(value)

    def mean(stat: dict[str, Any]) -> str:
        spread = "" if stat["std"] is None else f" ± {number(stat['std'])}"
        return text(stat["mean"]) + spread

    def chosen(value: str, at: int | None) -> str:
        return value if at is None else f"{value} (round {at})"

    def row(name: str, of: dict[str, Any]) -> tuple[str, str, str, str, float]:
        selected, rounds = mean(of["selected"]), of["selected_rounds"]
        if len(rounds) == 1:
            selected = chosen(selected, rounds[0])
        return name, mean(of["last"]), mean(of["refined"]), selected, sum(of["seconds"])

    m, seeds = report["methods"][method], report["seeds"]
    yield row(read.title(report, method), m)
    for target, of_target in m["targets"].items():
        yield row(f"on {read.printable(target)}", of_target)
    if m["targets"]:
        return
    for i, seed in enumerate(seeds if len(seeds) == len(m["seconds"]) > 1 else ()):
        last, refined, best = (
            text(m[which]["values"][i]) for which in ("last", "refined", "selected")
        )
        seconds = m["seconds"][i]
        yield f"seed {seed}", last, refined, chosen(best, m["selected_rounds"][i]), seconds


def tests(results: read.Results, name: str = "") -> int:
    """How many labelled test images a target has; without a name, all targets of the run."""
    chosen = [name] if name else read.targets(results)
    return sum(s.get("tested") or 0 for s in results["sites"] if s["name"] in chosen)


def untested(results: read.Results) -> str:
    """Why the target has no accuracy, as words that follow its name."""
    if (results.get("config") or {}).get("run.evaluate", True) is False:
        return "was not asked for it (run.evaluate is false)"
    return "gave no test results" if tests(results) else "brought no labelled tests"


def _scores(report: dict[str, Any]) -> Table:
    heading, number = _MEASURES[report["measure"]]
    where = "over the sources" if report["measure"] == "loss" else f"on {report['target']}"
    shown = _table(f"{heading} {where}")
    shown.add_column("method")
    shown.add_column("last round", justify="right")
    shown.add_column("refined", justify="right")
    shown.add_column("selected round", justify="right")
    shown.add_column("time", justify="right")
    for method in report["methods"]:
        style, indent = "bold" if method == report["method"] else "", ""
        for name, *texts, seconds in scores(report, method, number):
            shown.add_row(indent + escape(name), *texts, read.duration(seconds), style=style)
            style, indent = "dim", "  "
        shown.add_section()
    return shown


def _by_class(results: read.Results) -> list[RenderableType]:
    """The accuracy of each class at the target, of the last round and refined."""
    found = {
        f"{read.short_title(results, method)}{', refined' * (which == 'refined')}": accuracies
        for method in results["trainings"]
        for which in ("last", "refined")
        if (accuracies := read.by_class(results, method, which))
    }
    if not found:
        return []
    shown = _table("accuracy in % by class")
    shown.add_column("class")
    for heading in found:
        shown.add_column(escape(heading), justify="right")
    for name, *values in zip(results["classes"], *found.values(), strict=True):
        cells = (NOTHING if v is None else _between(*v) for v in values)
        shown.add_row(escape(read.printable(name)), *cells)
    if all(v is not None and v[0] == v[1] for values in found.values() for v in values):
        return [shown]
    rule = "by class real sites count in tens, which gives bounds; a dash: too few tests"
    return [shown, Text(rule)]


def _between(low: float, high: float) -> str:
    """Two accuracies in percent, or one if they are equal."""
    return "–".join(dict.fromkeys(f"{100 * share:.0f}" for share in (low, high)))


def _notes(report: dict[str, Any], results: read.Results) -> list[str]:
    notes, where = [_over(report)], read.printable(report["target"])
    if len(report["seeds"]) > 1:
        notes[0] += ": mean ± standard deviation"
    if report["measure"] == "accuracy":
        brought = (
            f"{read.counted(tests(results, t), 'labelled test')} at {t}" for t in report["targets"]
        )
        notes.append(read.printable(f"{' and '.join(brought)}, whose labels no training sees"))
    else:
        notes.append(f"no accuracy: {where} {untested(results)}")
    if any(n is not None for m in report["methods"].values() for n in m["selected_rounds"]):
        notes.append(f"selected: {results.get('selected_by', 'by infomax, without labels')}")
    return notes + remarks_on(results)


def _over(report: dict[str, Any]) -> str:
    seeds, targets = len(report["seeds"]), len(report["targets"])
    over = read.counted(report["rounds"], "round") + (f", {seeds} seeds" if seeds > 1 else "")
    return over + (f", {targets} targets" if targets > 1 else "")


def _table(heading: str) -> Table:
    return Table(
        title=Text(read.printable(heading), style="bold"), title_justify="left", box=box.SIMPLE_HEAD
    )


def _weights(report: dict[str, Any], sites: Iterable[dict[str, Any]]) -> Table:
    methods = report["methods"].items()
    weighed = [(read.short_title(report, m), f["weights"]) for m, f in methods if f["weights"]]
    many = [
        read.counted(len(report[of]), of[:-1]) for of in ("targets", "seeds") if len(report[of]) > 1
    ]
    over = f", mean of {' and '.join(many)}" if many else ""
    shown = _table(f"weights in the last round{over}")
    for column in ("site", "role"):
        shown.add_column(column)
    for column in ("examples", *(escape(heading) for heading, _ in weighed)):
        shown.add_column(column, justify="right")
    for site in sites:
        name = site["name"]
        alphas = [f"{w[name]:.3f}" if name in w else NOTHING for _, w in weighed]
        shown.add_row(escape(read.printable(name)), site["role"], f"{site['examples']:,}", *alphas)
    return shown


def _bytes(report: dict[str, Any]) -> Table:
    """The bytes that crossed, exact and rounded to three digits."""
    counts = {method: m["bytes"] for method, m in report["methods"].items()}
    shown = _table(f"bytes that crossed, {_over(report)}")
    shown.add_column("what")
    for method in counts:
        shown.add_column(escape(read.short_title(report, method)), justify="right")
        shown.add_column("", justify="right")

    def add(what: str, values: list[int], style: str = "") -> None:
        pairs = ((f"{v:,}", read.human(v)) if v else (NOTHING, "") for v in values)
        shown.add_row(what, *(cell for pair in pairs for cell in pair), style=style)

    # Keys are like `to source model`. Scalars come last; `to` the sites comes before `from` them.
    keys = {key: key.split(" ", 2) for c in counts.values() for key in c}
    for key in sorted(keys, key=lambda k: (keys[k][2] == "scalars", keys[k][0] == "from", k)):
        way, role, kind = keys[key]
        add(f"{kind} {way} {role}", [c.get(key, 0) for c in counts.values()])
    shown.add_section()
    totals = [sum(c.values()) for c in counts.values()]
    add("in all", totals, style="bold")
    rounds = [m["rounds"] for m in report["methods"].values()]
    add("a round", [round(t / r) for t, r in zip(totals, rounds, strict=True)])
    return shown


def _events(report: dict[str, Any]) -> list[RenderableType]:
    """One line per kind of trouble, with the rounds in which it happened."""
    kinds = read.kinds(report)
    if not kinds:
        return [Text("no troubles")]
    lines = [f"troubles ({len(kinds)})"]
    for (training, site, text), events in list(kinds.items())[:_MOST_EVENTS]:
        numbers = [event["round"] for event in events if "round" in event]
        when = f"round{'s' * (len(numbers) > 1)} {read.spans(numbers)}" if numbers else ""
        about = ", ".join(filter(None, (training, when)))
        lines.append("  " + read.printable(": ".join(filter(None, (about, site, text)))))
    if len(kinds) > _MOST_EVENTS:
        lines.append(f"  and {len(kinds) - _MOST_EVENTS} more, in {read.RESULTS}")
    return [Text(line) for line in lines]


def _doubts(results: read.Results) -> list[RenderableType]:
    """One line per doubt about a training."""
    lines = [f"  {about}, round {round_}: {text}" for about, round_, text in doubted(results)]
    heading = "doubts (signs without labels that a training may have gone wrong)"
    return [Text(heading), *map(Text, lines)] if lines else []
