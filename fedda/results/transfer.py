"""Negative transfer, seen without labels: a method's model looks worse than the source-only one.

Compared are two trainings with one seed and one target, by what results.json says of each: the
estimate of accuracy, and the validators but SND, which is highest where all images are given one
class. All are hints, so none of the last two decides alone:

    collapse   one class has over 90 % of the method's predictions, and not of the other's
    estimate   lower, by more than a point, while no more validators rose than fell
    validators where an estimate is missing or rough, two of the three fell and none rose
"""

from collections.abc import Iterator, Mapping
from typing import Any

from .doubts import ONE_CLASS, Doubt
from .read import Results, printable, seed_of, short_title
from .worth import VALIDATORS

LOWER = 0.01  # a difference of an estimate that counts: the step in which its parts leave a site
MOST_FELL = 2  # of the three validators
VOTERS = tuple(name for name in VALIDATORS if name != "snd")

Training = Mapping[str, Any]


def fallen(training: Training, source_only: Training) -> list[str]:
    """What is lower than the source-only model's: `estimate`, and names of validators."""
    return [name for name, change in _changes(training, source_only).items() if change < -LOWER]


def negative(training: Training, source_only: Training) -> bool:
    """Whether the evidence without labels says that a method's model is the worse one.

    Args:
        training: the method's entry in results.json.
        source_only: that of the method without adaptation, with the same seed and target.
    """
    if _collapsed(training) and not _collapsed(source_only):
        return True
    changes = _changes(training, source_only)
    of_estimate = changes.pop("estimate", None)
    fell = sum(change < -LOWER for change in changes.values())
    rose = sum(change > LOWER for change in changes.values())
    if of_estimate is None:
        return fell >= MOST_FELL and not rose
    return of_estimate < -LOWER and fell >= rose


def doubt(training: Training, source_only: Training, title: str) -> Doubt | None:
    """The doubt about a training that is worse than the source-only one; None if it is not.

    Args:
        training: the method's entry in results.json.
        source_only: that of the method without adaptation, with the same seed and target.
        title: the source-only method's title.
    """
    if not negative(training, source_only):
        return None
    seen = "; ".join(_evidence(training, source_only))
    text = (
        f"negative transfer: without labels the model looks worse than {title}'s: {seen}. Take "
        f"that one (run.keep=better does), or try other settings"
    )
    return Doubt("transfer", training["rounds"][-1]["round"], text)


def notes(results: Results) -> list[str]:
    """Which models were kept with `run.keep=better`; a sentence per training."""
    lines = []
    for method, trainings in results["trainings"].items():
        for training in trainings:
            if (kept := training.get("kept", method)) != method:
                about = f"{short_title(results, method)}, seed {seed_of(results, training)}"
                lines.append(
                    f"kept: {short_title(results, kept)}'s model in place of that of "
                    f"{printable(about)}, which looks worse without labels"
                )
    return lines


def _evidence(training: Training, source_only: Training) -> Iterator[str]:
    ours, theirs = training["validators"], source_only["validators"]
    if _collapsed(training) and not _collapsed(source_only):
        yield (
            f"one class has {100 * ours['largest']:.0f} % of the predictions, there "
            f"{100 * theirs['largest']:.0f} %"
        )
    for name in fallen(training, source_only):
        if name == "estimate":
            pair = (100 * each["estimate"]["accuracy"] for each in (training, source_only))
            yield "estimated accuracy {:.1f} % against {:.1f} %".format(*pair)
        else:
            heading, digits = VALIDATORS[name]
            yield f"{heading} {ours[name]:.{digits}f} against {theirs[name]:.{digits}f}"


def _changes(training: Training, source_only: Training) -> dict[str, float]:
    """How much each piece of evidence is above the source-only model's, where both have it."""
    both = [training, source_only]
    ours, theirs = (each.get("validators") or {} for each in both)
    both_have = [name for name in VOTERS if name in ours and name in theirs]
    changes = {name: round(ours[name] - theirs[name], 6) for name in both_have}
    estimates = [each.get("estimate") or {"same_model": False} for each in both]
    one_rule = len({each.get("changed") is None for each in estimates}) == 1
    if one_rule and all(each["same_model"] for each in estimates):
        change = estimates[0]["accuracy"] - estimates[1]["accuracy"]
        changes["estimate"] = round(change, 6)  # a point is not more than a point
    return changes


def _collapsed(training: Training) -> bool:
    return (training.get("validators") or {}).get("largest", 0.0) > ONE_CLASS
