"""Watching a run that another process executes, and ending it.

A run on a server is executed by a program that the server started; a simulated one by the command
`fedda run` itself. Either goes on while other commands come and go. What these need to find it is
in the run's folder: the lock names the process, and `submitted.json` the run on the server.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fedda.errors import RunError, typed
from fedda.files import put
from fedda.halves import load
from fedda.library.beginning import LAUNCH
from fedda.ops.lock import Holder, holder
from fedda.results.read import JOURNAL, RESULTS, begun
from fedda.results.story import INTERRUPTS

SUBMITTED = "submitted.json"
STOPPED, COMPLETED = "stopped", "completed"  # how a server says that a run ended
TRIES = 10  # failed requests in a row, one per second, after which a run is given up
LEAVE = 10.0  # seconds to wait until a process leaves a run, before it is asked in another way
ENDS = 60.0  # seconds to wait until a run that was stopped has ended


class StoppedError(RunError):
    """Somebody stopped the run."""


class DiedError(RunError):
    """The process that executed the run is gone."""


@dataclass(frozen=True)
class Submission:
    """A run that was started on a server; `fedda run` writes it to the run's folder."""

    run: int  # Flower's id of the run
    address: str  # HOST:PORT where the server listens for operators
    ca: str  # file of the server's certificate authority; empty for plain HTTP
    offset: int  # bytes of the journal that were there before, from an earlier start of the run

    def write(self, folder: Path) -> None:
        """Write it to a run's folder."""
        put(folder / SUBMITTED, json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> "Submission | None":
        """Read it from a run's folder; None if the run was not started on a server."""
        try:
            return cls(**json.loads((folder / SUBMITTED).read_text()))
        except (OSError, ValueError, TypeError):
            return None


class Going(NamedTuple):
    """A run that goes on: on a server, or of a process of which nothing else is known."""

    offset: int  # bytes of the journal before this run
    ended: Callable[[], str]  # says how it ended, in a word or two; empty while it goes on
    stop: Callable[[], object]  # asks it to end; a RunError if it cannot be asked from here
    process: Holder | None = None  # that executes it; on a server, only that knows it


def at_server(control: Any, submission: Submission) -> Going:
    """A run on a server, over the server's Control API."""
    number = submission.run
    return Going(
        submission.offset,
        lambda: control.run_state(number).ending,
        lambda: control.stop_run(number),
    )


def _interrupt(folder: Path, process: Holder) -> None:
    """Ask a process of this machine to leave its run: a simulation, or a run of `flwr run`."""
    if not process.near:
        raise RunError(f"The run in {folder} is executed on {process.host}; stop it there.")
    try:
        # As Ctrl-C does; but a command in the background of a script ignores Ctrl-C.
        for number in (signal.SIGINT, signal.SIGTERM):
            deadline = time.monotonic() + LEAVE
            if holder(folder) == process:
                os.kill(process.pid, number)
            while holder(folder) == process and time.monotonic() < deadline:
                time.sleep(0.1)
    except ProcessLookupError:
        pass  # it has just ended
    except PermissionError:
        raise RunError(
            f"The run in {folder} belongs to another user (process {process.pid}); stop it as that "
            "user."
        ) from None


@contextmanager
def going_on(folder: Path) -> Iterator[Going]:
    """Give the run that goes on in a folder.

    Raises:
        RunError: no run goes on there.
    """
    submission = Submission.read(folder)
    if submission is not None:
        with connection(submission.address, submission.ca) as control:
            run = at_server(control, submission)
            if _unended(run):
                yield run
                return
    process = holder(folder)
    if process is None:
        raise RunError(f"No run is going on in {folder}{_instead(folder)}.")
    # `watch` looks whether the process is there.
    yield Going(began(folder / JOURNAL), str, partial(_interrupt, folder, process), process)


def all_going_on(directory: Path) -> list[Path]:
    """List the folders below a folder of runs in which a run goes on."""
    found = []
    for folder in sorted(path for path in directory.glob("*") if path.is_dir()):
        try:
            with going_on(folder):
                found.append(folder)
        except RunError:
            continue
    return found


def connection(address: str, ca: Path | str | None) -> Any:
    """Connect to a server's Control API (`server.superlink.control.Control`)."""
    return load("server", "superlink.control").Control(address, Path(ca) if ca else None)


def watch(
    journal: Path,
    offset: int,
    ended: Callable[[], str],
    display: Callable[[dict[str, Any]], None],
    process: Holder | None = None,
) -> None:
    """Show what another process writes to a run's journal, until the run ends.

    Args:
        journal: the file, in the run's folder.
        offset: number of bytes at its beginning to skip.
        ended: says how the run ended; empty while it goes on.
        display: called with every event.
        process: the process that executes the run, if it is known already.

    Raises:
        StoppedError: somebody stopped the run.
        DiedError: the process that executed the run is gone, without a last word.
        RunError: the run failed (with its reason), or the server no longer answers.
    """
    from fedda.results.progress import follow

    process = process or holder(journal.parent)
    failures, how, silent = 0, "", ""

    def gone() -> bool:
        """Whether the process began and is no longer there."""
        nonlocal process
        now = holder(journal.parent)
        process = now or process
        return now is None and process is not None and not process.alive

    def over() -> bool:
        nonlocal failures, how, silent
        is_gone = gone()  # the server may know how it ended
        try:
            how = ended()
        except RunError as error:
            failures, silent = failures + 1, f" Its server is gone, too: {error}"
            if failures == TRIES and not is_gone:
                raise
            return is_gone
        failures, silent = 0, ""
        return is_gone or bool(how)

    for event in follow(journal, over, offset):
        display(event)
        if event["event"] == "started" and "pid" in event:  # before it has locked the folder
            process = Holder(event["pid"], event["began"], event["host"])
        if event["event"] == "failed":
            raise _failure(event, ended)
        if event["event"] == "done":
            return
    if how == STOPPED:
        raise StoppedError("The run was stopped.")
    if how == COMPLETED:
        raise RunError(
            f"The run has finished, but {journal} does not say so: its folder was moved or removed "
            "while it went on; its results are where the folder is now, or in a new one there."
        )
    if gone() and process is not None:
        raise DiedError(
            f"The program that executed the run (process {process.pid}) has ended without a word: "
            f"it was killed, or its machine ran out of memory.{silent}"
        )
    raise RunError(
        f"The server ended the run ({how}) without a word: its clock was set while the run went "
        "on, or its log says more."
    )


def stop(folder: Path) -> None:
    """End the run that goes on in a folder, and wait until it has ended.

    Raises:
        RunError: no run goes on there, it cannot be reached from here, or it does not end.
    """
    with going_on(folder) as run:
        run.stop()
    deadline = time.monotonic() + ENDS
    while process := holder(folder):
        if time.monotonic() > deadline:
            raise RunError(
                f"The run in {folder} was asked to end and has not ended in {ENDS:.0f} s; end its "
                f"process {process.pid} on {process.host} with kill -9."
            )
        time.sleep(0.2)


def resume_hint(folder: Path, stopped: bool = False) -> str:
    """Return the command that resumes the run; empty if it failed before its first checkpoint."""
    checkpoints = (folder / LAUNCH).is_file() and (
        any(folder.glob("*/checkpoint.json")) or (stopped and (folder / JOURNAL).is_file())
    )
    return f"\ngo on with: {typed('fedda', 'run', '--resume', folder)}" if checkpoints else ""


def _unended(run: Going) -> bool:
    """Whether the server says that a run goes on; False if no server answers."""
    try:
        return not run.ended()
    except RunError:
        return False


def _failure(failed: dict[str, Any], ended: Callable[[], str]) -> RunError:
    """The error of a run that failed: somebody stopped it, its server ended, or it says why.

    A program is interrupted in the same way by a person and by the end of its server, which then no
    longer answers.
    """
    text, error = str(failed["text"]), failed.get("error")
    if error not in INTERRUPTS:
        return RunError(text)
    try:
        stopped = ended() == STOPPED or error == "KeyboardInterrupt"
    except RunError:
        return RunError(
            "The run's server was stopped; start it first (`fedda superlink`), then go on with the "
            "run (`fedda run --resume`)."
        )
    return (StoppedError if stopped else RunError)(text)


def _instead(folder: Path) -> str:
    """What to do with the run in a folder in which none goes on; empty if it holds none."""
    if not folder.is_dir():
        return f": {'it is a file, and no run' if folder.exists() else 'there is no such'} folder"
    if (folder / RESULTS).is_file():
        return f"; it has finished: {typed('fedda', 'report', folder)}"
    resume = typed("fedda", "run", "--resume", folder)
    return f"; go on with it: {resume}" if begun(folder) else ""


def began(journal: Path) -> int:
    """Return the number of bytes of a journal before the last start of the run."""
    found = offset = 0
    if journal.exists():
        for line in journal.read_bytes().splitlines(keepends=True):
            if line.startswith(b'{"event": "started"'):
                found = offset
            offset += len(line)
    return found
