"""What all strategies share: requests out, checked replies in, the target's test.

A method's strategy says what goes to whom in a round and how the replies become the next model.
It holds no torch module and touches no disk; what it must remember from round to round is in
`memory`, plain JSON, and `kept`, packed arrays, so that a run can be stopped and resumed.
Strategies implement Flower's hooks and so also run under Flower's own `Strategy.start`.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from fedda import records
from fedda.config import ExchangeConfig, GuardConfig, Task, WaitConfig, layouts, method_module
from fedda.errors import ConfigError, FeddaError, NotFiniteError, QuorumError, WireError, public
from fedda.exchange import Group, Session
from fedda.train import generator
from fedda.wire import EVALUATION, Arrays, Contract, Kind, Manifest, Packed, Role, pack, pieces

from .mail import Mail
from .roster import Node, Roster

if TYPE_CHECKING:
    from fedda.exchange import Host, LocalHost

Notice = Callable[[str, str, str], None]  # what happened, to which site, in words


@dataclass(frozen=True)
class Reply:
    """A reply that passed every check."""

    node: Node
    arrays: Mapping[str, Packed]
    numbers: Mapping[str, Any]


class FedDA(Strategy):
    """Base of the methods' strategies.

    `roles` are those that train in this method; a round cannot do without them.

    Args:
        task: what the sites are told of the run.
        roster: the sites, with the counts that weigh averages.
        model: the layout of the run's model.
        wait: deadlines and the quorum.
        guard: bounds on replies.
        mail: how messages travel; by default Flower's grid, polled quickly.
        notice: told of every site that failed or was refused.
        sources_per_round: so many sources, drawn anew each round from the seed; 0: all.
        there: the ids of the nodes worth asking; by default those that Flower calls online.
        exchange: where sessions for gradients are opened, for the methods that sum any.
        lazy: how gradients are summed.
    """

    roles: ClassVar[tuple[Role, ...]] = ("source",)

    def __init__(
        self,
        task: Task,
        roster: Roster,
        model: Manifest,
        *,
        wait: WaitConfig | None = None,
        guard: GuardConfig | None = None,
        mail: Mail | None = None,
        notice: Notice = lambda what, site, text: None,
        sources_per_round: int = 0,
        there: Callable[[Grid], set[int]] = lambda grid: set(grid.get_node_ids()),
        exchange: "Host | LocalHost | None" = None,
        lazy: ExchangeConfig | None = None,
    ) -> None:
        self.task = task
        self.roster = roster
        self.layout = model
        self.wait = wait or WaitConfig()
        self.guard = guard or GuardConfig()
        self.mail = mail
        self.notice = notice
        self.sources_per_round = sources_per_round
        self.there = there
        self.exchange = exchange
        self.lazy = lazy or ExchangeConfig(p=1)
        self.session: Session | None = None
        self.contract: Contract = method_module(task.method).CONTRACT
        self.layouts = layouts(task.method, task.options, model)
        self.evaluation: Contract = getattr(method_module(task.method), "EVALUATION", EVALUATION)
        self.memory: dict[str, Any] = {}
        self.kept: dict[str, Packed] = {}
        self.weights: dict[str, float] = {}
        self._asked: set[str] = set()

    # ---- Flower's hooks -------------------------------------------------------------------

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The model, to every source that is there."""
        self._begin(server_round, arrays, grid)
        return [self.request(n, self.source_arrays(n)) for n in self._present(grid)]

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The model, to the target, which tests it on the labelled files it may have."""
        self._begin(server_round, arrays, grid)
        target = self.roster.target
        if target.id not in self.there(grid):
            self.notice("absent", target.name, "not connected; this round goes untested")
            return []
        return [self.request(target, {"model": self.model}, kind="evaluate")]

    def source_arrays(self, node: Node) -> dict[str, Packed]:
        """What a source gets at the start of a round."""
        return {"model": self.model}

    def aggregate_evaluate(
        self, server_round: int, replies: Iterable[Message]
    ) -> MetricRecord | None:
        """The target's numbers as they are."""
        for reply in self.accept(replies, contract=self.evaluation):
            return MetricRecord(dict(reply.numbers))
        return None

    @property
    def anew(self) -> bool:
        """Whether this round's infomax is of another kind of model than the rounds' before it."""
        return False

    def summary(self) -> None:
        """Nothing: the server reports what it does."""

    def needed(self) -> set[str]:
        """Names of the sites that no round can do without; a paused run waits for them."""
        return {self.roster.target.name} if "target" in self.roles else set()

    # ---- what methods are written with ----------------------------------------------------

    def request(
        self,
        node: Node,
        arrays: Mapping[str, Packed],
        numbers: Mapping[str, float] | None = None,
        kind: str = "train",
    ) -> Message:
        """A message for one site, with a record of its own, valid until the deadline."""
        self._asked.add(node.name)
        step = {"round": self.round, **(numbers or {})}
        tables: dict[str, Mapping[str, Any]] = {"task": self.task.flat(), "step": step}
        if kind == "train" and self.session and node.name in self.session.invitations:
            invitation = self.session.invitations[node.name]
            tables["exchange"] = {**self.lazy.lazy.flat(), **invitation.flat()}
        content = records.write(arrays, **tables)
        ttl = self.wait.evaluate if kind == "evaluate" else self.wait.train
        return Message(content, node.id, kind, ttl=ttl, group_id=str(self.round))

    def ask(
        self,
        node: Node,
        arrays: Mapping[str, Packed],
        needs: Iterable[str] = (),
        **numbers: float,
    ) -> Reply:
        """Send one site a training request of its own in mid-round and wait for the reply.

        Raises:
            QuorumError: no acceptable reply came.
        """
        assert self.mail is not None
        replies = self.mail.deliver([self.request(node, arrays, numbers)], self.wait.train)
        for reply in self.accept(replies, needs):
            return reply
        raise QuorumError(f"{node.name} ({node.role}) gave no usable reply in this round.")

    def accept(
        self,
        replies: Iterable[Message],
        needs: Iterable[str] = (),
        contract: Contract | None = None,
    ) -> Iterator[Reply]:
        """Yield the replies that pass every check, as they arrive; report the others.

        Args:
            replies: from sites, or from whoever.
            needs: numbers that a reply is of no use without.
            contract: of the method, unless another is given.
        """
        for message in replies:
            node = self.roster.by_id(message.metadata.src_node_id)
            if node is None or node.name not in self._asked:
                self.notice("stale", node.name if node else "", "a reply nobody asked for; dropped")
                continue
            self._asked.remove(node.name)
            if message.has_error():
                self.notice("failed", node.name, public(message.error.code))
                if self.session:
                    self.session.give_up(node.name)
                continue
            try:
                reply = self._checked(node, message, set(needs), contract or self.contract)
            except FeddaError as error:
                self.notice("refused", node.name, str(error))
                continue
            del message
            yield reply
            del reply  # not held while the next one is fetched
        for name in sorted(self._asked):
            self.notice("silent", name, "no reply in time; left out of this round")
        self._asked.clear()

    def convene(self, groups: Mapping[str, Iterable[Node]], syncs: int) -> None:
        """Open a session of the exchange; the requests that follow carry the invitations.

        Args:
            groups: who sums which gradients; a group is named after one of the method's layouts,
                with `/SITE` behind it if there are several.
            syncs: sums per group.

        Raises:
            ConfigError: not one exchange fits into the round, or nobody hosts it.
        """
        if self.exchange is None:
            raise ConfigError(
                f"{self.task.method} sums gradients between sites in mid-round; run it with "
                "`fedda run`, whose server hosts that exchange."
            )
        if syncs < 1:
            raise ConfigError(
                f"exchange.p is {self.lazy.p}, more than the steps of a round; lower it, or "
                "train.rounds-per-epoch."
            )
        sizes = {n: sum(e.size for e in self.layouts[n.split("/")[0]].entries) for n in groups}
        self.session = self.exchange.open(
            [Group(n, sizes[n], syncs, tuple(m.name for m in who)) for n, who in groups.items()],
            join=self.lazy.join,
            wait=self.lazy.wait,
            rejoin=self.lazy.rejoin,
        )

    def skip_to_exchange(self) -> int:
        """Make believe that the rounds before the first exchange are over -> that round's number.

        For the rehearsal of a run, with a strategy that is used for nothing else.
        """
        return 1

    def adjourn(self) -> Session | None:
        """Close the session, if there is one, and hand it out."""
        session, self.session = self.session, None
        if session is not None:
            session.close()
        return session

    def steps_per_round(self, nodes: Iterable[Node]) -> int:
        """Steps of a round in which all take equally many: the largest site's share of an epoch."""
        train, most = self.task.train, max(self.roster.counts[n.name] for n in nodes)
        return max(1, math.ceil(most / train.batch_size / train.rounds_per_epoch))

    def enough(self, count: int) -> None:
        """Check the quorum of sources.

        Raises:
            QuorumError: fewer than `wait.min-sources` gave a usable reply.
        """
        if count < self.wait.min_sources:
            raise QuorumError(
                f"{count} sources are left in this round, but wait.min-sources is "
                f"{self.wait.min_sources}."
            )

    def as_sent(self, packed: Packed) -> Packed:
        """A model in the precision of the wire.

        Raises:
            NotFiniteError: a value is too large for it.
        """
        floats = self.task.wire.dtype
        if packed.manifest.floats == floats:
            return packed
        sent = pack(packed.unpack(), Kind.MODEL, floats)
        try:
            sent.check_finite("the server")
        except NotFiniteError as error:
            raise NotFiniteError(
                f"{error} wire.dtype is {floats}, whose largest value is {np.finfo(floats).max}; "
                "set it to float32."
            ) from None
        return sent

    def packed(self, arrays: Arrays) -> ArrayRecord:
        """The next model as Flower carries it; at the server always in full precision."""
        return records.to_arrays({"model": pack(arrays, Kind.MODEL)})

    # ---- checks -----------------------------------------------------------------------------

    def _begin(self, server_round: int, arrays: ArrayRecord, grid: Grid) -> None:
        self.round = server_round
        self.mail = self.mail or Mail(grid)
        text = Manifest(Kind.MODEL, "float32", self.layout.entries).text
        self.global_model = records.from_arrays(arrays, {"model": text})["model"]
        self.model = self.as_sent(self.global_model)
        self._norm = _norm(self.global_model.unpack(), None)
        self._asked.clear()

    def _present(self, grid: Grid) -> list[Node]:
        """The sources that are there now; waiting for others would only cost the deadline."""
        there = self.there(grid)
        target = self.roster.target
        if "target" in self.roles and target.id not in there:
            raise QuorumError(f"{target.name} (target) is not connected.")
        found = [n for n in self.roster.sources if n.id in there]
        for node in self.roster.sources:
            if node not in found:
                self.notice("absent", node.name, "not connected; left out of this round")
        self.enough(len(found))
        if not self.sources_per_round:
            return found
        draw = torch.randperm(len(found), generator=generator(self.task.seed, "sample", self.round))
        return [found[i] for i in sorted(draw[: self.sources_per_round].tolist())]

    def _checked(self, node: Node, message: Message, needs: set[str], contract: Contract) -> Reply:
        arrays, tables = records.read(message.content)
        if set(tables) != {"metrics"}:
            raise WireError(f"{node.name} sent tables {sorted(tables)}, the contract has metrics.")
        numbers = tables["metrics"]
        rule = contract.leaves[node.role]
        missing = {*(n for n in rule.arrays if "*" not in n), *needs} - {*arrays, *numbers}
        if missing:
            raise WireError(f"{node.name} sent no {', '.join(sorted(missing))}.")
        rule.check(
            arrays,
            numbers,
            model=self.layout,
            sites=len(self.roster.nodes),
            where=f"{node.name} ({node.role})",
            layouts=self.layouts,
        )
        names = {n.name for n in self.roster.nodes}
        for name, value in numbers.items():
            if "/" in name and name.split("/", 1)[1] not in names:
                raise WireError(f"{node.name} sent '{name[:80]}', which is about no site here.")
            if not math.isfinite(value):
                raise WireError(f"{name} from {node.name} is not finite.")
        for name, packed in arrays.items():
            packed.check_finite(node.name)
            if packed.manifest.kind is Kind.MODEL and name.split("/")[0] not in self.layouts:
                self._check_model(node, name, packed)
        return Reply(node, arrays, numbers)

    def _check_model(self, node: Node, name: str, packed: Packed) -> None:
        model, most = packed.unpack(), self.guard.max_change
        sent = self.global_model.unpack()
        for entry, values in model.items():
            if entry.endswith("running_var") and (values < 0).any():
                raise WireError(f"{entry} of '{name}' from {node.name} is a negative variance.")
            if "running_" in entry and self.guard.max_statistics:
                bound = self.guard.max_statistics * max(1.0, float(np.abs(sent[entry]).max()))
                if np.abs(values).max() > bound:
                    raise WireError(
                        f"{entry} of '{name}' from {node.name} exceeds {bound:g}, what "
                        "guard.max-statistics allows."
                    )
        if not most:
            return
        change = _norm(model, sent) / max(self._norm, 1e-12)
        if change > most:
            raise WireError(
                f"'{name}' from {node.name} is {change:.1f} norms away from the model it was sent; "
                f"guard.max-change allows {most:g}."
            )


def _norm(arrays: Arrays, minus: Arrays | None) -> float:
    """Euclidean norm of a model's weights, or of its difference from another's.

    BatchNorm's running statistics are left out: they follow the data, not the training.
    """
    total = 0.0
    for name, values in arrays.items():
        if values.dtype.kind == "f" and "running_" not in name:
            for part, other in pieces(values, values if minus is None else minus[name]):
                moved = part if minus is None else part - other
                total += float(np.vdot(moved, moved))
    return math.sqrt(total)
