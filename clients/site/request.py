"""A training or evaluation request to a site, read from the tables and arrays of a message."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from fedda.config import LazyConfig
from fedda.config.sections import validate
from fedda.errors import WireError
from fedda.exchange import Group, Invitation
from fedda.exchange.groups import KEYS
from fedda.methods import Stage
from fedda.settings import Task
from fedda.wire import Part
from fedda.wire.packing import Manifest, Packed

Numbers = dict[str, Any]
HEADING = ("round", "phase", "hop", "part", "final")  # of a request; the last only in such a round


@dataclass(frozen=True)
class Exchange:
    """Where gradients are summed in this round, and how."""

    invitation: Invitation
    lazy: LazyConfig

    @property
    def groups(self) -> list[Group]:
        """The groups in which gradients are summed; where members agree on keys is none of them."""
        return [group for group in self.invitation.groups if group.name != KEYS]

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> "Exchange":
        """Read the exchange's table of a request.

        Raises:
            WireError: the invitation cannot be read, or p is left open.
            ConfigError: a setting is invalid.
        """
        keys = set(LazyConfig().flat())
        lazy = {k: v for k, v in table.items() if k in keys}
        rest = {k: v for k, v in table.items() if k not in keys}
        settings = validate(LazyConfig, lazy, "exchange")
        if settings.p < 1:  # the server must have chosen p
            raise WireError("The request leaves exchange.p open; it needs 1 step per sum or more.")
        return cls(Invitation.parse(rest), settings)


@dataclass(frozen=True)
class Request:
    """One training or evaluation request, as a method's client sees it.

    Attributes:
        task: the training that it belongs to.
        round: counted from 1.
        stage: the phase of that round, with its first round and its last.
        hop: what is asked for; `test` in an evaluation request.
        part: the part that the site plays in it.
        final: whether this is the last round, though the task plans others after it.
        arrays: the received arrays, by name.
        numbers: the received numbers, by name.
        exchange: where and how the site sums gradients; None if it does not.
    """

    task: Task
    round: int
    stage: Stage
    hop: str
    part: str
    arrays: Mapping[str, Packed]
    numbers: Mapping[str, Any]
    exchange: Exchange | None = None
    final: bool = False

    @classmethod
    def make(
        cls,
        task: Mapping[str, Any],
        step: Mapping[str, Any],
        arrays: Mapping[str, Packed],
        exchange: Mapping[str, Any] | None = None,
    ) -> "Request":
        """Make a request from the tables and arrays of a message.

        Raises:
            WireError: round, phase, hop, part or final is invalid, or they do not fit together.
            ConfigError: a setting of the task is invalid.
        """
        training, heading = Task.parse(task), {name: step.get(name) for name in HEADING}
        server_round, phase, hop, part, final = heading.values()
        if type(server_round) is not int or not 1 <= server_round <= training.rounds:
            raise WireError(f"The request is for round {server_round} of {training.rounds}.")
        if final is not None and final is not True:
            raise WireError("A request says that its round is final by true, or says nothing.")
        stage = training.stage(server_round)
        if final and stage != training.stages[-1]:
            raise WireError(f"Round {server_round} is final, but not of the training's last phase.")
        if phase != stage.phase.name:
            raise WireError(
                f"The request is for phase '{str(phase)[:40]}', but round {server_round} belongs "
                f"to '{stage.phase.name}'."
            )
        numbers = {name: value for name, value in step.items() if name not in HEADING}
        read = None if exchange is None else Exchange.read(exchange)
        what = training, server_round, stage, str(hop), str(part)
        request = cls(*what, arrays, numbers, read, final is True)
        assert request.contract  # raises WireError if there is none
        return request

    @property
    def is_test(self) -> bool:
        """Whether the target is to test the model, and nobody trains it."""
        return self.hop == "test"

    @property
    def is_last(self) -> bool:
        """Whether this is the last round; its test also has the last step."""
        return self.final or self.round == self.task.rounds

    @cached_property
    def contract(self) -> Part:
        """The contract of this request: what may come with it, and what may go back.

        Raises:
            WireError: the phase has no such hop, or no such part in it.
        """
        phase = self.stage.phase
        part = phase.part(self.hop, self.part)
        if self.hop == "test" and self.part == "target":
            part = phase.test
        if part is None:
            method = self.task.method
            raise WireError(
                f"{method} asks no {self.part[:40]} for '{self.hop[:40]}' in its phase "
                f"'{phase.name}'; server and site need the same version of fedda."
            )
        return part

    def layouts(self, model: Manifest) -> Mapping[str, Manifest]:
        """Return the layouts of the arrays that are sent besides a model of this layout."""
        return self.stage.phase.layouts_for(self.is_test)(self.task.options, model)

    @property
    def comes_first(self) -> bool:
        """Whether this is the first hop of the round that asks this part for more than a key."""
        phase = self.stage.phase
        asked = ((hop, phase.part(hop, self.part)) for hop in phase.hops)
        return self.hop == next((hop for hop, part in asked if part and not part.signs), "")

    @property
    def draw(self) -> tuple[int, ...]:
        """What tells this round's random draws from others: a try again has draws of its own."""
        attempt = self.numbers.get("attempt", 1)
        return (self.round,) if attempt == 1 else (self.round, attempt)

    @property
    def steps(self) -> int:
        """Steps of this round, if the server sets them so that all sites take equally many.

        Raises:
            WireError: the request has no such number.
        """
        steps = self.numbers.get("steps")
        if type(steps) is not int or steps < 1:
            raise WireError("The request has no whole number of steps; it needs 1 or more.")
        return steps
