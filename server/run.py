"""A run: the method and its baseline, each with every seed, and the results in one file."""

import json
from collections.abc import Callable, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from flwr.serverapp import Grid

from fedda import plugins
from fedda.data.naming import listed, quoted
from fedda.errors import ConfigError, QuorumError, RosterError, RunError
from fedda.models import Meta
from fedda.ops.lock import alone, unwritable
from fedda.results import diagnostics
from fedda.results.card import CARD, card
from fedda.results.read import ABOUT, MODEL, RESULTS, begun
from fedda.settings import RunConfig, defaults, lasting

from . import checkpoint, preflight, sequence
from .journal import Curves, Journal
from .presence import OF_SOURCES, Newcomers, Sites
from .rehearsal import rehearse
from .start import check_start, start_of, task_for
from .strategy_modules import roster
from .summary import summarise
from .training import TrainingRounds

CONFIG, ROSTER = "config.json", "roster.json"


def execute(
    config: RunConfig, grid: Grid, journal: Journal, slots: Callable[[], int] | None = None
) -> dict[str, Any]:
    """Execute a run, or resume it -> the content of results.json.

    Args:
        config: the run.
        grid: the way to the sites.
        journal: receives every event of the run.
        slots: returns how many sites a simulation lets work at the same time; None: any number.

    Raises:
        ConfigError: a tracker that the settings ask for is not installed, a method cannot exchange
            gradients with these sites and settings, or the model to start from does not fit.
        ModelError: the model to start from cannot be read.
        RosterError: the offers of the sites that joined do not fit together.
        QuorumError: there were too few sites for longer than `wait.sites` seconds.
        RunError: the run's folder holds a run with other settings, holds a run that another
            process executes, or cannot be written.
    """
    folder = Path(config.run.dir) / config.run.name
    with Curves(config, folder, journal) as curves, alone(folder):
        claim(folder, config)
        trainings = Trainings(config, grid, journal, folder, curves)
        trainings.rehearse(slots)
        trainings.train(trainings.targets)
        results = trainings.write()
        if config.open:
            trainings.serve()
        journal.write("done", results=str(folder / RESULTS))
        return results


class Trainings:
    """The trainings of a run, in order, and what has come of them so far."""

    def __init__(
        self, config: RunConfig, grid: Grid, journal: Journal, folder: Path, curves: Curves
    ) -> None:
        self.config = config
        self.grid = grid
        self.journal = journal
        self.folder = folder
        self.curves = curves
        self.sites = Sites(grid, config, journal)
        self.members = meet(folder, config, self.sites, journal)
        if self.members.keyed:
            self.config = config = config.hiding(len(self.members.sources))
        self.targets = sequence.order(config, self.members)
        self.done: dict[str, list[dict[str, Any]]] = {m: [] for m in config.trainings}
        journal.write(
            "roster",
            sites=[str(n) for n in self.members.nodes],
            shape=list(self.members.shape),
            classes=self.members.classes,
            targets=list(self.targets),
            open=config.open,
        )

    def facing(self, method: str, target: str) -> roster.Roster:
        """The roster of one training."""
        return sequence.facing(self.config, method, self.members, target, self.targets)

    def rehearse(self, slots: Callable[[], int] | None) -> None:
        """Check that all trainings can take place, before the first of them begins.

        Raises:
            ConfigError: a method cannot exchange gradients with these sites and settings.
            RosterError: a site's weights are not the server's, or it cannot use its data.
            RunError: the simulation has too few slots for an exchange.
        """
        config, aims = self.config, {}
        for method, target in product(config.trainings, self.targets):
            aim = aims[method, target] = self.facing(method, target)
            together = rehearse(config, method, aim)
            if together and slots and (room := slots()) < together:
                raise RunError(
                    f"{method} sums gradients of {together} sites that work at the same time, but "
                    f"this simulation has room for {room}, one per CPU; give --engine process, "
                    f"which needs one CPU only, or use a machine with {together} CPUs."
                )
        self._ask(aims[config.method, self.targets[0]], self.members.nodes)

    def _ask(self, aim: roster.Roster, nodes: Sequence[roster.Node]) -> None:
        """Ask those of these sites that are connected whether they can take part."""
        config = self.config
        task = task_for(config, config.method, config.seeds[0], aim)
        there = [
            node
            for node in nodes
            if node.id in self.sites.there()
            and (node.role == "source" or node.name in self.targets)
        ]
        preflight.check(self.grid, task, there, config.wait.evaluate, config.run.evaluate)

    def train(self, targets: Sequence[str]) -> None:
        """Train every method with every seed on these targets."""
        for seed, target, method in product(self.config.seeds, targets, self.config.trainings):
            self._train(method, seed, target)

    def _train(self, method: str, seed: int, target: str) -> None:
        config, aim = self.config, self.facing(method, target)
        training = TrainingRounds(
            *(config, method, seed),
            grid=self.grid,
            sites=self.sites,
            members=aim,
            folder=self.folder,
            journal=self.journal,
            earlier=sequence.adapted(self.folder, task_for(config, method, seed, aim), aim),
        )
        with plugins.blaming(method):
            result = training.run()
        self.curves.finished(result)
        self.done[method].append(result)
        # A site may be back under another node id.
        self.members = self.members.taking(training.roster)

    def write(self) -> dict[str, Any]:
        """Write results.json and the run's model -> the content of results.json."""
        config = self.config
        results = summarise(config, self.members, self.done, self.journal)
        checkpoint.replace(self.folder / RESULTS, json.dumps(results, indent=1).encode())
        checkpoint.replace(self.folder / CARD, card(results, defaults()).encode())
        # With several targets each has a model of its own, and the run has none.
        if len(self.targets) == 1 and not config.open:
            model = Path(self.done[config.method][0]["model"])
            checkpoint.replace(self.folder / MODEL, model.read_bytes())
        return results

    def serve(self) -> None:
        """Train on every target that joins from now on, until somebody stops the run.

        A target that cannot be trained on, or stays away meanwhile, does not end the run.
        """
        waiting = Newcomers(self.sites, self.config, self.journal)
        while True:
            self.members, joined = waiting.wait(self.members)
            for target in joined:
                self.targets = (*self.targets, target)
                self._note_members()
                try:
                    for method in self.config.trainings:
                        rehearse(self.config, method, self.facing(method, target))
                    aim = self.facing(self.config.method, target)
                    self._ask(aim, [aim.target])
                    self.train([target])
                except (ConfigError, QuorumError, RosterError) as error:
                    self.targets = self.targets[:-1]
                    self.members = self.members.without(target)
                    self._note_members()
                    waiting.turn_away(target, str(error))
                else:
                    self.write()

    def _note_members(self) -> None:
        """Write down the roster, as a resumed run has the same members."""
        checkpoint.replace(self.folder / ROSTER, self.members.text().encode())


def meet(folder: Path, config: RunConfig, sites: Sites, journal: Journal) -> roster.Roster:
    """Wait for the sites; a resumed run waits for its former sites and keeps their counts.

    Raises:
        RosterError: the offers do not fit together, or differ from those the run began with.
        QuorumError: too few sites joined.
        ConfigError: the model that the run starts from does not fit the run or its sites.
        ModelError: the model that the run starts from cannot be read.
    """
    path = folder / ROSTER
    if config.run.resume and path.is_file():
        known = roster.Roster.parse(path.read_text())
        return sites.reunite(known, parts_left(folder, config, known))
    start = start_of(config)
    joined = sites.gather(classes_without_sources(config, start))
    check_start(config, start, joined)
    members = joined.bounded(config.guard.max_examples)
    for name in (n.name for n in joined.sources if members.counts[n.name] < n.examples):
        text = f"claims {joined.counts[name]} examples and counts as {members.counts[name]}"
        text += " beside all sources"
        journal.trouble("bounded", name, f"{text}; guard.max-examples says how many may count")
    alone = joined.alone()
    for name, classes in alone.items():
        text = f"alone names the classes {listed([quoted(each) for each in classes])}"
        text += "; all sites' models have them"
        if len(alone) > 1:
            others = listed([quoted(each) for n in alone if n != name for each in alone[n]])
            text += f". Other sources alone name {others}: if one class has two names, or letters "
            text += "of two alphabets that look alike, rename it at one site"
        journal.trouble("classes", name, text)
    for name, classes in joined.lacking().items():
        text = f"does not have the classes {listed([quoted(each) for each in classes])}"
        journal.trouble("classes", name, f"{text}, which other sources have")
    checkpoint.replace(path, members.text().encode())
    return members


def classes_without_sources(config: RunConfig, start: Meta | None) -> tuple[str, ...]:
    """Return the start model's class names if no source takes part in the run, else ()."""
    parts = {part for method in config.trainings for part in config.parts(method)}
    return start.classes if start and not OF_SOURCES & parts else ()


def parts_left(folder: Path, config: RunConfig, known: roster.Roster) -> dict[str, set[str]]:
    """The parts that the remaining rounds need, by target; a target without any is left out.

    Sources may leave after the last phase in which they have a part, and a target after its
    trainings; in a chain later targets may adapt from it.
    """
    left: dict[str, set[str]] = {}
    targets = sequence.order(config, known)
    for method, seed, target in product(config.trainings, config.seeds, targets):
        aim = sequence.facing(config, method, known, target, targets)
        earlier = aim.targets[1:]
        task = task_for(config, method, seed, aim)
        state = checkpoint.read(folder / task.label)
        after = state.round if state else 0
        last = diagnostics.last_round(task, config.run.patience, state.history if state else ())
        parts = set() if after == last else set(config.parts(method, after, later=bool(earlier)))
        if state and checkpoint.untested(state):
            parts.add("target")
        if parts:
            left.setdefault(target, set()).update(parts)
            for node in earlier:
                left.setdefault(node.name, set()).add("collaborator")
    return left


def claim(folder: Path, config: RunConfig) -> None:
    """Write down a new run's settings, or check that a resumed run has the settings it began with.

    Raises:
        RunError: a new run's folder already holds a run, or a resumed run's folder holds none or
            one with other settings; or the folder cannot be written or read.
    """
    path = folder / CONFIG
    mine = lasting(config.flat(), config.trainings)
    try:
        held = begun(folder)  # false for settings alone: no site joined, so reuse it
        if held != config.run.resume and not (config.run.resume and path.is_file()):
            state = "holds a run already" if held else "holds no run to go on with"
            raise RunError(
                f"{folder} {state}; choose another --name for a new run, or --resume a run that "
                "exists."
            )
        if held:
            theirs = lasting(json.loads(path.read_text()), config.trainings)
            theirs = {**{k: v for k, v in defaults().items() if k in mine}, **theirs}
            odd = sorted(k for k in theirs if mine.get(k) != theirs[k])
            if odd:
                raise RunError(
                    f"The run in {folder} began with {odd[0]} {theirs[odd[0]]!r}, not "
                    f"{mine.get(odd[0])!r}; resume it with the settings it began with."
                )
        checkpoint.replace(path, json.dumps(mine, indent=1).encode())
        checkpoint.replace(folder / ABOUT, json.dumps(_about(config), indent=1).encode())
    except OSError as error:
        raise unwritable(folder, error) from error
    except (ValueError, AttributeError) as error:
        raise RunError(
            f"{path} is damaged ({error}); restore it, or choose another --name for a new run."
        ) from error


def _about(config: RunConfig) -> dict[str, Any]:
    """What the live page says of a run's methods and settings without loading them."""
    own = config.flat()
    titles = {method: plugins.method(method).title for method in config.trainings}
    return {"titles": titles, "defaults": {k: v for k, v in defaults().items() if k in own}}
