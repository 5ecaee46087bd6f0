"""Evidence before export: what crossed, which attacks were tried, and what is not protected."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedda.results.read import human

from . import attacked
from .html import Html, e
from .page import document
from .parts import note, section, table

MEANING = {
    "images": "images recovered from a step over the site's least images or more",
    "membership": "members found, at one in a thousand others taken for members",
    "shares": "class shares told: 0 as by guesses, 1 all of them",
}
ATTACKS = ("update", "membership", "shares", "properties")
RARE = 0.001  # others taken for members


def figures(found: Mapping[str, Any], least: int) -> dict[str, float | None]:
    """The worst of each kind -> shares from 0 to 1; None if the attack was not tried.

    Args:
        found: what the attacks found, as in attacks.json.
        least: images over which this site takes a step, at least.
    """
    return {"images": _images(found, least), "membership": _members(found), "shares": _told(found)}


def above(found: Mapping[str, float | None], most: Mapping[str, float | None]) -> list[str]:
    """The figures that are above their thresholds; one that was not measured is above any."""
    odd = []
    for name, limit in most.items():
        value = found.get(name)
        if limit is not None and (value is None or value > limit):
            odd.append(name)
    return odd


def open_risks(
    config: Mapping[str, Any], crosses: Sequence[str], found: Mapping[str, Any]
) -> list[str]:
    """What is not protected in a run with these settings, in whole sentences.

    Args:
        config: the run's settings.
        crosses: what crossed, each as "from source model".
        found: what the attacks found.
    """
    risks = [
        "All figures are lower bounds, by these attacks on these data; better ones recover more.",
        "They hold for honest weights: a server that makes up the weights it sends can recover "
        "more than is measured here.",
    ]
    if any(kind.startswith("from source model") for kind in crosses):
        risks.append("The server saw the model of each single source: no sums, and none sealed.")
    if not config.get("privacy.noise"):
        risks.append("No example is protected by differential privacy (privacy.noise is 0).")
    if config.get("model.norm", "batch") == "batch":
        risks.append("BatchNorm's moments, if the network has such layers, tell class shares.")
    if any("gradient" in kind for kind in crosses):
        risks.append("Gradients crossed; `fedda audit gradients` attacks them, and not this page.")
    missing = [name for name in ATTACKS if name not in found]
    if missing:
        risks.append(f"Not tried: {', '.join(missing)}.")
    return [*risks, "All that take part know the mean model; the server knows numbers of tests."]


def page(about: Mapping[str, Any]) -> str:
    """Return the whole document.

    Args:
        about: what `fedda audit all --evidence` writes as JSON.
    """
    title = f"Evidence before export: {about['run']}"
    said = "No figure is above a threshold of the policy."
    if about["above"]:
        said = f"Above the policy's threshold: {', '.join(about['above'])}."
    tried = attacked.parse({**about["attacks"], "data": about["data"]})
    facts = [(name, str(about[name])) for name in ("made", "fedda", "run", "data", "model")]
    return document(
        title,
        e("h1", title),
        e("p", said, class_="strong"),
        table(("what", "is"), facts, left=2, wrap=(1,), label="What was attacked"),
        _judged(about),
        attacked.section_of(attacked.Attacked(tried)),
        _crossed(about["crosses"]),
        section("risks", "Not protected", e("ul", *(e("li", risk) for risk in about["risks"]))),
        _settings("options", "Settings of the attacks", about["options"]),
        _settings("settings", "Settings of the run", about["config"]),
        note("The file .json beside this page has all figures; .sig signs both."),
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


def _images(found: Mapping[str, Any], least: int) -> float | None:
    tried = found.get("update", {}).get("updates", ())
    if not tried:
        return None
    largest = max(u["examples"] for u in tried)  # no more could be tried on these data
    return max(u["recovered"] for u in tried if u["examples"] >= min(least, largest))


def _members(found: Mapping[str, Any]) -> float | None:
    tried = found.get("membership")
    if tried is None:
        return None
    rates = [
        {float(k): v for k, v in tried[kind]["tpr"].items()} for kind in ("lira", "confidence")
    ]
    return max(rate[RARE] for rate in rates)


def _told(found: Mapping[str, Any]) -> float | None:
    worst = None
    signs = {"shares": ("step", "first", "last"), "properties": ("moments", "vote", "coordinates")}
    for attack, names in signs.items():
        about = found.get(attack, {})
        for error in (about.get(name) for name in names):
            if error is not None:
                told = max(0.0, 1 - error / about["guess"]) if about["guess"] else 1.0
                worst = told if worst is None else max(worst, told)
    return worst
