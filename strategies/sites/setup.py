"""What a strategy is given for one training, and what it remembers of it."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flwr.serverapp import Grid

from fedda.config import ExchangeConfig, GuardConfig, WaitConfig
from fedda.exchange import Session
from fedda.settings import Task
from fedda.wire import Manifest, Packed

from .mail import Mail

if TYPE_CHECKING:
    from fedda.exchange import Host, LocalHost

Notice = Callable[[str, str, str], None]  # what happened, to which site, in words


@dataclass
class Memory:
    """What a strategy remembers from round to round; a checkpoint holds it.

    Attributes:
        numbers: whatever JSON can hold.
        arrays: packed arrays by name, each of a kind of its own.
    """

    numbers: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, Packed] = field(default_factory=dict)

    def copy(self) -> "Memory":
        """As it is now, for a round that may have to be repeated."""
        return Memory(dict(self.numbers), dict(self.arrays))


@dataclass(frozen=True)
class Setup:
    """What the server gives a strategy for one training.

    Attributes:
        task: what the sites are told of it.
        model: the layout of the run's model.
        wait: deadlines and the quorum.
        guard: bounds on replies.
        summing: how gradients are summed.
        sources_per_round: so many sources, drawn anew each round from the seed; 0: all.
        mail: how messages travel; by default Flower's grid, polled quickly.
        notice: told of every site that failed or was refused.
        online: the ids of the nodes worth asking; by default those that Flower calls online.
        exchange: where sessions for gradients are opened, for the methods that sum any.
        account: told of every such session when it has ended.
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
