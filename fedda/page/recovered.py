"""What an attack on the exchange's gradients recovered, as `fedda audit` left it with the run.

Anybody may have put a file there, so what is read is checked for its form, and only numbers and one
name of it reach the page.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedda.results.read import printable

from .html import Html, e, join
from .parts import NOTHING, grid, note, section, table
from .windows import Line, chart

AUDIT = "audit.json"
ALIKE = 0.9999  # where a threshold says more of the data than of an attack

# Forms of the attack: heading of a column, name of a curve, look; two are nearly the same curve.
FORMS = {
    "bare": ("one batch, bare", "one batch, nothing done", "k1"),
    "fixed": ("{p} steps, fixed", "", ""),
    "moving": ("{p} steps, moving", "{p} steps, discriminator moving", "k3 d2"),
    "sent": ("as {run}", "as {run} it", "k2"),
}
INTRO = (
    "Whoever sees a discriminator's gradient can divide that of the first layer's weights by that "
    "of its biases, unit by unit: a weighted mean of features, and one example's feature where a "
    "unit saw only one. This is a lower bound: other attacks find more."
)


@dataclass(frozen=True)
class Audited:
    """An audit that could be read, or why it could not."""

    about: Mapping[str, Any] | None = None
    problem: str = ""


def collect(run: Path) -> Audited | None:
    """The audit in a run's folder, if there is one."""
    path = run / AUDIT
    if not path.is_file():
        return None
    try:
        return Audited(parse(json.loads(path.read_text())))
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        return Audited(problem=f"{path} cannot be read ({error})")


def parse(found: Any) -> dict[str, Any]:
    """The same figures, each of the type it must have.

    Raises:
        ValueError, TypeError, LookupError: something is missing or is not a number.
    """
    settings, privacy = found["settings"], found["privacy"]
    about: dict[str, Any] = {
        "data": printable(str(found["data"])),
        "what-if": found.get("what-if") is True,  # older audits do not say
        "settings": {k: int(_number(settings[k])) for k in ("p", "min-examples")}
        | {k: _number(settings[k]) for k in ("clip", "noise")}
        | {"method": printable(str(settings.get("method", "")))}
        | {"penalty": _number(settings.get("penalty", 0))},
        "other": _leak(found["other"]),
        "threshold": _number(found["threshold"]),
        "windows": [_window(window) for window in found["windows"]],
        "privacy": None,
    }
    counts = ("features", "width", "parameters", "trials", "guesses")
    about |= {k: int(_number(found[k])) for k in counts}
    if not about["windows"]:
        raise ValueError("it has no windows")
    if privacy is not None:
        spent: dict[str, Any] = {k: _number(privacy[k]) for k in ("delta", "windows")}
        for part in ("one", "all") if "missing" not in privacy else ():
            spent[part] = {k: _number(privacy[part][k]) for k in ("presence", "replacement")}
        about["privacy"] = spent
    return about


def section_of(audited: Audited | None) -> Html | None:
    """The section, or nothing where no audit was made."""
    if audited is None:
        return None
    if audited.about is None:
        return section("audit", "Audit of gradients", note(f"Left out: {audited.problem}."))
    about = audited.about
    return section(
        "audit",
        "Audit of gradients",
        e("p", INTRO),
        _table(about),
        grid(_recovered(about), _cosines(about)),
        *map(note, remarks(about)),
    )


def remarks(about: Mapping[str, Any]) -> list[str]:
    """How to read the figures, in whole sentences."""
    settings, other, least = about["settings"], about["other"], about["settings"]["min-examples"]
    lines = []
    if about["what-if"]:
        lines.append(
            f"What if: no run has sent this. A run of {settings['method']} with the settings given "
            "here would, from this encoder."
        )
    lines += [
        f"Features of {about['features']:,} training examples of {about['data']}, of "
        f"{about['width']:,} numbers each; {about['trials']} windows of each size, each with a new "
        f"discriminator as a run starts with. A window is one batch, or {settings['p']} steps in "
        "which the discriminator stands still (fixed) or learns (moving).",
        f"Recovered is a cosine above {about['threshold']:.5f}: .999, or more where above 1 % come "
        f"to .999 without any attack. The best of {about['guesses']:,} other features of the same "
        f"data and their mean is at {other['cosine']:.3f} on average, and above .999 for "
        f"{_percent(other['recovered'])}.",
    ]
    if settings["penalty"]:
        lines.append(
            "The critic's penalty is left out of one batch's gradient and is in all others. The "
            "attack does not take it out, and somebody who knows the critic could: where others "
            "show less, that means little."
        )
    if about["threshold"] > ALIKE:
        lines.append(
            "These features are so alike, or some examples come twice, that a cosine hardly tells "
            "one from another: a low share recovered means little here."
        )
    sent = next((w for w in about["windows"] if w["sent"]), None)
    line = f"A window under {least:,} examples is not sent"
    if sent is None:
        line += ", and there were too few examples to try one that is."
    else:
        share = sent["sent"]["recovered"]
        line += (
            f"; of one with {sent['examples']:,}, {_percent(share)} of the examples come back, "
            f"{share * sent['examples']:.1f} in each window on average; the mean best cosine is "
            f"{sent['sent']['cosine']:.3f}."
        )
    lines.append(line)
    if not settings["noise"]:
        lines.append(
            f"The clip ({settings['clip']:g}) shortens weights and biases alike, so without noise "
            "it takes nothing from this attack. Norm is that of a window's mean gradient: a clip "
            "far above it makes the same noise much stronger."
        )
    else:
        length = settings["noise"] * settings["clip"] * math.sqrt(about["parameters"])
        norm = about["windows"][-1]["norm"]
        lines.append(
            f"Noise on {about['parameters']:,} values has a length of {length:,.3g}; the mean "
            f"gradient of the largest window has {norm:.3g} (norm). Noise much longer than that "
            "hides it from the run as well."
        )
    return lines + _privacy(settings["noise"], about["privacy"])


def _privacy(noise: float, spent: Mapping[str, Any] | None) -> list[str]:
    if spent is None:
        return []
    if "one" not in spent:
        return ['Epsilon is not known: install dp-accounting by pip install "fedda[privacy]".']
    one, whole = spent["one"], spent["all"]
    return [
        f"Noise of {noise:g} times the clip, at delta {spent['delta']:g}: epsilon "
        f"{one['presence']:,.3g} for one window of this site, sent or not "
        f"({one['replacement']:,.3g} for another in its place); {whole['presence']:,.3g} "
        f"({whole['replacement']:,.3g}) for all its {spent['windows']:,.0f} windows together.",
        "That is a bound for windows and for the site, not for single examples: their gradients "
        "are not clipped one by one, so an example has the site's epsilon and none of its own. "
        "Models and numbers that a method sends beside the gradients are not in it.",
    ]


def _table(about: Mapping[str, Any]) -> Html:
    heads = ["examples"]
    for head, _, _ in FORMS.values():
        heads += [_called(head, about), "cosine"]
    rows = []
    for window in about["windows"]:
        row = [f"{window['examples']:,}"]
        for form in FORMS:
            leak = window[form]
            row += [_percent(leak["recovered"]), f"{leak['cosine']:.3f}"] if leak else [NOTHING, ""]
        rows.append([*row, f"{window['norm']:.3g}"])
    other = about["other"]
    label = "Features recovered by examples in a window"
    made = table([*heads, "norm"], rows, label=label)
    words = f"Share recovered, and mean best cosine (other features: {other['cosine']:.3f})."
    return join(made, note(words, f" {NOTHING}: too few examples to be sent."))


def _called(name: str, about: Mapping[str, Any]) -> str:
    run = "a run would send" if about["what-if"] else "the run sends"
    return name.format(p=about["settings"]["p"], run=run)


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _recovered(about: Mapping[str, Any]) -> Html:
    lines = _lines(about, "recovered", 100)
    least = about["settings"]["min-examples"]
    return chart("Features recovered", "% of a window's examples", lines, (0, 100), least)


def _cosines(about: Mapping[str, Any]) -> Html:
    other = about["other"]["cosine"]
    flat = {w["examples"]: other for w in about["windows"]}
    lines = [*_lines(about, "cosine", 1), Line("best of other features", "k7 d1", flat)]
    least = about["settings"]["min-examples"]
    return chart("Best cosine, mean", "1: the feature itself", lines, (None, 1), least)


def _lines(about: Mapping[str, Any], what: str, factor: float) -> list[Line]:
    found = []
    for form, (_, name, css) in FORMS.items():
        values = {w["examples"]: factor * w[form][what] for w in about["windows"] if w[form]}
        if name and values:
            found.append(Line(_called(name, about), css, values))
    return found


# ---- reading -----------------------------------------------------------------------------------


def _window(found: Any) -> dict[str, Any]:
    window: dict[str, Any] = {"examples": int(found["examples"]), "norm": _number(found["norm"])}
    if window["examples"] < 1:
        raise ValueError(f"a window has {window['examples']} examples")
    for form in FORMS:
        window[form] = None if form == "sent" and found[form] is None else _leak(found[form])
    return window


def _leak(found: Any) -> dict[str, float]:
    return {k: _number(found[k]) for k in ("recovered", "cosine")}


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no number")
    return value
