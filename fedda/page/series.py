"""A run's results as the page draws them; whatever older results lack is a gap and no error."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fedda.results import Results, measure, summary, target, title

Seeds = dict[str, dict[int, float]]  # values by round, by seed


@dataclass(frozen=True)
class Run:
    """Results with what every section asks of them."""

    results: Results

    @cached_property
    def summary(self) -> dict[str, Any]:
        return summary(self.results)

    @cached_property
    def methods(self) -> list[str]:
        """The run's own method first, then what it is compared with."""
        own = self.results["method"]
        return sorted(self.results["trainings"], key=lambda method: method != own)

    @property
    def own(self) -> str:
        return self.results["method"]

    @property
    def seeds(self) -> list[str]:
        return [str(seed) for seed in self.results["seeds"]]

    @property
    def rounds(self) -> int:
        return self.summary["rounds"]

    @property
    def measure(self) -> str:
        """accuracy, or the best there is in its place."""
        return measure(self.results)

    @property
    def target(self) -> str:
        return target(self.results)

    @property
    def sources(self) -> list[str]:
        return [s["name"] for s in self.results["sites"] if s["role"] == "source"]

    @property
    def config(self) -> Mapping[str, Any]:
        return self.results.get("config") or {}

    def entries(self, method: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Every round of a method, with its seed."""
        for training in self.results["trainings"][method]:
            for entry in training["rounds"]:
                yield str(training["seed"]), entry

    def numbers(self, method: str, key: str) -> Seeds:
        """One number of the rounds."""
        found: Seeds = {seed: {} for seed in self.seeds}
        for seed, entry in self.entries(method):
            if is_number(entry.get(key)):
                found.setdefault(seed, {})[entry["round"]] = entry[key]
        return {seed: values for seed, values in found.items() if values}

    def inner(self, method: str, table: str, key: str, absent: float | None = None) -> Seeds:
        """One number of a table that each round holds, such as a site's weight."""
        found: Seeds = {}
        for seed, entry in self.entries(method):
            value = (entry.get(table) or {}).get(key, absent)
            if entry.get(table) and is_number(value):
                found.setdefault(seed, {})[entry["round"]] = value
        return found

    def keys(self, method: str, table: str) -> list[str]:
        """What a table of the rounds holds, in order of appearance."""
        if (method, table) not in self._keys:
            tables = (entry.get(table) or {} for _, entry in self.entries(method))
            self._keys[method, table] = list(dict.fromkeys(k for found in tables for k in found))
        return self._keys[method, table]

    @cached_property
    def _keys(self) -> dict[tuple[str, str], list[str]]:
        return {}

    def mean_by_round(self, method: str, table: str, key: str) -> dict[int, float]:
        """A table's number by round, averaged over the seeds that have the round."""
        sums: dict[int, list[float]] = {}
        for _, entry in self.entries(method):
            if entry.get(table) is not None:
                sums.setdefault(entry["round"], []).append(entry[table].get(key, 0))
        return {r: sum(values) / len(values) for r, values in sorted(sums.items())}

    def selected(self, method: str) -> dict[str, int]:
        """The round chosen without labels, by seed."""
        found = {str(t["seed"]): t.get("selected_round") for t in self.results["trainings"][method]}
        return {seed: number for seed, number in found.items() if number is not None}


def is_number(value: Any) -> bool:
    """Whether a value can be drawn; true and false cannot."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def short(method: str) -> str:
    """A method's name without remarks."""
    return title(method).partition(" (")[0]
