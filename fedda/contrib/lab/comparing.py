"""A comparison of methods on the same sites: for the command line, and as a function."""

import shutil
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedda.contrib.lab.comparison import Cell, Plan, Score, options
from fedda.contrib.lab.comparison.about import header
from fedda.contrib.lab.comparison.headway import CellsDisplay, title
from fedda.contrib.lab.comparison.statistics import MEAN, by_target
from fedda.contrib.lab.comparison.tables import as_csv, as_markdown
from fedda.contrib.lab.comparison.workers import ERROR
from fedda.data import Reading, passed_over
from fedda.errors import ConfigError, RunError
from fedda.files import put
from fedda.halves import REFERENCE
from fedda.library import own_data, own_model
from fedda.library.outcome import Run, frame
from fedda.library.simulated import (
    DATA,
    INSTEAD,
    Sites,
    chosen_seeds,
    note,
    placed,
    refuse_arguments,
    several,
    worded,
)
from fedda.library.unchanged import unchanged
from fedda.results.read import percent
from fedda.settings import named

if TYPE_CHECKING:
    import pandas as pd

STEM = "comparison"  # of the files that are written
ALONE = {key: name for key, name in INSTEAD.items() if name not in ("network", "resume")}


class Comparison:
    """The results of a comparison.

    Attributes:
        folder: all that was written.
        targets: the sites that were adapted to, in turn.
        seeds: one training of every variant and target per seed.
        scores: of every finished training.
        failures: why a training failed, by its name.
    """

    def __init__(
        self, plan: Plan, baseline: str, failed: Mapping[Cell, str], network: Any = None
    ) -> None:
        self.folder = plan.out
        self.targets = tuple(plan.targets)
        self.seeds = tuple(plan.seeds)
        self.scores: tuple[Score, ...] = tuple(plan.scores())
        self.failures = {title(cell): why for cell, why in failed.items()}
        self.markdown = as_markdown(self.scores, baseline, plan.targets)
        self._folders = {
            (cell.variant.name, cell.target, cell.seed): plan.folder(cell) for cell in plan.cells()
        }
        self._network = network

    @property
    def accuracies(self) -> dict[str, dict[str, float]]:
        """The mean accuracy over the seeds after the last round, by variant and target, 0 to 1."""
        found = by_target(self.scores, "last", self.targets)
        return {
            variant: {t: sum(v.values()) / len(v) for t, v in columns.items() if t != MEAN and v}
            for variant, columns in found.items()
        }

    def run(self, variant: str, target: str, seed: int) -> Run:
        """One of the trainings, as a run of its own.

        Raises:
            ConfigError: the comparison has no such training.
            RunError: it has not finished.
        """
        key = (variant, target, seed)
        if key not in self._folders:
            names = ", ".join(dict.fromkeys(name for name, _, _ in self._folders))
            raise ConfigError(
                f"The comparison has no training of {variant} on {target} with seed {seed}; its "
                f"variants are {names}."
            )
        return Run(self._folders[key], self._network)

    def to_frame(self) -> "pd.DataFrame":
        """A pandas table with one row per training.

        Columns: variant, target, seed, accuracy, refined, seconds and bytes.

        Raises:
            RunError: pandas is not installed.
        """
        return frame(
            [
                {
                    "variant": s.variant,
                    "target": s.target,
                    "seed": s.seed,
                    "accuracy": s.last,
                    "refined": s.refined,
                    "seconds": s.seconds,
                    "bytes": s.bytes,
                }
                for s in self.scores
            ]
        )

    def __repr__(self) -> str:
        parts = [
            f"{variant} on {target} {percent(mean)}"
            for variant, means in self.accuracies.items()
            for target, mean in means.items()
        ]
        return f"Comparison({', '.join(parts) or 'nothing was tested'})"


def train(
    plan: Plan, jobs: int, quiet: bool = False, say: Callable[[str], object] = lambda text: None
) -> dict[Cell, str]:
    """Train what is missing of a comparison -> errors by training.

    Args:
        plan: the comparison.
        jobs: trainings at a time.
        quiet: show no progress.
        say: called with a note about the data.

    Raises:
        FeddaError: data, settings or sites do not fit together.
    """
    plan.check()
    if odd := passed_over(plan.data, plan.reading, plan.targets):
        say(odd)
    for name in plan.untested():
        say(
            f"{name} brings no labelled tests, so it gets no accuracy: put labelled images into "
            "its test/<class>/, or import a benchmark with --transductive"
        )
    for text in plan.leaks():
        say(text)
    cells = plan.trainings()
    done = [cell for cell in cells if plan.results(cell) is not None]

    def accuracy(cell: Cell) -> float | None:
        (training,) = (plan.results(cell) or {})["trainings"][cell.variant.method]
        return training["final_accuracy"]

    jobs = max(min(jobs, len(cells) - len(done)), 1)
    shown: AbstractContextManager[Any] = nullcontext(lambda *_: None)
    if not quiet:
        rounds = {cell: plan.config(cell).rounds for cell in cells}
        shown = CellsDisplay(rounds, done, jobs, accuracy)
    with shown as display:
        return plan.run(jobs, display)


def write(plan: Plan, baseline: str, command: str) -> tuple[str, list[Path]]:
    """Write tables and picture of the finished trainings -> the tables as text, the files."""
    from fedda.contrib.lab.comparison.figure import draw  # matplotlib takes a second to import

    scores = plan.scores()
    if not scores:
        return "", []
    tables = as_markdown(scores, baseline, plan.targets)
    heading = f"Comparison on {plan.data.resolve().name}"
    written = [plan.out / f"{STEM}.md", plan.out / f"{STEM}.csv"]
    put(written[0], header(plan, heading, command) + tables)
    put(written[1], as_csv(scores))
    picture = plan.out / f"{STEM}.png"
    if draw(scores, baseline, picture, plan.targets):
        written.append(picture)
    return tables, written


def traces(plan: Plan, cells: Sequence[Cell]) -> list[str]:
    """The files with the tracebacks of failed trainings."""
    return [str(p) for p in (plan.folder(c) / ERROR for c in cells) if p.is_file()]


def compare(
    data: Sites,
    methods: Sequence[str],
    target: str | Sequence[str] = "all",
    seeds: int | Sequence[int] = 3,
    preset: str | Sequence[str] | None = None,
    dir: str | Path | None = None,
    *,
    network: own_model.Network | None = None,
    baseline: str = REFERENCE,
    oracle: bool = False,
    poison: Mapping[str, float] | None = None,
    engine: Literal["process", "ray"] = "process",
    jobs: int = 1,
    threads: int = 1,
    device: str = "auto",
    split: str = "",
    gray_bits: int | str = "auto",
    skip_broken: bool = False,
    follow_links: bool = False,
    columns: str = "",
    quiet: bool = False,
    **settings: Any,
) -> Comparison:
    """Train methods on the same sites, targets and seeds, and compare their accuracy.

        found = fedda.compare("digits", ["kd3a", "kd3a,vote=hard"], target="fonts", rounds=10)
        found.to_frame()

    It gives the numbers of `fedda compare`. Called again with the same `dir`, it trains only what
    is missing there, so seeds, targets and methods can be added.

    Args:
        data: As `fedda.simulate` takes it.
        methods: Such as `kd3a`, `kd3a:official` (one of its presets) or `kd3a,vote=hard,mixup=0`.
        target: A site, several of them one after the other, or `all`: every site.
        seeds: As `fedda.simulate` takes them.
        preset: Settings of a benchmark for all methods.
        dir: The folder of the comparison; by default a temporary one that is removed when the
            comparison is no longer used.
        network: As `fedda.simulate` takes it.
        baseline: The method that the others are compared with, or `none`.
        oracle: Add a row trained on the target's own labels, a bound that no federation has.
        poison: Percent of labels to flip, by source.
        engine: `process`, or `ray` for Flower's simulation.
        jobs: Trainings at a time, each in a process of its own if more than one; a script then
            needs `if __name__ == "__main__":`. 0: one per CPU core.
        threads: CPU threads of a training.
        device: As `fedda.simulate` takes it.
        split: The part of the data to train on, if not `train`.
        gray_bits: Significant bits of images with 16 bits of gray, or `auto`.
        skip_broken: Pass over images that cannot be read.
        follow_links: Read also what links and paths in tables name outside of a site's folder.
        columns: What tables call their columns, as `path=filename,label=diagnosis`.
        quiet: Show no progress.
        settings: For all methods, as `fedda.simulate` takes them; a method's own begin with its
            name: `kd3a_vote="hard"`.

    Raises:
        ConfigError: A setting is unknown, or settings contradict each other.
        DataError: A site's data cannot be used.
        RosterError: The sites do not fit together.
        RunError: `dir` holds another comparison, or every training failed.
    """
    if network is not None and (engine == "ray" or jobs != 1):
        raise ConfigError(
            "network is a function of this process, and engine='ray' or jobs above 1 start other "
            "ones; leave one of them out, or install the network as a package."
        )
    if isinstance(methods, str):
        raise ConfigError(f"methods is {methods!r}; give a list of methods, such as [{methods!r}].")
    targets = several(target)
    own = named("", settings)
    refuse_arguments(own, ALONE | ({"model.name": "network"} if network else {}))
    with ExitStack() as stack:
        stack.enter_context(unchanged())
        stack.enter_context(own_model.lent(network))
        out, scratch = stack.enter_context(placed(dir))
        stack.enter_context(worded(data, out / DATA))
        variants, base = options.variants_of(list(methods), baseline, oracle)
        flat = options.shared_of([], several(preset), 0) | own_model.settings_of(network) | own
        unread = targets if len(targets) == 1 and not oracle else []
        plan = options.plan_of(
            own_data.folder_of(data, out / DATA, unread),
            ",".join(targets),
            ",".join(map(str, chosen_seeds(seeds))) + ",",
            variants,
            flat,
            out,
            ",".join(f"{name}={share}" for name, share in (poison or {}).items()),
            engine,
            threads,
            Reading.of(split, gray_bits, skip_broken, follow_links, columns),
            device,
        )
        failed = train(plan, options.jobs_of(jobs, threads, engine), quiet, *[note] * (not quiet))
        if failed and not plan.scores():
            raise RunError(next(iter(failed.values())))
        write(plan, base, "fedda.compare(...)")
        found = Comparison(plan, base, failed, network)
    if scratch:
        weakref.finalize(found, shutil.rmtree, scratch, ignore_errors=True)
    return found
