"""`fedda compare`: train methods on the same domains, targets and seeds, and compare them."""

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from fedda.cli.exits import INTERRUPTED
from fedda.cli.its_files import reads_files
from fedda.cli.launch import apart, on_terminate
from fedda.halves import REFERENCE
from fedda.results.escaping import echo

if TYPE_CHECKING:
    from fedda.contrib.lab.comparison import Cell, Plan
    from fedda.data import Reading


@reads_files
def compare(
    context: typer.Context,
    methods: Annotated[list[str], typer.Argument(metavar="METHODS...", show_default=False)],
    data: Annotated[Path, typer.Option("--data", "--simulate", metavar="ROOT")],
    target: Annotated[str, typer.Option(metavar="NAME,...")] = "all",
    seeds: str = "3",
    change: Annotated[list[str] | None, typer.Option("-c", metavar="KEY=VALUE")] = None,
    preset: Annotated[list[str] | None, typer.Option(metavar="NAME")] = None,
    rounds: Annotated[int, typer.Option(min=0, show_default=False)] = 0,
    out: Annotated[Path, typer.Option("--out", "--dir", metavar="DIR", file_okay=False)] = Path(
        "comparison"
    ),
    engine: Literal["process", "ray"] = "process",
    jobs: Annotated[int, typer.Option(min=0)] = 0,
    threads: Annotated[int, typer.Option(min=1)] = 1,
    device: str = "auto",
    poison: Annotated[str, typer.Option(metavar="NAME=PERCENT,...")] = "",
    baseline: Annotated[str, typer.Option(metavar="METHOD")] = REFERENCE,
    oracle: Annotated[bool, typer.Option("--oracle")] = False,
    *,
    reading: "Reading",
) -> None:
    """Train methods on the same domains and seeds, and compare their accuracy.

      fedda data digits ./digits

      fedda compare kd3a kd3a,vote=hard --data ./digits --target fonts
      --rounds 10 -c input.size=16 -c input.channels=1

    This trains FedAvg, the baseline, and two variants of KD3A, seeds 0, 1 and 2.

    It prints the accuracy as mean and standard deviation over the seeds, for each
    target and over all targets. It also prints the accuracy of each variant minus
    that of FedAvg, seed by seed, with a 95 % confidence interval (Student's t).

    DIR holds comparison.md and comparison.png, comparison.csv with one row per
    training, and cells/ with one folder per training: results.json, the model,
    and the error if the training failed. Nothing leaves this machine.

    After an interruption the same command goes on: finished trainings are not
    repeated, others go on after their last finished round. Seeds, targets and
    methods can be added in the same DIR. A changed setting is refused, so that
    no table mixes results of different settings.

    Exit code 0 means that all trainings finished; 1 that some failed (they are
    named, and the same command tries them again) or that none could be started;
    130 that it was interrupted.

    Options:
        methods: Such as kd3a, kd3a:official (one of its presets) or kd3a,vote=hard,mixup=0.
        data: Folder with one folder or .npz file per domain.
        target: Domains to take as the target, one after the other; all: every domain.
        seeds: How many seeds (3 means 0, 1 and 2), or a list with a comma: '5,6', or '7,' for one
            seed.
        change: Change a setting for all methods; see `fedda settings`.
        preset: Settings of a benchmark for all methods, such as digit5. A method's own presets are
            written kd3a:NAME; they and -c win over this. May be given more than once.
        rounds: Rounds; short for -c rounds=N.
        out: Folder for all that is written.
        engine: process: one site after the other; ray: Flower's simulation.
        jobs: Trainings at a time. 0: cores divided by --threads; 1 with CUDA or ray.
        threads: CPU threads of each training.
        device: auto, cpu or cuda:N.
        poison: Share of labels to flip at these sources, for every method.
        baseline: Method that the others are compared with; it is trained even if METHODS does not
            name it. none: show no differences.
        oracle: Add a row trained on the target's own labels, if its training images have any: a
            bound that no federation has.
    """
    on_terminate()
    from fedda.contrib.lab.comparison import options

    apart(out, "--out", data, "--data")
    variants, base = options.variants_of(methods, baseline, oracle)
    flat = options.shared_of(change or [], preset or [], rounds)
    plan = options.plan_of(
        data, target, seeds, variants, flat, out, poison, engine, threads, reading, device
    )
    _perform(plan, options.jobs_of(jobs, threads, engine), base, _command(context))


def _perform(plan: "Plan", jobs: int, baseline: str, command: str) -> None:
    """Run the missing trainings, write and print the results, and set the exit code."""
    from fedda.contrib.lab.comparing import train

    try:
        failed = train(plan, jobs, say=lambda text: echo(f"note: {text}", err=True))
    except KeyboardInterrupt:
        _present(plan, baseline, command)
        echo(f"\nstopped; the same command goes on, from {plan.out}", err=True)
        raise typer.Exit(INTERRUPTED) from None
    _present(plan, baseline, command)
    _print_failures(plan, failed)
    if failed:
        raise typer.Exit(1)


def _present(plan: "Plan", baseline: str, command: str) -> None:
    """Write tables and picture of the finished trainings, and print the tables."""
    from fedda.contrib.lab.comparing import write

    tables, written = write(plan, baseline, command)
    if written:
        echo(f"\n{tables}")
        echo(f"written: {', '.join(map(str, written))}")


def _print_failures(plan: "Plan", failed: dict["Cell", str]) -> None:
    """Print which trainings failed; those with the same error share a line."""
    from fedda.contrib.lab.comparing import traces
    from fedda.contrib.lab.comparison.headway import title

    alike: dict[str, list[Cell]] = {}
    for cell, error in failed.items():
        alike.setdefault(error, []).append(cell)
    for error, cells in alike.items():
        echo(f"error: {'; '.join(map(title, cells))}: {error}", err=True)
        if existing := traces(plan, cells):
            echo(f"  its traceback: {existing[0]}", err=True)


def _command(context: typer.Context) -> str:
    """Return the command line, with names in place of paths on this machine."""
    from fedda.contrib.lab.comparison.about import without_folders

    words = ["fedda", "compare"]
    for parameter in context.command.params:
        name, value = str(parameter.name), context.params.get(str(parameter.name))
        if getattr(context.get_parameter_source(name), "name", "") != "COMMANDLINE":
            continue
        for each in value if isinstance(value, list | tuple) else [value]:
            words += [] if parameter.param_type_name == "argument" else [parameter.opts[0]]
            words += [] if each is True else [without_folders(str(each))]
    return shlex.join(words)
