"""A run's results as the page draws them; what older results lack is a gap, not an error."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fedda.results import read

# Values by round, by seed. With several targets, a seed also names the target: `0 on north`.
Seeds = dict[str, dict[int, float]]


@dataclass(frozen=True)
class RunSeries:
    """A run's results, and the values that the sections need from them."""

    results: read.Results

    @cached_property
    def summary(self) -> dict[str, Any]:
        return read.summary(self.results)

    @cached_property
    def methods(self) -> list[str]:
        """The run's own method first, then what it is compared with."""
        own = self.results["method"]
        return sorted(self.results["trainings"], key=lambda method: method != own)

    @property
    def own(self) -> str:
        return self.results["method"]

    def title(self, method: str) -> str:
        """Return a method's name as people know it."""
        return read.title(self.results, method)

    def short(self, method: str) -> str:
        """Return that name without remarks."""
        return read.short_title(self.results, method)

    @property
    def seeds(self) -> list[str]:
        return [str(seed) for seed in self.results["seeds"]]

    @property
    def rounds(self) -> int:
        return self.summary["rounds"]

    @property
    def measure(self) -> str:
        """The measure that is shown: accuracy, or the best one that the results have instead."""
        return read.measure(self.results)

    @property
    def target(self) -> str:
        """The target's name, or the names of several targets in words."""
        return read.target(self.results)

    @cached_property
    def targets(self) -> list[str]:
        return read.targets(self.results)

    @cached_property
    def each(self) -> str:
        """What tells the trainings of a method apart: seed, target, or both."""
        if len(self.targets) == 1:
            return "seed"
        return "target and seed" if len(self.seeds) > 1 else "target"

    @property
    def every(self) -> str:
        """`each` in the plural."""
        return self.each.replace("target", "targets").replace("seed", "seeds")

    @property
    def over(self) -> str:
        """What a method's means are taken over, in words; empty if it has one training."""
        many = {"target": len(self.targets), "seed": len(self.seeds)}
        return " and ".join(read.counted(n, what) for what, n in many.items() if n > 1)

    @cached_property
    def labels(self) -> dict[str, str]:
        """The target of each training of the run's own method, by seed."""
        trainings = self.results["trainings"].get(self.own, [])
        return {read.seed_of(self.results, t): t.get("target", self.targets[0]) for t in trainings}

    @property
    def sources(self) -> list[str]:
        return [s["name"] for s in self.results["sites"] if s["role"] == "source"]

    @property
    def config(self) -> Mapping[str, Any]:
        return self.results.get("config") or {}

    def entries(self, method: str, site: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield every round of a method, with its seed.

        Args:
            method: its name.
            site: leave out trainings that this site has no part in, as they adapt another target.
        """
        for training in self.results["trainings"][method]:
            if site not in read.others(self.results, training):
                for entry in training["rounds"]:
                    yield read.seed_of(self.results, training), entry

    def numbers(self, method: str, key: str, target: str = "") -> Seeds:
        """Return one number of every round, by default of all targets."""
        by_seed: Seeds = {seed: {} for seed in self.labels}
        for seed, entry in self.entries(method, target):
            if is_number(entry.get(key)):
                by_seed.setdefault(seed, {})[entry["round"]] = entry[key]
        return {seed: values for seed, values in by_seed.items() if values}

    def inner(self, method: str, table: str, key: str, absent: float | None = None) -> Seeds:
        """Return one number of a table that each round holds, such as a site's weight."""
        by_seed: Seeds = {}
        for seed, entry in self.entries(method, key):
            value = (entry.get(table) or {}).get(key, absent)
            if entry.get(table) and is_number(value):
                by_seed.setdefault(seed, {})[entry["round"]] = value
        return by_seed

    def keys(self, method: str, table: str) -> list[str]:
        """Return the keys of a table that each round holds, in order of appearance."""
        if (method, table) not in self._keys:
            tables = (entry.get(table) or {} for _, entry in self.entries(method))
            self._keys[method, table] = list(dict.fromkeys(k for each in tables for k in each))
        return self._keys[method, table]

    @cached_property
    def _keys(self) -> dict[tuple[str, str], list[str]]:
        return {}

    def selected(self, method: str) -> dict[str, int]:
        """Return the round chosen without labels, by seed."""
        trainings = self.results["trainings"][method]
        selected = {read.seed_of(self.results, t): t.get("selected_round") for t in trainings}
        return {seed: number for seed, number in selected.items() if number is not None}


def is_number(value: Any) -> bool:
    """Whether a value can be drawn; true and false cannot."""
    return isinstance(value, int | float) and not isinstance(value, bool)
