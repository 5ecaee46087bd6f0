"""FedDaDiL's server: FedAvg for the encoder, then atoms out, atoms back, and their mean.

Fernandes Montesuma et al., https://arxiv.org/abs/2309.07670, algorithm 1 and ServerAggregate.
"""

from collections.abc import Iterable
from functools import cached_property
from typing import ClassVar

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid

from fedda import wire
from fedda.algorithms import feddadil
from fedda.errors import QuorumError, WireError
from fedda.train import generator, seed_for
from fedda.wire import Arrays, Contract, Kind, Packed, Role

from .base import Reply
from .fedavg import FedAvg
from .roster import Node


class FedDaDiL(FedAvg):
    """Per round of stage 2: atoms to each of the N sites, atoms back from each.

    The encoder goes along once for every site, and again to one that was restarted.
    """

    roles: ClassVar[tuple[Role, ...]] = ("source", "target")

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Lines 4 and 5 of Alg. 1; before that FedAvg's rounds."""
        self.dictionary = server_round > self.task.options.encoder_rounds(self.task.rounds)
        if not self.dictionary:
            self.contract = feddadil.ENCODER
            return super().configure_train(server_round, arrays, config, grid)
        self._begin(server_round, arrays, grid)
        self.contract = feddadil.CONTRACT
        self.chosen = self._chosen()
        part = {name: a[:, self.chosen] for name, a in self._whole().items()}
        self.sent = self._packed_atoms(part)
        self.sites = [*self._present(grid), self.roster.target]
        return [self.request(node, self._arrays(node, self.sent)) for node in self.sites]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Eq. 12: the sites' versions averaged, index by index."""
        if not self.dictionary:
            return super().aggregate_train(server_round, replies)
        found = {reply.node.name: reply for reply in self.accept(replies, needs=feddadil.SENT)}
        found |= self._again([node for node in self.sites if node.name not in found])
        self.has.update(reply.node.id for reply in found.values())
        target = self.roster.target
        if target.name not in found:
            raise QuorumError(f"{target.name} (target) gave no usable reply in this round.")
        self.enough(len(found) - 1)
        names = sorted(found)
        by_examples = self.task.options.mean == "examples"
        counts = {name: self.roster.counts[name] if by_examples else 1 for name in names}
        self.weights = {name: count / sum(counts.values()) for name, count in counts.items()}
        versions = [found[name].arrays["atoms"].unpack() for name in names]
        mean = feddadil.mean_atoms(versions, list(self.weights.values()))
        whole = {name: a.copy() for name, a in self._whole().items()}
        for name, part in mean.items():
            whole[name][:, self.chosen] = part
        self.kept["atoms"] = wire.pack(whole, Kind.ATOMS)
        losses = {name: float(found[name].numbers["loss"]) for name in names}
        errors = {f"reconstruction/{n}": float(found[n].numbers["reconstruction"]) for n in names}
        loss = {"loss": float(np.mean(list(losses.values())))}  # eq. 10
        return self.packed(self.global_model.unpack()), MetricRecord({**loss, **errors})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The atoms, to the target, which fits its heads on them and tests those."""
        if not self.dictionary:
            return super().configure_evaluate(server_round, arrays, config, grid)
        self._begin(server_round, arrays, grid)
        target = self.roster.target
        if target.id not in self.there(grid):
            self.notice("absent", target.name, "not connected; this round goes untested")
            return []
        atoms = self._packed_atoms(self._whole())
        return [self.request(target, self._arrays(target, atoms), kind="evaluate")]

    @property
    def anew(self) -> bool:
        """The first round that tests heads fitted on atoms, whose infomax is another's."""
        return self.round == self.task.options.encoder_rounds(self.task.rounds) + 1

    @cached_property
    def has(self) -> set[int]:
        """The nodes that have the encoder; a server that was restarted knows of none."""
        return set()

    def _again(self, nodes: list[Node]) -> dict[str, Reply]:
        """Ask sites that gave nothing without the encoder once more, with it: they may lack it."""
        lacking = [node for node in nodes if node.id in self.has]
        self.has.difference_update(node.id for node in lacking)
        assert self.mail is not None
        there = set(self.mail.grid.get_node_ids())  # one that has left would cost the deadline
        lacking = [node for node in lacking if node.id in there]
        if not lacking:
            return {}
        requests = [self.request(node, self._arrays(node, self.sent)) for node in lacking]
        replies = self.mail.deliver(requests, self.wait.train)
        return {r.node.name: r for r in self.accept(replies, needs=feddadil.SENT)}

    def _arrays(self, node: Node, atoms: Packed) -> dict[str, Packed]:
        return {"atoms": atoms} if node.id in self.has else {"model": self.model, "atoms": atoms}

    def _whole(self) -> Arrays:
        """All atoms; in the first dictionary round line 1 of Alg. 1."""
        if "atoms" not in self.kept:
            seed = seed_for(self.task.seed, "atoms")
            z, y = feddadil.initial_atoms(self.global_model.unpack(), self.task.options, seed)
            self.kept["atoms"] = wire.pack({"z": z, "y": y}, Kind.ATOMS)
        return self.kept["atoms"].unpack()

    def _chosen(self) -> np.ndarray:
        """Which points of the atoms travel in this round."""
        o = self.task.options
        if o.travelling == o.samples:
            return np.arange(o.samples)
        draws = generator(self.task.seed, "points", self.round)
        return torch.randperm(o.samples, generator=draws)[: o.travelling].sort().values.numpy()

    def _packed_atoms(self, atoms: Arrays) -> Packed:
        packed = wire.pack(atoms, Kind.ATOMS, self.task.wire.dtype)
        packed.check_finite("the server")
        return packed

    def _checked(self, node: Node, message: Message, needs: set[str], contract: Contract) -> Reply:
        reply = super()._checked(node, message, needs, contract)
        if "atoms" in reply.arrays:
            self._check_atoms(node, reply.arrays["atoms"].unpack())
        return reply

    def _check_atoms(self, node: Node, atoms: Arrays) -> None:
        feddadil.check_labels(atoms["y"], node.name)
        sent = self.sent.unpack()["z"]
        change = float(np.linalg.norm(atoms["z"] - sent) / max(np.linalg.norm(sent), 1e-12))
        if self.guard.max_change and change > self.guard.max_change:
            raise WireError(
                f"The atoms from {node.name} are {change:.1f} norms away from those it was sent; "
                f"guard.max-change allows {self.guard.max_change:g}."
            )


STRATEGY = FedDaDiL
