"""`fedda run`: start a run on a server, or play one through on this machine."""

import json
import os
import signal
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fedda import config as settings
from fedda.cli.exits import clear_exit
from fedda.config import RunConfig
from fedda.errors import ConfigError, RunError
from fedda.folders import load

LAUNCH = "launch.json"
INTERRUPTED = 130


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


def run(
    method: Annotated[
        str, typer.Argument(metavar="[METHOD]", help="Which; `fedda methods` lists them.")
    ] = "",
    change: Annotated[
        list[str] | None,
        typer.Option("-c", metavar="KEY=VALUE", help="Change a setting; see `fedda settings`."),
    ] = None,
    preset: Annotated[str, typer.Option(help="A method's named choices: paper, official.")] = "",
    rounds: Annotated[
        int, typer.Option(min=0, show_default=False, help="Rounds; short for -c rounds=N.")
    ] = 0,
    seeds: Annotated[str, typer.Option(help="One training per seed, such as 0,1,2.")] = "",
    baseline: Annotated[
        str, typer.Option(help="Method to train beside it on the same seeds, or none.")
    ] = "fedavg",
    name: Annotated[str, typer.Option(help="Results go to DIR/NAME. Default: the method.")] = "",
    directory: Annotated[
        Path, typer.Option("--dir", file_okay=False, help="Folder of all runs.")
    ] = Path("runs"),
    simulate: Annotated[
        Path | None,
        typer.Option(metavar="ROOT", help="Without a server, over the domain folders of ROOT."),
    ] = None,
    target: Annotated[str, typer.Option(help="Which folder of ROOT is the target.")] = "",
    engine: Annotated[
        Literal["process", "ray"],
        typer.Option(help="process: one site after the other; ray: Flower's simulation."),
    ] = "process",
    poison: Annotated[
        str, typer.Option(metavar="NAME=PERCENT", help="Flip labels of a simulated source.")
    ] = "",
    threads: Annotated[
        int, typer.Option(min=0, help="CPU threads of a simulated site; 0: all, 1 for ray.")
    ] = 0,
    server: Annotated[
        Path,
        typer.Option(metavar="DIR", help="The folder `fedda superlink --dir` runs from."),
    ] = Path("fedda-server"),
    superlink: Annotated[
        str,
        typer.Option(
            metavar="HOST:PORT", help="A SuperLink started otherwise; --dir must be shared with it."
        ),
    ] = "",
    ca: Annotated[
        Path | None, typer.Option(help="Authority of that SuperLink's certificate.")
    ] = None,
    resume: Annotated[
        Path | None,
        typer.Option(metavar="RUN", help="Go on with the run in this folder, as it was started."),
    ] = None,
) -> None:
    """Run a method over sites that have joined a server, or over folders of this machine.

    On the server's machine, for the sites that `fedda-client` has joined to it:

      fedda run kd3a --server hub -c wait.min-sources=2 --seeds 0,1,2

    Without any server, over ROOT's folders, one per domain:

      fedda run kd3a --simulate ./digits --target fonts -c input.size=16 -c input.channels=1

    After an interruption:

      fedda run --resume runs/kd3a

    Results go to DIR/NAME: results.json, report.png and model.safetensors. Exit code 0 means that
    the run finished, 1 that it could not, 130 that it was interrupted.
    """
    with clear_exit():
        if resume is not None:
            flat, launch = _begun(resume)
            flat |= settings.overrides(str(flat["method"]), change or [])
        else:
            flat = _flat(method, change or [], preset, rounds, seeds, baseline)
            flat["run.dir"] = str(directory.absolute())
            flat["run.name"] = name or _free_name(directory, method)
            launch = Launch(
                str(simulate.absolute()) if simulate else "",
                target,
                engine,
                poison,
                threads or (os.cpu_count() or 1 if engine == "process" else 1),
                str(server.absolute()),
                superlink,
                str(ca.absolute()) if ca else "",
            )
        config = RunConfig.parse(flat)
        folder = Path(config.run.dir) / config.run.name
        if resume is None:
            if (folder / "config.json").exists():
                raise RunError(
                    f"{folder} holds a run already; choose another --name, or go on with it by "
                    f"fedda run --resume {folder}"
                )
            folder.mkdir(parents=True, exist_ok=True)
            started = asdict(launch) | {"settings": config.flat()}
            (folder / LAUNCH).write_text(json.dumps(started, indent=1))
        perform(config, launch)


def perform(config: RunConfig, launch: Launch) -> None:
    """Run, show the progress, then the results; an interruption says how to go on."""
    from fedda.cli.report import present
    from fedda.progress import Display

    folder = Path(config.run.dir) / config.run.name
    try:
        with Display(config) as display:
            if launch.simulate:
                _simulate(config, launch, folder, display)
            else:
                _on_server(config, launch, folder, display)
    except KeyboardInterrupt:
        typer.echo(f"\nstopped; go on with: fedda run --resume {folder}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    except RunError as error:
        if not (folder / "config.json").exists():
            raise
        raise RunError(f"{error}\ngo on with: fedda run --resume {folder}") from error
    present(folder)


def watch(journal: Path, offset: int, ended: Callable[[], bool], display: Any) -> None:
    """Show what a run on a server writes to its journal, until it ends.

    Raises:
        RunError: the run failed; with the reason it gave.
    """
    from fedda.progress import follow

    for event in follow(journal, ended, offset):
        display(event)
        if event["event"] == "failed":
            raise RunError(str(event["text"]))
        if event["event"] == "done":
            return
    raise RunError(f"The server ended the run without a word in {journal}; see the server's log.")


def _simulate(config: RunConfig, launch: Launch, folder: Path, display: Any) -> None:
    local, journals = load("server", "local"), load("server", "journal")
    poison = {}
    for pair in filter(None, launch.poison.split(",")):
        who, _, percent = pair.partition("=")
        try:
            poison[who] = float(percent)
        except ValueError:
            raise ConfigError(f"--poison {pair!r} is not NAME=PERCENT, such as svhn=30.") from None
    sites = local.folders(Path(launch.simulate), launch.target, poison, launch.threads)
    for site in sites:
        site["state-dir"] = str(folder / "state")
    journal = journals.Journal(folder / "journal.jsonl", display)
    local.simulate(config, sites, journal, launch.engine)


def _on_server(config: RunConfig, launch: Launch, folder: Path, display: Any) -> None:
    from fedda.fab import stage
    from fedda.submit import submit, write_connection

    address, ca = _server_of(launch)
    control = load("server", "control").Control(address, ca)
    journal = folder / "journal.jsonl"
    offset = journal.stat().st_size if journal.exists() else 0
    try:
        control.sites()  # says clearly when no server answers
        with tempfile.TemporaryDirectory() as scratch:
            home = Path(scratch) / "flwr"
            write_connection(home, address, ca)
            run_id = submit(stage(Path(scratch) / "app"), config.flat(), home)
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


def _flat(
    method: str, change: list[str], preset: str, rounds: int, seeds: str, baseline: str
) -> dict[str, Any]:
    """The settings of a new run."""
    if not method:
        raise ConfigError(f"Say which method: {', '.join(settings.methods())}.")
    presets: Mapping[str, Mapping[str, Any]] = settings.method_module(method).PRESETS
    if preset and preset not in presets:
        known = ", ".join(presets) or "none"
        raise ConfigError(f"{method} has no preset '{preset}'; it has {known}.")
    flat: dict[str, Any] = {"method": method}
    flat |= {f"{method}.{k}": v for k, v in presets.get(preset, {}).items()}
    flat |= {"rounds": rounds} if rounds else {}
    flat |= {"run.seeds": seeds} if seeds else {}
    flat["run.baseline"] = "" if baseline in ("none", method) else baseline
    return flat | settings.overrides(method, change)


def _begun(folder: Path) -> tuple[dict[str, Any], Launch]:
    """What a run was started with."""
    try:
        started = json.loads((folder / LAUNCH).read_text())
        flat = started.pop("settings")
        launch = Launch(**started)
    except (OSError, ValueError, TypeError) as error:
        raise RunError(f"{folder} holds no run that could be resumed ({error}).") from None
    place = {"run.dir": str(folder.absolute().parent), "run.name": folder.absolute().name}
    return flat | place | {"run.resume": True}, launch


def _free_name(directory: Path, method: str) -> str:
    names = (method if n == 1 else f"{method}-{n}" for n in range(1, 10_000))
    return next(n for n in names if not (directory / n / "config.json").exists())


def on_terminate() -> None:
    """Let SIGTERM end a command as Ctrl-C does, with everything it started."""
    signal.signal(signal.SIGTERM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
