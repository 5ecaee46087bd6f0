"""A run's journal: writes each event as a line of JSON to a file and passes it to listeners.

One of these draws curves in TensorBoard's files: `tensorboard --logdir RUN`. The event `training`
opens those of one method and seed; every event `round` adds a point to each. A resumed training
gets a further file with all its rounds, whose beginning makes TensorBoard forget those before.
Curves are a convenience: where they cannot be written, that is said once, and the run goes on
without them.
"""

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, Self

from fedda.config.sections import Flat
from fedda.errors import Code, FeddaError, code_of, reason
from fedda.ops.lock import GoingOnError
from fedda.results.read import ANSWERED, REFINED, Event, label
from fedda.results.story import added, facts
from fedda.settings import RunConfig

LONGEST = 600  # characters of a trouble's text; longer ones are cut, as they may quote a site
SAY = (5.0, 600.0)  # seconds until it is said whom a run waits for: at first, and at most
# Settings that may differ between the tries of a run, and so do not describe it.
PASSING = ("run.dir", "run.name", "run.resume", "run.expect", "run.seeds", "wait.", "track.")
# Keys of a round entry that are no curves.
NO_NUMBERS = ("event", "time", "method", "seed", "target", "round", ANSWERED, REFINED)

logger = logging.getLogger("fedda.server")
Listener = Callable[[Event], None]


class Journal:
    """Appends events to a file of JSON lines and calls the listeners.

    Args:
        path: the file, or None to keep events in memory only.
        listeners: functions, such as a progress display, that are called with every event. A
            listener that raises an error is not called again.
    """

    def __init__(self, path: Path | None = None, *listeners: Listener) -> None:
        self.path = path
        self.listeners = list(listeners)
        self.troubles: list[Event] = []
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.troubles = [facts(e) for e in self.past("trouble")]  # from before a resume

    def write(self, event: str, **facts: Any) -> None:
        """Record one event."""
        entry = {"event": event, "time": round(time.time(), 3), **facts}
        try:
            if self.path:
                with self.path.open("a") as file:
                    file.write(json.dumps(entry) + "\n")
        except OSError as error:  # a full disk must not hide events from the listeners
            logger.error("%s cannot be written (%s): %s", self.path, reason(error), entry)
        for listener in list(self.listeners):
            try:
                listener(entry)
            except Exception:  # a display whose terminal is gone must not end the run
                logger.exception("a listener of the run's journal failed and is not called again")
                self.listeners.remove(listener)

    def trouble(self, what: str, site: str, text: str, **facts: Any) -> None:
        """Record something that went wrong at or with a site, and keep it for the results."""
        text = text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
        self.troubles.append({"what": what, "site": site, "text": text, **facts})
        self.write("trouble", what=what, site=site, text=text, **facts)

    def knows(self, about: Event) -> bool:
        """Whether a trouble with these facts is recorded already."""
        return any(about.items() <= trouble.items() for trouble in self.troubles)

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Record why the run in the `with` block failed, if it does."""
        try:
            yield
        except GoingOnError:
            raise  # the journal belongs to the process that executes this run
        except FeddaError as error:
            self.write("failed", error=type(error).__name__, text=str(error))
            raise
        except (KeyboardInterrupt, SystemExit) as error:
            text = "the run was stopped, by a person or with its server; --resume goes on with it"
            self.write("failed", error=type(error).__name__, text=text)
            raise
        except BaseException as error:
            kind = type(error).__name__
            text = f"the run's program failed ({kind}); the server's superlink.log says where"
            if code_of(error) is Code.DISK:
                text = (
                    f"the disk of {self.path.parent if self.path else 'the run'} is full; make "
                    "room there, and --resume goes on with the run, of which nothing is lost"
                )
            self.write("failed", error=kind, text=text)
            raise

    def past(self, event: str) -> Iterator[Event]:
        """Yield the events of one kind in the file; skip a line that a crash cut short."""
        if self.path is not None and self.path.is_file():
            yield from (entry for entry in added(self.path)[0] if entry["event"] == event)


class Reminder:
    """Tells when to say again whom a run waits for: after seconds, then less and less often."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.calm()

    def calm(self) -> None:
        """Begin anew with short pauses, as something has come."""
        self._pause = SAY[0]
        self._next = time.monotonic() + self._pause

    def due(self) -> float:
        """Seconds since the wait began if it is time to say so, else 0."""
        now = time.monotonic()
        if now < self._next:
            return 0.0
        self._pause = min(2 * self._pause, SAY[1])
        self._next = now + self._pause
        return round(now - self._began, 1)


def by_reason(said: Mapping[str, str]) -> str:
    """Why sites gave no usable answer, each reason once, after those whose it is."""
    sites: dict[str, list[str]] = {}
    for site, text in said.items():
        sites.setdefault(text.rstrip("."), []).append(site)
    return "".join(f" {', '.join(names)}: {text}." for text, names in sites.items())


class Curves:
    """Listens to a run's journal inside its `with` block."""

    def __init__(self, config: RunConfig, folder: Path, journal: Journal) -> None:
        self._config, self._folder, self._journal = config, folder, journal
        self._writer: Any = None
        self._settings: Flat = {}
        self._failed = not config.track.tensorboard

    def __enter__(self) -> Self:
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
