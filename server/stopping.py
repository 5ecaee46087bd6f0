"""When a training ends before its last planned round: its evidence without labels rises no more.

The evidence is infomax on the target's unlabelled images, which every test says and by which a run
names its selected round. All here follows from the rounds so far, so a resumed run counts on.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from fedda.settings import Task

EVIDENCE = "infomax"


def last_round(task: Task, patience: int, history: Sequence[Mapping[str, Any]]) -> int:
    """The last round of a training: the planned one, or the one after patience has run out.

    That one round more is trained as the last, as only in a last round do sources calibrate, does
    the target take its last step, and do FRUDA's sites measure what the adaptation has brought.

    Args:
        task: the training.
        patience: after so many tested rounds without a higher infomax it ends; 0: never.
        history: the entries of its finished rounds. Those of earlier phases do not count, as their
            models are others, and neither do rounds of which no test came back.
    """
    best, waited = float("-inf"), 0
    for entry in history if patience else ():
        if entry["round"] < task.stages[-1].first or EVIDENCE not in entry:
            continue
        better = entry[EVIDENCE] > best
        best, waited = (entry[EVIDENCE], 0) if better else (best, waited + 1)
        if waited == patience:
            return min(entry["round"] + 1, task.rounds)
    return task.rounds


def sentence(task: Task, patience: int, last: int) -> str:
    """Say at which round a training ends early, and why; empty if it does not."""
    if last == task.rounds:
        return ""
    tests = "the last test" if patience == 1 else f"the last {patience} tests"
    return (
        f"it ends after round {last} of {task.rounds}, as the target's infomax without labels rose "
        f"in none of {tests} (run.patience)"
    )
