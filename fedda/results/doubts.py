"""Signs, seen without labels, that a training may have gone wrong.

They are found in what a run reports anyway, round by round: the share of the target's images that
KD3A's teachers are sure of, the weights of the sites, the number of classes that the target's
predictions use and the share of the most frequent one, the sources' loss, how often a discriminator
is right, and how often its gradients are clipped. None of them proves an error, and a training
without them may still be wrong. That a model is worse than the source-only one is in `transfer`.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

UNSURE = 0.05  # a smaller share of kept images teaches the target next to nothing
LOST = 0.5  # a share of kept images below this part of its highest one is a loss
ONE_SIDED = 0.7  # a source above this share of the sources' weight decides nearly alone
OVERRUN = 0.4  # a discriminator that is right less often follows encoders that outrun it
BENT = 0.5  # sums that are clipped more often no longer point where the loss falls
ONE_CLASS = 0.9  # a larger share of predictions for one class says that training has failed
BLIND = 2.0  # a mean loss above this many times ln C is far worse than that of knowing nothing
CHANCE = 0.97  # a mean loss above this many times ln C is that of knowing nothing
RISEN = 1.25  # a mean loss of so many times its lowest one has risen
HIGH = 0.75  # but only above this many times ln C is that a sign of trouble
# Over 382 trainings on ten sets (examples/benchmarks/grand.py) the estimate was off by 11 points
# where the last step changed more answers, and by 6 elsewhere.
CHANGED = 0.1
# Where the sources' models gave an image the same class less often, SHOT and DECISION were between
# 21 points below FedAvg and 29 above it, on 11 targets; on 7 others between 3 below and 4 above.
ALIKE = 0.5
# FADA's model III is to bring an entropy to ln C, what is lost of the features to 0, and estimated
# information down: these shares of ln C, of the variance and of the highest estimate count as done.
ENTROPY, REBUILT, FALLEN = 0.9, 0.5, 0.5
AT_ONCE = {"sources"}  # told in one round alone, when the models come
# What a round's entry must have to say something of a kind.
MEASURES = {
    "classes": "predicted",
    "one class": "largest",
    "kept": "kept",
    "weights": "weights",
    "discriminator": "discriminator-accuracy",
    "clipped": "clipped",
    "unknown shift": "changed",
    "sources": "alike",
    "disentangled": "confusion",
}
FIRST_STEPS = 20  # of training, or one per class: before, a loss as of guessing means nothing
LONG = 200  # steps of a round after which one alone is enough
LASTING = (
    3  # so many rounds in a row, or the last round, make a doubt, but a loss of one round does
)

Round = Mapping[str, Any]


@dataclass(frozen=True)
class Doubt:
    """A reason to doubt a training.

    Attributes:
        what: `classes`, `one class`, `loss`, `kept`, `weights`, `discriminator`, `clipped`,
            `sources`, `disentangled`, `unknown shift` or `transfer`.
        round: the round in which it was noticed.
        text: what was seen, and what to do.
    """

    what: str
    round: int
    text: str

    def to_json(self) -> dict[str, Any]:
        """The doubt as plain JSON types."""
        return asdict(self)


def doubts(
    history: Sequence[Round],
    rounds: int,
    classes: int,
    examples: Mapping[str, int],
    entropies: Collection[int] = (),
    rate: float = 0.0,
    steps: float = FIRST_STEPS,
    suspect: str = "",
) -> list[Doubt]:
    """Find reasons to doubt a training, at most one of each kind, in order of the rounds.

    When the training has ended, those of which the last rounds showed nothing any more are over.

    Args:
        history: the entries of its finished rounds: `round`, and where known `kept`, `predicted`
            (a number of classes), `weights` by site, `discriminator-accuracy`, `clipped`, the share
            of the sums in which a site's gradient was clipped, `alike`, the share of the target's
            images to which two sources' models give the same class, `confusion`, `reconstruction`
            and `information` of FADA's model III, and in the last round `largest`, the share of
            the predictions that are the most frequent class, and `changed`, the share of the
            answers that the target's last step changed.
        rounds: the number of rounds that the training will have.
        classes: C, the number of classes of the sources.
        examples: the sources' numbers of examples; sites that are not among them are targets.
        entropies: the rounds whose `loss` is a mean cross entropy of the sources.
        rate: the first learning rate, of which advice is given; 0: unknown.
        steps: of the largest source in a round.
        suspect: what of a site's data makes a training diverge or learn nothing, too.
    """
    found: dict[str, Doubt] = {}
    losses: list[float] = []
    row: dict[str, int] = {}
    quiet: dict[str, int] = {}  # rounds in a row, up to the last, that say the contrary
    most = {"kept": 0.0, "predicted": 0, "information": 0.0}
    for entry in history:
        seen = {
            "classes": _classes(entry, classes, int(most["predicted"])),
            "one class": _one_class(entry, suspect),
            "kept": _kept(entry, most["kept"]),
            "weights": _weights(entry, examples),
            "discriminator": _discriminator(entry),
            "clipped": _clipped(entry),
            "unknown shift": _shift(entry),
            "sources": _alike(entry),
            "disentangled": _apart(entry, classes, rounds, most["information"]),
        }
        for what, text in seen.items():
            row[what] = row.get(what, 0) + 1 if text else 0
            if MEASURES[what] in entry:
                quiet[what] = 0 if text else quiet.get(what, 0) + 1
            lasts = row[what] >= LASTING or entry["round"] == rounds or what in AT_ONCE
            if text and lasts:
                found.setdefault(what, Doubt(what, entry["round"], text))
        if entry["round"] in entropies and "loss" in entry:
            losses.append(entry["loss"])
            text = _loss(losses, classes, _judged(len(losses), steps, classes), rate)
            quiet["loss"] = 0 if text else quiet.get("loss", 0) + 1
            if text:
                found.setdefault("loss", Doubt("loss", entry["round"], _caused(text, suspect)))
        for what in most:
            most[what] = max(most[what], entry.get(what, 0))
    ended = bool(history) and history[-1]["round"] == rounds
    left = [d for what, d in found.items() if not (ended and quiet.get(what, 0) >= LASTING)]
    return sorted(left, key=lambda doubt: doubt.round)


def _shift(entry: Round) -> str:
    if entry.get("changed", 0.0) <= CHANGED:
        return ""
    return (
        f"the target's last step changed {100 * entry['changed']:.0f} % of the answers: the models "
        "and the target's images disagree, and nobody can know without labels which are right, so "
        "the estimate may be off by 20 points; label a few images there (fedda label)"
    )


def _alike(entry: Round) -> str:
    if entry.get("alike", 1.0) >= ALIKE:
        return ""
    return (
        f"two sources' models give the same class to {100 * entry['alike']:.0f} % of the target's "
        "images: labels that the target makes of them are a wager, which may gain or lose 20 "
        "points; train the sources longer, or take AdaBN or KD3A, refined"
    )


def _apart(entry: Round, classes: int, rounds: int, before: float) -> str:
    if entry["round"] < rounds or "confusion" not in entry:
        return ""
    entropy, even = entry["confusion"], math.log(classes)
    lost, told = entry.get("reconstruction", 0.0), entry.get("information", 0.0)
    fallen = told <= FALLEN * before or told < 0.1
    if entropy >= ENTROPY * even and lost <= REBUILT and fallen:
        return ""
    return (
        f"FADA's two parts of the features are not apart: the class identifier's entropy is "
        f"{entropy:.2f} nats and should be {even:.2f}, the reconstructor does not rebuild "
        f"{100 * min(lost, 1):.0f} % of the features' variance and should rebuild all, and the "
        f"estimated information is {told:.2f} nats, after {before:.2f} at most before: model III "
        "is then model II with two more layers, and fada.parts=adversarial says as much"
    )


def _classes(entry: Round, classes: int, before: int) -> str:
    if "predicted" not in entry or (count := int(entry["predicted"])) >= classes:
        return ""
    vanished = f", and {before} in an earlier round" if before > count else ""
    return (
        f"the target's images are given {count} of the {classes} classes (a class counts from a "
        f"tenth of an equal share){vanished}; if the target has images of the others, the model "
        "does not know them there"
    )


def _caused(text: str, suspect: str) -> str:
    """A doubt with what may be its cause, which is to be looked at before settings."""
    return f"{text}; {suspect}" if suspect else text


def _one_class(entry: Round, suspect: str) -> str:
    if entry.get("largest", 0.0) <= ONE_CLASS:
        return ""
    text = (
        f"one class has {100 * entry['largest']:.0f} % of the predictions for the target's images; "
        "unless the target has hardly any other, training has failed: lower train.lr (with "
        "DILS and FRUDA the encoder's own, dils.lr or fruda.lr), or give it more rounds"
    )
    return _caused(text, suspect)


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


def _kept(entry: Round, before: float) -> str:
    if "kept" not in entry:
        return ""
    kept = entry["kept"]
    if kept < UNSURE:
        return (
            f"teachers are sure of {100 * kept:.1f} % of the target's images, so it learns next to "
            "nothing from them; lower kd3a.gate, or train the sources longer before"
        )
    if kept < LOST * before:
        return (
            f"teachers are sure of {100 * kept:.0f} % of the target's images, after "
            f"{100 * before:.0f} % in an earlier round: classes may be getting lost; try "
            "kd3a.mixup-among=heard or kd3a.mixup=0"
        )
    return ""


def _discriminator(entry: Round) -> str:
    if entry.get("discriminator-accuracy", 1.0) >= OVERRUN:
        return ""
    return (
        f"the discriminator is right about {100 * entry['discriminator-accuracy']:.0f} % of the "
        "images, less often than by chance: the encoders change faster than it can learn; lower "
        "their learning rate or reversal.strength, or raise discriminator.lr"
    )


def _clipped(entry: Round) -> str:
    if entry.get("clipped", 0.0) <= BENT:
        return ""
    return (
        f"exchange.clip shortened {100 * entry['clipped']:.0f} % of the gradients that were "
        "summed, each side's by itself, so that their sum points elsewhere; raise exchange.clip, "
        "or bound a critic by its layers (bound=spectral)"
    )


def _weights(entry: Round, examples: Mapping[str, int]) -> str:
    weights = {n: w for n, w in (entry.get("weights") or {}).items() if n in examples}
    total, images = sum(weights.values()), sum(examples[n] for n in weights)
    if len(weights) < 2 or total <= 0:
        return ""
    first = max(weights, key=lambda name: (weights[name], name))
    share = weights[first] / total
    if share <= ONE_SIDED or share <= examples[first] / max(images, 1) + 0.01:
        return ""
    return (
        f"{first} has {100 * share:.0f} % of the weight of all sources, by its examples it would "
        f"have {100 * examples[first] / images:.0f} %; the model is nearly that of one source"
    )
