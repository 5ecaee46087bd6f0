"""What the server gives a strategy for one training, and what the strategy remembers."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flwr.serverapp import Grid

from fedda.config import ExchangeConfig, GuardConfig, WaitConfig
from fedda.exchange import Session
from fedda.settings import Task
from fedda.wire.packing import Manifest, Packed

from .mail import Mail

if TYPE_CHECKING:
    from fedda.exchange import Host, LocalHost

Notice = Callable[[str, str, str], None]  # kind of event, name of the site, sentence


@dataclass
class Memory:
    """What a strategy remembers from round to round; a checkpoint holds it.

    Attributes:
        numbers: values that JSON can hold, by name.
        arrays: packed arrays by name; their kinds may differ.
    """

    numbers: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, Packed] = field(default_factory=dict)

    def copy(self) -> "Memory":
        """Copy it, for a round that may have to be repeated."""
        return Memory(dict(self.numbers), dict(self.arrays))


@dataclass(frozen=True)
class Earlier:
    """A finished training of the same chain.

    Attributes:
        model: the model of its last round, in full precision.
        memory: what its strategy remembered at the end.
    """

    model: Packed
    memory: Memory


@dataclass(frozen=True)
class Setup:
    """What the server gives a strategy for one training.

    Attributes:
        task: the training's settings that the sites receive.
        model: the layout of the run's model.
        wait: deadlines and the quorum.
        guard: bounds on replies.
        summing: how gradients are summed.
        sources_per_round: how many sources a round has, drawn each round from the seed; 0: all.
        mail: sends requests and fetches replies; by default a new `Mail` on Flower's grid.
        notice: called for every site that is absent, fails, is refused or sends no reply.
        online: returns the ids of nodes that are online; by default those that Flower lists.
        exchange: opens the sessions in which sites sum gradients, for methods that sum any.
        account: called with every such session when it has ended.
        earlier: in a chain, the trainings before this one, by target and in order.
        report: called with the name of an event and its facts, to write it to the run's journal.
    """

    task: Task
    model: Manifest
    wait: WaitConfig = field(default_factory=WaitConfig)
    guard: GuardConfig = field(default_factory=GuardConfig)
    summing: ExchangeConfig = field(default_factory=lambda: ExchangeConfig(p=1))
    sources_per_round: int = 0
    mail: Mail | None = None
    notice: Notice = lambda what, site, text: None
    online: Callable[[Grid], set[int]] = lambda grid: set(grid.get_node_ids())
    exchange: "Host | LocalHost | None" = None
    account: Callable[[Session], None] = lambda session: None
    earlier: Mapping[str, Earlier] = field(default_factory=dict)
    report: Callable[[str, Mapping[str, Any]], None] = lambda what, facts: None
