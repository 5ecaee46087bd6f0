"""Open a session of the exchange, in which sites sum gradients in mid-round."""

from collections.abc import Iterable, Mapping

from fedda.errors import ConfigError
from fedda.exchange import Group, Outliers, Session
from fedda.exchange.masked import agreement
from fedda.maths.bounds import LEAST
from fedda.wire.packing import Manifest

from .post import Setup
from .roster import Node


def convene(
    setup: Setup,
    layouts: Mapping[str, Manifest],
    groups: Mapping[str, Iterable[Node]],
    syncs: int,
    apart: Node | None,
) -> Session:
    """Open a session; of groups, syncs and errors see `FedDA.convene`.

    Args:
        setup: the training's setup, with the host of the exchange and the waiting times.
        layouts: the layouts of the gradients, by name.
        groups: the sites of each group, by the group's name.
        syncs: number of sums per group.
        apart: the site whose gradients' lengths are not compared with the others'; None: nobody's
            are. They are not either of fewer than three sites, or where they are masked.
    """
    lazy = setup.summing
    if setup.exchange is None:
        raise ConfigError(
            f"{setup.task.method} sums gradients between sites in mid-round, which needs the "
            "server that `fedda superlink` starts."
        )
    if syncs < 1:
        batch = setup.task.train.batch_size
        lower = " or exchange.p" if (lazy.p - 1) * batch >= lazy.min_examples else ""
        raise ConfigError(
            f"exchange.p is {lazy.p}, more than the steps of a round; lower "
            f"train.rounds-per-epoch{lower}."
        )
    sizes = {name: sum(e.size for e in layouts[name.split("/")[0]].entries) for name in groups}
    told = [
        Group(name, sizes[name], syncs, tuple(node.name for node in nodes), lazy.masked)
        for name, nodes in groups.items()
    ]
    every = dict.fromkeys(name for group in told for name in group.members)
    alike = [name for name in every if apart is not None and name != apart.name]
    if lazy.masked:
        told.append(agreement(told))
    guard = setup.guard
    compared = guard.max_update > 0 and len(alike) >= LEAST and not lazy.masked
    return setup.exchange.open(
        told,
        join=lazy.join,
        wait=lazy.wait,
        rejoin=lazy.rejoin,
        outliers=Outliers(guard, alike) if compared else None,
    )


def report(setup: Setup, session: Session) -> None:
    """Name the sites whose gradients did not count as they were, when a session has ended."""
    for site, found in session.outliers().items():
        sent = sum(group.syncs for group in session.invitations[site].groups)
        if found.numberless:
            text = f"{found.numberless} of its {sent} gradients were no numbers; "
            setup.notice("refused", site, f"{text}left out of their sums")
        if found.clipped:
            text = (
                f"{found.clipped} of its {sent} gradients were up to {found.longest:.3g} times as "
            )
            text += "long as the longest of the others'; scaled down, as guard.max-update is "
            text += f"{setup.guard.max_update:g}"
            setup.notice("clipped", site, text)
