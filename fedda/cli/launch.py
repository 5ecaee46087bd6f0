"""Carrying a run out, on a server or on this machine, and watching it from the terminal."""

import json
import os
import signal
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer

from fedda.errors import ConfigError, FeddaError, RunError
from fedda.halves import load
from fedda.ops import keys
from fedda.settings import RunConfig

INTERRUPTED = 130
TRIES = 10  # questions in a row, a second apart, that a server may leave unanswered


@dataclass(frozen=True)
class Launch:
    """How a run was started, kept in its folder so that it can be resumed the same way."""

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
        typer.echo(f"\nstopped{_way_on(folder)}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except FeddaError as error:
        raise type(error)(f"{error}{_way_on(folder)}") from error
    present(folder)


def apart(place: Path, option: str, root: Path, source: str) -> None:
    """Refuse to write where every folder is taken for a domain.

    Raises:
        ConfigError: the place lies in the folder of the domains.
    """
    if place.resolve().is_relative_to(root.resolve()):
        raise ConfigError(
            f"{option} {place} lies in {source} {root}, where every folder is taken for a domain; "
            f"give {option} a folder elsewhere."
        )


def _way_on(folder: Path) -> str:
    """What to type to go on, once there is something to go on from."""
    begun = any(folder.glob("*/checkpoint.json"))
    return f"\ngo on with: fedda run --resume {folder}" if begun else ""


def watch(journal: Path, offset: int, ended: Callable[[], bool], display: Any) -> None:
    """Show what a run on a server writes to its journal, until it ends.

    Raises:
        RunError: the run failed, with the reason it gave; or the server does not answer any more.
    """
    from fedda.results.progress import follow

    failures = 0

    def over() -> bool:
        nonlocal failures
        try:
            found = ended()
        except RunError:
            failures += 1
            if failures == TRIES:
                raise
            return False
        failures = 0
        return found

    for event in follow(journal, over, offset):
        display(event)
        if event["event"] == "failed":
            raise RunError(str(event["text"]))
        if event["event"] == "done":
            return
    raise RunError(f"The server ended the run without a word in {journal}; see the server's log.")


def _simulate(config: RunConfig, launch: Launch, folder: Path, display: Any) -> None:
    local, journals = load("server", "simulation"), load("server", "journal")
    poison = {}
    for pair in filter(None, launch.poison.split(",")):
        who, _, percent = pair.partition("=")
        try:
            poison[who] = float(percent)
        except ValueError:
            raise ConfigError(f"--poison {pair!r} is not NAME=PERCENT, such as svhn=30.") from None
    sites = local.folders(Path(launch.simulate), launch.target, poison, launch.threads)
    local.rehearse(config, sites)  # else a site that cannot answer would be waited for
    journal = journals.Journal(folder / "journal.jsonl", display)
    local.simulate(config, sites, journal, launch.engine)


def _on_server(config: RunConfig, launch: Launch, folder: Path, display: Any) -> None:
    from fedda.ops.bundle import stage
    from fedda.ops.submit import submit, write_connection

    address, ca = _server_of(launch)
    if ca is not None:
        keys.check_certificate(ca)
    with load("server", "run").alone(folder):
        pass  # else this would show, and spoil, what another run writes
    control = load("server", "superlink.control").Control(address, ca)
    journal = folder / "journal.jsonl"
    offset = journal.stat().st_size if journal.exists() else 0
    try:
        control.sites()  # says clearly when no server answers
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
    """Address and authority of the operators' side of the server."""
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
    """Let SIGTERM and SIGHUP end a command as Ctrl-C does, with everything it started."""
    for each in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(each) is not signal.SIG_IGN:  # nohup asks for it
            signal.signal(each, lambda *_: os.kill(os.getpid(), signal.SIGINT))
