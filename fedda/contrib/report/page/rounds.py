"""The run round by round: accuracy, weights, losses, and other numbers of a method."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from fedda.maths import schedule

from .headline import SCALES
from .html import Html, grid, join, look, section
from .line import Curve, Scale, chart
from .series import RunSeries, Seeds, is_number

PERCENT = Scale("confidence, share of examples (%)", lambda v: f"{100 * v:.1f}", 100, 0, 100)
PLAIN = Scale("as the method gives it", lambda v: f"{v:.4g}")
SHARE = Scale("share (%)", lambda v: f"{100 * v:.1f}", 100, 0, 100)
LOSS = Scale("loss", PLAIN.text)
WEIGHT = Scale("share of the average", lambda v: f"{v:.3f}", 1, 0, None)
LISTED = 12  # most sites that a figure names
THIN = 60  # most thin lines, one per seed, in a figure

# Numbers of a round with a figure of their own; any other gets one named after its key.
FIGURES = {
    "infomax": ("Infomax on the target's training examples", Scale("nats, label-free", PLAIN.text)),
    "test_loss": ("Test loss on the target", Scale("cross entropy (nats)", PLAIN.text)),
    "loss": ("Training loss, mean over the sources", LOSS),
    "distillation": ("Distillation loss at the target", LOSS),
    "entropy": ("Entropy of the target's answers", LOSS),
    "discrepancy": ("Discrepancy of the two heads at the target", LOSS),
    "predicted": ("Classes that the model gives at the target", Scale("classes", PLAIN.text)),
    "focused": ("Whether the focus weighs the sources", Scale("1: yes, 0: examples", PLAIN.text)),
    "clipped": ("Gradients shortened by exchange.clip", SHARE),
    "discriminator-loss": ("Discriminator's loss", LOSS),
    "discriminator-accuracy": ("Images whose domain the discriminator sees", SHARE),
    "mmd": ("Squared distance of the sites' mean embeddings (MMD)", LOSS),
}
HEADS = {"reconstruction": "FedDaDiL-R", "ensemble": "FedDaDiL-E", "encoder": "FedAvg's head"}
PARTS = ("accuracy-", "reconstruction/")  # beginnings of the names of numbers that share a figure
OWN = {"round", "seconds", "tested", "accuracy", "kept", *FIGURES}


def rounds(run: RunSeries) -> Html:
    """Make the sections of everything that has a value per round."""
    shown = [_score(run), *(_weights(run, m) for m in run.methods)]
    losses = [_figure(run, key) for key in FIGURES if key != run.measure]
    own = [_heads(run), _errors(run), _gate_figure(run)]
    more = [_figure(run, key) for key in _others(run)]
    return join(
        section("accuracy", "Accuracy and weights", grid(*shown)),
        section("training", "Training", grid(*losses, *own, *more)),
    )


def _score(run: RunSeries) -> Html | None:
    names = {
        "accuracy": f"Accuracy on {run.target}",
        "infomax": f"No labelled tests: infomax on {run.target}",
        "loss": "Nothing was tested: training loss",
    }
    if len(run.targets) == 1:
        curves = [
            Curve(run.short(m), _style(i), run.numbers(m, run.measure), run.selected(m))
            for i, m in enumerate(run.methods)
        ]
    else:
        curves = [_on(run, m, t) for m in run.methods for t in run.targets]
    remarks = []
    if len(run.seeds) > 1:
        remarks.append("Bold: mean over the seeds; thin: each seed.")
    if any(run.selected(m) for m in run.methods):
        remarks.append("Ringed: the round chosen without labels.")
    axes = {"accuracy": "accuracy (%)", "infomax": "infomax (nats)", "loss": "loss"}
    unit = replace(SCALES[run.measure], unit=axes[run.measure])
    troubles = Counter(event["round"] for event in run.results["events"] if "round" in event)
    if troubles:
        remarks.append("Dots on the axis: rounds with troubles.")
    heading, remark = names[run.measure], " ".join(remarks)
    return chart(heading, curves, unit, run.rounds, remark=remark, tall=True, troubles=troubles)


def _on(run: RunSeries, method: str, target: str) -> Curve:
    """Make a method's curve on one of several targets: a colour per target, a baseline dashed."""
    css = look(run.targets.index(target)) + " d1" * (method != run.own)
    seeds = run.numbers(method, run.measure, target)
    return Curve(f"{run.short(method)} on {target}", css, seeds, run.selected(method))


def _style(place: int) -> str:
    """Style the run's own method blue, its baseline gray and dashed, others in other colours."""
    return ["k1", "k7 d1"][place] if place < 2 else f"k{place} d{place % 4}"


def _weights(run: RunSeries, method: str) -> Html | None:
    sites = run.keys(method, "weights")
    every = {site: run.inner(method, "weights", site, 0.0) for site in sites}
    looks = site_looks(run)
    curves = [Curve(s, looks.get(s, "k7 d2"), seeds) for s, seeds in every.items()]
    curves.sort(key=lambda c: (c.name not in run.targets, -_last_value(c)))
    biggest = {c.name for c in sorted(curves, key=_last_value)[-LISTED:]} | {*run.targets}
    curves = [Curve(_name(run, c.name), c.css, c.seeds, drawn=c.name in biggest) for c in curves]
    left_out = len(curves) - sum(c.drawn for c in curves)
    thin = len(run.labels) * sum(c.drawn for c in curves) <= THIN
    remark = f"Mean over the {run.every}. "
    if thin:
        remark = f"Bold: mean over the {run.every}; thin: each {run.each}. "
    remark *= len(run.labels) > 1
    remark += _together([c for c in curves if c.drawn])
    remark += f"{left_out} more sites with less weight are in the table." * (left_out > 0)
    heading = f"Weight of each site in {run.short(method)}'s average"
    return chart(heading, curves, WEIGHT, run.rounds, remark=remark, thin=thin, tall=True)


def _together(curves: Sequence[Curve]) -> str:
    """Name the curves that lie on one another, as those of equal weights do."""
    alike: dict[tuple[float, ...], list[str]] = {}
    for curve in curves:
        alike.setdefault(tuple(round(v, 3) for v in curve.mean.values()), []).append(curve.name)
    return "".join(
        f"{', '.join(names[:-1])} and {names[-1]} lie on one another. "
        for names in alike.values()
        if len(names) > 1
    )


def _last_value(curve: Curve) -> float:
    mean = curve.mean
    return mean[max(mean)] if mean else 0.0


def _name(run: RunSeries, site: str) -> str:
    return f"{site} (target)" if site in run.targets else site


def site_looks(run: RunSeries) -> dict[str, str]:
    """Return each site's colour and dashes, the same in all figures; targets in text colour."""
    ink = {target: f"k0 d{1 + i % 3}" for i, target in enumerate(run.targets)}
    return {s: look(i + 1) for i, s in enumerate(run.sources)} | ink  # the first is the method's


def _figure(run: RunSeries, key: str) -> Html | None:
    heading, scale = FIGURES.get(key, (key.replace("_", " ").replace("-", " "), PLAIN))
    curves = [
        Curve(run.short(m), _style(i), run.numbers(m, key)) for i, m in enumerate(run.methods)
    ]
    return chart(heading, curves, scale, run.rounds)


def _others(run: RunSeries) -> list[str]:
    """Return the names of numbers that have no figure of their own in this module."""
    keys = (
        k
        for m in run.methods
        for _, entry in run.entries(m)
        for k, v in entry.items()
        if is_number(v)
    )
    return sorted(k for k in set(keys) - OWN if not k.startswith(PARTS))


def _parts(run: RunSeries, beginning: str) -> dict[str, Seeds]:
    """Return the own method's numbers with this beginning of their names, by the rest of it."""
    keys = (k for _, entry in run.entries(run.own) for k in entry if k.startswith(beginning))
    numbers = {k: run.numbers(run.own, k) for k in dict.fromkeys(keys)}
    return {k.removeprefix(beginning): seeds for k, seeds in numbers.items()}


def _heads(run: RunSeries) -> Html | None:
    """Draw the accuracy of each head that FedDaDiL's target could predict with."""
    curves = [
        Curve(HEADS.get(name, name), look(i), seeds)
        for i, (name, seeds) in enumerate(_parts(run, "accuracy-").items())
    ]
    unit = replace(SCALES["accuracy"], unit="accuracy (%)")
    return chart(f"Accuracy on {run.target} by head", curves, unit, run.rounds)


def _errors(run: RunSeries) -> Html | None:
    """Draw how well each site's barycenter of the atoms fits its data, as the site measured it."""
    looks = site_looks(run)
    curves = [
        Curve(_name(run, site), looks.get(site, "k7 d2"), seeds)
        for site, seeds in _parts(run, "reconstruction/").items()
    ]
    inked = {_name(run, target) for target in run.targets}
    curves = [
        Curve(c.name, c.css, c.seeds, drawn=i < LISTED or c.name in inked)
        for i, c in enumerate(curves)
    ]
    unit = Scale("transport cost of points, whose mean |z|² is 1", PLAIN.text)
    return chart("Reconstruction error of each site", curves, unit, run.rounds)


def _gate_figure(run: RunSeries) -> Html | None:
    """Draw the gate of a method's teachers, from its settings, and the share that passed it."""
    curves = [
        Curve(f"{run.short(m)}: examples kept", _style(i), run.numbers(m, "kept"))
        for i, m in enumerate(run.methods)
    ]
    if not any(c.seeds for c in curves):
        return None
    gates = gate(run)
    if gates:
        curves.append(Curve("confidence a teacher needs (gate)", "k2 d2", {"": gates}))
    remark = (
        "The gate follows from the settings gate.low, gate.high and gate.reach." if gates else ""
    )
    return chart("Gate, and examples that pass it", curves, PERCENT, run.rounds, remark=remark)


def gate(run: RunSeries) -> dict[int, float]:
    """Return the gate of every round; empty if no method of the results has such settings."""
    found = [f"{m}.gate" for m in run.methods if f"{m}.gate.low" in run.config]
    if not found:
        return {}
    low, high = (run.config.get(f"{found[0]}.{end}") for end in ("low", "high"))
    if not isinstance(low, int | float) or not isinstance(high, int | float):
        return {}
    rounds = run.config.get("rounds", run.rounds)
    reach = run.config.get(f"{found[0]}.reach", True)
    return {r: schedule.gate(r, rounds, low, high, bool(reach)) for r in range(1, run.rounds + 1)}
