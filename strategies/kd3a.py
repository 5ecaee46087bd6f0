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
from fedda.wire.packing import Arrays, Kind, Packed, pack

from .base import FedDA, Numbers
from .sites.replies import Reply
from .sites.roster import Node

# Name of the number that the target sends about each source, by weighting.
ABOUT = {"focus": "focus", "examples": "", "h-divergence": "distance"}


class KD3A(FedDA):
    """Per round: 1 model to each source, K + 1 to the target, 1 back from each of the K + 1.

    The target has one of its K + 1 already, from its test of the last round.
    """

    def combine(self, replies: Iterable[Message]) -> tuple[Arrays, Numbers]:
        """Algorithm 1, lines 6 to 16."""
        sources = sorted(self.channel.each(replies, {self.reported}), key=lambda r: r.node.name)
        self.enough(len(sources))
        models, numbers = self.channel.onward(sources, self.for_weighing(sources))
        needs = {"loss", "kept"}
        target = self.ask_target("distil", {"model": self.model} | models, needs, **numbers)
        refused = self.refused(target)
        sources = [r for r in sources if r.node.name not in refused]
        self.enough(len(sources))
        model, self.weights = self.channel.averaged(
            target, sources, lambda: self.average(target, sources)
        )
        # A site that is away keeps its last weight.
        self.memory.numbers["alpha"] = self.memory.numbers.get("alpha", {}) | self.weights
        return self._matched(model), self._numbers(sources, target)

    def for_weighing(self, sources: Sequence[Reply]) -> dict[str, float]:
        """What the target needs, besides its own numbers, to compute the server's weights."""
        if self.options.teacher_batchnorm != "updated":
            return {}
        examples, past = self.examples(sources)
        return {f"examples/{n}": e for n, e in sorted(examples.items())} | {
            f"past/{n}": w for n, w in past.items()
        }

    def examples(self, sources: Sequence[Reply]) -> tuple[dict[str, int], dict[str, float]]:
        """N_k and the last round's alpha, of the target and of these sources."""
        names = [self.roster.target.name, *(r.node.name for r in sources)]
        before = self.memory.numbers.get("alpha", {})
        past = {n: w for n, w in before.items() if n in names}
        return {n: self.roster.counts[n] for n in names}, past

    def average(self, target: Reply, sources: Sequence[Reply]) -> tuple[Arrays, dict[str, float]]:
        """Lines 10 to 13 -> the mean, and alpha by site.

        Raises:
            QuorumError: the target did not tell what a source added.
        """
        options, (examples, past) = self.options, self.examples(sources)
        own, about = target.node.name, ABOUT[options.weighting]
        for reply in sources:
            if about and f"{about}/{reply.node.name}" not in target.numbers:
                raise QuorumError(f"{own} (target) did not tell the {about} of {reply.node.name}.")
        alpha = kd3a.site_weights(options, examples, own, target.numbers, past)
        models = [r.model().unpack() for r in (target, *sources)]
        model = kd3a.mix(models, [alpha[n] for n in examples], options)
        if options.heads == "local":
            model |= heads_of(models[0])
            heads = zip(sources, models[1:], strict=True)
            self.memory.arrays |= {r.node.name: pack(heads_of(m), Kind.MODEL) for r, m in heads}
        return model, alpha

    def _matched(self, model: Arrays) -> Arrays:
        """Line 16: with `batchnorm=loss` the target trains the mean."""
        if self.options.batchnorm != "loss":
            return model
        mixed = self.as_sent(pack(model, Kind.MODEL))
        return self.ask_target("match_moments", {"model": mixed}).model().unpack()

    def _numbers(self, sources: Sequence[Reply], target: Reply) -> Numbers:
        """The round's numbers."""
        reported = {
            r.node.name: float(r.numbers[self.reported])
            for r in sources
            if self.reported in r.numbers
        }
        numbers = self.of_sources(reported) if reported else {}
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


STRATEGY = KD3A
