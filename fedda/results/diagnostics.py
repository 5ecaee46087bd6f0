"""Signs, seen without labels of the target, that a training has gone wrong.

They are found in what a run reports anyway, round by round: the share of the target's images that
KD3A's teachers are sure of, and the sources' loss. Of 238 trainings on data that no setting was
chosen on, three were doubted by that share, all of them more than 5 points below FedAvg, as 35
were; signs such as a vanished class, one-sided weights or a lower infomax named as many of the good
ones as of the bad, and are not looked for. A training without doubts may still be wrong.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

UNSURE = 0.05  # a smaller share of kept images teaches the target next to nothing
LOST = 0.5  # a share of kept images below this part of its highest one is a loss
BLIND = 2.0  # a mean loss above this many times ln C is far worse than that of knowing nothing
CHANCE = 0.97  # a mean loss above this many times ln C is that of knowing nothing
RISEN = 1.25  # a mean loss of so many times its lowest one has risen
HIGH = 0.75  # but only above this many times ln C is that a sign of trouble
FIRST_STEPS = 20  # of training, or one per class: before, a loss as of guessing means nothing
LONG = 200  # steps of a round after which one alone is enough
# So many rounds in a row, or the last round, make a doubt; a loss of one round does.
LASTING = 3

Round = Mapping[str, Any]


@dataclass(frozen=True)
class Doubt:
    """A reason to doubt a training."""

    what: str  # `loss` or `kept`
    round: int  # the round in which it was noticed
    text: str  # what was seen, and what to do

    def to_json(self) -> dict[str, Any]:
        """The doubt as plain JSON types."""
        return asdict(self)


def doubts(
    history: Sequence[Round],
    rounds: int,
    classes: int,
    entropies: Collection[int] = (),
    rate: float = 0.0,
    steps: float = FIRST_STEPS,
    suspect: str = "",
) -> list[Doubt]:
    """Find reasons to doubt a training, at most one of each kind, in order of the rounds.

    When the training has ended, those of which the last rounds showed nothing any more are over.

    Args:
        history: the entries of its finished rounds: `round`, and where known `kept` and `loss`.
        rounds: the number of rounds that the training will have.
        classes: C, the number of classes of the sources.
        entropies: the rounds whose `loss` is a mean cross entropy of the sources.
        rate: the first learning rate, of which advice is given; 0: unknown.
        steps: of the largest source in a round.
        suspect: what of a site's data makes a training diverge or learn nothing, too.
    """
    found: dict[str, Doubt] = {}
    losses: list[float] = []
    quiet: dict[str, int] = {}  # rounds in a row, up to the last, that say the contrary
    row, most = 0, 0.0  # rounds in a row with too few kept, and the most kept before
    for entry in history:
        if "kept" in entry:
            text = _kept(entry["kept"], most)
            row, most = row + 1 if text else 0, max(most, entry["kept"])
            quiet["kept"] = 0 if text else quiet.get("kept", 0) + 1
            if text and (row >= LASTING or entry["round"] == rounds):
                found.setdefault("kept", Doubt("kept", entry["round"], text))
        if entry["round"] in entropies and "loss" in entry:
            losses.append(entry["loss"])
            text = _loss(losses, classes, _judged(len(losses), steps, classes), rate)
            quiet["loss"] = 0 if text else quiet.get("loss", 0) + 1
            if text:
                text = f"{text}; {suspect}" if suspect else text  # to be looked at before settings
                found.setdefault("loss", Doubt("loss", entry["round"], text))
    ended = bool(history) and history[-1]["round"] == rounds
    left = [d for what, d in found.items() if not (ended and quiet.get(what, 0) >= LASTING)]
    return sorted(left, key=lambda doubt: doubt.round)


def _judged(rounds: int, steps: float, classes: int) -> bool:
    """Whether a model has had steps enough to know more than nothing, in two rounds or a long one.

    A mean over one short round is that of its first steps.
    """
    return (rounds > 1 or steps >= LONG) and rounds * steps >= max(FIRST_STEPS, classes)


def _loss(losses: Sequence[float], classes: int, judged: bool, rate: float) -> str:
    """What a training's losses so far say of its learning rate; it needs no target.

    Args:
        losses: of the rounds so far.
        classes: C.
        judged: whether the model has had steps enough to know more than nothing.
        rate: the first learning rate.
    """
    loss, guess = losses[-1], math.log(classes)
    risen = loss > RISEN * min(losses) and loss > HIGH * guess
    diverges = risen or loss > BLIND * guess
    if not diverges and not (judged and min(losses[-2:]) > CHANCE * guess):
        return ""
    before = f", after {min(losses):.2f} in an earlier round" if risen else ""
    seen = (
        f"the sources' mean loss is {loss:.2f}{before}, and {guess:.2f} is that of guessing among "
        f"{classes} classes: "
    )
    third, triple = (f" to {rate / 3:.2g}", f" to {rate * 3:.2g}") if rate else ("", "")
    if diverges:
        return f"{seen}training diverges; lower train.lr{third}"
    slow = loss < losses[0]
    change = f"raise train.lr{triple}" if slow else f"lower train.lr{third}"
    learnt = "next to nothing" if slow else "nothing"
    return (
        f"{seen}{learnt} is learnt; {change}, and for photographs take a pretrained network "
        "(--preset photos)"
    )


def _kept(kept: float, before: float) -> str:
    """What a share of kept images says, after a highest one before."""
    if kept < UNSURE:
        return (
            f"teachers are sure of {100 * kept:.1f} % of the target's images, so it learns next to "
            "nothing from them; lower kd3a.gate, or train the sources longer before"
        )
    if kept < LOST * before:
        return (
            f"teachers are sure of {100 * kept:.0f} % of the target's images, after "
            f"{100 * before:.0f} % in an earlier round: classes may be getting lost; try "
            "kd3a.mixup=0"
        )
    return ""
