"""`fedda choose`: take a method for a target by a few labels of its images."""

import json
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedda.cli.exits import interruptible
from fedda.cli.its_files import reads_files
from fedda.cli.launch import apart, on_terminate
from fedda.files import put
from fedda.halves import REFERENCE
from fedda.results.escaping import echo

if TYPE_CHECKING:
    from fedda.contrib.lab.comparison import Plan, Variant
    from fedda.contrib.lab.labelled import Labels
    from fedda.data import Reading

USUAL = "adabn,kd3a"
STEM = "choice"  # of the files that are written


@reads_files
def choose(
    data: Annotated[Path, typer.Option("--data", "--simulate", metavar="ROOT")],
    target: Annotated[str, typer.Option(metavar="NAME")],
    labels: Annotated[Path | None, typer.Option(metavar="FOLDER")] = None,
    method: Annotated[str, typer.Option(metavar="METHODS")] = USUAL,
    seeds: str = "1",
    change: Annotated[list[str] | None, typer.Option("-c", metavar="KEY=VALUE")] = None,
    preset: Annotated[list[str] | None, typer.Option(metavar="NAME")] = None,
    rounds: Annotated[int, typer.Option(min=0, show_default=False)] = 0,
    out: Annotated[Path, typer.Option("--out", "--dir", metavar="DIR", file_okay=False)] = Path(
        "choice"
    ),
    jobs: Annotated[int, typer.Option(min=0)] = 0,
    threads: Annotated[int, typer.Option(min=1)] = 1,
    device: str = "auto",
    *,
    reading: "Reading",
) -> None:
    """Take a method for a target by a few labels of its images; without labels, say what to take.

    Nothing that was measured without labels ranks methods well enough to choose by it. So without
    --labels this trains nothing, and names the default and how to make labels. With labels it
    trains FedAvg and METHODS on all domains of ROOT, with the target's last step, and counts how
    many of the labelled images each refined model has right:

      fedda label --target ./digits/fonts --n 50 --out ./labels

      fedda choose --data ./digits --target fonts --labels ./labels --rounds 12
      -c input.size=16 -c input.channels=1

    FedAvg, refined, is taken unless labels tell a better one from it. DIR holds choice.md,
    choice.json, and cells/ with one folder per training, as of fedda compare. After an interruption
    the same command goes on, and methods, seeds and labels can be added.

    Exit code 0 means that all trainings finished and a choice was made; 1 that some failed, or
    that none could be made; 130 that it was interrupted.

    Options:
        data: Folder with one folder or .npz file per domain; the sites are simulated.
        target: The domain to adapt to.
        labels: Of the target's images, from `fedda label`.
        method: Methods to train beside FedAvg, as fedda compare takes them.
        seeds: How many seeds, or a list, as in fedda compare.
        change: Change a setting for all methods; see `fedda settings`.
        preset: Settings of a benchmark for all methods.
        rounds: Rounds of a training; short for -c rounds=N.
        out: Folder for all that is written.
        jobs: Trainings at a time. 0: cores divided by --threads.
        threads: CPU threads of each training.
        device: auto, cpu or cuda:N.
    """
    on_terminate()
    from fedda.contrib.lab.comparison import options
    from fedda.errors import RunError

    apart(out, "--out", data, "--data")
    variants, _ = options.variants_of([method], REFERENCE)
    variants.sort(key=lambda v: v.method != REFERENCE)
    flat = options.shared_of(change or [], preset or [], rounds)
    plan = options.plan_of(
        data, target, seeds, variants, flat, out, "", "process", threads, reading, device
    )
    if len(plan.targets) != 1:
        raise RunError(f"--target {target} names several domains; a choice is for one.")
    words = _words(preset or [], change or [], rounds)
    if labels is None:
        _without(plan, words)
        return
    known = _labels(plan, labels)
    failed = _train(plan, options.jobs_of(jobs, threads, "process"))
    _present(plan, known, words)
    if failed:
        raise typer.Exit(1)


def _without(plan: "Plan", words: Sequence[str]) -> None:
    """Say what to take without labels, and how to make some."""
    from fedda.data import domains

    (target,) = plan.targets
    place = domains(plan.data, plan.reading, plan.targets)[target]
    label = shlex.join(["fedda", "label", "--target", str(place), "--n", "50", "--out", "./labels"])
    echo(
        f"Without labels take FedAvg and AdaBN, refined: {_command(plan, plan.variants[0], words)}"
    )
    echo(f"To choose by measuring, label 20 to 50 images ({label}), and give --labels ./labels.")


def _labels(plan: "Plan", folder: Path) -> "Labels":
    """The labels of the target."""
    from fedda.contrib.lab.labelled import Labels
    from fedda.data import domains
    from fedda.data.load import identities

    place = domains(plan.data, plan.reading, plan.targets)[plan.targets[0]]
    return Labels.read(folder, identities(place, "target", plan.reading))


def _train(plan: "Plan", jobs: int) -> bool:
    """Train what is missing -> whether a training failed."""
    from fedda.contrib.lab.comparison.headway import CellsDisplay, title
    from fedda.data import passed_over

    plan.check()
    if odd := passed_over(plan.data, plan.reading, plan.targets):
        echo(f"note: {odd}", err=True)
    cells = plan.trainings()
    done = [cell for cell in cells if plan.results(cell) is not None]
    rounds = {cell: plan.config(cell).rounds for cell in cells}
    jobs = max(min(jobs, len(cells) - len(done)), 1)
    with (
        interruptible(f"stopped; the same command goes on, from {plan.out}"),
        CellsDisplay(rounds, done, jobs, None) as display,
    ):
        failed = plan.run(jobs, display)
    for cell, error in failed.items():
        echo(f"error: {title(cell)}: {error}", err=True)
    return bool(failed)


def _present(plan: "Plan", known: "Labels", words: Sequence[str]) -> None:
    """Judge the finished trainings by the labels, and write and print the choice."""
    from fedda.contrib.lab.comparison import Cell
    from fedda.contrib.lab.labelled import right
    from fedda.contrib.lab.measured import Choice, as_json, as_markdown, most, refined_model
    from fedda.data import domains
    from fedda.errors import RunError
    from fedda.models import describe

    (target,) = plan.targets
    place = domains(plan.data, plan.reading, plan.targets)[target]
    found, files = {}, list[Path]()
    for variant in plan.variants:
        cells = [Cell(variant, target, seed) for seed in plan.seeds]
        if all(plan.results(cell) is not None for cell in cells):
            files = [refined_model(plan.folder(cell)) for cell in cells]
            found[variant] = most([right(f, place, known, plan.reading) for f in files])
    if plan.variants[0] not in found:
        raise RunError("FedAvg could not be trained, and every method is judged beside it.")
    commands = {v: _command(plan, v, words) for v in found}
    choice = Choice(plan, known, found, commands, len(describe(files[0]).classes))
    text = as_markdown(choice)
    written = [plan.out / f"{STEM}.md", plan.out / f"{STEM}.json"]
    put(written[0], text)
    put(written[1], json.dumps(as_json(choice), indent=1))
    known.looked()
    echo(f"\n{text}")
    echo(f"its models: {', '.join(map(str, choice.folders))}")
    echo(f"written: {', '.join(map(str, written))}")


def _command(plan: "Plan", variant: "Variant", words: Sequence[str]) -> str:
    """The `fedda run` that trains a variant."""
    from fedda import plugins

    others = tuple(f"{m}." for m in plugins.methods() if m != variant.method)
    pairs = zip(words[::2], words[1::2], strict=True)
    shared = [w for flag, v in pairs if not v.startswith(others) for w in (flag, v)]
    shared += ["--preset", variant.preset] if variant.preset else []
    own = [w for k, v in variant.settings.items() for w in ("-c", f"{k}={_plain(v)}")]
    where = plan.where(plan.targets[0])
    return shlex.join(["fedda", "run", variant.method, *where, *shared, *own])


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _words(presets: Sequence[str], changes: Sequence[str], rounds: int) -> list[str]:
    """The options of `fedda run` with which all methods are trained."""
    words = [word for name in presets for word in ("--preset", name)]
    words += ["-c", f"rounds={rounds}"] if rounds else []
    return words + [word for pair in changes for word in ("-c", pair)]
