"""What attacks recover, a row each: the same in the terminal, on the page and in findings.json.

Anybody may have put that file into a run's folder. So everything read from it is checked for its
form, and only numbers and the names of data and method leave it: all other words are from here.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedda.errors import reason
from fedda.results.read import percent, printable

FINDINGS = "findings.json"
EARLIER = ("audit.json", "attacks.json")  # where earlier versions wrote other formats
HEADS = ("attack", "recovers", "by guesses", "what closes it")
HIDDEN = 16  # images of a block, the fewest that a site trains on by default
ALIKE = 0.9999  # a threshold above this shows that the features are alike

NOISE = "privacy.noise"
WINDOW = "exchange.min-examples, exchange.noise, fewer hidden units"
BLOCK = f"more images in a block (--min-images), {NOISE}"

# What each attack is tried on: the words for it, with {n} for the examples, and what closes it.
ATTACKS: dict[str, dict[str, tuple[str, str]]] = {
    "gradients": {"window": ("features from a window of {n}", WINDOW)},
    "update": {
        "early": ("images from a step of an early model over {n}", BLOCK),
        "last": ("images from a step of the last model over {n}", BLOCK),
    },
    "membership": {
        "model": ("membership (LiRA)", NOISE),
        "confidence": ("membership, by confidence alone", NOISE),
        "atoms": ("membership by the nearest atom", "feddadil.samples"),
    },
    "shares": {
        "step": ("class shares, from one step of a new model", "several steps, secure sums"),
        "first": ("class shares, from a new model's first round", "secure sums"),
        "last": ("class shares, from a round of the last model", "secure sums"),
        "mean": ("the same, from the mean of three sites", ""),
    },
    "properties": {
        "moments": ("class shares, from BatchNorm's moments", "model.norm=group, secure sums"),
        "moments_mean": ("the same, from the mean of three sites", ""),
        "vote": ("class shares, from KD3A's numbers", "kd3a.weighting=examples"),
        "coordinates": ("class shares, from FedDaDiL's coordinates", ""),
    },
}
# Forms of a window's gradient, each a measure: a share; FORM-cosine is the mean best cosine.
FORMS = {
    "bare": "bare",
    "fixed": "fixed",
    "moving": "moving",
    "sent": "as the run sends it",
    "what-if": "as a run would send it",
}
# The measures that a table shows, with a factor. The rest is in the file alone.
SHOWN = {form: (100, f"{words} {{:.1f}} %") for form, words in FORMS.items()} | {
    "features": (100, "{:.1f} %"),
    "cosine": (1, "cosine {:.3f}"),
    "norm": (1, "norm {:.3g}"),
    "images": (100, "{:.1f} % of the images"),
    "psnr": (1, "{:.1f} dB"),
    "auc": (1, "AUC {:.3f}"),
    "tpr@0.01": (100, "{:.1f} % at 1 % false"),
    "error": (1, "error {:.2f}"),
    "named": (100, "largest class named for {:.1f} %"),
}
NEEDED = {
    "gradients": {form + end for form in ("bare", "fixed", "moving") for end in ("", "-cosine")},
    "update": {"images", "psnr"},
    "membership": {"auc", "tpr@0.01", "tpr@0.001"},
    "shares": {"error"},
    "properties": {"error"},
}
REMARKS = {
    "update": "An image counts as recovered if its peak signal-to-noise ratio is above "
    "{threshold:.1f} dB, what one image in a hundred reaches by guesses: other images of the same "
    "data and their mean. The attacker is a server that knows the labels and asks for one step, of "
    "the run's last model or of one after a first epoch.",
    "membership": "Membership: {shadows:.0f} models, each trained with privacy.noise={noise:g} and "
    "epochs={epochs:.0f} on another half of {examples:,.0f} examples, without the other sites. The "
    "attacker knows all examples; a mean over several sites tells less.",
    "shares": "Class shares: {sites:.0f} made sites of {examples:.0f} examples; error 0 if all "
    "shares are known, 1 if entirely wrong.",
    "properties": "Moments and numbers: {sites:.0f} made sites of {examples:.0f} examples, whose "
    "labels are not used by what they send; error 0 if all shares are known, 1 if entirely wrong.",
}


@dataclass(frozen=True)
class Finding:
    """A row: what an attack recovers from one thing that leaves a site."""

    attack: str  # a name in ATTACKS
    on: str  # what it was tried on, a name in ATTACKS[attack]
    examples: int  # over how many examples that was computed
    recovered: dict[str, float]  # figures by measure
    guess: dict[str, float]  # what somebody reaches who knows nothing of the run, by measure

    @property
    def closed_by(self) -> str:
        """What closes it."""
        summed = self.attack == "update" and self.examples >= HIDDEN
        return ATTACKS[self.attack][self.on][1] + ", secure sums" * summed

    def cells(self) -> tuple[str, ...]:
        """The texts of a table's row, below HEADS."""
        words = ATTACKS[self.attack][self.on][0].format(n=self.examples)
        return words, _shown(self.recovered), _shown(self.guess), self.closed_by


@dataclass(frozen=True)
class Audit:
    """One attack as it was tried: its rows, and how it was tried."""

    attack: str  # a name in ATTACKS
    # of the attack, by name, as plain JSON types; with the data's name and the seed
    settings: dict[str, Any]
    findings: tuple[Finding, ...]  # its rows, one or more

    def to_json(self) -> dict[str, Any]:
        """Everything as plain JSON types."""
        rows = [
            {k: v for k, v in vars(f).items() if k != "attack"} | {"closed_by": f.closed_by}
            for f in self.findings
        ]
        return self.settings | {"findings": rows}

    def remarks(self) -> list[str]:
        """The figures explained in whole sentences."""
        if self.attack == "gradients":
            return [*_of_gradients(self.settings, self.findings)]
        return [REMARKS[self.attack].format(**self.settings, examples=self.findings[0].examples)]


@dataclass(frozen=True)
class Audits:
    """The audits of a run that could be read, or why they could not."""

    audits: tuple[Audit, ...] = ()
    problem: str = ""


def collect(run: Path) -> Audits:
    """Read the audits in a run's folder, if there are any."""
    path = run / FINDINGS
    if not path.is_file():
        old = next((run / name for name in EARLIER if (run / name).is_file()), None)
        advice = f"{old} is of an earlier version; run `fedda audit` again"
        return Audits(problem=advice if old else "")
    try:
        return Audits(parse(json.loads(path.read_text())))
    except (OSError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
        return Audits(problem=f"{path} cannot be read ({reason(error)})")


def parse(table: Any) -> tuple[Audit, ...]:
    """Return the audits of a file, each figure checked to be a finite number.

    Raises:
        ValueError, TypeError, LookupError, AttributeError, ArithmeticError: something is missing
            or is not of the right form.
    """
    audits = []
    for attack, given in table.items():
        findings = tuple(_finding(attack, row) for row in given["findings"])
        if not findings:
            raise ValueError(f"{attack} has no findings")
        settings = {k: _plain(v) for k, v in given.items() if k != "findings"}
        settings["data"] = printable(str(given["data"]))
        audits.append(Audit(attack, settings, findings))
        audits[-1].remarks()  # fails if a setting is missing
    return tuple(audits)


def _finding(attack: str, row: Any) -> Finding:
    examples = int(_number(row["examples"]))
    if row["on"] not in ATTACKS[attack] or examples < 1:
        raise ValueError(f"{attack} of {row['on']!r} over {examples} examples is not known")
    if missing := NEEDED[attack] - row["recovered"].keys():
        raise ValueError(f"{attack} has no {', '.join(sorted(missing))}")
    recovered, guess = (
        {name: _number(value) for name, value in row[part].items()}
        for part in ("recovered", "guess")
    )
    return Finding(attack, row["on"], examples, recovered, guess)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if value is None or isinstance(value, bool):
        return value
    return printable(value) if isinstance(value, str) else _number(value)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a finite number")
    return value


def _shown(figures: dict[str, float]) -> str:
    shown = [(figures[name], *form) for name, form in SHOWN.items() if name in figures]
    return "; ".join(text.format(factor * value) for value, factor, text in shown)


def _of_gradients(s: dict[str, Any], findings: tuple[Finding, ...]) -> Iterator[str]:
    yield (
        "Anybody who sees a discriminator's gradient can divide the gradient of the first layer's "
        "weights by that of its biases, unit by unit. The result is a weighted mean of features, "
        "and the feature of one example where a unit reacted to only one."
    )
    if s["what-if"]:
        yield (
            f"What if: no run has sent this. A run of {s['method']} with the settings given here "
            "would send it, from this encoder."
        )
    yield (
        f"Features of {s['features']:,.0f} training examples of {s['data']}, of {s['width']:,.0f} "
        f"numbers each; {s['trials']:.0f} windows of each size, each with a new discriminator, as "
        f"at the start of a run. A window is one batch (bare), or {s['p']:.0f} steps in which the "
        "discriminator does not change (fixed) or learns (moving)."
    )
    guess = findings[0].guess
    yield (
        "A feature counts as recovered if the cosine between it and what the attack computes is "
        f"above {s['threshold']:.5f}. The threshold is .999, or more if over 1 % of the features "
        f"reach .999 by guesses, without any attack. The guesses are {s['guesses']:,.0f} other "
        f"features of the same data and their mean: the best has a cosine of {guess['cosine']:.3f} "
        f"on average, and is above .999 for {percent(guess['features'])} of the features."
    )
    if s["penalty"]:
        yield (
            "The critic's penalty is not in one batch's gradient, but in all others. The attack "
            "does not subtract it, though somebody who knows the critic could: lower figures for "
            "the other gradients therefore mean little."
        )
    if s["threshold"] > ALIKE:
        yield (
            "A cosine hardly tells these features apart: they are very much alike, or some "
            "examples occur twice. A low share recovered means little here."
        )
    line = f"A window with fewer than {s['min-examples']:,.0f} examples is not sent"
    form = "what-if" if s["what-if"] else "sent"
    sent = next((f for f in findings if form in f.recovered), None)
    if sent is None:
        yield f"{line}, and there were too few examples to try a window that is."
    else:
        share = sent.recovered[form]
        yield (
            f"{line}; from a window with {sent.examples:,}, {percent(share)} of the features are "
            f"recovered, {share * sent.examples:.1f} on average; the mean best cosine is "
            f"{sent.recovered[f'{form}-cosine']:.3f}."
        )
    if not s["noise"]:
        yield (
            f"The clip ({s['clip']:g}) scales the gradients of weights and biases alike, so "
            "without noise it takes nothing from this attack. Norm is the norm of a window's mean "
            "gradient: noise is a multiple of the clip, so a clip far above the norm makes it much "
            "stronger than the gradient."
        )
        return
    length = s["noise"] * s["clip"] * math.sqrt(s["parameters"])
    norm = findings[-1].recovered["norm"]
    yield (
        f"Noise on {s['parameters']:,.0f} values has a norm of {length:,.3g}; the mean gradient of "
        f"the largest window has a norm of {norm:.3g}. Noise of a much larger norm hides the "
        "gradient from the run as well."
    )
    spent = s.get("privacy") or {}
    if "one" not in spent:
        yield 'Epsilon is not known: install dp-accounting by pip install "fedda[privacy]".'
        return
    one, whole = spent["one"], spent["all"]
    yield (
        f"Noise of {s['noise']:g} times the clip gives, at delta {spent['delta']:g}: epsilon "
        f"{one['presence']:,.3g} for one window of this site, sent or not sent "
        f"({one['replacement']:,.3g} for replacing it by another one), and epsilon "
        f"{whole['presence']:,.3g} ({whole['replacement']:,.3g}) for all its "
        f"{spent['windows']:,.0f} windows together."
    )
    yield (
        "That is a bound for windows and for the site, not for single examples: their gradients "
        "are not clipped one by one, so an example has the site's epsilon and none of its own. It "
        "does not cover models and numbers that a method sends besides gradients."
    )
