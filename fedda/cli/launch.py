"""Start a run on a server or on this machine, and show its progress in the terminal."""

import json
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import typer

from fedda.errors import ConfigError, FeddaError, RunError
from fedda.halves import load
from fedda.ops import keys
from fedda.settings import RunConfig

INTERRUPTED = 130
TRIES = 10  # failed requests in a row, one per second, after which a run is given up


@dataclass(frozen=True)
class Launch:
    """How a run was started; written to its folder, so that it can be resumed in the same way."""

    simulate: str = ""
    target: str = ""
    engine: str = "process"
    poison: str = ""
    threads: int = 1
    server: str = ""
    superlink: str = ""
    ca: str = ""


def perform(config: RunConfig, launch: Launch) -> None:
    """Run, show the progress, then the results; after a failure say how to go on."""
    from fedda.cli.report import present
    from fedda.results.progress import Display

    folder = Path(config.run.dir) / config.run.name
    try:
        with Display(config) as display:
            if launch.simulate:
                _simulate(config, launch, folder, display)
            else:
                _on_server(config, launch, folder, display)
    except KeyboardInterrupt:
        typer.echo(f"\nstopped{_resume_hint(folder)}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except FeddaError as error:
        raise type(error)(f"{error}{_resume_hint(folder)}") from error
    present(folder)


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


def _resume_hint(folder: Path) -> str:
    """Return the command that resumes the run; empty if there is no checkpoint yet."""
    begun = any(folder.glob("*/checkpoint.json"))
    return f"\ngo on with: fedda run --resume {folder}" if begun else ""


def watch(journal: Path, offset: int, ended: Callable[[], bool], display: Any) -> None:
    """Show what a run on a server writes to its journal, until it ends.

    Raises:
        RunError: the run failed (with its reason), or the server no longer answers.
    """
    from fedda.results.progress import follow

    failures = 0

    def over() -> bool:
        nonlocal failures
        try:
            finished = ended()
        except RunError:
            failures += 1
            if failures == TRIES:
                raise
            return False
        failures = 0
        return finished

    for event in follow(journal, over, offset):
        display(event)
        if event["event"] == "failed":
            raise RunError(str(event["text"]))
        if event["event"] == "done":
            return
    raise RunError(f"The server ended the run but wrote no end in {journal}; see the server's log.")


def _simulate(config: RunConfig, launch: Launch, folder: Path, display: Any) -> None:
    local, journals = load("server", "simulation"), load("server", "journal")
    poison = {}
    for pair in filter(None, launch.poison.split(",")):
        site, _, percent = pair.partition("=")
        try:
            poison[site] = float(percent)
        except ValueError:
            raise ConfigError(f"--poison {pair!r} is not NAME=PERCENT, such as svhn=30.") from None
    sites = local.folders(Path(launch.simulate), launch.target, poison, launch.threads)
    local.rehearse(config, sites)  # else the run would wait for a site that cannot answer
    journal = journals.Journal(folder / "journal.jsonl", display)
    local.simulate(config, sites, journal, launch.engine)


def _on_server(config: RunConfig, launch: Launch, folder: Path, display: Any) -> None:
    from fedda.ops.bundle import stage
    from fedda.ops.submit import submit, write_connection

    address, ca = _server_of(launch)
    if ca is not None:
        keys.check_certificate(ca)
    # Refused if another run writes to this folder: its journal would be shown, and mixed with ours.
    with load("server", "run").alone(folder):
        pass
    control = load("server", "superlink.control").Control(address, ca)
    journal = folder / "journal.jsonl"
    offset = journal.stat().st_size if journal.exists() else 0
    try:
        control.sites()  # gives a clear error if no server answers
        with tempfile.TemporaryDirectory() as scratch:
            home = Path(scratch) / "flwr"
            write_connection(home, address, ca)
            run_id = submit(stage(Path(scratch) / "app", config.flat()), config.flat(), home)
        try:
            watch(journal, offset, lambda: control.run_state(run_id).ended, display)
        except KeyboardInterrupt:
            control.stop_run(run_id)
            raise
    finally:
        control.close()


def _server_of(launch: Launch) -> tuple[str, Path | None]:
    """Return the address of the server's control API and its certificate authority's file."""
    if launch.superlink:
        return launch.superlink, Path(launch.ca) if launch.ca else None
    path = Path(launch.server) / "server.json"
    try:
        about = json.loads(path.read_text())
        return about["admin"], Path(about["ca"]) if about["ca"] else None
    except (OSError, ValueError, KeyError):
        raise RunError(
            f"No server runs from {launch.server}; start one with fedda superlink --dir, name "
            "another by --server or --superlink, or run without one by --simulate."
        ) from None


def on_terminate() -> None:
    """Let SIGTERM and SIGHUP end a command and all that it started, as Ctrl-C does."""
    for each in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(each) is not signal.SIG_IGN:  # nohup ignores SIGHUP
            signal.signal(each, _interrupt)


def _interrupt(_number: int, frame: FrameType | None) -> None:
    """Do what Ctrl-C does, also where it is ignored, as in the background of a script."""
    handler = signal.getsignal(signal.SIGINT)
    (handler if callable(handler) else signal.default_int_handler)(signal.SIGINT, frame)
