"""FedDaDiL's server: FedAvg for the encoder, then atoms out, atoms back, and their mean.

Fernandes Montesuma et al., https://arxiv.org/abs/2407.11647, algorithm 1 and ServerAggregate.
"""

from collections.abc import Iterable
from functools import cached_property

import numpy as np
import torch
from flwr.app import Message

from fedda.algorithms import feddadil
from fedda.errors import QuorumError, WireError
from fedda.train import generator, seed_for
from fedda.wire import packing
from fedda.wire.packing import Arrays, Kind, Packed

from .base import Numbers
from .fedavg import FedAvg
from .sites.replies import Reply
from .sites.roster import Node


class FedDaDiL(FedAvg):
    """Per round of stage 2: atoms to each of the N sites, atoms back from each.

    Every site also receives the encoder once, and again if it was restarted.
    """

    def requests(self) -> list[Message]:
        """Lines 4 and 5 of Alg. 1; in the encoder's phase as FedAvg."""
        if self.phase.name == "encoder":
            return super().requests()
        self.chosen = self.choose()
        part = {name: a[:, self.chosen] for name, a in self.atoms().items()}
        self.sent = self.pack_atoms(part)
        self.sites = [*self.present(), self.roster.target]
        return [self.request(node, self.arrays_for(node, self.sent)) for node in self.sites]

    def combine(self, replies: Iterable[Message]) -> tuple[Arrays, Numbers]:
        """Eq. 12: make the next atoms of the sites' versions, index by index."""
        if self.phase.name == "encoder":
            return super().combine(replies)
        by_site = {reply.node.name: reply for reply in self.accept(replies, needs=feddadil.SENT)}
        by_site |= self.ask_again([node for node in self.sites if node.name not in by_site])
        self.has_encoder.update(reply.node.id for reply in by_site.values())
        target = self.roster.target
        if target.name not in by_site:
            raise QuorumError(f"{target.name} (target) gave no usable reply in this round.")
        self.enough(len(by_site) - 1)
        names = sorted(by_site)
        versions = [by_site[name].arrays["atoms"].unpack() for name in names]
        whole = {name: a.copy() for name, a in self.atoms().items()}
        for name, part in self.merge(names, versions).items():
            whole[name][:, self.chosen] = part
        self.memory.arrays["atoms"] = packing.pack(whole, Kind.ATOMS)
        losses = [float(by_site[name].numbers["loss"]) for name in names]
        errors = {f"reconstruction/{n}": float(by_site[n].numbers["reconstruction"]) for n in names}
        return self.global_model.unpack(), {"loss": float(np.mean(losses)), **errors}  # eq. 10

    def merge(self, names: list[str], versions: list[Arrays]) -> Arrays:
        """Eq. 12: the mean of the sites' versions; with `mean=random` a random one of them."""
        if self.options.mean == "random":
            draws = generator(self.task.seed, "site", self.round)
            return feddadil.drawn_atoms(versions, draws)
        by_examples = self.options.mean == "examples"
        counts = {name: self.roster.counts[name] if by_examples else 1 for name in names}
        self.weights = {name: count / sum(counts.values()) for name, count in counts.items()}
        return feddadil.mean_atoms(versions, list(self.weights.values()))

    def tested(self) -> dict[str, Packed]:
        """Return the atoms: the target fits its heads on them, and tests these heads."""
        if self.phase.name == "encoder":
            return super().tested()
        return self.arrays_for(self.roster.target, self.pack_atoms(self.atoms()))

    @cached_property
    def has_encoder(self) -> set[int]:
        """Ids of the nodes that have the encoder; empty after a restart of the server."""
        return set()

    def ask_again(self, nodes: list[Node]) -> dict[str, Reply]:
        """Ask sites that gave no usable reply again, now with the encoder if they got none."""
        lacking = [node for node in nodes if node.id in self.has_encoder]
        self.has_encoder.difference_update(node.id for node in lacking)
        connected = set(self.mail.grid.get_node_ids())  # waiting for others costs the deadline
        again = [node for node in lacking if node.id in connected]
        arrays = {"model": self.model, "atoms": self.sent}
        return {r.node.name: r for r in self.ask(again, "learn", arrays, needs=feddadil.SENT)}

    def arrays_for(self, node: Node, atoms: Packed) -> dict[str, Packed]:
        """Return atoms, with the encoder for a site that lacks it."""
        encoder = {} if node.id in self.has_encoder else {"model": self.model}
        return encoder | {"atoms": atoms}

    def atoms(self) -> Arrays:
        """Return all atoms; in the first dictionary round make them (line 1 of Alg. 1)."""
        if "atoms" not in self.memory.arrays:
            seed = seed_for(self.task.seed, "atoms")
            z, y = feddadil.initial_atoms(self.global_model.unpack(), self.options, seed)
            self.memory.arrays["atoms"] = packing.pack({"z": z, "y": y}, Kind.ATOMS)
        return self.memory.arrays["atoms"].unpack()

    def choose(self) -> np.ndarray:
        """Choose the points of the atoms that are sent in this round -> their indices."""
        o = self.options
        if o.travelling == o.samples:
            return np.arange(o.samples)
        draws = generator(self.task.seed, "points", self.round)
        return torch.randperm(o.samples, generator=draws)[: o.travelling].sort().values.numpy()

    def pack_atoms(self, atoms: Arrays) -> Packed:
        """Pack atoms in the precision in which they are sent."""
        packed = packing.pack(atoms, Kind.ATOMS, self.task.wire.dtype)
        packed.check_finite("the server")
        return packed

    def examine(self, reply: Reply) -> None:
        """Check that atoms have valid probabilities and are not far from those that were sent."""
        if "atoms" not in reply.arrays:
            return
        node, atoms = reply.node, reply.arrays["atoms"].unpack()
        feddadil.check_labels(atoms["y"], node.name)
        sent, most = self.sent.unpack()["z"], self.setup.guard.max_change
        with np.errstate(over="ignore"):  # an infinite change is beyond every bound
            change = float(np.linalg.norm(atoms["z"] - sent) / max(np.linalg.norm(sent), 1e-12))
        if most and change > most:
            raise WireError(
                f"The atoms from {node.name} are {change:.1f} norms away from those that were "
                f"sent; guard.max-change allows {most:g}."
            )


STRATEGY = FedDaDiL
