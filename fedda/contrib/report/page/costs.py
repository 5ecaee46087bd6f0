"""What the run cost: bytes by kind, role and direction, and time by phase, over the rounds."""

from collections.abc import Sequence

from fedda.results.read import human

from .html import NOTHING, Html, e, grid, join, look, note, section, table
from .line import Curve, Scale, chart
from .rounds import site_looks
from .series import RunSeries

PHASES = {
    "train": "training: until the last reply",
    "aggregate": "the server's own work",
    "test": "testing at the target",
    "checkpoint": "checkpoint",
    "waiting": "waiting for sites",
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
    """Draw a figure per method, all in the same unit."""
    curves = {
        m: _parts(run, m, "bytes", sorted(run.keys(m, "bytes"), key=_order)) for m in run.methods
    }
    every = (v for of in curves.values() for c in of for v in c.mean.values())
    highest = max(every, default=0)
    factor, unit = next(((f, u) for f, u in UNITS if highest >= f), (1, "B"))
    scale = Scale(f"{unit}{_per(run)}", human, 1 / factor, 0, None, exact=True)
    return grid(
        *(
            chart(f"{run.short(m)}: bytes per round", of, scale, run.rounds, thin=False)
            for m, of in curves.items()
        )
    )


def _parts(run: RunSeries, method: str, what: str, keys: Sequence[str]) -> list[Curve]:
    """A curve for each part of what a round took that is not zero throughout."""
    names = PHASES if what == "phases" else {key: _name(key) for key in keys}
    curves = (
        Curve(names.get(key, key), look(i), run.inner(method, what, key, 0.0))
        for i, key in enumerate(keys)
    )
    return [curve for curve in curves if any(curve.mean.values())]


def _per(run: RunSeries) -> str:
    return f", mean of the {run.every}" if run.over else ""


def _time(run: RunSeries) -> Html:
    curves: dict[str, list[Curve]] = {}
    for method in run.methods:
        known = run.keys(method, "phases")
        order = [p for p in PHASES if p in known] + [p for p in known if p not in PHASES]
        curves[method] = _parts(run, method, "phases", order) or [
            Curve("round, without its checkpoint", look(0), run.numbers(method, "seconds"))
        ]
    scale = Scale(f"s{_per(run)}", _seconds, 1, 0, None, exact=True)
    figures = [
        chart(f"{run.short(m)}: time per round", of, scale, run.rounds, thin=False)
        for m, of in curves.items()
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
    return section("time", "Time", _time_table(run, curves), note(remark), shown)


def _seconds(value: float) -> str:
    """Write a time in seconds, as on the axis, without minutes."""
    return f"{value:.2f} s" if value < 100 else f"{value:,.0f} s"


def _time_table(run: RunSeries, curves: dict[str, list[Curve]]) -> Html:
    names = list(dict.fromkeys(x.name for of in curves.values() for x in of))
    totals = {m: {x.name: sum(x.mean.values()) for x in of} for m, of in curves.items()}
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
