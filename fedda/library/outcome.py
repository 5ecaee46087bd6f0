"""What a run gives: its results, round by round, and its models."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedda.errors import ConfigError, DataError, ModelError, RunError
from fedda.results import read
from fedda.results.diagnostics import Doubt
from fedda.settings import as_arguments

if TYPE_CHECKING:
    import numpy as np
    import pandas as pd
    from torch import nn

    from fedda.models import Meta
    from fedda.models import Model as Classifier


@dataclass(frozen=True)
class Training:
    """One training: a method, a seed and a target.

    Attributes:
        method: its name.
        seed: of every random draw.
        target: the site that it adapted to.
        accuracy: of the target's tests after the last round, 0 to 1; None without tests.
        refined: likewise, of the model that the target's last step has made there.
        accuracies: the accuracy after each round.
        losses: the mean training loss of each round; None where no source trained.
        weights: what each site counted in the last round; empty if none were used.
        doubts: signs that it may have gone wrong.
        bytes: that crossed, by what they were, such as `from source model`.
        seconds: that it took.
        rounds: all that was noted of each round.
    """

    method: str
    seed: int
    target: str
    accuracy: float | None
    refined: float | None
    accuracies: tuple[float | None, ...]
    losses: tuple[float | None, ...]
    weights: Mapping[str, float]
    doubts: tuple[Doubt, ...]
    bytes: Mapping[str, int]
    seconds: float
    rounds: tuple[Mapping[str, Any], ...]

    @classmethod
    def of(cls, method: str, noted: Mapping[str, Any]) -> "Training":
        """A training as results.json holds it."""
        rounds = noted["rounds"]
        return cls(
            method=method,
            seed=noted["seed"],
            target=noted.get("target", ""),
            accuracy=noted["final_accuracy"],
            refined=(noted.get("refined") or {}).get("accuracy"),
            accuracies=tuple(each.get("accuracy") for each in rounds),
            losses=tuple(each.get("loss") for each in rounds),
            weights=rounds[-1].get("weights", {}) if rounds else {},
            doubts=tuple(
                Doubt(**each | {"text": as_arguments(each["text"])})
                for each in noted.get("doubts", ())
            ),
            bytes=noted["bytes"],
            seconds=noted["seconds"],
            rounds=tuple(rounds),
        )


class Results:
    """The results of a run: its trainings, and means over the seeds.

    Attributes:
        raw: the content of results.json.
        method: the method's name.
        seeds: one training of each method per seed and target.
        classes: their names, in the order of the model's outputs.
        accuracy: the target's after the last round, mean over seeds and targets, 0 to 1.
        troubles: what went wrong at or with sites: `what`, `site`, `text`.
        trainings: all of them, the baseline's first.
    """

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.raw = dict(raw)
        self.method: str = raw["method"]
        self.seeds: tuple[int, ...] = tuple(raw["seeds"])
        self.classes: tuple[str, ...] = tuple(raw.get("classes", ()))
        self.accuracy: float | None = raw.get("final_accuracy")
        self.troubles: tuple[Mapping[str, Any], ...] = tuple(raw["events"])
        self.trainings = tuple(
            Training.of(method, noted) for method, of in raw["trainings"].items() for noted in of
        )

    @property
    def accuracies(self) -> dict[str, float | None]:
        """The accuracy of each method that was trained, by its name."""
        means = read.summary(self.raw)
        if means["measure"] != "accuracy":
            return dict.fromkeys(means["methods"])
        return {method: found["last"]["mean"] for method, found in means["methods"].items()}

    @property
    def doubts(self) -> tuple[Doubt, ...]:
        """The doubts of all trainings of the method, without those of its baseline."""
        return tuple(d for t in self.of(self.method) for d in t.doubts)

    def of(self, method: str) -> tuple[Training, ...]:
        """The trainings of a method, in the order of seeds and targets."""
        return tuple(t for t in self.trainings if t.method == method)

    def to_frame(self) -> "pd.DataFrame":
        """A pandas table with one row per method, seed, target and round.

        Columns: method, seed, target, round, accuracy, loss, infomax, seconds, bytes, and one
        `weight SITE` per site that counted.

        Raises:
            RunError: pandas is not installed.
        """
        rows = [
            {
                "method": training.method,
                "seed": training.seed,
                "target": training.target,
                "round": each["round"],
                "accuracy": each.get("accuracy"),
                "loss": each.get("loss"),
                "infomax": each.get("infomax"),
                "seconds": each.get("seconds"),
                "bytes": sum(each.get("bytes", {}).values()),
                **{f"weight {site}": w for site, w in each.get("weights", {}).items()},
            }
            for training in self.trainings
            for each in training.rounds
        ]
        return frame(rows)

    def __repr__(self) -> str:
        parts = [f"{method} {read.percent(mean)}" for method, mean in self.accuracies.items()]
        return f"Results({', '.join(parts)}; {read.counted(len(self.seeds), 'seed')})"


class Model:
    """A trained model, ready to predict.

    Attributes:
        network: the torch module, on the CPU, in evaluation mode.
        classes: names of the classes, in the order of its outputs.
        shape: of one input, (channels, H, W) or (d,).
    """

    def __init__(self, network: "Classifier", about: "Meta") -> None:
        self.network = network
        self.classes = tuple(about.classes)
        self.shape = tuple(about.shape)
        self._inputs = about.inputs

    def predict(self, images: Any, batch: int = 256) -> list[str]:
        """The likeliest class of each example.

        Args:
            images: arrays in any form that `fedda.simulate` takes, or one image (H, W) or
                (H, W, 3), or a folder or file of them; the answers are in their order.
                Images are brought to the size and colours that the model was trained with.
            batch: examples at a time.

        Raises:
            DataError: they cannot be used, or do not fit the model.
        """
        return [self.classes[i] for i in self.probabilities(images, batch).argmax(axis=1)]

    def probabilities(self, images: Any, batch: int = 256) -> "np.ndarray":
        """The probability of each class, as `predict` takes the images -> float32 (N, C)."""
        import numpy as np

        from fedda import models
        from fedda.models.arithmetic import plain_modes

        with plain_modes():
            parts = self._parts(images, batch)
            return np.concatenate([models.predict(self.network, x, batch).numpy() for x in parts])

    def _parts(self, images: Any, batch: int) -> Any:
        """The examples in the model's shape, some at a time."""
        import torch

        from fedda.data import Reading, batches
        from fedda.data.batchwise import fitted
        from fedda.data.own_columns import own_columns
        from fedda.data.sets import Unlabelled

        from . import program_inputs

        shape, resize, *_, columns = self._inputs
        reading = Reading().of_model(self._inputs)
        if isinstance(images, str | Path):
            found = batches(Path(images), shape, batch, resize, reading)
            yield from (some.examples.x for some in found)
            return
        images = program_inputs.in_order(images, columns, reading.fills)
        images = one_or_several(images, self.shape)
        array = torch.from_numpy(program_inputs.images(images, "images"))
        if (own := own_columns(array, "images", reading)) is not None:
            array = own(array)
        if array.ndim == 3:
            array = array[:, None]
        elif array.ndim == 4:
            array = array.permute(0, 3, 1, 2).contiguous()
        if (array.ndim == 4) != (len(self.shape) == 3):
            raise DataError(
                f"images has the shape {tuple(array.shape)}, but the model takes inputs of shape "
                f"{self.shape}; give data like its training data."
            )
        for x in array.split(batch):
            yield fitted(Unlabelled(x), shape, resize).x

    def __repr__(self) -> str:
        return f"Model({len(self.classes)} classes, inputs of shape {self.shape})"


def one_or_several(images: Any, shape: tuple[int, ...]) -> Any:
    """Images as a stack of them: one image alone becomes a stack of one.

    Args:
        images: arrays, or one image of Pillow.
        shape: of one input of the model.

    Raises:
        DataError: they could be one image as well as several.
    """
    from .program_inputs import as_array

    array = as_array(images)
    if len(shape) != 3 or array.ndim == 1:
        return array
    if hasattr(images, "getbands") or (array.ndim == 3 and array.shape[2] in (1, 3)):
        return array[None]
    odd = array.ndim == 3 and (array.shape[2] in (2, 4) or array.shape[0] == shape[0] == 3)
    if odd or array.ndim == 2:
        raise DataError(
            f"images has the shape {tuple(array.shape)}, which may be one image or several: give "
            "several as (N, H, W) or (N, H, W, 3), and one as images[None]"
        )
    return array


class Run:
    """A finished run.

    Attributes:
        folder: where its results are.
        results: accuracies, estimates, doubts, weights and bytes.
    """

    def __init__(
        self, folder: Path, network: "Callable[[tuple[int, ...]], nn.Module] | None" = None
    ) -> None:
        self.folder = folder
        self.results = Results(read.load(folder))
        self._network = network

    @cached_property
    def model(self) -> Model:
        """The method's model of the first seed.

        Raises:
            ModelError: the run has several targets (`model_of` names one), or it cannot be read.
        """
        targets = read.targets(self.results.raw)
        if len(targets) > 1:
            raise ModelError(
                f"The run has the targets {', '.join(targets)}, each with a model of its own; "
                "give one to run.model_of."
            )
        return self.model_of()

    def model_of(
        self, target: str | None = None, method: str | None = None, seed: int | None = None
    ) -> Model:
        """The model of one training, by default of the method's first one.

        Where the adapted model stays at its target, it is taken from that simulated site's folder.

        Raises:
            ConfigError: there is no such training.
            ModelError: the model cannot be read.
        """
        from fedda import models

        from .own_model import lent

        raw = self.results.raw
        wanted = method or self.results.method
        for noted in raw["trainings"].get(wanted, ()):
            if target in (None, noted.get("target")) and seed in (None, noted["seed"]):
                with lent(self._network):
                    return Model(*models.load(self._file(wanted, noted)))
        known = [f"{t.method} with seed {t.seed} on {t.target}" for t in self.results.trainings]
        raise ConfigError(f"There is no such training; the run has {'; '.join(known)}.")

    def _file(self, method: str, noted: Mapping[str, Any]) -> Path:
        """The model's file; the folder may have been moved since the run."""
        if adapted := noted.get("adapted"):
            there = self.folder / "sites" / adapted["file"]
            if there.is_file():
                return there
            raise ModelError(
                f"{method}'s adapted model stayed at {adapted['site']}; load it there with "
                f"fedda predict, from {adapted['file']} below that site's --state-dir."
            )
        own = self.folder / Path(noted["model"]).parent.name / read.MODEL
        # A comparison keeps only the run's own copy; there is one training in it.
        return own if own.is_file() or len(self.results.trainings) > 1 else self.folder / read.MODEL

    def __repr__(self) -> str:
        return f"Run({self.folder.name!r}, {self.results!r})"


def load(dir: str | Path, network: "Callable[[tuple[int, ...]], nn.Module] | None" = None) -> Run:
    """A finished run, from its folder; `fedda run` and `fedda.simulate` write one.

        run = fedda.load("runs/kd3a")
        run.results.to_frame()

    Args:
        dir: the run's folder.
        network: the function that was given to `simulate`, if one was.

    Raises:
        RunError: the folder holds no results.
    """
    folder = Path(dir).absolute()
    if folder.is_file():
        raise RunError(f"{dir} is a file; give the folder of a finished run.")
    return Run(folder, network)


def frame(rows: Sequence[Mapping[str, Any]]) -> "pd.DataFrame":
    """A pandas table of rows.

    Raises:
        RunError: pandas is not installed.
    """
    from fedda.data.optional import needed

    return needed("pandas", "frames", "to_frame", RunError).DataFrame(rows)
