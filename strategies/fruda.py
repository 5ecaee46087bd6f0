"""FRUDA's server: it asks all candidates at once, names the pair, and keeps every adapted model.

Gan et al., FRUDA, https://arxiv.org/abs/2112.13381, section 3.3.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from flwr.app import Message

from fedda.errors import QuorumError, WireError
from fedda.maths import ocs
from fedda.train import generator
from fedda.wire.packing import Arrays, Packed

from .base import Numbers
from .dils import DILS, full
from .sites.post import Setup
from .sites.replies import Reply
from .sites.roster import Node, Roster

HALVES = ("first", "second")


class FRUDA(DILS):
    """A model to each source and back; all models to the target; then DILS between two sites."""

    def __init__(self, setup: Setup, roster: Roster) -> None:
        super().__init__(setup, roster)
        self._ended: set[str] = set()  # sites because of which an exchange of the choice ended

    def requests(self) -> list[Message]:
        """Send each source its own model to pretrain; measure the candidates; then adapt."""
        if self.phase.name == "pretrain":
            return [
                self.request(node, {"model": self.as_sent(self.model_of(node))})
                for node in self.present()
            ]
        return self.selection() if self.phase.name == "select" else super().requests()

    def combine(self, replies: Iterable[Message]) -> tuple[Arrays, Numbers]:
        """Return a source's model, then the chosen collaborator's, at the end the target's."""
        if self.phase.name == "pretrain":
            return self.pretrained(replies)
        return self.selected(replies) if self.phase.name == "select" else self.adapted(replies)

    # ---- pretraining ------------------------------------------------------------------------

    def pretrained(self, replies: Iterable[Message]) -> tuple[Arrays, Numbers]:
        """Remember each source's model -> the first source's, which the target tests."""
        losses = {}
        for reply in self.accept(replies, {"loss"}):
            self.memory.arrays[f"model/{reply.node.name}"] = full(reply)
            losses[reply.node.name] = float(reply.numbers["loss"])
        self.enough(len(losses))
        first = self.roster.sources[0]
        self.weights = {first.name: 1.0}
        return self.model_of(first).unpack(), {"loss": sum(losses.values()) / len(losses)}

    def model_of(self, node: Node) -> Packed:
        """Return a site's own model, in full precision; before its first round the run's."""
        earlier, name = self.setup.earlier, f"model/{node.name}"
        if node.name in earlier:
            return earlier[node.name].model
        memories = [self.memory, *(training.memory for training in earlier.values())]
        return next((m.arrays[name] for m in memories if name in m.arrays), self.global_model)

    # ---- the choice -------------------------------------------------------------------------

    def candidates(self) -> list[Node]:
        """Return the sites that the target may adapt from, all of them online.

        Raises:
            QuorumError: the target is not online, or no candidate is.
        """
        target, earlier = self.roster.target, self.setup.earlier
        if not self.is_online(target):
            raise QuorumError(f"{target.name} (target) is not connected.")
        # A target whose training ended before it adapted has no error to go by.
        able = [
            node
            for node in self.roster.nodes
            if node.role == "source"
            or (node.name in earlier and "eps" in earlier[node.name].memory.numbers)
        ]
        online = [node for node in able if self.is_online(node)]
        for node in able:
            if node not in online:
                self.setup.notice("absent", node.name, "not connected; it is no candidate")
        # A round's tries would all end like the first. If all have ended one, they get another try.
        if steady := [node for node in online if node.name not in self._ended]:
            for node in online:
                if node not in steady:
                    text = "the exchange of an earlier try ended because of it; it is no candidate"
                    self.setup.notice("refused", node.name, text)
            online = steady
        selector = self.options.select
        if not any(n.role == "source" for n in online) and selector in ("source", "all"):
            raise QuorumError(f"fruda.select is {selector}, but no source is connected.")
        if not online:
            raise QuorumError("No candidate for a collaborator is connected.")
        return online

    def selection(self) -> list[Message]:
        """Invite all candidates to train a critic each, with the target."""
        self.asked, target = self.candidates(), self.roster.target
        pairs = {f"critic/{n.name}": [n, target] for n in self.asked}
        # Each is about a model of its own, and a long gradient spoils its own distance alone.
        self.convene(pairs, self.options.measure.steps, alike=False)
        models = {n.name: self.as_sent(self.model_of(n)) for n in self.asked}
        to_target = {f"model/{name}": model for name, model in models.items()}
        to_each = [self.request(n, {"model": models[n.name]}) for n in self.asked]
        return [*to_each, self.request(target, to_target)]

    def examine(self, reply: Reply) -> None:
        """Refuse numbers that are no errors, constants or means.

        Raises:
            WireError: a number is missing, or out of its range.
        """
        name, numbers = reply.node.name, reply.numbers
        selects = self.phase.name == "select"
        if selects and reply.node.role == "source" and not 0 <= numbers.get("error", -1) <= 1:
            raise WireError(f"{name} sent no error between 0 and 1.")
        if selects and name != self.roster.target.name and not set(HALVES) <= set(numbers):
            raise WireError(f"{name} sent no {' and '.join(HALVES)}.")
        if any(value < 0 for key, value in numbers.items() if key.startswith("theta/")):
            raise WireError(f"{name} sent a Lipschitz constant below 0.")

    def selected(self, replies: Iterable[Message]) -> tuple[Arrays, Numbers]:
        """Choose the collaborator by the candidates' replies and the target's -> its model.

        Raises:
            QuorumError: the target gave no usable reply, or no candidate did.
        """
        by_name = {reply.node.name: reply for reply in self.accept(replies)}
        target, options = self.roster.target, self.options
        mine = by_name.pop(target.name, None)
        if mine is None:
            self._ended |= set(self.session.blamed if self.session else ()) - {target.name}
            raise QuorumError(f"{target.name} (target) gave no usable reply.")
        among, refused = [], self.refused(mine)
        for node in self.asked:
            if (own := by_name.get(node.name)) is None or node.name in refused:
                continue
            if doubt := self.doubt(node, own, mine):
                self.setup.notice("refused", node.name, f"{doubt}; it is no candidate")
            else:
                among.append(self.candidate(node, own, mine))
        if options.select == "source":
            among = [c for c in among if c.labelled]
        if not among or (options.select == "all" and not any(c.labelled for c in among)):
            raise QuorumError("No candidate for a collaborator gave a usable reply.")
        draws = generator(self.task.seed, "collaborator", target.name)
        chosen = ocs.choose(options.select, among, draws)
        self.memory.numbers["selection"] = {
            "selector": options.select,
            "collaborator": chosen.name,
            "candidates": [self.row(c, c is chosen or options.select == "all") for c in among],
        }
        self.setup.report("selected", self.memory.numbers["selection"])
        self.weights = {chosen.name: 1.0}
        (node,) = (n for n in self.asked if n.name == chosen.name)
        numbers: Numbers = {"candidates": len(among), "eps": chosen.eps}
        if shares := [
            r.numbers["clipped"] for r in [mine, *by_name.values()] if "clipped" in r.numbers
        ]:
            numbers["clipped"] = max(shares)
        return self.model_of(node).unpack(), numbers

    def doubt(self, node: Node, own: Reply, mine: Reply) -> str:
        """Say what is wrong if a site's mean is not the one that its gradients told the target.

        The target cannot tell it of a discriminator, or with a gradient penalty.
        """
        if f"mean/{node.name}" not in mine.numbers:
            return ""
        mean, slack = (_number(mine, f"{what}/{node.name}") for what in ("mean", "mean-slack"))
        claimed = (_number(own, HALVES[0]) + _number(own, HALVES[1])) / 2
        if abs(claimed - mean) <= slack:
            return ""
        return f"it says {claimed:.3g} is its critic's mean, but its gradients say {mean:.3g}"

    def candidate(self, node: Node, own: Reply, mine: Reply) -> ocs.Prospect:
        """Put together what a candidate and the target have measured.

        Raises:
            QuorumError: a number is missing.
        """
        labelled = node.role == "source"
        eps = own.numbers["error"] if labelled else self.eps_of(node)
        theta = _number(mine, f"theta/{node.name}")
        distance, error = self.distance(node, own, mine)
        return ocs.Prospect(node.name, labelled, float(eps), theta, distance, error)

    def eps_of(self, node: Node) -> float:
        """Return the error that an adapted target has, as carried forward to it."""
        return float(self.setup.earlier[node.name].memory.numbers["eps"])

    def distance(
        self, node: Node, own: Reply, mine: Reply, selecting: bool = True
    ) -> tuple[float, float]:
        """Return the distance between a candidate and the target, and its error."""
        theirs = (_number(own, HALVES[0]), _number(own, HALVES[1]))
        ours = tuple(_number(mine, f"{half}/{node.name}") for half in HALVES)
        pad = selecting and self.options.select == "pad"
        return (ocs.proxy_a_distance if pad else ocs.wasserstein)(theirs, ours)  # type: ignore[arg-type]

    def row(self, c: ocs.Prospect, chosen: bool) -> dict[str, Any]:
        """Return a candidate's row of the table in results.json."""
        distance = "pad" if self.options.select == "pad" else "w1"
        measured = {distance: c.distance, f"{distance}-error": c.error}
        scored = {"bound": c.bound} if distance == "w1" else {}
        known = {"name": c.name, "labelled": c.labelled, "eps": c.eps, "theta": c.theta}
        return known | measured | scored | {"chosen": chosen}

    # ---- the adaptation ---------------------------------------------------------------------

    def pair(self) -> tuple[Node, Node]:
        """Return the chosen collaborator and the target."""
        name = self.memory.numbers["selection"]["collaborator"]
        (collaborator,) = (node for node in self.roster.nodes if node.name == name)
        return collaborator, self.roster.target

    def members(self) -> Sequence[Node]:
        """Return the sites that adapt together: the pair, or with `all` every candidate."""
        rows = self.memory.numbers["selection"]["candidates"]
        chosen = {row["name"] for row in rows if row["chosen"]}
        helpers = [node for node in self.roster.nodes if node.name in chosen]
        return [*helpers, self.roster.target]

    def groups(self) -> dict[str, Sequence[Node]]:
        """Return the sites of each discriminator; with `all` each candidate has one."""
        if self.options.select != "all":
            return super().groups()
        *helpers, target = self.members()
        return {f"discriminator/{node.name}": [node, target] for node in helpers}

    def starting(self, node: Node) -> Packed:
        """Return a candidate's own model; to the target the chosen collaborator's."""
        target = node.name == self.roster.target.name
        return self.model if target else self.as_sent(self.model_of(node))

    def adapted(self, replies: Iterable[Message]) -> tuple[Arrays, Numbers]:
        """Return the collaborator's model as it was; after the last round the target's."""
        _, numbers = self.collected(replies)
        if not self.is_last:
            return self.global_model.unpack(), numbers
        return self.measured(numbers)

    def measured(self, numbers: Numbers) -> tuple[Arrays, Numbers]:
        """Measure the pair's distance after the adaptation, and carry the error forward.

        Raises:
            QuorumError: one of the two gave no usable reply.
        """
        pair = collaborator, target = self.pair()
        self.adjourn()  # the session in which both adapted
        self.convene({f"critic/{collaborator.name}": pair}, self.options.measure.steps)
        asked = self.ask(pair, "measure", {"model": self.model})
        by_name = {reply.node.name: reply for reply in asked}
        if missing := [node.name for node in pair if node.name not in by_name]:
            raise QuorumError(f"{' and '.join(missing)} gave no usable reply.")
        own, mine = by_name[collaborator.name], by_name[target.name]
        if doubt := self.doubt(collaborator, own, mine):
            self.setup.notice("refused", collaborator.name, f"{doubt}; these count")
            mean = _number(mine, f"mean/{collaborator.name}")
            own = replace(own, numbers={**own.numbers, **dict.fromkeys(HALVES, mean)})
        W1, error = self.distance(collaborator, own, mine, selecting=False)
        selection = self.memory.numbers["selection"]
        (before,) = (r for r in selection["candidates"] if r["name"] == collaborator.name)
        known = before["eps"], before["theta"]
        moved = _number(mine, "moved")
        eps = ocs.carried(*known, W1, before.get("w1", math.inf), moved)
        quality = {k: _number(mine, k) for k in ("infomax-before", "infomax-after")}
        kept = "before" if mine.numbers.get("kept") else "after"
        after = {"eps": eps, "w1": W1, "w1-error": error, "moved": moved, **quality, "kept": kept}
        self.memory.numbers |= {"eps": eps, "selection": {**selection, "after": after}}
        self.setup.report("adapted", {"collaborator": collaborator.name, **after})
        if kept == "before":
            worse = f"{quality['infomax-after']:.2f} after it, {quality['infomax-before']:.2f}"
            text = f"infomax is {worse} before; it keeps the model of {collaborator.name}"
            self.setup.notice("negative transfer", target.name, text)
        return full(mine).unpack(), numbers | {"eps": eps}

    # ---- what else differs from DILS --------------------------------------------------------

    def tested(self) -> dict[str, Packed]:
        """Return the model, except in the adaptation: the target then tests its own."""
        return {} if self.adapts and not self.is_last else {"model": self.model}

    def part_of(self, node: Node) -> str:
        """Return target for the target; else source while pretraining, then collaborator."""
        if node.name == self.roster.target.name:
            return "target"
        return "source" if self.phase.name == "pretrain" else "collaborator"

    def needed(self) -> set[str]:
        """Return nobody while pretraining, then the target, and in the adaptation the pair."""
        if self.adapts:
            return super().needed()
        return {self.roster.target.name} if self.phase.name == "select" else set()

    def findings(self) -> dict[str, Any]:
        """Return the table of the candidates, and what came of the choice."""
        selection = self.memory.numbers.get("selection")
        return {"selection": selection} if selection else {}


def _number(reply: Reply, name: str) -> float:
    """Return a number of a reply.

    Raises:
        QuorumError: the reply does not have it.
    """
    if name not in reply.numbers:
        raise QuorumError(f"{reply.node.name} sent no {name}.")
    return float(reply.numbers[name])


STRATEGY = FRUDA
