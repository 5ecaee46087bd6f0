"""KD3A's server: sources teach, the target distils, consensus focus weighs the mean.

Feng et al., ICML 2021, https://arxiv.org/abs/2011.09757, algorithm 1. In the paper the target does
all of this itself. Here the target keeps its data and the server does the averaging. So the target
sends its model and one number per source, and the server's operator can see the weights.
"""

from collections.abc import Iterable

import numpy as np
import torch
from flwr.app import Message

from fedda.algorithms import kd3a
from fedda.maths.average import heads_of, statistics_of
from fedda.wire import Arrays, Kind, Packed, pack, pieces

from .base import FedDA, Numbers
from .sites.roster import Node

# Name of the number that the target sends about each source, by weighting.
ABOUT = {"focus": "focus", "examples": "", "h-divergence": "distance", "gap": "gain"}


class KD3A(FedDA):
    """Per round: 1 model to each source, K + 1 to the target, 1 back from each of the K + 1.

    The target has one of its K + 1 already, from its test of the last round.
    """

    def requests(self) -> list[Message]:
        """Line 3: send a model to every source."""
        return [self.request(node, {"model": self.model_for(node)}) for node in self.present()]

    def combine(self, replies: Iterable[Message]) -> tuple[Arrays, Numbers]:
        """Algorithm 1, lines 6 to 16."""
        options = self.options
        sources = sorted(self.accept(replies, needs={"loss"}), key=lambda r: r.node.name)
        self.enough(len(sources))
        teachers = {f"teacher/{r.node.name}": r.model() for r in sources}
        about = ABOUT[options.weighting]
        needs = {"loss", "kept", *(f"{about}/{r.node.name}" for r in sources if about)}
        names = [self.roster.target.name, *(r.node.name for r in sources)]
        examples = {n: self.roster.counts[n] for n in names}
        past = {n: w for n, w in self.memory.numbers.get("alpha", {}).items() if n in examples}
        updated = options.teacher_batchnorm == "updated"
        weighing = _weighing_inputs(examples, past) if updated else {}
        target = self.ask_target("distil", {"model": self.model} | teachers, needs, **weighing)

        everyone = [target, *sources]
        alpha = kd3a.site_weights(options, examples, names[0], target.numbers, past)
        models = [r.model().unpack() for r in everyone]
        model = mix(models, [alpha[n] for n in names], options.batchnorm)
        if updated:  # only the target has the teachers' updated statistics, so it has mixed them
            model |= statistics_of(models[0])
        if options.heads == "local":
            model |= heads_of(models[0])
            heads = zip(sources, models[1:], strict=True)
            self.memory.arrays |= {r.node.name: pack(heads_of(m), Kind.MODEL) for r, m in heads}
        if options.batchnorm == "loss":
            mixed = self.as_sent(pack(model, Kind.MODEL))
            model = self.ask_target("match_moments", {"model": mixed}).model().unpack()
        self.weights = alpha
        # A site that is away keeps its last weight.
        self.memory.numbers["alpha"] = self.memory.numbers.get("alpha", {}) | alpha
        losses = {"loss": float(np.mean([r.numbers["loss"] for r in sources]))}
        numbers = {"distillation": target.numbers["loss"], "kept": target.numbers["kept"]}
        if options.weighting == "focus":
            numbers["focused"] = float(kd3a.is_focused(options, float(numbers["kept"])))
        return model, losses | numbers

    def model_for(self, node: Node) -> Packed:
        """Return the model; with `kd3a.heads=local`, with the head that the source last trained."""
        head = self.memory.arrays.get(node.name)
        if head is None:
            return self.model
        return self.as_sent(pack(self.global_model.unpack() | head.unpack(), Kind.MODEL))


def mix(models: list[Arrays], alpha: list[float], batchnorm: str) -> Arrays:
    """Line 13, theta = sum_k alpha_k theta_k, and eq. 18 for BatchNorm's running statistics.

    Integer buffers cannot be averaged; they are copied from the first model, the target's.
    """
    form = "linear" if batchnorm == "linear" else "moments"
    mixed: Arrays = {}
    for name, first in models[0].items():
        if first.dtype.kind != "f":
            mixed[name] = first.copy()  # a view would keep the whole received model in memory
        elif name.endswith("running_var"):
            mean = name.replace("running_var", "running_mean")
            means, variances = (np.stack([m[n] for m in models]) for n in (mean, name))
            moments = torch.tensor(means), torch.tensor(variances)
            weights = torch.tensor(alpha, dtype=torch.float64)
            mu, var = kd3a.mix_moments(*moments, weights, form)
            mixed[mean], mixed[name] = mu.numpy(), var.numpy()
        elif not name.endswith("running_mean"):
            mixed[name] = np.empty_like(first)
            for mean, *parts in pieces(mixed[name], *(m[name] for m in models)):
                terms = (a * part.astype(np.float64) for a, part in zip(alpha, parts, strict=True))
                mean[...] = sum(terms, np.zeros(mean.shape))
    return {name: mixed[name] for name in models[0]}


def _weighing_inputs(examples: dict[str, int], past: dict[str, float]) -> dict[str, float]:
    """Return what the target needs, besides its own numbers, to compute the server's weights."""
    return {f"examples/{n}": e for n, e in examples.items()} | {
        f"past/{n}": w for n, w in past.items()
    }


STRATEGY = KD3A
