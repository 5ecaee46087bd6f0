"""The order of a run's trainings, and in a chain what each of them gets from those before it."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from fedda import plugins
from fedda.errors import ConfigError
from fedda.settings import RunConfig, Task
from fedda.wire.packing import Kind, pack

from . import checkpoint
from .strategy_modules import post, roster

Earlier = post.Earlier


def order(config: RunConfig, members: roster.Roster) -> tuple[str, ...]:
    """Return the names of the targets to which the run adapts, in order.

    An open run begins with those that its settings name; all others of the roster follow.

    Raises:
        RosterError: there is no target of the name `run.target`.
        ConfigError: a method's chain names a site that is none of these targets.
    """
    aims = [aim.target.name for aim in members.aims(config.run.target)]
    for method in config.trainings:
        chain = plugins.method(method).chain
        named = tuple(chain(config.options[method])) if chain else ()
        if odd := [name for name in named if name not in aims]:
            raise ConfigError(
                f"{method}.sequence names '{odd[0]}', which is no target of this run; name some of "
                f"{', '.join(aims)}, or leave it empty."
            )
        aims = [*named] or aims
    others = [node.name for node in members.targets if node.name not in aims]
    return (*aims, *others) if config.open else tuple(aims)


def facing(
    config: RunConfig,
    method: str,
    members: roster.Roster,
    target: str,
    targets: Sequence[str],
) -> roster.Roster:
    """Return the roster of one training; in a chain it includes the targets before this one."""
    nodes = {node.name: node for node in members.targets}
    before = targets[: targets.index(target)] if plugins.method(method).chain else ()
    aim = members.facing(nodes[target], [nodes[name] for name in before])
    return replace(aim, several=True) if config.open else aim


def adapted(folder: Path, task: Task, members: roster.Roster) -> Mapping[str, Earlier]:
    """Read the checkpoints of a chain's trainings before this one -> by target, in order.

    Raises:
        RunError: a checkpoint cannot be read.
    """
    found = {}
    for node in members.targets[1:]:
        label = task.model_copy(update={"target": node.name}).label
        state = checkpoint.read(folder / label)
        if state is not None:
            memory = post.Memory(dict(state.numbers), dict(state.arrays))
            found[node.name] = Earlier(pack(state.model, Kind.MODEL), memory)
    return found
