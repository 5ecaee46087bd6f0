"""What an attack on the exchange's gradients recovered, from the audit.json of `fedda audit`.

Anybody may have put that file there, so everything read from it is checked for its form, and only
numbers and the names of data and method reach the page.
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
ALIKE = 0.9999  # a threshold above this shows that the features are alike

# Forms of the attack: column heading, name of the curve, its colour and dashes. `fixed` has no
# curve, because it would nearly be that of another form.
FORMS = {
    "bare": ("one batch, bare", "one batch, nothing done", "k1"),
    "fixed": ("{p} steps, fixed", "", ""),
    "moving": ("{p} steps, moving", "{p} steps, discriminator moving", "k3 d2"),
    "sent": ("as {run}", "as {run} it", "k2"),
}
INTRO = (
    "Anybody who sees a discriminator's gradient can divide the gradient of the first layer's "
    "weights by that of its biases, unit by unit. The result is a weighted mean of features, and "
    "the feature of one example where a unit reacted to only one. The figures are a lower bound: "
    "other attacks recover more."
)


@dataclass(frozen=True)
class Audited:
    """An audit that could be read, or why it could not."""

    about: Mapping[str, Any] | None = None
    problem: str = ""


def collect(run: Path) -> Audited | None:
    """Read the audit in a run's folder, if there is one."""
    path = run / AUDIT
    if not path.is_file():
        return None
    try:
        return Audited(parse(json.loads(path.read_text())))
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        return Audited(problem=f"{path} cannot be read ({error})")


def parse(audit: Any) -> dict[str, Any]:
    """Return the figures of an audit, each checked to be of the right type.

    Raises:
        ValueError, TypeError, LookupError: something is missing or is not a number.
    """
    settings, privacy = audit["settings"], audit["privacy"]
    about: dict[str, Any] = {
        "data": printable(str(audit["data"])),
        "what-if": audit.get("what-if") is True,  # older audits do not say
        "settings": {k: int(_number(settings[k])) for k in ("p", "min-examples")}
        | {k: _number(settings[k]) for k in ("clip", "noise")}
        | {"method": printable(str(settings.get("method", "")))}
        | {"penalty": _number(settings.get("penalty", 0))},
        "other": _leak(audit["other"]),
        "threshold": _number(audit["threshold"]),
        "windows": [_window(window) for window in audit["windows"]],
        "privacy": None,
    }
    counts = ("features", "width", "parameters", "trials", "guesses")
    about |= {k: int(_number(audit[k])) for k in counts}
    if not about["windows"]:
        raise ValueError("it has no windows")
    if privacy is not None:
        spent: dict[str, Any] = {k: _number(privacy[k]) for k in ("delta", "windows")}
        for part in ("one", "all") if "missing" not in privacy else ():
            spent[part] = {k: _number(privacy[part][k]) for k in ("presence", "replacement")}
        about["privacy"] = spent
    return about


def section_of(audited: Audited | None) -> Html | None:
    """Make the section; None if there is no audit."""
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
    """Explain the figures in whole sentences."""
    settings, other, least = about["settings"], about["other"], about["settings"]["min-examples"]
    lines = []
    if about["what-if"]:
        lines.append(
            f"What if: no run has sent this. A run of {settings['method']} with the settings given "
            "here would send it, from this encoder."
        )
    lines += [
        f"Features of {about['features']:,} training examples of {about['data']}, of "
        f"{about['width']:,} numbers each; {about['trials']} windows of each size, each with a new "
        f"discriminator, as at the start of a run. A window is one batch, or {settings['p']} steps "
        "in which the discriminator does not change (fixed) or learns (moving).",
        "A feature counts as recovered if the cosine between it and what the attack computes is "
        f"above {about['threshold']:.5f}. The threshold is .999, or more if over 1 % of the "
        "features reach .999 by guesses, without any attack. The guesses are "
        f"{about['guesses']:,} other features of the same data and their mean: the best has a "
        f"cosine of {other['cosine']:.3f} on average, and is above .999 for "
        f"{_percent(other['recovered'])} of the features.",
    ]
    if settings["penalty"]:
        lines.append(
            "The critic's penalty is not in one batch's gradient, but in all others. The attack "
            "does not subtract it, though somebody who knows the critic could: lower figures for "
            "the other gradients therefore mean little."
        )
    if about["threshold"] > ALIKE:
        lines.append(
            "A cosine hardly tells these features apart: they are very much alike, or some "
            "examples occur twice. A low share recovered means little here."
        )
    sent = next((w for w in about["windows"] if w["sent"]), None)
    line = f"A window with fewer than {least:,} examples is not sent"
    if sent is None:
        line += ", and there were too few examples to try a window that is."
    else:
        share = sent["sent"]["recovered"]
        line += (
            f"; from a window with {sent['examples']:,}, {_percent(share)} of the features are "
            f"recovered, {share * sent['examples']:.1f} on average; the mean best cosine is "
            f"{sent['sent']['cosine']:.3f}."
        )
    lines.append(line)
    if not settings["noise"]:
        lines.append(
            f"The clip ({settings['clip']:g}) scales the gradients of weights and biases alike, so "
            "without noise it takes nothing from this attack. Norm is the norm of a window's mean "
            "gradient: noise is a multiple of the clip, so a clip far above the norm makes it much "
            "stronger than the gradient."
        )
    else:
        length = settings["noise"] * settings["clip"] * math.sqrt(about["parameters"])
        norm = about["windows"][-1]["norm"]
        lines.append(
            f"Noise on {about['parameters']:,} values has a norm of {length:,.3g}; the mean "
            f"gradient of the largest window has a norm of {norm:.3g}. Noise of a much larger norm "
            "hides the gradient from the run as well."
        )
    return lines + _privacy(settings["noise"], about["privacy"])


def _privacy(noise: float, spent: Mapping[str, Any] | None) -> list[str]:
    if spent is None:
        return []
    if "one" not in spent:
        return ['Epsilon is not known: install dp-accounting by pip install "fedda[privacy]".']
    one, whole = spent["one"], spent["all"]
    return [
        f"Noise of {noise:g} times the clip gives, at delta {spent['delta']:g}: epsilon "
        f"{one['presence']:,.3g} for one window of this site, sent or not sent "
        f"({one['replacement']:,.3g} for replacing it by another one), and epsilon "
        f"{whole['presence']:,.3g} ({whole['replacement']:,.3g}) for all its "
        f"{spent['windows']:,.0f} windows together.",
        "That is a bound for windows and for the site, not for single examples: their gradients "
        "are not clipped one by one, so an example has the site's epsilon and none of its own. "
        "It does not cover models and numbers that a method sends besides gradients.",
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
    lines = []
    for form, (_, name, css) in FORMS.items():
        values = {w["examples"]: factor * w[form][what] for w in about["windows"] if w[form]}
        if name and values:
            lines.append(Line(_called(name, about), css, values))
    return lines


# ---- checks of what is read ----------------------------------------------------------------------


def _window(figures: Any) -> dict[str, Any]:
    examples, norm = int(figures["examples"]), _number(figures["norm"])
    window: dict[str, Any] = {"examples": examples, "norm": norm}
    if window["examples"] < 1:
        raise ValueError(f"a window has {window['examples']} examples")
    for form in FORMS:
        window[form] = None if form == "sent" and figures[form] is None else _leak(figures[form])
    return window


def _leak(figures: Any) -> dict[str, float]:
    return {k: _number(figures[k]) for k in ("recovered", "cosine")}


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a finite number")
    return value
