"""The trainings of a choice on a server: real sites, one run after another.

The operator has no site's data. So the sites and their network are learnt from one round of FedAvg,
and the target itself says how its trainings' models agree on its images (`run.beside`).
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from fedda import models, plugins
from fedda.comparison import Cell, Plan, Variant
from fedda.comparison.cells import Notify, of_journal
from fedda.errors import FeddaError
from fedda.halves import REFERENCE
from fedda.library.beginning import Launch, beginning
from fedda.results.read import begun, model_file
from fedda.settings import RunConfig
from fedda.wire import MOST_BESIDE

from .candidates import unfit

LOOK = "look"  # the folder of the first round

# Starts a run on the server and calls a listener with each event until the run has ended. Raises
# a FeddaError if it failed, and KeyboardInterrupt after it has ended the run at Ctrl-C.
Submit = Callable[[RunConfig, Launch, Path, Callable[[Mapping[str, Any]], None]], None]


@dataclass(frozen=True, kw_only=True)
class LivePlan(Plan):
    """All trainings over the sites that have joined a server; `data` is the server's folder.

    Attributes:
        launch: how runs are started there.
        submit: what starts one and waits for its end.
    """

    launch: Launch
    submit: Submit
    simulated: ClassVar[bool] = False

    def where(self, target: str) -> list[str]:
        """The options of `fedda run` for these sites."""
        at = [("--server", self.launch.server), ("--superlink", self.launch.superlink)]
        at += [("--ca", self.launch.ca)]
        chosen = at[1:] if self.launch.superlink else at[:1]
        words = [word for flag, value in chosen if value for word in (flag, value)]
        study = str(self.settings.get("run.study", ""))
        return [*words, *(["--study", study] if study else []), "--target", target]

    def config(self, cell: Cell) -> RunConfig:
        """The settings of one training's run."""
        found = super().config(cell)
        return found.model_copy(
            update={"run": found.run.model_copy(update={"target": cell.target})}
        )

    def look(self, notify: Notify) -> dict[str, Any]:
        """Train one round of FedAvg, unless it was done before -> its results.

        Raises:
            FeddaError: no server answers, no such target has joined, or the round failed.
        """
        cell = Cell(Variant(REFERENCE), self.targets[0], self.seeds[0])
        one = replace(self, out=self.out / LOOK, settings={**self.settings, "rounds": 1})
        if (results := one.results(cell)) is None:
            one.train(cell, notify)
            results = one.results(cell)
        assert results is not None, "a run that has ended has results"
        return results | {"batchnorm": _has_batchnorm(one.folder(cell))}

    def obstacle(self, name: str, seen: Mapping[str, Any]) -> str:
        """Why a method does not fit what a first round has shown; empty if it does."""
        sources = [s for s in seen["sites"] if s["role"] == "source"]
        target = next(s for s in seen["sites"] if s["role"] == "target")
        network = seen["config"]["model.name"]
        if why := unfit(name, network, len(sources), lambda: bool(seen["batchnorm"])):
            return why
        least = int(seen["config"]["exchange.min-examples"])
        able = [s for s in sources if s["examples"] >= least]
        if plugins.method(name).gradients and (target["examples"] < least or not able):
            who = target if target["examples"] < least else max(sources, key=_examples)
            return (
                f"{who['name']} has {who['examples']} examples, and a gradient must be summed over "
                f"{least} (exchange.min-examples)"
            )
        return ""

    def check(self) -> None:
        """Find what would make a training fail, as far as that is known without the sites.

        Raises:
            ConfigError: settings contradict each other.
            RunError: OUT holds other trainings.
        """
        self.check_variants()
        for cell in self.cells():
            self.config(cell)
            self.results(cell)

    def execute(self, cells: Sequence[Cell], jobs: int, notify: Notify) -> None:
        """Train cells, one after another."""
        for cell in cells:
            error = None
            try:
                self.train(cell, notify)
            except FeddaError as trouble:  # one training's trouble must not end the others
                error = str(trouble)
            notify("done", cell, error)

    def train(self, cell: Cell, notify: Notify) -> None:
        """Train one cell; if it was begun before, resume it.

        Raises:
            FeddaError: it failed.
        """
        folder, config = self.folder(cell), self.config(cell)
        resume, before = begun(folder), self.cells()
        before = [c for c in before[: before.index(cell)] if c.seed == cell.seed]
        done = [c.training for c in before if self.results(c) is not None]
        beside = ",".join(done[-MOST_BESIDE:])
        run = config.run.model_copy(update={"resume": resume, "beside": beside})
        config = config.model_copy(update={"run": run})
        with nullcontext() if resume else beginning(config, self.launch):
            self.submit(config, self.launch, folder, of_journal(cell, notify))

    def sites(self, cell: Cell) -> list[dict[str, Any]]:
        """None are known here: they are those that have joined."""
        return []


def _examples(site: Mapping[str, Any]) -> int:
    return int(site["examples"])


def _has_batchnorm(folder: Path) -> bool:
    """Whether the part of a run's network that learns has a BatchNorm layer."""
    network, _ = models.load(model_file(folder))
    return bool(models.batchnorms(network))
