"""When a training ends before its last planned round: its evidence rises no more, or it collapses.

The evidence is infomax on the target's unlabelled images, which every test says and by which a run
names its selected round. All here follows from the rounds so far, so a resumed run counts on.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fedda.settings import Task

EVIDENCE = "infomax"
RETURNED = "returned"  # in the entry of a round after which a training went back to an earlier one
LASTING = 3  # so many tests in a row must show a collapse
FEW = 0.25  # of the classes that were given before: so few left are a collapse
LOST = 0.5  # of the highest infomax: with less left, the answers say less, too


def last_round(task: Task, patience: int, history: Sequence[Mapping[str, Any]]) -> int:
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


def collapse(task: Task, history: Sequence[Mapping[str, Any]]) -> str:
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
        f"the training has collapsed: for {LASTING} rounds the target's images were given {left} "
        f"of the {known} classes that they were given before"
    )


def sentence(
    task: Task, patience: int, last: int, history: Sequence[Mapping[str, Any]] = ()
) -> str:
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
