"""What a run would founder on in its first exchange of gradients, found before it begins.

The requests of the round with that exchange are made, with a model that nobody has trained, and
sent to no one; the exchange is convened in this process and dissolved again.
"""

from typing import cast

from flwr.app import ConfigRecord
from flwr.serverapp import Grid

from fedda import models
from fedda.config import RunConfig, method_module
from fedda.errors import ConfigError
from fedda.exchange import LocalHost
from fedda.folders import load_half
from fedda.wire import Kind, pack

from .folders import base, roster

NOBODY = cast(Grid, None)  # there is nobody to ask, as everybody counts as there


def rehearse(config: RunConfig, method: str, who: roster.Roster) -> int:
    """How many sites must work at the same time in a round of a method; 0 if none need.

    Raises:
        ConfigError: the method can exchange no gradients with these sites and settings.
    """
    if not method_module(method).CONTRACT.gradients:
        return 0
    task = config.task(method, config.seeds[0], who.shape, who.classes, len(who.nodes))
    arrays = models.to_arrays(models.blank(task.model, task.dims, task.classes))
    strategy: base.FedDA = load_half("strategies", method).STRATEGY(
        task,
        who,
        pack(arrays, Kind.MODEL).manifest,
        wait=config.wait,
        guard=config.guard,
        there=lambda grid: {node.id for node in who.nodes},
        exchange=LocalHost(),
        lazy=config.summing,
    )
    first = strategy.skip_to_exchange()
    if first > config.rounds:
        raise ConfigError(
            f"{method} sums no gradients in its first {first - 1} rounds, and rounds is "
            f"{config.rounds}, so nothing would adapt; raise it"
            f"{f', or lower {method}.pretrain' if hasattr(task.options, 'pretrain') else ''}."
        )
    # Every source is invited, though with sources-per-round only a few are in any one round.
    list(strategy.configure_train(first, strategy.packed(arrays), ConfigRecord(), NOBODY))
    session = strategy.adjourn()
    assert session is not None
    sites = set(session.invitations)
    least = config.exchange.min_examples
    if few := [f"{n.name} has {n.examples}" for n in who.nodes if _is_short(n, sites, least)]:
        raise ConfigError(
            f"A gradient leaves a site only over {least} examples (exchange.min-examples), but "
            f"{', '.join(few)} in all; leave out such sites, or give them more examples."
        )
    return min(len(sites), config.sources_per_round + 1) if config.sources_per_round else len(sites)


def _is_short(node: roster.Node, sites: set[str], least: int) -> bool:
    return node.name in sites and node.examples < least
