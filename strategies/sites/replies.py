"""The checks that a reply must pass before a strategy sees it: the contract's and the guard's."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from flwr.app import Message

from fedda import records
from fedda.config import GuardConfig
from fedda.errors import QuorumError, WireError
from fedda.wire import Arrays, Kind, Manifest, Packed, Part, pieces

from .roster import Node, Roster

# A model whose weights are smaller than this, in the root of their mean square, counts as if they
# were so large. A new head is small, and it grows by many times its norm in its first round.
SMALL = 0.2


@dataclass(frozen=True)
class Reply:
    """A reply that passed every check."""

    node: Node
    arrays: Mapping[str, Packed]
    numbers: Mapping[str, Any]

    def model(self) -> Packed:
        """Return the model in the reply.

        Raises:
            QuorumError: the reply has none, and the contract allows that.
        """
        if "model" not in self.arrays:
            raise QuorumError(f"{self.node.name} sent no model.")
        return self.arrays["model"]


class Checks:
    """Checks the replies of one training.

    Args:
        guard: bounds on replies.
        layout: the layout of the run's model.
    """

    def __init__(self, guard: GuardConfig, layout: Manifest) -> None:
        self._guard = guard
        self._layout = layout

    def begin(self, sent: Packed) -> None:
        """Set the model at the start of a round, with which the round's replies are compared."""
        self._sent = sent.unpack()
        self._unit = max(norm(self._sent), SMALL * math.sqrt(weights(self._sent)))

    def read(
        self,
        node: Node,
        message: Message,
        contract: Part,
        layouts: Mapping[str, Manifest],
        needs: Iterable[str],
        roster: Roster,
    ) -> Reply:
        """Check a reply, and return its arrays and numbers.

        Args:
            node: the site that sent it.
            message: the reply.
            contract: the contract of the part that the site was asked to do.
            layouts: layouts of the arrays that are sent besides the run's model.
            needs: names of the numbers that the reply must have.
            roster: the sites of the training; a number called `NAME/SITE` is about one of them.

        Raises:
            WireError: something is missing, not allowed or out of bounds.
            NotFiniteError: a value is not finite.
        """
        arrays, tables = records.read(message.content)
        if set(tables) != {"metrics"}:
            raise WireError(
                f"{node.name} sent tables {sorted(tables)}; the contract allows only 'metrics'."
            )
        numbers, rule = tables["metrics"], contract.leaves
        missing = {*(n for n in rule.arrays if "*" not in n), *needs} - {*arrays, *numbers}
        if missing:
            raise WireError(f"{node.name} sent no {', '.join(sorted(missing))}.")
        rule.check(
            arrays,
            numbers,
            model=self._layout,
            sites=len(roster.nodes),
            where=f"{node.name} ({node.role})",
            layouts=layouts,
        )
        names = {n.name for n in roster.nodes}
        for name, value in numbers.items():
            if "/" in name and name.split("/", 1)[1] not in names:
                raise WireError(f"{node.name} sent '{name[:80]}', which is about no site here.")
            if not math.isfinite(value):
                raise WireError(f"{name} from {node.name} is not finite.")
        for name, packed in arrays.items():
            packed.check_finite(node.name)
            if packed.manifest.kind is Kind.MODEL and name.split("/")[0] not in layouts:
                self._check_model(node, name, packed)
        return Reply(node, arrays, numbers)

    def mean(self, model: Arrays) -> None:
        """Check a mean whose terms nobody saw, by the bounds of single models.

        Raises:
            QuorumError: it is out of bounds, so the round has to be repeated.
        """
        try:
            self._check_arrays("the secure sum", "model", model)
        except WireError as error:
            raise QuorumError(f"{error} A source sent what it should not.") from None

    def _check_model(self, node: Node, name: str, packed: Packed) -> None:
        self._check_arrays(node.name, name, packed.unpack())

    def _check_arrays(self, who: str, name: str, model: Arrays) -> None:
        most = self._guard.max_change
        for entry, values in model.items():
            if entry.endswith("running_var") and (values < 0).any():
                raise WireError(f"{entry} of '{name}' from {who} is a negative variance.")
            if "running_" in entry and self._guard.max_statistics:
                largest = max(1.0, float(np.abs(self._sent[entry]).max()))
                bound = self._guard.max_statistics * largest
                if np.abs(values).max() > bound:
                    raise WireError(
                        f"{entry} of '{name}' from {who} exceeds {bound:g}, the most that "
                        "guard.max-statistics allows."
                    )
        if not most:
            return
        change = norm(model, self._sent) / self._unit
        if change > most:
            raise WireError(
                f"'{name}' from {who} is {change:.1f} norms away from the model that was "
                f"sent; guard.max-change allows {most:g}."
            )


def norm(arrays: Arrays, minus: Arrays | None = None) -> float:
    """Return the Euclidean norm of a model's weights, or of their difference from another's.

    BatchNorm's running statistics are left out: they follow the data, not the training.
    """
    total = 0.0
    for name, values in arrays.items():
        if _is_weight(name, values):
            for part, other in pieces(values, values if minus is None else minus[name]):
                with np.errstate(over="ignore"):  # an infinite norm is beyond every bound
                    moved = part if minus is None else part - other
                    total += float(np.vdot(moved, moved))
    return math.sqrt(total)


def weights(arrays: Arrays) -> int:
    """Return how many numbers `norm` is over."""
    return sum(values.size for name, values in arrays.items() if _is_weight(name, values))


def _is_weight(name: str, values: np.ndarray) -> bool:
    return values.dtype.kind == "f" and "running_" not in name
