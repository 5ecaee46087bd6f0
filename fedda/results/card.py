"""A run's model card, `MODEL_CARD.md`: what its model is, how good, and where it is of no use.

Mitchell et al., Model Cards for Model Reporting, FAT* 2019, https://arxiv.org/abs/1810.03993. It
is made to be handed on with the model, so it has neither names of sites nor paths nor addresses.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from fedda.comparison.tables import markdown
from fedda.halves import REFERENCE
from fedda.wire import COUNTED

from . import read

CARD = "MODEL_CARD.md"
# Sections whose settings can change the model; others hold names, addresses and waiting times.
TOLD = ("input", "model", "privacy", "train", "wire", "guard")


def card(results: read.Results, defaults: Mapping[str, Any]) -> str:
    """The card of a run, as Markdown.

    Args:
        results: the content of results.json.
        defaults: every setting's default; those that the run left as they are, are not listed.
    """
    title = read.title(results, results["method"])
    lines = [f"# {title}: {len(results['classes'])} classes", "", _what(results, title), ""]
    lines += ["## Data", "", *_data(results), ""]
    lines += ["## How good it is", "", *_quality(results), ""]
    lines += ["## Limits", "", *_limits(results), ""]
    lines += ["## What left the sites", "", *_crossed(results), ""]
    lines += [*_protected(results), ""]
    lines += ["## Settings", "", *_settings(results, defaults), ""]
    lines += ["## Use", "", "    fedda predict model.safetensors IMAGES --out predictions.csv", ""]
    return "\n".join(lines)


def _what(results: read.Results, title: str) -> str:
    config, versions = results["config"], results["versions"]
    shape = " x ".join(map(str, results["shape"]))
    classes = ", ".join(map(read.printable, results["classes"]))
    return (
        f"A classifier (`{config['model.name']}`, input {shape}) of {classes}. It was trained by "
        f"federated unsupervised domain adaptation with {title} (`{results['method']}`): labelled "
        "sources and a target without labels trained together, and no image left its site. "
        f"Made by fedda {versions['fedda']} with Flower {versions['flwr']} and PyTorch "
        f"{versions['torch']}."
    )


def _data(results: read.Results) -> list[str]:
    rows, numbers = [], Counter[str]()
    for site in results["sites"]:
        numbers[site["role"]] += 1
        name = f"{site['role']} {numbers[site['role']]}"
        rows.append([name, f"{site['examples']:,}", f"{site['tested']:,}"])
    return markdown(["site", "training examples", "labelled tests"], rows)


def _quality(results: read.Results) -> list[str]:
    rows = []
    seeds = read.counted(len(results["seeds"]), "seed")
    for method, trainings in results["trainings"].items():
        known = [t["final_accuracy"] for t in trainings if t["final_accuracy"] is not None]
        accuracy = _over(known) if known else "not tested"
        reported = [t.get(read.REFINED) or {} for t in trainings]
        refined = [t["accuracy"] for t in reported if "accuracy" in t]
        rows.append([read.title(results, method), accuracy, _over(refined) if refined else ""])
    lines = markdown(["", "accuracy at the target", "refined there"], rows)
    about = f"After the last round, over {seeds}: mean ± standard deviation."
    if any(site["tested"] and site["role"] == "target" for site in results["sites"]):
        about += " The accuracy is of labelled tests of the target, which no training read."
    else:
        about += " The target has no labelled tests, so nobody has measured its accuracy."
    if {*results["trainings"]} == {results["method"]} - {REFERENCE}:
        about += " No baseline was trained in this run, so a gain is not known."
    return [about, "", *lines]


def _limits(results: read.Results) -> list[str]:
    counts: Counter[str] = Counter()
    for training in results["trainings"][results["method"]]:
        counts.update(doubt["what"] for doubt in training.get("doubts", ()))
    lines = [
        "- It is adapted to the target's images. For others, the sources' included, it may be "
        "worse than a model that has not adapted.",
        "- A model can reveal something about the images that it was trained on.",
    ]
    if counts:
        named = ", ".join(f"{what} ({n})" for what, n in sorted(counts.items()))
        lines.append(
            f"- Signs that trainings may have gone wrong: {named}; the report explains them."
        )
    if read.adapted_elsewhere(results):
        lines.append("- The adapted model stays at the target: the run's own file has not adapted.")
    if results["untested"]:
        lines.append("- The last test of some trainings did not come back.")
    return lines


def _crossed(results: read.Results) -> list[str]:
    total: Counter[str] = Counter()
    for trainings in results["trainings"].values():
        for training in trainings:
            total.update(training["bytes"])
    rows = []
    for kind in COUNTED:
        sent = [sum(n for k, n in total.items() if k == f"{way} {role} {kind}")
                for way, role in (("from", "source"), ("from", "target"))]  # fmt: skip
        if any(sent):
            rows.append([kind, *map(read.human, sent)])
    return markdown(["in all trainings", "from sources", "from targets"], rows)


def _protected(results: read.Results) -> list[str]:
    """Say how models, gradients and examples were protected, and what that does not cover."""
    config, methods = results["config"], list(results["trainings"])
    lines = []
    hidden = {name: results["trainings"][name][-1].get("hidden") for name in methods}
    if summing := [name for name in methods if hidden[name] == "sum"]:
        titles = " and ".join(read.title(results, name) for name in summing)
        lines.append(
            f"- Secure sums (`secure=sum`): in {titles} the server learned the sum of the sources' "
            "models, and no single one. The target's model is not in the sum."
        )
    for name in methods:
        if hidden[name] == "sealed":
            lines.append(
                f"- Sealed models (`{name}.relay=sealed`): in {read.title(results, name)} the "
                "server relayed the sources' models encrypted and saw their mean alone; the target "
                "saw each."
            )
    summed = any(" gradient" in key for t in _trainings(results) for key in t["bytes"])
    if summed and config.get("exchange.masked"):
        lines.append(
            "- Masked gradients (`exchange.masked=true`): the server learned the sum of the sites' "
            "gradients, and no single one."
        )
    if summed and config.get("exchange.noise"):
        lines.append(
            f"- Noise on exchanged gradients (`exchange.noise={config['exchange.noise']:g}`): it "
            "protects windows of examples, not single ones."
        )
    if noise := config.get("privacy.noise"):
        lines.append(
            f"- Differential privacy of the sources' examples (`privacy.noise={noise:g}`, "
            f"`privacy.clip={config['privacy.clip']:g}`): {_spent(results)}. The target's examples "
            "have none."
        )
    if not lines:
        return ["Nothing hid single models or gradients from the server, and no noise was added."]
    return lines


def _spent(results: read.Results) -> str:
    """Say which epsilon the sources have spent, as they said it in their rounds."""
    said = [r["epsilon"] for t in _trainings(results) for r in t["rounds"] if "epsilon" in r]
    if not said:
        return "no source said which epsilon it has spent"
    return (
        f"the largest epsilon that a source said it had spent is {max(said):.3g}, over all its "
        "runs until then and at the delta of its own policy (1e-5 if that names none)"
    )


def _trainings(results: read.Results) -> Iterator[Mapping[str, Any]]:
    for trainings in results["trainings"].values():
        yield from trainings


def _settings(results: read.Results, defaults: Mapping[str, Any]) -> list[str]:
    sections = (*TOLD, results["method"])
    changed = [
        [f"`{key}`", f"`{value}`"]
        for key, value in results["config"].items()
        if key.partition(".")[0] in sections and value != defaults.get(key)
    ]
    whole = [["`rounds`", f"`{results['config']['rounds']}`"]]
    seeds = [["seeds", ", ".join(map(str, results["seeds"]))]]
    return ["Those that are no defaults:", "", *markdown(["", ""], [*whole, *seeds, *changed])]


def _over(shares: Sequence[float]) -> str:
    mean = sum(shares) / len(shares)
    if len(shares) == 1:
        return read.percent(mean)
    spread = (sum((s - mean) ** 2 for s in shares) / (len(shares) - 1)) ** 0.5
    return f"{100 * mean:.1f} ± {100 * spread:.1f} %"
