"""What a run's models are worth without labels: estimates and validators, over the seeds.

They are entries of each training in results.json: `validators`, `estimate`, `calibration_error`.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .read import Results, printable, short_title, targets

NOTHING = "–"
VALIDATORS = {  # name -> heading, decimals; higher is better
    "infomax": ("infomax (nats)", 2),
    "bnm": ("BNM", 2),
    "snd": ("SND", 2),
    "ami": ("ClassAMI", 2),
}
ECE = "calibration error"
WHAT = (
    "estimate: the difference of confidences (DoC), calibrated where sources have labels, without "
    "the answers that the target's last step changed; where no step was taken, its mean with two "
    "thresholded confidences (ATC). In brackets from the lowest to the highest of all, with the "
    "sampling error. It cannot see a shift that makes the model sure and wrong"
)
SEEN = (
    "{} calibrated on images of the training, for want of test files apart from it: the "
    "estimate is too high"
)
OTHER = (
    "{}: the target predicts with a model that the sources do not have; they tested the server's, "
    "so the estimate is rough"
)


@dataclass(frozen=True)
class Worth:
    """What is known of a method's models at one target: means over the seeds.

    Attributes:
        method: the method's name.
        target: the target's name.
        accuracy: on labelled tests; None if there are none. So are the others where nobody said
            them.
        estimate: of that accuracy, and its interval, `low` to `high`.
        error: the calibration error on labelled tests.
        largest: the share of the target's images that are given the most frequent class.
        validators: by name.
    """

    method: str
    target: str
    accuracy: float | None
    estimate: float | None
    low: float | None
    high: float | None
    error: float | None
    largest: float | None
    validators: Mapping[str, float]

    def estimated(self) -> str:
        """The estimate with its interval in percent, such as 71.2 [64, 78]."""
        if self.estimate is None or self.low is None or self.high is None:
            return NOTHING
        interval = f"[{100 * self.low:.0f}, {100 * self.high:.0f}]"
        return f"{100 * self.estimate:.1f} {interval}"


def worths(results: Results) -> list[Worth]:
    """What is known, per method and target; empty if no training says anything."""
    found = []
    for method, trainings in results["trainings"].items():
        for name in targets(results):
            here = [t for t in trainings if t.get("target", name) == name and t.get("validators")]
            if here:
                found.append(_worth(method, name, here))
    return found


def rows(results: Results) -> tuple[list[str], list[list[str]]]:
    """A table of all that is known -> its headings, and its rows of text; no rows if nothing is."""
    known = worths(results)
    several = len(targets(results)) > 1
    tested = any(w.accuracy is not None for w in known)
    head = ["method", *["target"] * several, "estimate in %", *["accuracy in %"] * tested]
    head += [heading for heading, _ in VALIDATORS.values()]
    head += ["largest class", *[ECE] * tested]
    body = []
    for w in known:
        row = [short_title(results, w.method), *[printable(w.target)] * several, w.estimated()]
        row += [_text(w.accuracy, 100, 1)] if tested else []
        row += [_text(w.validators.get(n), 1, digits) for n, (_, digits) in VALIDATORS.items()]
        row += [f"{_text(w.largest, 100, 0)} %"]
        body.append([*row, *([_text(w.error, 1, 2)] if tested else [])])
    return head, body


def remarks(results: Results) -> list[str]:
    """How to read the table; empty if there is none."""
    known = [w for w in worths(results) if w.estimate is not None]
    if not known:
        return []
    said, seen, other = [WHAT], dict[str, None](), dict[str, None]()
    for method, trainings in results["trainings"].items():
        for estimate in (t["estimate"] for t in trainings if t.get("estimate")):
            sources = estimate["sources"].items()
            seen |= {printable(s): None for s, numbers in sources if not numbers["held"]}
            other |= {} if estimate["same_model"] else {short_title(results, method): None}
    said += [SEEN.format(", ".join(seen))] if seen else []
    return said + ([OTHER.format(", ".join(other))] if other else [])


def _worth(method: str, target: str, trainings: Sequence[Mapping[str, Any]]) -> Worth:
    estimates = [t.get("estimate") or {} for t in trainings]
    validators = [t["validators"] for t in trainings]
    return Worth(
        method,
        target,
        _mean(t.get("final_accuracy") for t in trainings),
        *(_mean(e.get(key) for e in estimates) for key in ("accuracy", "low", "high")),
        error=_mean(t.get("calibration_error") for t in trainings),
        largest=_mean(v.get("largest") for v in validators),
        validators={
            name: value
            for name in VALIDATORS
            if (value := _mean(v.get(name) for v in validators)) is not None
        },
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return statistics.fmean(known) if known else None


def _text(value: float | None, times: float, digits: int) -> str:
    return NOTHING if value is None else f"{times * value:.{digits}f}"
