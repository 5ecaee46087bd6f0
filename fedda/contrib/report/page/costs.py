"""What the run cost: bytes by kind, role and direction, and time by phase, over the rounds."""

from collections import defaultdict

from fedda.results.read import human

from .bars import Layer, bars
from .html import Html, e, join
from .line import Curve, Scale, chart
from .parts import NOTHING, grid, note, section, table
from .rounds import site_looks
from .series import RunSeries

PHASES = {
    "train": ("training: until the last reply", 1),
    "aggregate": ("the server's own work", 3),
    "test": ("testing at the target", 5),
    "checkpoint": ("checkpoint", 4),
    "waiting": ("waiting for sites", 2),
}
UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))
SECONDS = Scale("s", lambda v: f"{v:.3f}", 1, 0, None)


def costs(run: RunSeries) -> Html:
    """Make the sections of bytes and of time."""
    return Html(section("bytes", "Bytes that crossed", _bytes_table(run), _bytes(run)) + _time(run))


def _name(key: str) -> str:
    way, role, kind = key.split(" ", 2)
    return f"{kind} {way} {role}"


def _order(key: str) -> tuple[bool, bool, str]:
    """Sort models before scalars, and bytes to the sites before bytes from them."""
    way, _, kind = key.split(" ", 2)
    return kind == "scalars", way == "from", key


def _bytes_table(run: RunSeries) -> Html:
    counts = {m: run.summary["methods"][m]["bytes"] for m in run.methods}
    keys = sorted({k for c in counts.values() for k in c}, key=_order)
    rows, styles = [], []

    def add(what: str, values: list[int | None], style: str = "") -> None:
        rows.append([what, *(_count(v) if v else NOTHING for v in values)])
        styles.append(style)

    for key in keys:
        add(_name(key), [c.get(key) for c in counts.values()])
    totals = [sum(c.values()) for c in counts.values()]
    done = [sum(len(t["rounds"]) for t in run.results["trainings"][m]) for m in run.methods]
    add("in all", list(totals), "strong")
    add("a round", [round(t / max(d, 1)) for t, d in zip(totals, done, strict=True)])
    head = ["what", *(f"{run.short(m)}, bytes" for m in run.methods)]
    return table(head, rows, styles=styles, label="Bytes by kind, direction and role, all rounds")


def _count(value: int) -> Html:
    """Write bytes exactly and in a unit: beside each other, or one below the other on a phone."""
    return join(e("span", f"{value:,}", class_="pair"), " ", e("span", human(value), class_="pair"))


def _bytes(run: RunSeries) -> Html | None:
    """Draw a figure per method, all with the same scale."""
    by_method = {}
    colours: dict[str, int] = {}
    for method in run.methods:
        keys = sorted(run.keys(method, "bytes"), key=_order)
        values = {k: run.mean_by_round(method, "bytes", k) for k in keys}
        by_method[method] = {k: v for k, v in values.items() if any(v.values())}
    for key in sorted({k for values in by_method.values() for k in values}, key=_order):
        colours[key] = (1 + len(colours)) % 8
    highest = max((_tallest(list(values.values())) for values in by_method.values()), default=0)
    factor, unit = next(((f, u) for f, u in UNITS if highest >= f), (1, "B"))
    per = f", mean of the {run.every}" if run.over else ""
    figures = []
    for method, values in by_method.items():
        layers = [Layer(_name(k), colours[k], v) for k, v in values.items()]
        figures.append(
            bars(
                f"{run.short(method)}: bytes per round",
                f"{unit}{per}",
                layers,
                run.rounds,
                human,
                factor=1 / factor,
                high=highest,
            )
        )
    return grid(*figures)


def _tallest(values: list[dict[int, float]]) -> float:
    sums: defaultdict[int, float] = defaultdict(float)
    for each in values:
        for r, v in each.items():
            sums[r] += v
    return max(sums.values(), default=0)


def _time(run: RunSeries) -> Html:
    per = f", mean of the {run.every}" if run.over else ""
    layers: dict[str, list[Layer]] = {}
    for method in run.methods:
        known = run.keys(method, "phases")
        order = [p for p in PHASES if p in known] + [p for p in known if p not in PHASES]
        layers[method] = [
            Layer(*PHASES.get(p, (p, 6)), run.mean_by_round(method, "phases", p)) for p in order
        ] or [Layer("round, without its checkpoint", 1, _whole(run, method))]
    highest = max(_tallest([dict(x.values) for x in of]) for of in layers.values())
    figures: list[Html | None] = [
        bars(f"{run.short(m)}: time per round", f"s{per}", of, run.rounds, _seconds, high=highest)
        for m, of in layers.items()
    ]
    split = any(run.keys(m, "phases") for m in run.methods)
    remark = f"One training, mean of the {run.every}. " if run.over else "One training. "
    remark += (
        "The server checks and adds replies as they arrive, while other sites still work. Its own "
        "work is therefore only the time in which no site was working."
        if split
        else "This run's results do not divide a round's time into phases."
    )
    figures += [_sites(run, m) for m in run.methods]
    shown = grid(*figures, pairs=True)
    return section("time", "Time", _time_table(run, layers), note(remark), shown)


def _seconds(value: float) -> str:
    """Write a time in seconds, as on the axis, without minutes."""
    return f"{value:.2f} s" if value < 100 else f"{value:,.0f} s"


def _whole(run: RunSeries, method: str) -> dict[int, float]:
    seeds = run.numbers(method, "seconds")
    numbers = sorted({r for values in seeds.values() for r in values})
    return {
        r: sum(v[r] for v in seeds.values() if r in v) / sum(r in v for v in seeds.values())
        for r in numbers
    }


def _time_table(run: RunSeries, layers: dict[str, list[Layer]]) -> Html:
    names = list(dict.fromkeys(x.name for of in layers.values() for x in of))
    totals = {m: {x.name: sum(x.values.values()) for x in of} for m, of in layers.items()}
    rows = []
    for name in names:
        row: list[str] = [name]
        for method in run.methods:
            value, whole = totals[method].get(name), sum(totals[method].values())
            share = f"{100 * value / whole:.0f} %" if value is not None and whole else ""
            row += [NOTHING if value is None else _seconds(value), share]
        rows.append(row)
    head = ["phase", *(x for m in run.methods for x in (run.short(m), ""))]
    return table(head, rows, label="Time by phase")


def _sites(run: RunSeries, method: str) -> Html | None:
    looks = site_looks(run)
    names = sorted(run.keys(method, "site_seconds"))
    every = [Curve(s, looks.get(s, "k7 d2"), run.inner(method, "site_seconds", s)) for s in names]
    slowest = sorted(every, key=lambda c: -max(c.mean.values(), default=0))
    shown = {c.name for c in slowest[:8]}
    curves = [Curve(c.name, c.css, c.seeds, drawn=c.name in shown) for c in slowest]
    remark = "As measured by each site, without the time on the network."
    if len(curves) > 8:
        remark += " The figure shows the slowest eight; the table has all."
    heading = f"{run.short(method)}: training time at the sites"
    return chart(heading, curves, SECONDS, run.rounds, remark=remark, thin=False)
