"""Train one method with one seed, round by round, until it is done or cannot go on.

Flower's own loop always starts at round 1, waits for ever for sites that left, and reports a run as
completed even if every site failed. This loop has a quorum and a deadline. It pauses while too few
sites are connected, repeats a round that failed, and can be stopped after any round and resumed.
"""

import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message
from flwr.serverapp import Grid

from fedda import plugins, records
from fedda.errors import Code, NotFiniteError, QuorumError
from fedda.exchange import Session
from fedda.results import diagnostics
from fedda.results.read import ANSWERED, MODEL, REFINED
from fedda.settings import RunConfig
from fedda.wire.packing import Arrays, Kind, layout

from . import checkpoint
from .journal import Journal, by_reason
from .ledger import Ledger, Phases, TimedMail
from .presence import Sites
from .sequence import Earlier
from .start import expect, first_model, hints, host, planned_steps, save_model, task_for
from .strategy_modules import base, post, roster

FINAL = {Code.POLICY.public, Code.BUDGET.public}  # a site that says so will say so again


class TrainingRounds:
    """Trains one method with one seed over the sites of a roster."""

    def __init__(
        self,
        config: RunConfig,
        method: str,
        seed: int,
        *,
        grid: Grid,
        sites: Sites,
        members: roster.Roster,
        folder: Path,
        journal: Journal,
        earlier: Mapping[str, Earlier] | None = None,
    ) -> None:
        """Prepare to train."""
        self.config = config
        self.method = method
        self.seed = seed
        self.grid = grid
        self.sites = sites
        self.roster = members
        self.journal = journal
        self.phases = Phases()
        self.mail = TimedMail(grid, self._sent, self._received)
        self.mail.phases, self.mail.lost, self.mail.owed = self.phases, self._lost, self._owed
        self.mail.failed = lambda: self.strategy.failed()
        self.strategy: base.FedDA  # made when the training begins
        self.round = 0
        self._forsaken = False  # whether the target stayed away for as long as the run waits
        self.task = task_for(config, method, seed, members)
        self.folder = folder / self.task.label
        self.earlier = earlier or {}
        self.ledger = Ledger(folder, grid, self.task.label)
        self._said: dict[str, str] = {}  # why a site's reply is none in this try of the round

    @property
    def _about(self) -> dict[str, Any]:
        """The entries by which the journal's events name this training."""
        target = {"target": self.task.target} if self.task.target else {}
        return {"method": self.method, "seed": self.seed, **target}

    def run(self) -> dict[str, Any]:
        """Train, from the checkpoint if there is one -> the training's entry in results.json.

        Raises:
            QuorumError: there were too few sites for longer than `wait.sites` seconds.
            RunError: a checkpoint cannot be written or read.
        """
        state = checkpoint.read(self.folder)
        if state is None:
            state = checkpoint.State(0, first_model(self.config, self.task))
        self.ledger.restore(state.ledger)
        strategy = self.strategy = self._strategy(state)
        steps = planned_steps(self.task, {n.name: n.examples for n in self.roster.sources})
        self.journal.write(
            "training",
            **self._about,
            round=state.round,
            rounds=self._last(state),
            steps=steps,
            hints=hints(self.task, steps, self.config.idle),
        )
        arrays, resumed = strategy.packed(state.model), state.round
        while state.round < self._last(state):
            # The state's model is a view of the bytes that are sent, so memory holds it once.
            state.model = self._unpacked(arrays)
            start = time.perf_counter()
            self.round, strategy.last = state.round + 1, self._last(state)
            self.phases.restart()
            self._fewest: list[int] = []
            try:
                arrays, numbers = self._train_round(arrays)
            except (QuorumError, NotFiniteError) as error:
                made = isinstance(error, NotFiniteError)
                why = str(error).rstrip(".") if made else self._divergence
                back = self._gone_back(state, why)
                if back is None:
                    raise
                state = back
                break
            tested = self._tested(arrays) if self.config.run.evaluate else {}
            entry = {
                "round": self.round,
                **numbers,
                **({checkpoint.UNTESTED: True} if tested is None else tested),
                "weights": dict(strategy.weights),
                "bytes": self.ledger.round(self.round),
                "seconds": round(time.perf_counter() - start, 3),
                "phases": self.phases.seconds(),
                "site_seconds": self.phases.sites(),
            }
            state = checkpoint.State(
                self.round,
                self._unpacked(arrays),
                strategy.memory.arrays,
                strategy.memory.numbers,
                [*state.history, entry],
                self.ledger.state(),
                diagnostics.selected(
                    {} if diagnostics.tests_anew(self.task, self.round) else state.best,
                    tested or {},
                    self.round,
                ),
            )
            with self.phases.phase("checkpoint"):
                checkpoint.write(self.folder, state)
            entry["phases"] = self.phases.seconds()  # now with this checkpoint's time
            self.journal.write("round", **self._about, **entry)
            for doubt in set(self._doubts(state.history)) - set(self._doubts(state.history[:-1])):
                self.journal.write("doubt", **self._about, **doubt.to_json())
            if not self._is_last and (why := diagnostics.collapse(self.task, state.history)):
                state = self._gone_back(state, why) or state
            self._say_if_ending(state)
        if resumed == self._last(state) and checkpoint.untested(state):
            state = self._make_up(arrays, state)
        return self._finish(state)

    def _last(self, state: checkpoint.State) -> int:
        """The training's last round, as far as its finished rounds tell."""
        return diagnostics.last_round(self.task, self.config.run.patience, state.history)

    @property
    def _is_last(self) -> bool:
        """Whether the current round is the training's last."""
        return self.round == self.strategy.last

    def _say_if_ending(self, state: checkpoint.State) -> None:
        """Write to the journal that the training will end early, once that is known."""
        patience, last = self.config.run.patience, self._last(state)
        if last == state.round + 1 and (text := diagnostics.sentence(self.task, patience, last)):
            self.journal.write("ending", **self._about, round=state.round, last=last, text=text)

    @property
    def _divergence(self) -> str:
        """What sites said of values that are not finite, in words; empty if none did."""
        said = [t for t in self._said.values() if t.startswith(Code.NOT_FINITE.public)]
        return f"the training has diverged: {said[0]}" if said else ""

    def _gone_back(self, state: checkpoint.State, why: str) -> checkpoint.State | None:
        """End the training with the model of the round with the highest infomax -> its last state.

        None where that is not possible, as an adapted model stays at the target, or nothing was
        tested.

        Args:
            state: after the last finished round.
            why: what went wrong; empty if it is no matter of the model.
        """
        # Without a best round of this phase the file is an earlier phase's, or not there.
        can = why and state.best and not self.task.stays
        best = checkpoint.read(self.folder, checkpoint.BEST) if can else None
        if best is None:
            return None
        self.round = self.strategy.last = state.round
        self.strategy.memory = post.Memory(dict(best.numbers), dict(best.arrays))
        tested = self._tested(self.strategy.packed(best.model)) or {checkpoint.UNTESTED: True}
        entry = state.history[-1] | tested | {diagnostics.RETURNED: best.round}
        state = replace(best, round=state.round, history=state.history, best=state.best)
        state = self._amended(state, entry)
        text = f"{why}; it ends, with the model of round {best.round}"
        self.journal.write("ending", **self._about, round=state.round, last=state.round, text=text)
        return state

    def _amended(self, state: checkpoint.State, entry: dict[str, Any]) -> checkpoint.State:
        """Give the last round another entry, also in the checkpoint and in the journal."""
        entry["bytes"] = self.ledger.round(self.round)
        history = [*state.history[:-1], entry]
        state = replace(state, history=history, ledger=self.ledger.state())
        checkpoint.write(self.folder, state)
        self.journal.write("round", **self._about, **entry)
        return state

    def _strategy(self, state: checkpoint.State) -> base.FedDA:
        """Make the strategy, with what the state says that it remembers."""
        self._layout = layout(state.model, Kind.MODEL)
        setup = post.Setup(
            self.task,
            replace(self._layout, floats=self.task.wire.dtype),
            wait=self.config.wait,
            guard=self.config.guard,
            summing=self.config.summing,
            sources_per_round=self.config.sources_per_round,
            mail=self.mail,
            notice=self._notice,
            online=lambda grid: self.sites.there(),
            exchange=host(self.grid, self._exchanged),
            account=self._account,
            earlier=self.earlier,
            report=lambda what, facts: self.journal.write(what, **self._about, **facts),
        )
        made: base.FedDA = plugins.strategy(self.method)(setup, self.roster)
        expect(self.grid, self.task, self._layout, len(self.roster.sources))
        made.memory = post.Memory(dict(state.numbers), dict(state.arrays))
        return made

    def _unpacked(self, arrays: ArrayRecord) -> Arrays:
        return records.from_arrays(arrays, {"model": self._layout.text})["model"].unpack()

    def _train_round(self, sent: ArrayRecord) -> tuple[ArrayRecord, dict[str, Any]]:
        """Train one round; repeat it, up to `wait.tries` times, while too few sites take part."""
        for left in reversed(range(self.config.wait.tries)):
            memory = self.strategy.memory.copy()
            self._said.clear()
            try:
                with self.phases.phase("waiting"):
                    self.strategy.roster = self.roster = self.sites.refresh(self.roster)
                with self.phases.phase("aggregate"):
                    return self._round_trip(sent)
            except QuorumError as error:
                self.strategy.memory = memory
                if not left:
                    raise QuorumError(f"{error}{by_reason(self._said)}") from error
                with self.phases.phase("waiting"):
                    self._pause(str(error))
        raise AssertionError("wait.tries is at least 1")

    def _round_trip(self, sent: ArrayRecord) -> tuple[ArrayRecord, dict[str, Any]]:
        strategy = self.strategy
        strategy.weights = {}  # stays empty in a round that averages no sites
        try:
            requests = strategy.configure_train(self.round, sent, ConfigRecord(), self.grid)
            replies = self.mail.deliver(requests, self.config.wait.train)
            arrays, numbers = strategy.aggregate_train(self.round, replies)
        finally:
            strategy.adjourn()
        assert arrays is not None and numbers is not None
        fewest = {"gradient-examples": min(self._fewest)} if self._fewest else {}
        return arrays, dict(numbers) | fewest

    def _account(self, session: Session) -> None:
        """Count the bytes that crossed in a session of the exchange, when it has ended."""
        self.ledger.session(self.round, session, {n.name: n.role for n in self.roster.nodes})
        self._fewest.append(min(session.fewest().values(), default=0))

    def _pause(self, why: str) -> None:
        self.journal.trouble("paused", "", f"{why} The run waits.", round=self.round)
        needed, sources = self.strategy.needed(), self.strategy.channel.least_sources
        self.roster = self.sites.back(self.roster, needed, sources)
        self.journal.trouble("resumed", "", "enough sites are connected again", round=self.round)

    def _tested(self, arrays: ArrayRecord) -> dict[str, Any] | None:
        """Test the new model; repeat it, up to `wait.tries` times -> numbers, None if none came.

        The run waits for the target, but not once more in every round while it stays away.
        """
        last, target = self._is_last, self.roster.target.name
        self._said.clear()
        for _ in range(self.config.wait.tries):
            tested = self._test(arrays)
            if tested is not None:
                self._forsaken = False
                return tested
            if (self._forsaken and not last) or self._said.get(target) in FINAL:
                break
            try:
                with self.phases.phase("waiting"):
                    self.strategy.roster = self.roster = self.sites.back(self.roster, {target}, 0)
            except QuorumError:
                self._forsaken = True
                break
        text = "no test of this round came back"
        if last:
            text += "; resume the run when the site is connected, to make up for it"
        self.journal.trouble("untested", target, text, round=self.round, **self._about)
        return None

    def _make_up(self, arrays: ArrayRecord, state: checkpoint.State) -> checkpoint.State:
        """Test the last round's model if no test of it came back in its round."""
        self.round = self.strategy.last = state.round
        tested = self._tested(arrays)
        if tested is None:
            return state
        entry = {k: v for k, v in state.history[-1].items() if k != checkpoint.UNTESTED} | tested
        best = diagnostics.selected(state.best, tested, self.round)
        return self._amended(replace(state, best=best), entry)

    def _doubts(self, history: list[dict[str, Any]]) -> list[diagnostics.Doubt]:
        """Reasons to doubt the training, from what its rounds reported."""
        counts = [self.roster.counts[n.name] for n in self.roster.sources]
        return diagnostics.doubted(self.task, self.config.run.patience, counts, history)

    def _test(self, arrays: ArrayRecord) -> dict[str, Any] | None:
        """Let the target test the new model -> its numbers, or None if no test came back."""
        with self.phases.phase("test"):
            strategy = self.strategy
            requests = strategy.configure_evaluate(self.round, arrays, ConfigRecord(), self.grid)
            replies = self.mail.deliver(requests, self.config.wait.evaluate)
            answer = strategy.aggregate_evaluate(self.round, replies)
        last = self._is_last
        return None if answer is None else diagnostics.of_test(answer, self.task.classes, last)

    def _finish(self, state: checkpoint.State) -> dict[str, Any]:
        task, target = self.task, self.roster.target.name
        path = self.folder / MODEL
        save_model(path, task, state.model, self.roster.classes)
        # The target that keeps its adapted model, and the model's file below its --state-dir.
        kept = {"site": target, "file": f"{target}/{task.training}.model.safetensors"}
        apart = (REFINED, ANSWERED)
        rounds = [{k: v for k, v in e.items() if k not in apart} for e in state.history]
        return {
            "seed": self.seed,
            "target": target,
            "final_accuracy": state.history[-1].get("accuracy"),
            "selected_accuracy": state.best.get("accuracy"),
            "selected_round": state.best.get("round"),
            "seconds": round(sum(entry["seconds"] for entry in state.history), 3),
            "bytes": self.ledger.total(),
            "model": str(path),
            "hidden": self.task.hidden,
            "stopped": diagnostics.sentence(
                self.task, self.config.run.patience, state.round, state.history
            ),
            **({"adapted": kept} if task.stays else {}),
            **self.strategy.findings(),
            REFINED: state.history[-1].get(REFINED),
            ANSWERED: state.history[-1].get(ANSWERED) or {},
            "doubts": [doubt.to_json() for doubt in self._doubts(state.history)],
            "rounds": rounds,
        }

    def _sent(self, message: Message) -> None:
        node = self.roster.by_id(message.metadata.dst_node_id)
        site = (node.name, node.role) if node else ("", "unknown")
        self.ledger.message("to", *site, self.round, message)

    def _received(self, message: Message) -> None:
        node = self.roster.by_id(message.metadata.src_node_id)
        site = (node.name, node.role) if node else ("", "unknown")
        self.ledger.message("from", *site, self.round, message)
        if node:
            self.phases.note(node.name, message)

    def _lost(self, node_id: int, why: str) -> None:
        """Tell the strategy that a node's reply is not waited for any more, and why."""
        node = self.roster.by_id(node_id)
        if node:
            self.strategy.give_up(node.name, why)

    def _owed(self, node_ids: Collection[int]) -> None:
        """Say now and then which nodes still owe a reply."""
        if seconds := self.mail.reminder.due():
            names = [node.name for node in self.roster.nodes if node.id in node_ids]
            about = self._about | {"round": self.round}
            self.journal.write("waiting-for", sites=names, seconds=seconds, **about)

    def _exchanged(self, what: str, site: str, text: str) -> None:
        """Write troubles of the exchange to the journal; joining and leaving is only logged."""
        if what in ("refused", "cut", "resumed", "ended"):
            self.journal.trouble(f"exchange {what}", site, text, round=self.round, **self._about)

    def _notice(self, what: str, site: str, text: str) -> None:
        clipped = {"what": "clipped", "site": site, **self._about}
        if what == "clipped" and self.journal.knows(clipped):  # one trouble a training
            self.journal.write(what, site=site, text=text, round=self.round, **self._about)
            return
        if what in ("failed", "refused"):
            self._said[site] = text
        for node in self.roster.nodes:
            if node.name == site and what in ("silent", "failed"):
                self.sites.doubt(node.id)
        self.journal.trouble(what, site, text, round=self.round, **self._about)
