"""A run's curves in TensorBoard's files: `tensorboard --logdir RUN`.

The journal's event `training` opens the curves of one method and seed; every event `round` adds a
point to each. A resumed training gets a further file with all its rounds, whose beginning makes
TensorBoard forget those before. Curves are a convenience: where they cannot be written, that is
said once, and the run goes on without them.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from fedda.config.sections import Flat
from fedda.results.read import ANSWERED, REFINED, label
from fedda.settings import RunConfig

from .journal import Event, Journal

# Settings that may differ between the tries of a run, and so do not describe it.
PASSING = ("run.dir", "run.name", "run.resume", "run.expect", "run.seeds", "wait.", "track.")
# Keys of a round entry that are no curves.
NO_NUMBERS = ("event", "time", "method", "seed", "target", "round", ANSWERED, REFINED)


class Curves:
    """Listens to a run's journal inside its `with` block."""

    def __init__(self, config: RunConfig, folder: Path, journal: Journal) -> None:
        self._config, self._folder, self._journal = config, folder, journal
        self._writer: Any = None
        self._settings: Flat = {}
        self._failed = not config.track.tensorboard

    def __enter__(self) -> Self:
        if not self._failed:
            self._journal.listeners.append(self)
        return self

    def __exit__(self, *error: object) -> None:
        self._failed = True
        with suppress(Exception):
            if self._writer:
                self._writer.close()

    def __call__(self, event: Event) -> None:
        """Handle one event; only `training` and `round` matter to curves."""
        if event["event"] == "training":
            self._attempt(lambda: self._begin(event))
        elif event["event"] == "round":
            self._attempt(lambda: self._add(event["round"], dict(numbers(event)), event["time"]))

    def finished(self, training: Mapping[str, Any]) -> None:
        """Add a finished training's summary, its entry in results.json."""
        last, summary = training["rounds"][-1]["round"], dict(final(training))
        self._attempt(lambda: self._end(last, summary))

    def _begin(self, event: Event) -> None:
        # Here, as it takes time and memory.
        from torch.utils.tensorboard import SummaryWriter

        method, seed, target = event["method"], event["seed"], event.get("target", "")
        others = tuple(f"{name}." for name in self._config.options if name != method)
        flat = self._config.flat().items()
        settings = {k: v for k, v in flat if not k.startswith((*PASSING, *others))}
        settings |= {"method": method, "seed": seed} | ({"run.target": target} if target else {})
        folder = self._folder / label(method, seed, target)
        self._settings = settings
        self._writer = SummaryWriter(str(folder), purge_step=0)
        lines = [f"| {key} | {value} |" for key, value in settings.items()]
        table = "\n".join(["| setting | value |", "| --- | --- |", *lines])
        self._writer.add_text("settings", table, 0)
        current, past = (method, seed, target), self._journal.past("round")
        mine = (e for e in past if (e["method"], e["seed"], e.get("target", "")) == current)
        for number, each in {e["round"]: e for e in mine}.items():  # the last try of each
            if number <= event["round"]:
                self._add(number, dict(numbers(each)), each["time"])
        self._writer.flush()

    def _add(self, step: int, values: Mapping[str, float], time: float | None = None) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step, walltime=time)
        self._writer.flush()

    def _end(self, step: int, summary: Mapping[str, float]) -> None:
        from torch.utils.tensorboard.summary import hparams

        self._add(step, summary)
        for each in hparams(dict(self._settings), dict(summary)):
            self._writer._get_file_writer().add_summary(each)
        self._writer.close()
        self._writer = None

    def _attempt(self, step: Callable[[], None]) -> None:
        if self._failed:
            return
        try:
            step()
        except Exception as error:
            self._failed = True
            why = " ".join(str(error).split())[:200] or type(error).__name__
            text = f"TensorBoard's files cannot be written ({why}); training goes on without them"
            self._journal.trouble("tracking", "", text)


def numbers(entry: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """Every number of a round entry under a name: `accuracy`, `weights/anna`, `phases/train`."""
    for key, value in entry.items():
        name = prefix + str(key)
        if not prefix and key in NO_NUMBERS:
            continue
        if key == "bytes":  # `to source model`
            value = {str(k).replace(" ", "-"): v for k, v in value.items()}
        if isinstance(value, Mapping):
            yield from numbers(value, f"{name}/")
        elif isinstance(value, list | tuple):
            yield from numbers({str(i): v for i, v in enumerate(value)}, f"{name}/")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, float(value)


def final(training: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """The numbers of a training's summary, without those that were not measured."""
    summary = {
        "final/accuracy": training["final_accuracy"],
        "final/selected-accuracy": training["selected_accuracy"],
        "final/selected-round": training["selected_round"],
        "final/seconds": training["seconds"],
        "final/bytes": sum(training["bytes"].values()),
        "final/refined-accuracy": (training.get(REFINED) or {}).get("accuracy"),
    }
    yield from ((name, float(value)) for name, value in summary.items() if value is not None)
