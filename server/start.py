"""Find the model that `run.start-from` names, and check that it fits the run and its sites."""

from collections.abc import Sequence
from pathlib import Path

from fedda import models, plugins
from fedda.config import ModelConfig
from fedda.data.naming import unlike
from fedda.errors import ConfigError
from fedda.models import Extension, Meta
from fedda.results.read import model_file
from fedda.settings import RunConfig, Task
from fedda.wire.packing import Arrays

from .strategy_modules import roster

IF_SEVERAL = "start from one of its trainings"  # advice, if the run has several models
NAMED = 5  # at most so many class names in an error message


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


def finished(run: Path, task: Task) -> Arrays:
    """Read the weights of a finished run's model, to start a training from them.

    Raises:
        ModelError: it cannot be read.
        ConfigError: it has another architecture, or was made for other inputs or classes.
    """
    model, about = models.load(model_file(run, IF_SEVERAL))
    extension = Extension.of(task.about, task.options)
    _check_model(run, about, task.method, task.model, extension)
    _check_data(run, about, task.dims, task.inputs.columns, task.names)
    if model.backbone is not None:
        _compare(run, "frozen weights", model.backbone.digest(), task.frozen)
    return models.to_arrays(model)


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
    if about.columns and columns and (other := unlike(about.columns, columns)):
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
