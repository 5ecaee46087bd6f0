"""A model's card, from its run's results: a template and four tables; no site and no path."""

from collections import Counter
from collections.abc import Mapping
from html import escape
from statistics import fmean, stdev
from string import Template
from typing import Any

from fedda.halves import REFERENCE
from fedda.results.escaping import markdown
from fedda.wire.packing import COUNTED

from . import read
from .remarks import adapted_elsewhere

CARD = "MODEL_CARD.md"
# Sections whose settings can change the model; others hold names, addresses and waiting times.
TOLD = ("input", "model", "privacy", "train", "wire", "guard", "secure")
TEMPLATE = Template("""\
# $title: $n classes

A classifier (`$network`, input $shape) of $classes. It was trained by federated unsupervised
domain adaptation with $title: labelled sources and a target without labels trained together, and no
example left its site. Made by fedda $fedda with Flower $flwr and PyTorch $torch.

## Data

$data

## How good it is

$measured

$quality

## Limits

- It is adapted to the target's examples. For others, the sources' included, it may be worse than a
  model that has not adapted.
- A model can reveal something about the examples that it was trained on.
$limits
## What left the sites

$crossed

$protected

## Settings

Those that are no defaults:

$settings

## Use

    fedda predict model.safetensors IMAGES --out predictions.csv
""")
HIDDEN = {
    "sum": "Secure sums: the server learned the sum of the sources' models, and no single one",
    "sealed": "Sealed models: the server saw the models' mean alone, and the target saw each",
}


def card(results: read.Results, defaults: Mapping[str, Any]) -> str:
    """The card of a run, as Markdown; settings that have their default are not listed."""
    method, config, sites = results["method"], results["config"], results["sites"]
    trainings = [t for every in results["trainings"].values() for t in every]
    sent: Counter[str] = Counter()
    for training in trainings:
        sent.update(training["bytes"])
    ways = {k: [sent[f"from {role} {k}"] for role in ("source", "target")] for k in COUNTED}
    measured = "After the last round, over the seeds: mean ± standard deviation."
    if not any(site["tested"] and site["role"] == "target" for site in sites):
        measured += " The target has no labelled tests, so nobody has measured its accuracy."
    if {*results["trainings"]} == {method} - {REFERENCE}:
        measured += " No baseline was trained in this run, so a gain is not known."
    doubts = Counter(d["what"] for t in results["trainings"][method] for d in t.get("doubts", ()))
    limits = [f"- Signs that trainings may have gone wrong: {n} x {k}." for k, n in doubts.items()]
    if adapted_elsewhere(results):
        limits.append(
            "- The adapted model stays at the target: the run's own file has not adapted."
        )
    changed = [
        (f"`{key}`", f"`{value}`")
        for key, value in config.items()
        if key.partition(".")[0] in (*TOLD, method) and value != defaults.get(key)
    ]
    kept = [("`rounds`", f"`{config['rounds']}`"), ("seeds", read.spans(results["seeds"]))]
    data = [(s["role"], f"{s['examples']:,}", f"{s['tested']:,}") for s in sites]
    crossed = [(k, *map(read.human, sizes)) for k, sizes in ways.items() if any(sizes)]
    quality = [
        (
            read.title(results, name),
            _over([t["final_accuracy"] for t in every]) or "not tested",
            _over([(t.get(read.REFINED) or {}).get("accuracy") for t in every]),
        )
        for name, every in results["trainings"].items()
    ]
    return TEMPLATE.substitute(
        title=read.title(results, method),
        n=len(results["classes"]),
        network=config["model.name"],
        shape=" x ".join(map(str, results["shape"])),
        classes=escape(", ".join(map(read.printable, results["classes"])), quote=False),
        **{name: results["versions"][name] for name in ("fedda", "flwr", "torch")},
        data="\n".join(markdown(["site", "training examples", "labelled tests"], data)),
        measured=measured,
        quality="\n".join(markdown(["", "accuracy at the target", "refined there"], quality)),
        limits="".join(f"{line}\n" for line in limits),
        crossed="\n".join(markdown(["in all trainings", "from sources", "from targets"], crossed)),
        protected="\n".join(_protected(results, config, trainings, sent)),
        settings="\n".join(markdown(["", ""], [*kept, *changed])),
    )


def _protected(
    results: read.Results,
    config: Mapping[str, Any],
    trainings: list[Mapping[str, Any]],
    sent: Mapping[str, int],
) -> list[str]:
    """What hid models, gradients and examples, and what that does not cover."""
    last = {read.title(results, name): every[-1] for name, every in results["trainings"].items()}
    hides = {title: HIDDEN.get(training.get("hidden", "")) for title, training in last.items()}
    lines = [f"- {title}: {how}." for title, how in hides.items() if how]
    if any(" gradient" in key for key in sent):
        if config.get("exchange.masked"):
            lines.append("- Masked gradients: the server learned their sum, and no single one.")
        if noise := config.get("exchange.noise"):
            lines.append(f"- Noise of {noise:g} on exchanged gradients: for windows of examples.")
    if noise := config.get("privacy.noise"):
        said = [r["epsilon"] for t in trainings for r in t["rounds"] if "epsilon" in r]
        spent = f"epsilon {max(said):.3g}" if said else "which epsilon was spent no source said"
        lines.append(
            f"- Differential privacy of the sources' examples (noise {noise:g}): {spent}, at the "
            "delta of the source's policy. The target's examples have none."
        )
    none = "Nothing hid single models or gradients from the server, and no noise was added."
    return lines or [none]


def _over(shares: list[float | None]) -> str:
    known = [100 * share for share in shares if share is not None]
    if len(known) > 1:
        return f"{fmean(known):.1f} ± {stdev(known):.1f} %"
    return f"{known[0]:.1f} %" if known else ""
