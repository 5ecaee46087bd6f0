"""How many steps a training has planned, and what of its plan a user may not have meant.

A method that adapts a network from its first weights needs steps, not rounds: on digits of five
kinds (`examples/benchmarks/digit_five.py`) KD3A is where FedAvg is until some hundred steps of a
source, and leaves it behind from about a thousand on.
"""

from collections.abc import Mapping, Sequence

from fedda.settings import Task

ENOUGH = 1000  # steps of a source, over all rounds


def steps(task: Task, examples: Mapping[str, int]) -> int:
    """Steps of the source that takes most, in all rounds; 0 if sources leave before the last."""
    trains = [any("source" in hop for hop in s.phase.hops.values()) for s in task.stages]
    if not trains or not trains[-1]:
        return 0
    spans = [stage.last - stage.first + 1 for stage in task.stages]
    rounds = sum(span for span, source in zip(spans, trains, strict=True) if source)
    return rounds * max((task.train.steps_of(n) for n in examples.values()), default=0)


def hints(task: Task, planned: int, idle: Sequence[str] = ()) -> list[str]:
    """What a user may not have meant: few steps, a rate that rises, what sites show, idle settings.

    Features that are given, as of vectors or a frozen network, adapt in fewer steps.
    """
    moves = task.model.train == "all" and task.model.name != "identity"
    said, train = [], task.train
    if moves and task.about.adapts and 0 < planned < ENOUGH:
        said.append(
            f"{planned} steps at a source are planned; a network that learns from its first "
            f"weights gains most by {task.method} after {ENOUGH} and more: "
            f"--rounds {-(-task.rounds * ENOUGH // planned)}, or train.steps raised likewise, "
            "would give them"
        )
    if train.schedule in ("cosine", "linear") and train.lr_end > train.lr:
        said.append(
            f"train.lr-end is {train.lr_end:g}, above train.lr of {train.lr:g}, so the learning "
            f"rate rises over the rounds; to have it fall, set -c train.lr-end={train.lr / 50:g}"
        )
    said += filter(None, dict.fromkeys(stage.phase.tells for stage in task.stages))
    if idle:
        said.append(f"{', '.join(idle)}: of no method that is trained here, so without effect")
    return said
