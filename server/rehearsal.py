"""Rehearse a run's first exchange of gradients, so that errors in it show before the run begins.

The server makes the requests of the first round with an exchange, from an untrained model, and
sends them to no site. It opens the exchange in this process and closes it again.
"""

from typing import cast

from flwr.app import ConfigRecord
from flwr.serverapp import Grid

from fedda import models, plugins
from fedda.errors import ConfigError
from fedda.exchange import LocalHost, Session
from fedda.maths.average import least_for
from fedda.secure import hiding
from fedda.settings import RunConfig
from fedda.wire.packing import Kind, pack

from .strategy_modules import base, roster

NOBODY = cast(Grid, None)  # no grid is needed: every site counts as present


def rehearse(config: RunConfig, method: str, members: roster.Roster) -> int:
    """Return how many sites must work at the same time in a round of a method; 0 without exchange.

    Raises:
        ConfigError: the method cannot exchange gradients with these sites and settings, or there
            are too few sources for a robust mean.
    """
    about = plugins.method(method)
    if hiding.averages(about):
        check_enough(config, members)
    if not about.gradients or not about.sums(config.options[method]):
        return 0
    task = config.task(method, config.seeds[0], members.shape, members.classes, len(members.nodes))
    stages = [stage for stage in task.stages if stage.phase.gradients]
    if not stages:
        first = next(phase for phase in about.phases if phase.gradients)
        raise ConfigError(
            f"{method} sums no gradients in its first {config.rounds} rounds, and rounds is "
            f"{config.rounds}, so its phase '{first.name}' would never begin; raise rounds"
            f"{f', or lower {method}.pretrain' if hasattr(task.options, 'pretrain') else ''}."
        )
    extension = models.Extension.of(task.about, task.options)
    arrays = models.to_arrays(models.blank(task.model, task.dims, task.classes, extension))
    sessions: list[Session] = []
    setup = base.Setup(
        task,
        pack(arrays, Kind.MODEL).manifest,
        wait=config.wait,
        guard=config.guard,
        summing=config.summing,
        online=lambda grid: {node.id for node in members.nodes},
        exchange=LocalHost(),
        account=sessions.append,
    )
    strategy: base.FedDA = plugins.strategy(method)(setup, members)
    # Invites every source, though with sources-per-round only some take part in a round.
    sent = strategy.packed(arrays)
    list(strategy.configure_train(stages[0].first, sent, ConfigRecord(), NOBODY))
    strategy.adjourn()
    (session,) = sessions
    sites = set(session.invitations)
    least = config.exchange.min_examples
    if short := [n for n in members.nodes if n.name in sites and n.examples < least]:
        few = ", ".join(f"{node.name} has {node.examples}" for node in short)
        left = {node.role for node in members.nodes if node not in short}
        leave = "leave out such sites, " if len(left) > 1 else ""  # else no run is left
        raise ConfigError(
            f"A gradient leaves a site only over {least} examples (exchange.min-examples), but "
            f"{few} in all; {leave}give them more examples, or take a method that sums no "
            "gradients."
        )
    return min(len(sites), config.sources_per_round + 1) if config.sources_per_round else len(sites)


def check_enough(config: RunConfig, members: roster.Roster) -> None:
    """Check that a round has sources enough for `guard.mean`.

    Raises:
        ConfigError: it has fewer.
    """
    rule, liars, sources = config.guard.mean, config.guard.liars, len(members.sources)
    of_round = min(sources, config.sources_per_round or sources)
    least = least_for(rule, liars)
    if sources and of_round < least:
        share = f" and guard.liars {liars:g}" * (rule in ("trimmed", "krum"))
        other = "weighted or bounded" if of_round >= least_for("bounded", liars) else "weighted"
        raise ConfigError(
            f"guard.mean is {rule}{share}, which needs {least} sources in a round, but there are "
            f"{of_round}; set it to {other}, or let more sources take part."
        )
