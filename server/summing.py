"""Choose where a run's gradients are summed: in this process for a simulation, else on a port."""

import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from flwr.serverapp import Grid

from fedda.config import ExchangeConfig
from fedda.exchange import LocalHost
from fedda.ops.spawn import EXCHANGE_AT, LOOPBACK

if TYPE_CHECKING:
    from fedda.exchange import Host

Notice = Callable[[str, str, str], None]


def host(grid: Grid, config: ExchangeConfig, notice: Notice) -> "Host | LocalHost":
    """Return the host that opens sessions of the exchange; its port is bound with the first one.

    Args:
        grid: Flower's, or that of a simulation in this process.
        config: the run's settings; address and port that they leave open are those that `fedda
            superlink` was started with.
        notice: called with each event of the exchange: what happened, the site, and a text.
    """
    if getattr(grid, "in_process", False):
        return LocalHost(notice)
    from fedda.exchange import Host

    bind, _, port = os.environ.get(EXCHANGE_AT, f"{LOOPBACK}:0").rpartition(":")
    bind = bind.strip("[]")
    # Sites dial no host that only a server named; they know the SuperLink's, which is the default.
    return Host(config.bind or bind, config.port or int(port), notice, announce=config.host)
