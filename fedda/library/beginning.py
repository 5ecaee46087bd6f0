"""A run's settings, where its results go, and the note of how it was started."""

import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from fedda import plugins
from fedda.config.sections import Flat, validate
from fedda.config.site_config import FileOptions
from fedda.errors import ConfigError, RunError, typed
from fedda.files import put
from fedda.halves import REFERENCE
from fedda.ops.lock import STARTER, GoingOnError, alone, holder, still_going_on
from fedda.results import read
from fedda.results.story import added
from fedda.settings import RunConfig, presets

LAUNCH = "launch.json"


class Launch(FileOptions):
    """How a run was started; written to its folder, so that it can be resumed in the same way."""

    simulate: str = ""
    target: str = ""
    engine: str = "process"
    poison: str = ""
    threads: int = 1
    server: str = ""
    superlink: str = ""
    ca: str = ""
    teacher: str = ""
    device: str = "auto"


def new_settings(
    method: str, chosen: Sequence[str], given: Flat, baseline: str, changes: Flat
) -> Flat:
    """The settings of a new run.

    Args:
        method: its name.
        chosen: presets.
        given: settings that have an argument or option of their own; empty if it was not given.
        baseline: a method, `none`, or empty if it was not given.
        changes: all other settings; they win over all else.
    """
    if not method:
        raise ConfigError(f"Say which method: {', '.join(plugins.methods())}.")
    flat: Flat = {"method": method, **presets.settings(method, chosen)}
    flat |= {key: value for key, value in given.items() if value}
    # With a model to start from, a baseline would only train that model further.
    beside = baseline or ("none" if (flat | changes).get("run.start-from") else REFERENCE)
    flat["run.baseline"] = "" if beside in ("none", method) else beside
    return flat | changes


@contextmanager
def beginning(config: RunConfig, launch: Launch) -> Iterator[Path]:
    """Note how a new run is started; if it does not begin in the `with` block, leave no folder.

    A run on a server has begun once the server writes its journal, another once it trains.

    Raises:
        RunError: the folder holds a run already, or cannot be written.
    """
    folder = Path(config.run.dir) / config.run.name
    if read.begun(folder):
        if holder(folder):
            raise still_going_on(folder)
        raise RunError(
            f"{folder} holds a run already; choose another --name, or go on with it by "
            f"{typed('fedda', 'run', '--resume', folder)}"
        )
    journal, here = folder / read.JOURNAL, launch.simulate or launch.target

    def kept() -> bool:
        there = journal.exists()
        return there and (not here or any(e["event"] == "training" for e in added(journal)[0]))

    # Who starts another run of this name is told so: it may wait for its sites there.
    with unless(kept, folder), alone(folder, STARTER):
        with alone(folder):
            started = launch.model_dump() | {"settings": config.flat()}
            put(folder / LAUNCH, json.dumps(started, indent=1))
        yield folder


@contextmanager
def unless(kept: Callable[[], bool], folder: Path) -> Iterator[None]:
    """If the `with` block fails, leave no folder that was not there before, unless it is kept."""
    fresh = [place for place in (folder, *folder.parents) if not place.exists()]
    try:
        yield
    except BaseException as error:
        if folder in fresh and not kept() and not isinstance(error, GoingOnError):
            shutil.rmtree(folder, ignore_errors=True)
            for parent in fresh[1:]:
                with suppress(OSError):  # something else lies in it by now
                    parent.rmdir()
        raise


def started(folder: Path) -> tuple[dict[str, Any], Launch]:
    """Read the settings with which a run was started, and how.

    Raises:
        RunError: the folder does not say it.
    """
    try:
        noted = json.loads((folder / LAUNCH).read_text())
        flat = noted.pop("settings")
        launch = validate(Launch, noted, LAUNCH)
    except (OSError, ValueError, TypeError, KeyError, ConfigError) as error:
        why = f"it has no {LAUNCH}" if isinstance(error, OSError) else str(error)
        raise RunError(
            f"{folder} holds no run that could be resumed ({why}); give the folder of a run, "
            "DIR/NAME; `fedda runs --dir DIR` lists them."
        ) from None
    place = {"run.dir": str(folder.absolute().parent), "run.name": folder.absolute().name}
    return flat | place, launch
