"""What a training begins with: its task, its plan, its first model, and where gradients are summed.

The first model is new, or the one that `run.start-from` names, if that fits the run and its sites.
Its last one is saved here, too: another run may start from it.
"""

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from flwr.serverapp import Grid

from fedda import models, plugins
from fedda.config import ModelConfig
from fedda.data.naming import unlike
from fedda.errors import ConfigError
from fedda.exchange import Host, LocalHost
from fedda.models import Extension, Meta
from fedda.ops.spawn import LANES
from fedda.results.read import model_file
from fedda.settings import RunConfig, Task
from fedda.wire.packing import Arrays, Manifest

from .strategy_modules import roster

IF_SEVERAL = "start from one of its trainings"  # advice, if the run has several models
NAMED = 5  # at most so many class names in an error message
# Steps of a source, over all rounds. A method that adapts a network from its first weights needs
# steps, not rounds: on digits of five kinds (`examples/benchmarks/digit_five.py`) KD3A is where
# FedAvg is until some hundred, and leaves it behind from about a thousand on.
ENOUGH = 1000
Notice = Callable[[str, str, str], None]


def start_of(config: RunConfig) -> Meta | None:
    """Return what the file of the run's start model says of it; None without `run.start-from`.

    Raises:
        ModelError: it cannot be read, or there are several to choose from.
        ConfigError: its architecture is not the one that the run's methods train.
    """
    if not config.run.start_from:
        return None
    run = Path(config.run.start_from)
    about = models.describe(model_file(run, IF_SEVERAL))
    for method in config.trainings:
        extension = Extension.of(plugins.method(method), config.options[method])
        _check_model(run, about, method, config.model, extension)
    return about


def check_start(config: RunConfig, about: Meta | None, members: roster.Roster) -> None:
    """Check that the run's start model takes the inputs and classes of the sites that joined.

    Raises:
        ConfigError: it was made for other inputs or classes.
    """
    if about is not None:
        itself = members.shape, members.columns, members.classes
        _check_data(Path(config.run.start_from), about, *itself)


def task_for(config: RunConfig, method: str, seed: int, members: roster.Roster) -> Task:
    """Return the description of a training that its sites receive."""
    target = members.target.name if members.several else ""
    later = len(members.targets) > 1  # it has the sites of the trainings before it
    about = members.shape, members.classes, len(members.nodes), target, later, members.columns
    task = config.task(method, seed, *about)
    if not task.model.freezes:
        return task
    return task.model_copy(update={"frozen": models.digest(task.model, task.dims)})


def first_model(config: RunConfig, task: Task) -> Arrays:
    """Make the model that all sites start from; sites draw the same, and compare.

    Raises:
        ModelError: the finished run's model cannot be read.
        ConfigError: it has another architecture, or was made for other inputs or classes.
    """
    extension = Extension.of(task.about, task.options)
    if not config.run.start_from:
        made = models.build(task.model, task.dims, task.classes, task.seed, extension)
        return models.to_arrays(made)
    run = Path(config.run.start_from)
    model, about = models.load(model_file(run, IF_SEVERAL))
    _check_model(run, about, task.method, task.model, extension)
    _check_data(run, about, task.dims, task.inputs.columns, task.names)
    if model.backbone is not None:
        _compare(run, "frozen weights", model.backbone.digest(), task.frozen)
    return models.to_arrays(model)


def save_model(path: Path, task: Task, arrays: Arrays, classes: Sequence[str]) -> None:
    """Write a finished training's model to a file, with its frozen part."""
    extension = Extension.of(task.about, task.options)
    model = models.blank(task.model, task.dims, task.classes, extension)
    models.load_arrays(model, arrays)
    if task.model.freezes:
        model.attach(models.backbone(task.model, task.dims, fetch=True))
    models.save(path, model, config=task.model, inputs=task.inputs, classes=classes)


def _check_model(
    run: Path, about: Meta, method: str, config: ModelConfig, extension: Extension | None
) -> None:
    theirs = about.config
    _compare(run, "model", theirs.name, config.name)
    _compare(run, "hidden layers", theirs.hidden, config.hidden)
    _compare(run, "bottleneck", theirs.bottleneck, config.bottleneck)
    _compare(run, "train", theirs.train, config.train)
    if (theirs.weights == "none") != (config.weights == "none"):  # pretrained ones normalise inputs
        _compare(run, "weights", theirs.weights, config.weights)
    if about.extension != extension:
        raise ConfigError(
            f"The model in {run} has {_layers(about.extension)}, but {method} trains one with "
            f"{_layers(extension)}; start from a run of the same method and settings."
        )


def _check_data(
    run: Path,
    about: Meta,
    shape: tuple[int, ...],
    columns: tuple[str, ...],
    classes: Sequence[str],
) -> None:
    _compare(run, "inputs of shape", about.shape, tuple(shape))
    if about.inputs.columns and columns and (other := unlike(about.inputs.columns, columns)):
        raise ConfigError(
            f"Beside this run's sites, the model in {run} has {other}; start from a run of the "
            "same columns."
        )
    if about.classes == tuple(classes):
        return
    gone = [name for name in about.classes if name not in classes]
    new = [name for name in classes if name not in about.classes]
    odd = [f"knows {_few(gone)}, which this run does not"] if gone else []
    odd += [f"does not know {_few(new)}"] if new else []
    how = " and ".join(odd) or "has this run's classes in another order"
    raise ConfigError(f"The model in {run} {how}; start from a run with the same class names.")


def _compare(run: Path, what: str, its: object, mine: object) -> None:
    if its != mine:
        raise ConfigError(
            f"The model in {run} has {what} {its!r}, but this run has {mine!r}; start from a run "
            "of the same model and data."
        )


def _layers(extension: Extension | None) -> str:
    return f"the layers of {extension}" if extension else "no layers of a method's own"


def _few(names: list[str]) -> str:
    more = f" and {len(names) - NAMED} more" if len(names) > NAMED else ""
    return f"{', '.join(names[:NAMED])}{more}"


def planned_steps(task: Task, examples: Mapping[str, int]) -> int:
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


def host(grid: Grid, notice: Notice) -> Host | LocalHost | None:
    """The host that opens sessions of the exchange; None: sites cannot come here.

    Args:
        grid: a `LaneGrid`, Flower's, or that of a simulation in this process.
        notice: called with each event of the exchange: what happened, the site, and a text.
    """
    if getattr(grid, "in_process", False):
        return LocalHost(notice)
    lanes, folder = getattr(grid, "host", None), os.environ.get(LANES)
    if lanes is None and folder is None:
        return None
    return Host(lanes or Path(str(folder)), notice)


def expect(grid: Grid, task: Task, layout: Manifest, sources: int) -> None:
    """Let replies come as large as those of a training may be, where the grid bounds them.

    A reply may hold arrays that no request held, such as a discriminator per source.

    Args:
        grid: a `LaneGrid`, or one without such a bound.
        task: the training.
        layout: of the run's model.
        sources: how many there are.
    """
    if accept := getattr(grid, "expect", None):
        stages = [stage.phase.layouts(task.options, layout) for stage in task.stages]
        others = max(sum(each.nbytes for each in layouts.values()) for layouts in stages)
        accept(layout.nbytes + others * max(1, sources))
