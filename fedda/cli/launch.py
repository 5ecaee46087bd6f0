"""Start a run on a server or on this machine, and show its progress in the terminal."""

import json
import logging
import signal
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import Any

import typer

from fedda import plugins
from fedda.cli.exits import INTERRUPTED, interruptible
from fedda.cli.watching import (
    DiedError,
    Going,
    StoppedError,
    Submission,
    at_server,
    connection,
    resume_hint,
    watch,
)
from fedda.errors import ConfigError, FeddaError, RunError, typed
from fedda.library.beginning import Launch, started
from fedda.ops import certificate
from fedda.ops.address import address
from fedda.ops.lock import GoingOnError, alone, holder
from fedda.results.escaping import PlainConsole, echo
from fedda.results.read import JOURNAL
from fedda.settings import RunConfig

logger = logging.getLogger("fedda.plugins")
ABOUT = "server.json"  # in the folder of a server: where it listens for operators


def perform(config: RunConfig, launch: Launch) -> None:
    """Run, show the progress, then the results; after a failure say how to go on."""
    from fedda.results.progress import Display

    folder = Path(config.run.dir) / config.run.name
    if process := holder(folder):
        echo(f"process {process.pid} still executes the run in {folder}; waiting for its end")
    with concluding(folder), Display(config) as display:
        if launch.simulate:
            from fedda.library.simulated import execute

            def note(text: str) -> None:
                echo(f"note: {text}", err=True)

            execute(config, launch, display, say=note)
        else:
            on_server(config, launch, folder, display)


@contextmanager
def concluding(folder: Path) -> Iterator[None]:
    """Show the results of the run that goes on in the `with` block; after a failure, how to go on.

    Raises:
        Exit: the run was stopped.
        FeddaError: the run failed.
    """
    try:
        yield
    except (KeyboardInterrupt, StoppedError):
        echo(f"\nstopped{resume_hint(folder, stopped=True)}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except GoingOnError:
        raise
    except FeddaError as error:
        raise type(error)(f"{error}{resume_hint(folder)}") from error
    with interruptible(f"the run has finished; its results are in {folder}"):
        present(folder)


def present(folder: Path) -> None:
    """Print a run's results, and let packages show them too (`fedda.listeners`).

    Raises:
        RunError: the folder holds no results, or a file cannot be written.
    """
    from fedda.results.read import load
    from fedda.results.terminal import table

    results = load(folder)
    PlainConsole().print(table(results))
    for name, each in plugins.installed("listeners").items():
        try:
            each.value(results, folder)
        except Exception:  # a package's fault takes nothing from a run that has finished
            logger.exception("the listener %s of %s failed; the run has ended", name, each.origin)


def settings_of(folder: Path) -> RunConfig | None:
    """The settings of a run that `fedda run` began; None if it was begun otherwise."""
    try:
        return RunConfig.parse(started(folder)[0])
    except FeddaError:
        return None


def apart(place: Path, option: str, root: Path, source: str) -> None:
    """Refuse an output folder inside the folder of the domains.

    Raises:
        ConfigError: the output folder lies where every folder is taken for a domain.
    """
    if place.resolve().is_relative_to(root.resolve()):
        raise ConfigError(
            f"{option} {place} lies in {source} {root}, where every folder is taken for a domain; "
            f"give {option} a folder elsewhere."
        )


def on_command_line(context: typer.Context, name: str) -> bool:
    """Whether an option was on the command line."""
    return getattr(context.get_parameter_source(name), "name", "") == "COMMANDLINE"


def refuse_local(context: typer.Context, names: Sequence[str]) -> None:
    """Refuse options of simulated sites where the sites are not simulated.

    Raises:
        ConfigError: one of them was given.
    """
    for name in (name for name in context.params if name in names):
        if on_command_line(context, name):
            raise ConfigError(
                f"--{name.replace('_', '-')} is for simulated sites; give --simulate ROOT with it, "
                "or leave it out."
            )


def on_server(config: RunConfig, launch: Launch, folder: Path, display: Any) -> None:
    """Run on a server, and call `display` with every event until the run has ended.

    At Ctrl-C the run is ended at the server.

    Raises:
        FeddaError: no server answers, or the run failed.
    """
    from fedda.ops.bundle import stage

    address, ca = _server_of(launch)
    if ca is not None:
        own = ca.with_name("server.pem")  # of a server that has run since before anybody was warned
        for file in (ca, *([own] if own.is_file() else [])):
            if warning := certificate.check_certificate(file):
                echo(f"warning: {warning}", err=True)
    # Refused if another run writes to this folder: its journal would be shown, and mixed with ours.
    with alone(folder):
        pass
    journal = folder / JOURNAL
    offset = journal.stat().st_size if journal.exists() else 0
    with connection(address, ca) as control:
        control.sites()  # gives a clear error if no server answers
        _end_former(folder, address, control)
        run: Going | None = None
        try:
            with tempfile.TemporaryDirectory() as scratch:
                app = stage(Path(scratch) / "app", config.flat())
                with _held():  # else the server may have a run that nobody ends
                    run_id = control.start_run(app, config.flat())
                    submission = Submission(run_id, address, str(ca or ""), offset)
                    run = at_server(control, submission)
                    submission.write(folder)
            watch(journal, offset, run.ended, display)
        except (KeyboardInterrupt, DiedError):
            if run is not None:
                with _held():
                    try:
                        run.stop()  # so that another can begin at once
                    except RunError as error:
                        echo(f"\nthe run could not be ended at its server: {error}", err=True)
            raise


@contextmanager
def _held() -> Iterator[None]:
    """Let a signal that comes in the block wait until its end."""
    came: list[int] = []
    numbers = {signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}
    former = {n: signal.signal(n, lambda number, _: came.append(number)) for n in numbers}
    try:
        yield
    finally:
        for number, handler in former.items():
            signal.signal(number, handler)
    for number in came[:1]:
        signal.raise_signal(number)


def _end_former(folder: Path, address: str, control: Any) -> None:
    """End what the server still knows of a run whose process is gone, as it would for a minute."""
    former = Submission.read(folder)
    if former is not None and former.address == address:
        with suppress(RunError):  # it has ended, or this server was started after it
            control.stop_run(former.run)


def _server_of(launch: Launch) -> tuple[str, Path | None]:
    """Return HOST:PORT of the server's control API, and its certificate authority's file.

    Raises:
        RunError: no server runs from the folder of `fedda superlink` that is given.
    """
    if launch.superlink:
        server = address(launch.superlink, port=None)
        return str(server), Path(launch.ca) if launch.ca else None
    folder = Path(launch.server)
    try:
        about = json.loads((folder / ABOUT).read_text())
        return about["admin"], Path(about["ca"]) if about["ca"] else None
    except (OSError, ValueError, KeyError):
        raise RunError(
            f"No server runs from {folder}; start one with "
            f"{typed('fedda', 'superlink', '--dir', folder)}, name another by --server or "
            "--superlink, or run without one by --simulate."
        ) from None


def on_terminate() -> None:
    """Let SIGTERM and SIGHUP end a command and all that it started, as Ctrl-C does."""
    hangup = getattr(signal, "SIGHUP", signal.SIGTERM)  # Windows has none
    for each in {signal.SIGTERM, hangup}:
        if signal.getsignal(each) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(each, _interrupt)


def _interrupt(_number: int, frame: FrameType | None) -> None:
    """Do what Ctrl-C does, also where it is ignored, as in the background of a script."""
    handler = signal.getsignal(signal.SIGINT)
    (handler if callable(handler) else signal.default_int_handler)(signal.SIGINT, frame)
