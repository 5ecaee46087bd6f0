"""One training: one method and one seed, round by round, until it is done or cannot go on.

Flower's own loop has no start round, waits for ever for sites that left and calls a run completed
in which every site failed. This one keeps a quorum and a deadline, pauses while too few sites are
there, repeats a round that did not come about, and can be stopped after any round and resumed.
"""

import time
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from fedda import models, records, wire
from fedda.config import RunConfig, Task
from fedda.errors import ConfigError, QuorumError
from fedda.folders import load_half
from fedda.wire import Arrays, Kind

from . import checkpoint
from .exchange import host
from .folders import base, roster
from .journal import Journal
from .lean import LeanGrid
from .ledger import Ledger
from .phases import Phases, TimedMail
from .sites import Sites


class Training:
    """Trains one method with one seed over the sites of a roster."""

    def __init__(
        self,
        config: RunConfig,
        method: str,
        seed: int,
        *,
        grid: Grid,
        sites: Sites,
        who: roster.Roster,
        folder: Path,
        journal: Journal,
    ) -> None:
        self.config = config
        self.method = method
        self.seed = seed
        self.grid = grid
        self.sites = sites
        self.roster = who
        self.folder = folder
        self.journal = journal
        self.ledger = Ledger()
        self.phases = Phases()
        self.mail = TimedMail(grid, self._sent, self._received)
        self.mail.phases = self.phases
        self.round = 0
        self.task = config.task(method, seed, who.shape, who.classes, len(who.nodes))

    def run(self) -> dict[str, Any]:
        """Train, or go on training -> what results.json says of it.

        Raises:
            QuorumError: too few sites, for longer than `wait.sites`.
            RunError: a checkpoint cannot be written or read.
        """
        state = checkpoint.read(self.folder)
        if state is None:
            state = checkpoint.State(0, self._initial())
        self.ledger.restore(state.ledger)
        strategy = self._strategy(state)
        self.journal.write(
            "training",
            method=self.method,
            seed=self.seed,
            round=state.round,
            rounds=self.config.rounds,
        )
        arrays = strategy.packed(state.model)
        while state.round < self.config.rounds:
            # The state's model is a view of what travels, so that it is in memory once.
            state.model = self._unpacked(arrays)
            start = time.perf_counter()
            self.round = state.round + 1
            self.phases.restart()
            arrays, numbers = self._train_round(strategy, arrays)
            found = self._test(strategy, arrays) if self.config.run.evaluate else {}
            entry = {
                "round": self.round,
                **numbers,
                **found,
                "weights": dict(strategy.weights),
                "bytes": self.ledger.round(self.round),
                "seconds": round(time.perf_counter() - start, 3),
                "phases": self.phases.seconds(),
                "site_seconds": self.phases.sites(),
            }
            state = checkpoint.State(
                self.round,
                self._unpacked(arrays),
                {name: packed.unpack() for name, packed in strategy.kept.items()},
                strategy.memory,
                [*state.history, entry],
                self.ledger.state(),
                self._select({} if strategy.anew else state.best, found),
            )
            with self.phases.phase("checkpoint"):
                checkpoint.write(self.folder, state)
            entry["phases"] = self.phases.seconds()  # the next checkpoint has this one's time too
            self.journal.write("round", method=self.method, seed=self.seed, **entry)
        return self._finish(state)

    def _strategy(self, state: checkpoint.State) -> base.FedDA:
        self._layout = wire.pack(state.model, Kind.MODEL).manifest
        made: base.FedDA = load_half("strategies", self.method).STRATEGY(
            self.task,
            self.roster,
            self._layout,
            wait=self.config.wait,
            guard=self.config.guard,
            mail=self.mail,
            notice=self._notice,
            sources_per_round=self.config.sources_per_round,
            there=lambda grid: self.sites.there(),
            exchange=host(self.grid, self.config.exchange, self._exchanged),
            lazy=self.config.summing,
        )
        if isinstance(self.grid, LeanGrid):
            # A reply may bring what no request has brought yet, such as a discriminator per source.
            others = sum(layout.nbytes for layout in made.layouts.values())
            self.grid.expect(self._layout.nbytes + others * len(self.roster.sources))
        made.memory = dict(state.memory)
        made.kept = {site: wire.pack(a, Kind.MODEL) for site, a in state.kept.items()}
        return made

    def _unpacked(self, arrays: ArrayRecord) -> Arrays:
        return records.from_arrays(arrays, {"model": self._layout.text})["model"].unpack()

    def _train_round(
        self, strategy: base.FedDA, sent: ArrayRecord
    ) -> tuple[ArrayRecord, dict[str, Any]]:
        """One round, tried again when too few sites took part."""
        for left in reversed(range(self.config.wait.tries)):
            memory, kept = dict(strategy.memory), dict(strategy.kept)
            try:
                with self.phases.phase("waiting"):
                    strategy.roster = self.roster = self.sites.refresh(self.roster)
                with self.phases.phase("aggregate"):
                    return self._round_trip(strategy, sent)
            except QuorumError as error:
                strategy.memory, strategy.kept = memory, kept
                if not left:
                    raise
                with self.phases.phase("waiting"):
                    self._pause(strategy, str(error))
        raise AssertionError("wait.tries is at least 1")

    def _round_trip(
        self, strategy: base.FedDA, sent: ArrayRecord
    ) -> tuple[ArrayRecord, dict[str, Any]]:
        try:
            requests = strategy.configure_train(self.round, sent, ConfigRecord(), self.grid)
            replies = self.mail.deliver(requests, self.config.wait.train)
            arrays, numbers = strategy.aggregate_train(self.round, replies)
        finally:
            session = strategy.adjourn()
            for name, (to, back) in session.traffic().items() if session else ():
                role = next(n.role for n in self.roster.nodes if n.name == name)
                self.ledger.add(self.round, role, "to", Kind.GRADIENT, to)
                self.ledger.add(self.round, role, "from", Kind.GRADIENT, back)
        assert arrays is not None and numbers is not None
        fewest = {"gradient-examples": min(session.fewest().values(), default=0)} if session else {}
        return arrays, dict(numbers) | fewest

    def _pause(self, strategy: base.FedDA, why: str) -> None:
        self.journal.trouble("paused", "", f"{why} The run waits.", round=self.round)
        needed, sources = strategy.needed(), self.config.wait.min_sources
        self.roster = self.sites.back(self.roster, needed, sources)
        self.journal.trouble("resumed", "", "enough sites are there again", round=self.round)

    def _test(self, strategy: base.FedDA, arrays: ArrayRecord) -> dict[str, Any]:
        """The target's test of the new model; a round without it is no reason to stop."""
        with self.phases.phase("test"):
            requests = strategy.configure_evaluate(self.round, arrays, ConfigRecord(), self.grid)
            replies = self.mail.deliver(requests, self.config.wait.evaluate)
            found = dict(strategy.aggregate_evaluate(self.round, replies) or {})
        found.pop("seconds", None)
        if "loss" in found:
            found["test_loss"] = found.pop("loss")
        return found

    def _select(self, best: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
        """The round with the highest infomax so far: chosen without any label."""
        if "infomax" not in found or found["infomax"] <= best.get("infomax", float("-inf")):
            return best
        return {k: found[k] for k in ("infomax", "accuracy") if k in found} | {"round": self.round}

    def _finish(self, state: checkpoint.State) -> dict[str, Any]:
        model = models.blank(self.config.model, self.task.dims, self.task.classes)
        models.load_arrays(model, state.model)
        classes = self.roster.classes
        path = self.folder / "model.safetensors"
        models.save(path, model, config=self.config.model, shape=self.task.dims, classes=classes)
        kept = {} if getattr(self.task.options, "share", True) else {"adapted": self._kept()}
        return {
            "seed": self.seed,
            "final_accuracy": state.history[-1].get("accuracy"),
            "selected_accuracy": state.best.get("accuracy"),
            "selected_round": state.best.get("round"),
            "seconds": round(sum(entry["seconds"] for entry in state.history), 3),
            "bytes": self.ledger.total(),
            "model": str(path),
            **kept,
            "rounds": state.history,
        }

    def _kept(self) -> dict[str, str]:
        """Whose adapted model stays where it is, and its file below that site's --state-dir."""
        name = self.roster.target.name
        return {"site": name, "file": f"{name}/{self.task.training}.model.safetensors"}

    def _initial(self) -> Arrays:
        """The model all sites start from; pretrained weights are read here and nowhere else."""
        task = self.task
        if encoder := getattr(self.config.options[self.method], "encoder", ""):
            return finished(Path(encoder), task)
        return models.to_arrays(models.build(task.model, task.dims, task.classes, task.seed))

    def _sent(self, message: Message) -> None:
        node = self.roster.by_id(message.metadata.dst_node_id)
        self.ledger.count(message, self.round, node.role if node else "unknown", "to")

    def _received(self, message: Message) -> None:
        node = self.roster.by_id(message.metadata.src_node_id)
        self.ledger.count(message, self.round, node.role if node else "unknown", "from")
        if node:
            self.phases.note(node.name, message)

    def _exchanged(self, what: str, site: str, text: str) -> None:
        """Who came and went is in the exchange's log; what went wrong, in the run's."""
        if what in ("refused", "cut", "resumed", "ended"):
            about: dict[str, Any] = {"round": self.round, "method": self.method, "seed": self.seed}
            self.journal.trouble(f"exchange {what}", site, text, **about)

    def _notice(self, what: str, site: str, text: str) -> None:
        for node in self.roster.nodes:
            if node.name == site and what in ("silent", "failed"):
                self.sites.doubt(node.id)
        self.journal.trouble(what, site, text, round=self.round, method=self.method, seed=self.seed)


def finished(run: Path, task: Task) -> Arrays:
    """The model of a finished run, to start another one from.

    Raises:
        ModelError: it cannot be read.
        ConfigError: it is of another architecture, or for other data.
    """
    model, about = models.load(run / "model.safetensors" if run.is_dir() else run)
    ours = (task.model.name, task.model.sizes, task.dims, task.names)
    theirs = (about.config.name, about.config.sizes, about.shape, about.classes)
    for what, mine, its in zip(("model", "sizes", "shape", "classes"), ours, theirs, strict=True):
        if mine != its:
            raise ConfigError(
                f"The encoder in {run} has {what} {its!r}, but this run has {mine!r}; start from a "
                "run of the same model and data."
            )
    return models.to_arrays(model)
