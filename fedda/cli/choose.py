"""`fedda choose`: take a method and its settings for a target that has no labels."""

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedda.cli.exits import clear_exit, interruptible
from fedda.cli.its_files import OPTIONS, reads_files
from fedda.cli.launch import apart, on_server, on_terminate, refuse_local
from fedda.halves import REFERENCE
from fedda.library.beginning import Launch
from fedda.results.plainly import echo

if TYPE_CHECKING:
    from fedda.choose.labelled import Labels
    from fedda.comparison import Cell, Plan
    from fedda.data import Reading

# Of simulated sites.
LOCAL = ("jobs", "threads", "labels", *OPTIONS)
STEM = "choice"  # of the files that are written


@reads_files
def choose(
    context: typer.Context,
    target: Annotated[str, typer.Option(metavar="NAME")],
    data: Annotated[Path | None, typer.Option("--data", "--simulate", metavar="ROOT")] = None,
    server: Annotated[Path | None, typer.Option(metavar="DIR")] = None,
    superlink: Annotated[str, typer.Option(metavar="HOST:PORT")] = "",
    ca: Path | None = None,
    study: Annotated[str, typer.Option(metavar="NAME")] = "",
    method: Annotated[str, typer.Option(metavar="NAME,...")] = "",
    seeds: str = "3",
    settings: Annotated[int, typer.Option(min=0)] = 2,
    budget: Annotated[float, typer.Option(metavar="MINUTES", min=0)] = 0.0,
    change: Annotated[list[str] | None, typer.Option("-c", metavar="KEY=VALUE")] = None,
    labels: Annotated[Path | None, typer.Option(metavar="FOLDER")] = None,
    preset: Annotated[list[str] | None, typer.Option(metavar="NAME")] = None,
    rounds: Annotated[int, typer.Option(min=0, show_default=False)] = 0,
    out: Annotated[Path, typer.Option("--out", "--dir", metavar="DIR", file_okay=False)] = Path(
        "choice"
    ),
    search_seed: Annotated[int, typer.Option(min=0)] = 0,
    jobs: Annotated[int, typer.Option(min=0)] = 0,
    threads: Annotated[int, typer.Option(min=1)] = 1,
    *,
    reading: "Reading",
) -> None:
    """Take a method and its settings for a target without labels, and say how sure that is.

      fedda data digits ./digits

      fedda choose --data ./digits --target fonts --rounds 12
      -c input.size=16 -c input.channels=1

    Candidates are FedAvg, which does not adapt, and several methods, each with its default and a
    few drawn settings. They train in up to three rungs: all with a quarter of the rounds and one
    seed, the better half with half of the rounds, the better half of those with all rounds and all
    seeds. FedAvg is in every rung, and so is the best setting of each method.

    No label of the target's files takes part in the choice. It rests on the estimated accuracy,
    infomax, BNM, ClassAMI, and the agreement with the mean of all models on the target's images. A
    candidate that looks worse than FedAvg is out. One that is not clearly better than a simpler one
    is not taken, so the answer may be FedAvg. Labelled tests of the target, if there are any, are
    reported apart. A few labels that somebody gives for this say more than all that:

      fedda label --target ./digits/fonts --n 50 --out ./labels

      fedda choose --data ./digits --target fonts --labels ./labels ...

    With --data the sites are simulated on this machine, so all domains must lie here, as with
    fedda compare. For agreement the saved models predict the target's images here, too. With
    --server the trainings are runs over the sites that have joined, after one round of FedAvg that
    shows which methods fit; there the target says how far its models agree:

      fedda choose --server ./hub --target clinic-b --preset photos --budget 120

    DIR holds choice.md, choice.json, and one folder per rung with the trainings. After an
    interruption the same command goes on. Seeds, methods and minutes can be added in the same DIR.

    Exit code 0 means that all trainings finished and a choice was made; 1 that some failed (they
    are named, and a choice was made among the others) or that none could be made; 130 that it was
    interrupted.

    Options:
        target: The domain to adapt to.
        data: Folder with one folder or .npz file per domain; the sites are simulated.
        server: Instead of --data: the folder that `fedda superlink` was given as --dir. The sites
            that have joined do the trainings, one after another.
        superlink: Instead of --data: a SuperLink not started by `fedda superlink`; it must share
            the folder --out.
        ca: Certificate authority of that SuperLink.
        study: With --server: the study that the trainings belong to.
        method: Methods to try beside FedAvg. Default: adabn if the network has BatchNorm, kd3a,
            fdann, and mdan if there are several sources.
        seeds: How many seeds the last rung has, or a list, as in fedda compare.
        settings: Settings of each method that are drawn, beside its default ones.
        budget: Minutes of training, on as many cores as --jobs says; what does not fit is not
            tried, and the report says so. 0: no limit.
        change: Change a setting for all methods; see `fedda settings`.
        labels: A few labels of the target's images, from `fedda label`, which then take part in the
            choice; with --data.
        preset: Settings of a benchmark for all methods.
        rounds: Rounds of a full training; short for -c rounds=N.
        out: Folder for all that is written.
        search_seed: Seed of the drawn settings.
        jobs: Trainings at a time. 0: cores divided by --threads.
        threads: CPU threads of each training.
    """
    on_terminate()
    from fedda.choose import candidates, search, verdict
    from fedda.choose.decision import decide
    from fedda.choose.on_server import LivePlan
    from fedda.comparison import Variant, options
    from fedda.errors import ConfigError, RunError
    from fedda.results.read import counted
    from fedda.settings import seeds_of

    with clear_exit():
        live = server is not None or bool(superlink)
        if (data is not None) + (server is not None) + bool(superlink) != 1:
            raise ConfigError("Give --data ROOT, or --server DIR, or --superlink HOST:PORT.")
        if live:
            refuse_local(context, LOCAL)
        flat = options.shared_of(change or [], preset or [], rounds)
        flat |= {"run.study": study} if study else {}
        first = [Variant(REFERENCE)]
        if data is not None:
            apart(out, "--out", data, "--data")
            plan = options.plan_of(
                data, target, seeds, first, flat, out, "", "process", threads, reading
            )
        else:
            hub, authority = (str(path.absolute()) if path else "" for path in (server, ca))
            plan = LivePlan(
                Path(hub or superlink),
                out.absolute(),
                first,
                [name for name in target.split(",") if name],
                seeds_of(seeds),
                flat,
                launch=Launch(server=hub, superlink=superlink, ca=authority),
                submit=on_server,
            )
        if len(plan.targets) != 1:
            raise RunError(f"--target {target} names several domains; a choice is for one.")
        names = [name for name in method.split(",") if name]
        why_not = _why_not(plan, names)
        methods, left_out = candidates.methods_of(names, why_not)
        variants = candidates.candidates(methods, settings, flat, search_seed)
        at_a_time = 1 if live else options.jobs_of(jobs, threads, "process")
        known = None if labels is None else _labels(plan, labels)
        made = search.Search(replace(plan, variants=variants), at_a_time, budget, known)
        made.check()
        for rung in made.rungs:
            echo(
                f"rung {rung.number}: FedAvg and {rung.width} more, "
                f"{counted(rung.rounds, 'round')}, {counted(len(rung.seeds), 'seed')}"
            )
        with interruptible(f"stopped; the same command goes on, from {out}"):
            outcome = made.run(lambda part, cells: _display(part, cells, made.jobs))
        found = decide(outcome.candidates)
        shared = _words(preset or [], change or [], rounds)
        _present(verdict.Choice(made, outcome, found, shared, left_out), out)
        if known is not None:
            known.looked()
    if outcome.failed:
        raise typer.Exit(1)


def _labels(plan: "Plan", folder: Path) -> "Labels":
    """The labels of a target whose data lie here."""
    from fedda.choose.labelled import Labels
    from fedda.data import domains
    from fedda.data.load import identities

    (target,) = plan.targets
    return Labels.read(
        folder, identities(domains(plan.data, plan.reading)[target], "target", plan.reading)
    )


def _why_not(plan: "Plan", names: Sequence[str]) -> Callable[[str], str]:
    """What says why a method does not fit the sites; on a server one round is trained for that."""
    from fedda.choose.candidates import obstacle
    from fedda.choose.on_server import LivePlan

    if not isinstance(plan, LivePlan):
        return lambda name: obstacle(name, plan)
    if names:
        return lambda name: ""
    echo("one round of FedAvg, to see the sites and their network")
    seen = plan.look(lambda *_: None)
    sites = ", ".join(f"{s['name']} ({s['role']}, {s['examples']})" for s in seen["sites"])
    echo(f"sites: {sites}")
    return lambda name: plan.obstacle(name, seen)


def _present(choice: Any, out: Path) -> None:
    """Write and print the choice."""
    from fedda.choose.verdict import as_json, as_markdown

    text = as_markdown(choice)
    written = [out / f"{STEM}.md", out / f"{STEM}.json"]
    written[0].write_text(text)
    written[1].write_text(json.dumps(as_json(choice), indent=1))
    echo(f"\n{text}")
    echo(f"its models: {', '.join(map(str, choice.folders))}")
    echo(f"written: {', '.join(map(str, written))}")


def _display(plan: "Plan", cells: Sequence["Cell"], jobs: int) -> Any:
    """The progress of some trainings, which says nothing that labels of the target tell."""
    from fedda.comparison.headway import CellsDisplay

    done = [cell for cell in cells if plan.results(cell) is not None]
    rounds = {cell: plan.config(cell).rounds for cell in cells}
    return CellsDisplay(rounds, done, min(jobs, len(cells)), None)


def _words(presets: Sequence[str], changes: Sequence[str], rounds: int) -> list[str]:
    """The options of `fedda run` with which all candidates were trained."""
    words = [word for name in presets for word in ("--preset", name)]
    words += ["-c", f"rounds={rounds}"] if rounds else []
    return words + [word for pair in changes for word in ("-c", pair)]
