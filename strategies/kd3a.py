"""KD3A's server: sources teach, the target distils, consensus focus weighs the mean.

Feng et al., ICML 2021, https://arxiv.org/abs/2011.09757, algorithm 1. In the paper the target does
all of this itself. Here the target keeps its data and the server does the averaging. So the target
sends its model and one number per source, and the server's operator can see the weights.

With `kd3a.relay=sealed` the target averages, as in the paper, and the server relays models that
only the target can read.
"""

from collections.abc import Iterable, Sequence

from flwr.app import Message

from fedda.algorithms import kd3a
from fedda.errors import QuorumError
from fedda.maths.average import heads_of
from fedda.wire import Arrays, Kind, Packed, pack

from .base import FedDA, Numbers
from .sites.replies import Reply
from .sites.roster import Node

# Name of the number that the target sends about each source, by weighting.
ABOUT = {"focus": "focus", "examples": "", "h-divergence": "distance", "gap": "gain"}


class KD3A(FedDA):
    """Per round: 1 model to each source, K + 1 to the target, 1 back from each of the K + 1.

    The target has one of its K + 1 already, from its test of the last round.
    """

    def requests(self) -> list[Message]:
        """Line 3: send a model to every source, or first ask the target for a key."""
        nodes = self.present()
        if self.options.relay == "sealed":
            self._sources = nodes
            return [self.request(self.roster.target, {})]
        return [self.request(node, {"model": self.model_for(node)}) for node in nodes]

    def combine(self, replies: Iterable[Message]) -> tuple[Arrays, Numbers]:
        """Algorithm 1, lines 6 to 16."""
        options = self.options
        if options.relay == "sealed":
            return self._relay(replies)
        sources = sorted(self.accept(replies, needs={self.told}), key=lambda r: r.node.name)
        self.enough(len(sources))
        teachers = {f"teacher/{r.node.name}": r.model() for r in sources}
        about = ABOUT[options.weighting]
        needs = {"loss", "kept"}
        counts, before = self.roster.counts, self.memory.numbers.get("alpha", {})
        weighing: dict[str, float] = {}
        if options.teacher_batchnorm == "updated":
            came = {self.roster.target.name, *(r.node.name for r in sources)}
            past = {n: w for n, w in before.items() if n in came}
            weighing = _weighing_inputs({n: counts[n] for n in sorted(came)}, past)
        target = self.ask_target("distil", {"model": self.model} | teachers, needs, **weighing)
        refused = self.refused(target)
        sources = [r for r in sources if r.node.name not in refused]
        self.enough(len(sources))
        names = [self.roster.target.name, *(r.node.name for r in sources)]
        examples = {n: counts[n] for n in names}
        past = {n: w for n, w in before.items() if n in examples}
        for name in names[1:]:
            if about and f"{about}/{name}" not in target.numbers:
                raise QuorumError(f"{names[0]} (target) did not tell the {about} of {name}.")

        everyone = [target, *sources]
        alpha = kd3a.site_weights(options, examples, names[0], target.numbers, past)
        models = [r.model().unpack() for r in everyone]
        model = kd3a.mix(models, [alpha[n] for n in names], options)
        if options.heads == "local":
            model |= heads_of(models[0])
            heads = zip(sources, models[1:], strict=True)
            self.memory.arrays |= {r.node.name: pack(heads_of(m), Kind.MODEL) for r, m in heads}
        self.weights = alpha
        # A site that is away keeps its last weight.
        self.memory.numbers["alpha"] = self.memory.numbers.get("alpha", {}) | alpha
        return self._matched(model), self._numbers(sources, target)

    def _relay(self, replies: Iterable[Message]) -> tuple[Arrays, Numbers]:
        """The same mean, which the target makes of models that the server cannot read.

        Raises:
            QuorumError: the target made no key, or could use too few models.
        """
        name, counts = self.roster.target.name, self.roster.counts
        keys = [reply.arrays["key"] for reply in self.accept(replies)]
        if not keys:
            raise QuorumError(f"{name} (target) made no key for this round.")
        answered, sealed = [], {}
        sent = {"model": self.model, f"key/{name}": keys[0]}
        needs = {self.told} - {"loss"}  # which says more than a server that reads no model may know
        for reply in self.ask(self._sources, "train", sent, needs):
            answered.append(reply)
            sealed[f"sealed/{reply.node.name}"] = reply.arrays["sealed"]
        self.enough(len(sealed))
        guard, members = self.setup.guard, {name, *(r.node.name for r in answered)}
        numbers = {"max-change": guard.max_change, "max-statistics": guard.max_statistics}
        numbers |= {"max-update": guard.max_update, "most": max(counts[n] for n in members)}
        needs = {"loss", "kept", f"alpha/{name}"}
        target = self.ask_target("distil", {"model": self.model} | sealed, needs, **numbers)
        told = self.refused(target)
        self.enough(len(sealed) - len(told))
        used = sorted(members - told)
        self.weights = {n: float(target.numbers.get(f"alpha/{n}", 0.0)) for n in used}
        model = self._matched(target.model().unpack())
        return model, self._numbers([r for r in answered if r.node.name not in told], target)

    def _matched(self, model: Arrays) -> Arrays:
        """Line 16: with `batchnorm=loss` the target trains the mean."""
        if self.options.batchnorm != "loss":
            return model
        mixed = self.as_sent(pack(model, Kind.MODEL))
        return self.ask_target("match_moments", {"model": mixed}).model().unpack()

    def _numbers(self, sources: Sequence[Reply], target: Reply) -> Numbers:
        """The round's numbers."""
        told = {r.node.name: float(r.numbers[self.told]) for r in sources if self.told in r.numbers}
        numbers = self.of_sources(told) if told else {}
        numbers["distillation"] = target.numbers["loss"]
        numbers["kept"] = target.numbers["kept"]
        if self.options.weighting == "focus":
            numbers["focused"] = float(kd3a.is_focused(self.options, float(numbers["kept"])))
        return numbers

    def model_for(self, node: Node) -> Packed:
        """Return the model; with `kd3a.heads=local`, with the head that the source last trained."""
        head = self.memory.arrays.get(node.name)
        if head is None:
            return self.model
        return self.as_sent(pack(self.global_model.unpack() | head.unpack(), Kind.MODEL))


def _weighing_inputs(examples: dict[str, int], past: dict[str, float]) -> dict[str, float]:
    """Return what the target needs, besides its own numbers, to compute the server's weights."""
    return {f"examples/{n}": e for n, e in examples.items()} | {
        f"past/{n}": w for n, w in past.items()
    }


STRATEGY = KD3A
