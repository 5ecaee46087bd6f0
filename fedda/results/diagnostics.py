"""What the rounds of a training say without labels of the target: that it went wrong, or is over.

Signs that it went wrong are found in what a run reports anyway, round by round: the share of the
target's examples that KD3A's teachers are sure of, and the sources' loss. Of 238 trainings on data
that no setting was chosen on, three were doubted by that share, all of them more than 5 points
below FedAvg, as 35 were; signs such as a vanished class, one-sided weights or a lower infomax named
as many of the good ones as of the bad, and are not looked for. A training without doubts may still
be wrong.

It ends before its last planned round when its evidence rises no more, or it collapses. The evidence
is infomax on the target's unlabelled images, which every test says and by which a run names its
selected round. All here follows from the rounds so far, so a resumed run counts on.
"""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from fedda.methods import Phase
from fedda.results.read import ANSWERED, REFINED
from fedda.settings import Task

UNSURE = 0.05  # a smaller share of kept images teaches the target next to nothing
LOST = 0.5  # a share of kept images, or infomax, below this part of its highest one is a loss
BLIND = 2.0  # a mean loss above this many times ln C is far worse than that of knowing nothing
CHANCE = 0.97  # a mean loss above this many times ln C is that of knowing nothing
RISEN = 1.25  # a mean loss of so many times its lowest one has risen
HIGH = 0.75  # but only above this many times ln C is that a sign of trouble
FIRST_STEPS = 20  # of training, or one per class: before, a loss as of guessing means nothing
LONG = 200  # steps of a round after which one alone is enough
LASTING = 3  # so many rounds in a row make a doubt or a collapse; for a doubt the last one does
EVIDENCE = "infomax"
RETURNED = "returned"  # in the entry of a round after which a training went back to an earlier one
FEW = 0.25  # of the classes that were given before: so few left are a collapse

# What results.json says of the target's last step, and the numbers of its test that say it.
OF_ANSWERS = {"last": "answers", "refined": "answers-refined"}
OF_REFINED = {"accuracy": "accuracy-refined", "changed": "changed", "agreed": "agreed"}

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


def doubted(
    task: Task, patience: int, counts: Collection[int], history: Sequence[Round]
) -> list[Doubt]:
    """The reasons to doubt a training, whose sources count as so many examples."""
    steps = max((task.train.steps_of(n) for n in counts), default=0)
    entropies = {
        r
        for stage in task.stages
        if _learns_labels(stage.phase)
        for r in range(stage.first, stage.last + 1)
    }
    about = last_round(task, patience, history), task.classes, entropies
    return doubts(history, *about, task.train.lr, steps, task.suspect)


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


def _learns_labels(phase: Phase) -> bool:
    """Whether the sources train models in a phase, so that their loss is a cross entropy."""
    parts = [hop["source"] for hop in phase.hops.values() if "source" in hop]
    return any("model" in part.leaves.arrays for part in parts)


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
            f"teachers are sure of {100 * kept:.1f} % of the target's examples, so it learns next "
            "to nothing from them; lower kd3a.gate, or train the sources longer before"
        )
    if kept < LOST * before:
        return (
            f"teachers are sure of {100 * kept:.0f} % of the target's examples, after "
            f"{100 * before:.0f} % in an earlier round: classes may be getting lost; try "
            "kd3a.mixup=0"
        )
    return ""


def of_test(told: Mapping[str, Any], classes: int, last: bool) -> dict[str, Any]:
    """The numbers of a test as results.json has them; only the last round's tell of its answers."""
    tested = {name: value for name, value in told.items() if name != "seconds"}
    if "loss" in tested:
        tested["test_loss"] = tested.pop("loss")
    answers = {n: tested.pop(key) for n, key in OF_ANSWERS.items() if key in tested}
    if last:
        tested[ANSWERED] = {}
        for name, cells in answers.items():
            rows = [list(cells[i : i + classes + 1]) for i in range(0, len(cells), classes + 1)]
            table = {"counts": [row[:-1] for row in rows], "tests": [row[-1] for row in rows]}
            tested[ANSWERED][name] = table
        tested[REFINED] = {n: tested.pop(k) for n, k in OF_REFINED.items() if k in tested} or None
    return tested


def selected(best: dict[str, Any], tested: Round, server_round: int) -> dict[str, Any]:
    """The round with the highest infomax so far, the last of equal ones; it needs no label.

    Args:
        best: the one of the rounds before; empty if there is none.
        tested: what a round's test found.
        server_round: this round.
    """
    if EVIDENCE not in tested or tested[EVIDENCE] < best.get(EVIDENCE, float("-inf")):
        return best
    chosen = {k: tested[k] for k in (EVIDENCE, "accuracy") if k in tested}
    return chosen | {"round": server_round}


def tests_anew(task: Task, server_round: int) -> bool:
    """Whether earlier rounds' infomax no longer compares with that of a round."""
    stages = [stage for stage in task.stages if stage.first <= server_round]
    begins = stages[-1].first == server_round and len(stages) > 1
    return begins and stages[-1].phase.test.leaves != stages[-2].phase.test.leaves


def last_round(task: Task, patience: int, history: Sequence[Round]) -> int:
    """The last round of a training: the planned one, or the one after patience has run out.

    That one round more is trained as the last, as only in a last round does the target take its
    last step, and do FRUDA's sites measure what the adaptation has brought.

    Args:
        task: the training.
        patience: after so many tested rounds without a higher infomax it ends; 0: never.
        history: the entries of its finished rounds. Those of earlier phases do not count, as their
            models are others, and neither do rounds of which no test came back.
    """
    if history and RETURNED in history[-1]:
        return history[-1]["round"]
    best, waited = float("-inf"), 0
    for entry in history if patience else ():
        if entry["round"] < task.stages[-1].first or EVIDENCE not in entry:
            continue
        better = entry[EVIDENCE] > best
        best, waited = (entry[EVIDENCE], 0) if better else (best, waited + 1)
        if waited == patience:
            return min(entry["round"] + 1, task.rounds)
    return task.rounds


def collapse(task: Task, history: Sequence[Round]) -> str:
    """What of the target's answers says that a training has collapsed, in words; empty if nothing.

    In each of the last tests its images were given a quarter of the classes that they were given in
    an earlier round, or fewer, and infomax was below half of its highest value. A target that has
    but a quarter of the classes can look like that, too: with two of ten a perfect model has an
    infomax of ln 2 = .69, which is a collapse beside an earlier 1.5, and none beside an earlier 1.

    Args:
        task: the training.
        history: the entries of its finished rounds; those of earlier phases do not count.
    """
    first = task.stages[-1].first
    tests = [e for e in history if e["round"] >= first and {EVIDENCE, "predicted"} <= e.keys()]
    if len(tests) <= LASTING:
        return ""
    known = max(int(entry["predicted"]) for entry in tests)
    highest = max(entry[EVIDENCE] for entry in tests)
    for entry in tests[-LASTING:]:
        few = known > 1 and int(entry["predicted"]) <= max(1, FEW * known)
        if not few or entry[EVIDENCE] >= LOST * highest:
            return ""
    left = int(tests[-1]["predicted"])
    return (
        f"the training has collapsed: for {LASTING} rounds the target's examples were given {left} "
        f"of the {known} classes that they were given before"
    )


def sentence(task: Task, patience: int, last: int, history: Sequence[Round] = ()) -> str:
    """Say at which round a training ends early, and why; empty if it does not."""
    if history and (back := history[-1].get(RETURNED)):
        return f"it ended after round {last} of {task.rounds} and went back to round {back}'s model"
    if last == task.rounds:
        return ""
    tests = "the last test" if patience == 1 else f"the last {patience} tests"
    return (
        f"it ends after round {last} of {task.rounds}, as the target's infomax without labels rose "
        f"in none of {tests} (run.patience)"
    )
