"""What all strategies share: they send requests, check replies and ask the target to test.

A method's strategy reads like a round in the paper:

    requests()         makes the messages that begin a round, one per site
    combine(replies)   makes the next model of the replies; `ask` sends further requests
    model_for(node)    returns the model that a source is sent to train
    sent_along()       returns the arrays that it is sent along with that
    tested()           returns what the target is sent to test

A strategy holds no torch module and touches no disk. `memory` holds what it must remember from
round to round, so that a run can be stopped and resumed. Strategies implement Flower's hooks, so
they also run under Flower's own `Strategy.start`.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from fedda import records
from fedda.errors import ConfigError, NotFiniteError, QuorumError
from fedda.train import generator
from fedda.wire.packing import Arrays, Kind, Manifest, Packed, pack

from .sites.correspondence import Correspondence, Numbers
from .sites.mail import Mail
from .sites.post import Setup
from .sites.replies import Reply
from .sites.roster import Node, Roster
from .sites.sessions import convene, report
from .upload_channel import CHANNELS


class FedDA(Correspondence):
    """Base of the methods' strategies.

    Attributes:
        weights: how much each site counted in the last mean, for reports.
        channel: how the sources' models come: as they are, under masks, or sealed.
    """

    def __init__(self, setup: Setup, roster: Roster) -> None:
        super().__init__(setup, roster)
        self.weights: dict[str, float] = {}
        self.channel = CHANNELS[self.task.hidden](self)
        self._buffer: object = None  # of the model at the start of the round

    # ---- what a method writes -------------------------------------------------------------

    def requests(self) -> list[Message]:
        """Make the requests of a round's first hop: here the model, to all sources of the round."""
        return self.channel.requests(self.present())

    def combine(self, replies: Iterable[Message]) -> tuple[Arrays, Numbers]:
        """Combine the replies to `requests` -> the next model, and the round's numbers."""
        raise NotImplementedError

    def tested(self) -> dict[str, Packed]:
        """Return what the target is sent to test: here the model."""
        return {"model": self.model}

    def findings(self) -> dict[str, Any]:
        """Return what results.json says of the training besides its rounds: here nothing."""
        return {}

    def needed(self) -> set[str]:
        """Name the sites without which this round cannot run; a paused run waits for them."""
        return {self.roster.target.name} if "target" in self.phase.parts else set()

    # ---- what a method uses ---------------------------------------------------------------

    def begin(self, server_round: int, arrays: ArrayRecord, grid: Grid) -> None:
        """Begin a round: set its number, its model and what sends its requests."""
        self.round = server_round
        self._mail = self._mail or Mail(grid)
        self._mail.again = self.post.held.again
        self._online = self.setup.online(grid)
        text = Manifest(Kind.MODEL, "float32", self.setup.model.entries).text
        model = records.from_arrays(arrays, {"model": text})["model"]
        if model.buffer is not self._buffer:  # a round begins with the model of the last test
            self._buffer, self.global_model = model.buffer, model
            self.model = self.as_sent(model)
            self.post.checks.begin(model)
        self.post.open.clear()

    def is_online(self, node: Node) -> bool:
        """Whether a site is online, so that it can answer a request."""
        return node.id in self._online

    def present(self) -> list[Node]:
        """Return the sources of this round, all of them online.

        A request to a site that is not online would make the round wait until its deadline.

        Raises:
            QuorumError: too few sources are online, or the phase needs the target and it is not.
        """
        target = self.roster.target
        if "target" in self.phase.parts and not self.is_online(target):
            raise QuorumError(f"{target.name} (target) is not connected.")
        if "source" not in self.phase.parts:
            return []
        connected = [n for n in self.roster.sources if self.is_online(n)]
        for node in self.roster.sources:
            if node not in connected:
                self.setup.notice("absent", node.name, "not connected; left out of this round")
        self.enough(len(connected))
        if not (most := self.setup.sources_per_round):
            return connected
        draws = generator(self.task.seed, "sample", self.round)
        drawn = torch.randperm(len(connected), generator=draws)[:most]
        return [connected[i] for i in sorted(drawn.tolist())]

    def test_request(self, numbers: Mapping[str, float] | None = None) -> Message:
        """Make the request that asks the target to test.

        Args:
            numbers: further numbers to send; those that the method's test does not take are not.
        """
        phase, node = self.phase, self.roster.target
        layouts = phase.layouts_for(True)(self.options, self.setup.model)
        heading = self.heading("test", "target")
        taken = phase.test.enters.numbers
        told = {n: v for n, v in (numbers or {}).items() if n.split("/")[0] + "/*" in taken}
        return self.post.write(
            node, heading, phase.test, layouts, self.tested(), told, keep=self._comes_again()
        )

    def _comes_again(self) -> bool:
        """Whether the target trains with the tested model in the next round.

        Only fedda's own mail sends a request again whose model the target has lost.
        """
        if self.setup.mail is None or self.is_last:
            return False
        hops = self.task.stage(self.round + 1).phase.hops.values()
        enters = [hop["target"].enters for hop in hops if "target" in hop]
        names = {name for rule in enters for name in (*rule.arrays, *rule.optional)}
        tested = {n if "/" not in n else n.partition("/")[0] + "/*" for n in self.tested()}
        return bool(tested & names)

    def convene(self, groups: Mapping[str, Iterable[Node]], syncs: int, alike: bool = True) -> None:
        """Open a session of the exchange, in which sites sum gradients.

        The requests of the hop that sums carry the invitations to it.

        Args:
            groups: the sites of each group, by the group's name. The name is that of the layout of
                the group's gradients; if several groups share a layout, `/SITE` follows it.
            syncs: number of sums per group.
            alike: whether the gradients of all sites but the target are about as long, so that
                `guard.max-update` bounds them.

        Raises:
            ConfigError: the round is too short for one sum, or there is no host for the exchange.
        """
        layouts = self.phase.layouts(self.options, self.setup.model)
        apart = self.roster.target if alike else None
        self.session = convene(self.setup, layouts, groups, syncs, apart)

    def failed(self) -> bool:
        """Whether the session of the exchange ended early, so that the round cannot succeed."""
        return self.session is not None and bool(self.session.ended)

    def refused(self, target: Reply) -> set[str]:
        """The sites whose models the target did not use; each is a notice to the operator."""
        found = {n.partition("/")[2] for n in target.numbers if n.startswith("refused/")}
        for name in sorted(found):
            text = "the target cannot use its model; the target's log says why"
            self.setup.notice("refused", name, text)
        return found

    def adjourn(self) -> None:
        """Close the session of the exchange, if one is open, and hand it to `setup.account`."""
        session, self.session = self.session, None
        if session is not None:
            session.close()
            report(self.setup, session)
            self.setup.account(session)

    def steps_per_round(self, nodes: Iterable[Node]) -> int:
        """Return the steps of every site in a round: the largest site's share of an epoch.

        Sites that take no part in the round bound nobody's number of examples.
        """
        counts = self.roster.counted(list(nodes), self.setup.guard.max_examples)
        return self.task.train.steps_of(max(counts.values()))

    def enough(self, count: int) -> None:
        """Check the quorum of sources.

        Raises:
            QuorumError: the count is below `wait.min-sources`, or below what the channel needs.
        """
        self.channel.enough(count)

    def packed(self, arrays: Arrays) -> ArrayRecord:
        """Convert a model to Flower's record; at the server it is always in full precision."""
        return records.to_arrays({"model": pack(arrays, Kind.MODEL)})

    # ---- Flower's hooks -------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Begin a round."""
        self.begin(server_round, arrays, grid)
        return self.requests()

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Finish the round, and return the next model and the round's numbers."""
        model, numbers = self.combined(self.combine(replies))
        return self.packed(model), numbers

    def combined(self, returned: Any) -> tuple[Arrays, MetricRecord]:
        """What `combine` returned, as the next model, laid out as the last one, and numbers.

        Raises:
            ConfigError: it is something else. Other shapes would be read as other weights.
            NotFiniteError: a value of it is not finite.
        """
        by = f"combine of {type(self).__module__}.{type(self).__qualname__} returned"
        try:
            model, told = returned
            found, numbers = {n: np.asarray(a) for n, a in model.items()}, MetricRecord(dict(told))
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"{by} a {type(returned).__name__} that cannot be used ({error}); it must return "
                "the next model, a dict of arrays by name, and a dict of numbers, as FedAvg's does."
            ) from error
        entries = self.global_model.manifest.entries
        shapes, made = ({e.name: e.shape for e in entries}, {n: a.shape for n, a in found.items()})
        for name in {**shapes, **made}:
            if shapes.get(name) != made.get(name):
                shape, wanted = (each.get(name, "missing") for each in (made, shapes))
                raise ConfigError(
                    f"{by} another model than the run's: the shape of '{name}' is {shape}, and in "
                    f"the run's model {wanted}."
                )
        with np.errstate(over="ignore", invalid="ignore"):  # which is refused below
            next_one = {e.name: found[e.name].astype(e.dtype, copy=False) for e in entries}
        whole = [(n, found[n]) for n, a in next_one.items() if a.dtype.kind != "f"]
        for name, value in (*whole, *next_one.items(), *numbers.items()):
            if not np.isfinite(value).all():
                raise NotFiniteError(
                    f"{by} '{name}' with values that are not finite, though all sites' replies are "
                    "finite: look there for a division by 0 or an overflow."
                )
        return next_one, numbers

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Ask the target to test, on its labelled files if it has any.

        Args:
            server_round: the round, counted from 1.
            arrays: the model.
            config: further numbers to send, of which a method's test takes its own.
            grid: the way to the sites.
        """
        self.begin(server_round, arrays, grid)
        target = self.roster.target
        if not self.is_online(target):
            self.setup.notice("absent", target.name, "not connected; this round is not tested")
            return []
        return [self.test_request(config)]  # type: ignore[arg-type]

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """Return the target's numbers unchanged."""
        for reply in self.accept(replies):
            return MetricRecord(dict(reply.numbers))
        return None

    def summary(self) -> None:
        """Log nothing: the server reports the run itself."""
