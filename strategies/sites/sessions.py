"""Open a session of the exchange, in which sites sum gradients in mid-round."""

from collections.abc import Collection, Mapping, Sequence

from fedda.errors import ConfigError
from fedda.exchange import Group, Outliers, Session
from fedda.exchange.masked import agreement
from fedda.maths.bounds import LEAST
from fedda.wire.packing import Manifest

from .post import Setup


def convene(
    setup: Setup,
    layouts: Mapping[str, Manifest],
    members: Mapping[str, Sequence[str]],
    syncs: int,
    alike: Collection[str] = (),
) -> Session:
    """Open a session.

    Args:
        setup: the training's setup, with the host of the exchange and the waiting times.
        layouts: the layouts of the gradients, by name.
        members: names of the sites in each group, by the group's name. The name is that of the
            layout of the group's gradients; if several groups share a layout, `/SITE` follows it.
        syncs: number of sums per group.
        alike: names of the sites whose gradients are compared by their lengths; fewer than
            three, and masked gradients, are not.

    Raises:
        ConfigError: the round is too short for one sum, or there is no host for the exchange.
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
    sizes = {name: sum(e.size for e in layouts[name.split("/")[0]].entries) for name in members}
    groups = [
        Group(name, sizes[name], syncs, tuple(sites), lazy.masked)
        for name, sites in members.items()
    ]
    if lazy.masked:
        groups.append(agreement(groups))
    guard = setup.guard
    compared = guard.max_update > 0 and len(alike) >= LEAST and not lazy.masked
    return setup.exchange.open(
        groups,
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
