"""One training of a comparison, its name, and the events that report its progress."""

import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .variants import Variant


@dataclass(frozen=True)
class Cell:
    """One training: a variant, a target and a seed."""

    variant: Variant
    target: str
    seed: int

    @property
    def name(self) -> str:
        """The name of the training's run and folder."""
        return f"{self.variant.slug}.{_plain(self.target)}.{self.seed}"

    @property
    def training(self) -> str:
        """The name of the training in its sites' files."""
        return f"{self.name}.{self.variant.method}-{self.seed}"


# Called with an event, its cell and a value: "begin" with the number of rounds that an earlier try
# finished, "line" with what its sites say of long work before it, "round" with the round's number,
# "done" with an error or None.
Notify = Callable[[str, Cell, Any], None]


def of_journal(cell: Cell, notify: Notify) -> Callable[[Mapping[str, Any]], None]:
    """Listens to the journal of a cell's run: passes on that it begins, and each of its rounds."""

    def listen(event: Mapping[str, Any]) -> None:
        if event["event"] in ("training", "round"):
            notify("begin" if event["event"] == "training" else "round", cell, event["round"])

    return listen


def _plain(name: str) -> str:
    """A domain's name as a part of a run's name; unchanged if its characters allow that."""
    plain = re.sub(r"[^\w.-]", "-", name)
    digest = hashlib.blake2b(name.encode(), digest_size=4).hexdigest()
    return name if plain == name else f"{plain}-{digest}"
