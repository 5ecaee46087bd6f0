"""`fedda run`: start a run on a server, or simulate one on this machine."""

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fedda.cli.exits import interruptible
from fedda.cli.its_files import OPTIONS, names_files
from fedda.cli.launch import apart, on_command_line, on_terminate, perform, refuse_local
from fedda.cli.watching import resume_hint
from fedda.errors import ConfigError
from fedda.library.beginning import Launch, beginning, new_settings, started
from fedda.ops.engines import check_engine
from fedda.ops.lock import STARTER, alone
from fedda.settings import RunConfig, overrides, seeds_of

RESUMES = ("resume", "change")  # the only options that may be given with --resume
LOCAL = ("engine", "poison", "threads", "device", *OPTIONS, "teacher")
REMOTE = ("server", "superlink", "ca")
INSTEAD = {
    "method": "the argument METHOD",
    "run.look": "fedda look",
    "run.dir": "--dir",
    "run.name": "--name",
    "run.resume": "--resume RUN",
}


@names_files
def run(
    context: typer.Context,
    method: Annotated[str, typer.Argument(metavar="[METHOD]")] = "",
    change: Annotated[list[str] | None, typer.Option("-c", metavar="KEY=VALUE")] = None,
    preset: Annotated[list[str] | None, typer.Option(metavar="NAME")] = None,
    rounds: Annotated[int, typer.Option(min=0, show_default=False)] = 0,
    seeds: Annotated[str, typer.Option(show_default=False)] = "",
    baseline: str = "",
    start_from: Annotated[Path | None, typer.Option("--start-from", metavar="RUN")] = None,
    name: str = "",
    directory: Annotated[Path, typer.Option("--dir", "--out", file_okay=False)] = Path("runs"),
    simulate: Annotated[Path | None, typer.Option("--simulate", "--data", metavar="ROOT")] = None,
    target: Annotated[str, typer.Option(metavar="NAME")] = "",
    engine: Literal["process", "ray"] = "process",
    poison: Annotated[str, typer.Option(metavar="NAME=PERCENT")] = "",
    teacher: Annotated[
        Path | None, typer.Option(metavar="FILE", exists=True, dir_okay=False)
    ] = None,
    threads: Annotated[int, typer.Option(min=1)] = 1,
    device: str = "auto",
    *,
    files: dict[str, Any],
    server: Annotated[Path, typer.Option(metavar="DIR")] = Path("fedda-server"),
    superlink: Annotated[str, typer.Option(metavar="HOST:PORT")] = "",
    ca: Annotated[Path | None, typer.Option(readable=False)] = None,
    resume: Annotated[Path | None, typer.Option(metavar="RUN")] = None,
) -> None:
    """Run a method over sites that have joined a server, or over folders of this machine.

    On the server's machine, for the sites that `fedda-client` has joined to it:

      fedda run kd3a --server hub -c wait.min-sources=2 --seeds 3

    Without any server, over ROOT's folders, one per domain:

      fedda run kd3a --simulate ./digits --target fonts -c input.size=16 -c input.channels=1

    To adapt the model of a finished run at a target, without sources if the method needs none:

      fedda run METHOD --server hub --start-from runs/fedavg --target clinic-b

    After an interruption:

      fedda run --resume runs/kd3a

    Results go to DIR/NAME: results.json, report.png and model.safetensors. Each training also has
    its own folder with its model.safetensors; a run with several targets has models only there.
    Exit code 0 means that the run finished, 1 that it could not, 130 that it was stopped.

    A run on a server goes on if this command is killed: fedda attach shows it, fedda stop ends it.

    Options:
        method: Method to run; `fedda methods` lists them.
        change: Change a setting; see `fedda settings`.
        preset: Named settings of the method (paper, official) or of a benchmark (digit5, ...); if
            more than one is given, the last one wins; -c wins over all. `fedda settings --presets`
            lists them.
        rounds: Rounds; short for -c rounds=N.
        seeds: One training per seed: how many (3 means 0, 1 and 2), or a list with a comma: '5,6',
            or '7,' for one seed.
        baseline: Method to train on the same seeds for comparison, or none. Default: fedavg, or
            none with --start-from.
        start_from: A finished run's folder, or a model file, whose model to start from. Phases that
            only prepare a model are left out. If sources take part in none of the other phases, the
            run needs no sources.
        name: Results go to DIR/NAME. Default: the method.
        directory: Folder of all runs.
        simulate: Run without a server, over the domain folders of ROOT.
        target: Target to adapt to, if several have joined; without this option the run adapts to
            each in turn. With --simulate: the folder of ROOT that is the target, or several of
            them, separated by commas.
        engine: process: one site after the other; ray: Flower's simulation.
        poison: Share of labels to flip at a simulated source.
        teacher: A simulated target's own teacher, as of `fedda-client --teacher`.
        threads: CPU threads of a simulated site. More are faster, but the two engines give the same
            bits only with the same number.
        device: Of simulated sites: auto, which takes the first GPU if there is one, cpu or cuda:N.
        server: The folder that `fedda superlink` was given as --dir.
        superlink: A SuperLink not started by `fedda superlink`; it must share the folder --dir.
        ca: Certificate authority of that SuperLink.
        resume: Go on with the run in this folder, as it was started.
    """
    on_terminate()
    hint = resume_hint(resume, stopped=True) if resume else ""
    with interruptible(f"stopped before anything began{hint}"):
        _refuse_ignored(context, resume, simulate)
        if resume is not None:
            flat, launch = started(resume)
            flat |= {"run.resume": True} | _changes(str(flat["method"]), change or [])
        else:
            if simulate is not None:
                apart(directory, "--dir", simulate, "--simulate")
            given = {
                "rounds": rounds,
                "run.seeds": ",".join(map(str, seeds_of(seeds))) if seeds else "",
                "run.start-from": str(start_from.absolute()) if start_from else "",
                "run.target": target if simulate is None else "",
            }
            changes = _changes(method, change or [])
            flat = new_settings(method, preset or [], given, baseline, changes)
            flat["run.dir"] = str(directory.absolute())
            flat["run.name"] = name or _free_name(directory, method)
            check_engine(engine)
            launch = Launch(
                simulate=str(simulate.absolute()) if simulate else "",
                target=target if simulate else "",
                engine=engine,
                poison=poison,
                threads=threads,
                server=str(server.absolute()),
                superlink=superlink,
                ca=str(ca.absolute()) if ca else "",
                device=device,
                teacher=str(teacher.absolute()) if teacher else "",
                **files,
            )
        config = RunConfig.parse(flat)
    begun = alone(resume, STARTER) if resume else beginning(config, launch)
    with interruptible(f"stopped{hint}"), begun:
        perform(config, launch)


def _changes(method: str, pairs: list[str]) -> dict[str, Any]:
    """Return the settings given by -c; refuse those that have an option of their own."""
    changes: dict[str, Any] = overrides(method, pairs)
    for key in filter(INSTEAD.get, changes):
        raise ConfigError(f"-c {key}= is not taken here; use {INSTEAD[key]} instead.")
    return changes


def _refuse_ignored(context: typer.Context, resume: Path | None, simulate: Path | None) -> None:
    """Refuse options that would have no effect.

    Raises:
        ConfigError: an option would have no effect; the error names the first one.
    """
    if simulate is None and resume is None:
        refuse_local(context, LOCAL)
    for name in (name for name in context.params if on_command_line(context, name)):
        words = {"method": "METHOD", "directory": "--dir"}
        option = words.get(name, f"--{name.replace('_', '-')}")
        if resume is not None and name not in RESUMES:
            raise ConfigError(
                f"{option} has no effect with --resume, which goes on with a run as it was "
                "started; leave it out, or start a new run without --resume."
            )
        if simulate is not None and name in REMOTE:
            raise ConfigError(
                f"{option} is for runs on a server; leave it out, or leave out --simulate."
            )


def _free_name(directory: Path, method: str) -> str:
    names = (method if n == 1 else f"{method}-{n}" for n in range(1, 10_000))
    return next(n for n in names if not (directory / n / "config.json").exists())
