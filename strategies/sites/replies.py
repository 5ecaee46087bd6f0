"""The checks that a reply must pass before a strategy sees it: the contract's and the guard's."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from flwr.app import Message

from fedda import records
from fedda.config import GuardConfig
from fedda.errors import FeddaError, QuorumError, WireError
from fedda.maths.bounds import Bounds
from fedda.wire import Part
from fedda.wire.packing import Arrays, Kind, Manifest, Packed

from .roster import Node, Roster


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


def with_cause(text: str, suspect: str) -> str:
    """A sentence of a training that went wrong, and what may be the cause."""
    return f"{text.rstrip('.')}; {suspect}" if suspect else text


class Checks:
    """Checks the replies of one training.

    Args:
        guard: bounds on replies.
        layout: the layout of the run's model.
        suspect: what of a site's data may be the cause where a model is out of bounds.
    """

    def __init__(self, guard: GuardConfig, layout: Manifest, suspect: str = "") -> None:
        self._bounds = Bounds(guard.max_change, guard.max_statistics)
        self._layout = layout
        self._suspect = suspect

    def begin(self, sent: Packed) -> None:
        """Set the model at the start of a round, with which the round's replies are compared."""
        self._bounds.begin(sent)

    def read(
        self,
        node: Node,
        message: Message,
        contract: Part,
        layouts: Mapping[str, Manifest],
        needs: Iterable[str],
        roster: Roster,
        sent: Packed | None = None,
    ) -> Reply:
        """Check a reply, and return its arrays and numbers.

        Args:
            node: the site that sent it.
            message: the reply.
            contract: the contract of the part that the site was asked to do.
            layouts: layouts of the arrays that are sent besides the run's model.
            needs: names of the numbers that the reply must have.
            roster: the sites of the training; a number called `NAME/SITE` is about one of them.
            sent: the model that the request held, of which the reply's may be a change.

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
            classes=len(roster.classes),
        )
        names = {n.name for n in roster.nodes}
        for name, value in numbers.items():
            if "/" in name and name.split("/", 1)[1] not in names:
                raise WireError(f"{node.name} sent '{name[:80]}', which is about no site here.")
            if name not in rule.counts and not math.isfinite(value):
                raise WireError(f"{name} from {node.name} is not finite.")
        arrays = {name: packed.of(sent) for name, packed in arrays.items()}
        for name, packed in arrays.items():
            try:
                packed.check_finite(node.name)
                if packed.manifest.kind is Kind.MODEL and name.split("/")[0] not in layouts:
                    self._bounds.check(node.name, name, packed.unpack())
            except FeddaError as error:
                raise type(error)(with_cause(str(error), self._suspect)) from None
        return Reply(node, arrays, numbers)

    def mean(self, model: Arrays) -> None:
        """Check a mean whose terms nobody saw, by the bounds of single models.

        Raises:
            QuorumError: it is out of bounds, so the round has to be repeated.
        """
        try:
            self._bounds.check("the secure sum", "model", model)
        except WireError as error:
            raise QuorumError(f"{error} A source sent what it should not.") from None
