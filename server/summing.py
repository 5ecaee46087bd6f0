"""Choose where a run's gradients are summed: in this process for a simulation, else over lanes."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.serverapp import Grid

from fedda.exchange import LocalHost
from fedda.ops.spawn import LANES

if TYPE_CHECKING:
    from fedda.exchange import Host

Notice = Callable[[str, str, str], None]


def host(grid: Grid, notice: Notice) -> "Host | LocalHost | None":
    """The host that opens sessions of the exchange; None: sites cannot come here.

    Args:
        grid: a `LaneGrid`, Flower's, or that of a simulation in this process.
        notice: called with each event of the exchange: what happened, the site, and a text.
    """
    if getattr(grid, "in_process", False):
        return LocalHost(notice)
    lanes, folder = getattr(grid, "host", None), os.environ.get(LANES)
    if lanes is None and folder is None:
        return None
    from fedda.exchange import Host

    return Host(lanes or Path(str(folder)), notice)
