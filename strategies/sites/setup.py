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
    """What a strategy remembers from round to round; a checkpoint holds it."""

    numbers: dict[str, Any] = field(default_factory=dict)  # values that JSON can hold, by name
    # packed arrays by name; their kinds may differ
    arrays: dict[str, Packed] = field(default_factory=dict)

    def copy(self) -> "Memory":
        """Copy it, for a round that may have to be repeated."""
        return Memory(dict(self.numbers), dict(self.arrays))


@dataclass(frozen=True)
class Earlier:
    """A finished training of the same chain."""

    model: Packed  # the model of its last round, in full precision
    memory: Memory  # what its strategy remembered at the end


@dataclass(frozen=True)
class Setup:
    """What the server gives a strategy for one training."""

    task: Task  # the training's settings that the sites receive
    model: Manifest  # the layout of the run's model
    wait: WaitConfig = field(default_factory=WaitConfig)  # deadlines and the quorum
    guard: GuardConfig = field(default_factory=GuardConfig)  # bounds on replies
    # how gradients are summed
    summing: ExchangeConfig = field(default_factory=lambda: ExchangeConfig(p=1))
    # how many sources a round has, drawn each round from the seed; 0: all
    sources_per_round: int = 0
    # sends requests and fetches replies; by default a new `Mail` on Flower's grid
    mail: Mail | None = None
    # called for every site that is absent, fails, is refused or sends no reply
    notice: Notice = lambda what, site, text: None
    # returns the ids of nodes that are online; by default those that Flower lists
    online: Callable[[Grid], set[int]] = lambda grid: set(grid.get_node_ids())
    # opens the sessions in which sites sum gradients, for methods that sum any
    exchange: "Host | LocalHost | None" = None
    # called with every such session when it has ended
    account: Callable[[Session], None] = lambda session: None
    # in a chain, the trainings before this one, by target and in order
    earlier: Mapping[str, Earlier] = field(default_factory=dict)
    # called with the name of an event and its facts, to write it to the run's journal
    report: Callable[[str, Mapping[str, Any]], None] = lambda what, facts: None
