"""The checks that a reply must pass before a strategy sees it: the contract's and the guard's."""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from flwr.app import Message

from fedda import records
from fedda.config import GuardConfig
from fedda.errors import FeddaError, QuorumError, WireError
from fedda.maths.bounds import Bounds, Peers, scaled, too_long
from fedda.wire import Part
from fedda.wire.packing import Arrays, Kind, Manifest, Packed, pack

from .roster import Node, Roster

MODEL = "model"  # arrays of this name are a site's to keep, and of names such as model/SITE
MOST_HELD = 2**28  # bytes


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


class Lengths:
    """Scales down updates of sites that are much longer than the others': `guard.max-update`.

    An update is the model that came minus the model that was sent. A reply is handed on as soon as
    no reply that is still to come can make its update too long, which is at the latest when all
    have come. That depends on the longest, so mostly it is when the second has come, or with f
    liars one more than f. What is held back is packed as it came. Beyond MOST_HELD bytes the
    shortest is handed on, whatever comes.

    Args:
        guard: `max_update` and `liars` count.
        sites: how many sites were asked; at most so many replies come.
    """

    def __init__(self, guard: GuardConfig, sites: int) -> None:
        self._bound = guard.max_update, guard.liars
        self._peers = Peers(*self._bound, sites)
        self._held: dict[str, tuple[Reply, Packed]] = {}

    def add(self, reply: Reply, sent: Packed, length: float) -> list[Reply]:
        """Take a reply -> those that are not too long, whatever comes, in order of arrival."""
        self._peers.add(reply.node.name, length)
        self._held[reply.node.name] = (reply, sent)
        free = [name for name in self._held if self._peers.factor(name) == 1]
        held = {n: len(r.model().buffer) for n, (r, _) in self._held.items() if n not in free}
        while sum(held.values()) > MOST_HELD and len(held) > 1:
            free.append(min(held, key=self._peers.lengths.__getitem__))
            del held[free[-1]]
        return [self._held.pop(name)[0] for name in free]

    def rest(self) -> Iterator[tuple[Reply, float, float]]:
        """Yield what is held when no more comes, scaled down where it is too long.

        With each reply comes how long its update was, in units of what it is compared with, and
        what it was multiplied by: 1 if it is as it came.
        """
        long = too_long(self._peers.lengths, *self._bound)
        while self._held:
            name = next(iter(self._held))
            reply, sent = self._held.pop(name)
            times, factor = long.get(name, (0.0, 1.0))
            if factor < 1:  # only a part of the way from the model that was sent
                model = scaled(reply.model().unpack(), sent.before.unpack(), factor)
                reply = replace(reply, arrays={**reply.arrays, MODEL: pack(model, Kind.MODEL)})
            yield reply, times, factor
            del reply  # free it before the next one is made
