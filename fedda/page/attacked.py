"""What attacks on models, atoms and shares recovered, from the attacks.json of `fedda audit`.

Anybody may have put that file there, so only numbers and the name of the data reach the page, each
checked for its form. Pictures never do: they show images of the site.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedda.results.read import printable

from .html import Html, e
from .parts import note, section, table

ATTACKS = "attacks.json"
HIDDEN = 16  # images of a block, the fewest that a site trains on by default
NOISE = "privacy.noise"
Row = tuple[str, str, str, str]  # attack, what it recovers, what guesses reach, what closes it


@dataclass(frozen=True)
class Attacked:
    """Attacks that could be read, or why they could not."""

    about: Mapping[str, Any] | None = None
    problem: str = ""


def collect(run: Path) -> Attacked | None:
    """Read the attacks in a run's folder, if there are any."""
    path = run / ATTACKS
    if not path.is_file():
        return None
    try:
        return Attacked(parse(json.loads(path.read_text())))
    except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
        return Attacked(problem=f"{path} cannot be read ({error})")


def parse(found: Any) -> dict[str, Any]:
    """Return the figures of the attacks that were tried, each checked to be a finite number.

    Raises:
        ValueError, TypeError, LookupError: something is missing or is not a number.
    """
    about: dict[str, Any] = {"data": printable(str(found["data"]))}
    if "update" in found:
        given = found["update"]
        keys = ("examples", "psnr", "best", "recovered")
        each = [
            {"early": bool(u["early"])} | {k: _number(u[k]) for k in keys} for u in given["updates"]
        ]
        if not each:
            raise ValueError("it has no updates")
        numbers = {k: _number(given[k]) for k in ("threshold", "guess")}
        about["update"] = numbers | {"updates": each}
    if "membership" in found:
        given = found["membership"]
        about["membership"] = {
            k: _number(given[k]) for k in ("shadows", "epochs", "examples", "noise")
        }
        about["membership"] |= {k: _found(given[k]) for k in ("lira", "confidence")}
    if "atoms" in found:
        about["atoms"] = _found(found["atoms"])
    if "shares" in found:
        keys = ("sites", "examples", "step", "first", "last", "mean", "guess", "named", "chance")
        about["shares"] = {k: _number(found["shares"][k]) for k in keys}
    if "properties" in found:
        given = found["properties"]
        about["properties"] = {k: _number(given[k]) for k in ("sites", "examples", "guess")}
        signs = {k: given[k] for k in ("moments", "moments_mean", "vote", "coordinates")}
        about["properties"] |= {k: _number(v) for k, v in signs.items() if v is not None}
    return about


def rows(about: Mapping[str, Any]) -> list[Row]:
    """The table: what each attack recovers, and beside it what guesses reach."""
    found: list[Row] = []
    if update := about.get("update"):
        for u in update["updates"]:
            n = int(u["examples"])
            closed = f"more images in a block (--min-images), {NOISE}"
            closed += "" if n < HIDDEN else ", secure sums"
            what = f"{_percent(u['recovered'])} of the images; {u['psnr']:.1f} dB"
            guess = f"1 %; {update['guess']:.1f} dB"
            model = "an early" if u["early"] else "the last"
            found.append((f"images from a step of {model} model over {n}", what, guess, closed))
    if tried := about.get("membership"):
        for key, name in (("lira", "membership (LiRA)"), ("confidence", "by confidence alone")):
            what = f"AUC {tried[key]['auc']:.3f}; {_percent(tried[key]['tpr'])} at 1 % false"
            found.append((name, what, "AUC .5; 1 %", NOISE))
    if atoms := about.get("atoms"):
        what = f"AUC {atoms['auc']:.3f}; {_percent(atoms['tpr'])} at 1 % false"
        found.append(("membership by the nearest atom", what, "AUC .5; 1 %", "feddadil.samples"))
    if shares := about.get("shares"):
        guess = f"error {shares['guess']:.2f}"
        for key, name, closed in (
            ("step", "class shares, from one step of a new model", "several steps, secure sums"),
            ("first", "from a new model's first round", "secure sums"),
            ("last", "from a round of the last model", "secure sums"),
            ("mean", "the same, from the mean of three sites", ""),
        ):
            found.append((name, f"error {shares[key]:.2f}", guess, closed))
    if told := about.get("properties"):
        guess = f"error {told['guess']:.2f}"
        for key, name, closed in (
            ("moments", "class shares, from BatchNorm's moments", "model.norm=group, secure sums"),
            ("moments_mean", "the same, from the mean of three sites", ""),
            ("vote", "class shares, from KD3A's numbers", "kd3a.weighting=examples"),
            ("coordinates", "class shares, from FedDaDiL's coordinates", ""),
        ):
            if key in told:
                found.append((name, f"error {told[key]:.2f}", guess, closed))
    return found


def section_of(attacked: Attacked | None) -> Html | None:
    """Make the section; None if no attack was tried."""
    if attacked is None:
        return None
    title = "Audit of models"
    if attacked.about is None:
        return section("attacks", title, note(f"Left out: {attacked.problem}."))
    heads = ("attack", "recovers", "by guesses", "what closes it")
    made = table(heads, rows(attacked.about), left=4, wrap=(0, 1, 2, 3), label=title)
    lines = [note(line) for line in remarks(attacked.about)]
    words = (
        f"Attacks on {attacked.about['data']}, tried at the site; none of its examples are on this "
        "page. The figures are lower bounds: better attacks recover more."
    )
    return section("attacks", title, e("p", words), made, *lines)


def remarks(about: Mapping[str, Any]) -> list[str]:
    """Explain the figures in whole sentences."""
    lines = []
    if update := about.get("update"):
        lines.append(
            f"An image counts as recovered if its peak signal-to-noise ratio is above "
            f"{update['threshold']:.1f} dB, what one image in a hundred reaches by guesses: other "
            "images of the same data and their mean. The attacker is a server that knows the "
            "labels and asks for one step, of the run's last model or of one after a first epoch."
        )
    if tried := about.get("membership"):
        noise = f" with privacy.noise={tried['noise']:g}" if tried["noise"] else ""
        lines.append(
            f"Membership: {tried['shadows']:.0f} models, each trained{noise} for "
            f"{tried['epochs']:.0f} epochs on another half of {tried['examples']:,.0f} examples, "
            "without the other sites. The attacker knows all examples; a mean over several sites "
            "tells less."
        )
    if shares := about.get("shares"):
        lines.append(
            f"Class shares: {shares['sites']:.0f} made sites of {shares['examples']:.0f} examples; "
            "error 0 if all shares are known, 1 if entirely wrong. The largest class is named for "
            f"{_percent(shares['named'])} of them, by guesses for {_percent(shares['chance'])}."
        )
    if told := about.get("properties"):
        lines.append(
            f"Moments and numbers: {told['sites']:.0f} made sites of {told['examples']:.0f} "
            "examples, whose labels are not used by what they send; errors as for class shares."
        )
    return lines


def _found(given: Any) -> dict[str, float]:
    tpr = {float(k): _number(v) for k, v in given["tpr"].items()}
    return {"auc": _number(given["auc"]), "tpr": tpr[0.01]}


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %"


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a finite number")
    return value
