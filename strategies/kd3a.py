"""KD3A's server: sources teach, the target distils, consensus focus weighs the mean.

Feng et al., ICML 2021, https://arxiv.org/abs/2011.09757, algorithm 1. The paper's target does all
of this itself; here it keeps its data and the server does the averaging, so the target sends its
model and one number per source, and the weights are public to the operator.
"""

from collections.abc import Iterable
from typing import ClassVar

import numpy as np
import torch
from flwr.app import ArrayRecord, Message, MetricRecord

from fedda import gap
from fedda.algorithms import kd3a
from fedda.wire import Arrays, Kind, Packed, Role, pack, pieces

from .base import FedDA, Reply
from .roster import Node

# What the target says about each source, by weighting.
ABOUT = {"focus": "focus", "examples": "", "h-divergence": "distance", "gap": "gain"}


class KD3A(FedDA):
    """Per round: 1 model to each source, K + 1 to the target, 1 back from each of the K + 1."""

    roles: ClassVar[tuple[Role, ...]] = ("source", "target")

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Algorithm 1, lines 6 to 16."""
        options = self.task.options
        sources = sorted(self.accept(replies, needs={"loss"}), key=lambda r: r.node.name)
        self.enough(len(sources))
        teachers = {f"teacher/{r.node.name}": r.arrays["model"] for r in sources}
        about = ABOUT[options.weighting]
        needs = {"loss", "kept", *(f"{about}/{r.node.name}" for r in sources if about)}
        target = self.ask(self.roster.target, {"model": self.model} | teachers, needs)

        everyone = [target, *sources]
        alpha = self._alpha(target, sources)
        alpha = kd3a.smooth(self.memory.get("alpha", {}), alpha, options.smoothing)
        models = [r.arrays["model"].unpack() for r in everyone]
        model = mix(models, [alpha[r.node.name] for r in everyone], options.batchnorm)
        if options.heads == "local":
            model |= _heads(models[0])
            heads = zip(sources, models[1:], strict=True)
            self.kept |= {r.node.name: pack(_heads(m), Kind.MODEL) for r, m in heads}
        if options.batchnorm == "loss":
            mixed = self.as_sent(pack(model, Kind.MODEL))
            reply = self.ask(self.roster.target, {"model": mixed}, stage=2)
            model = reply.arrays["model"].unpack()
        self.weights = alpha
        self.memory["alpha"] = self.memory.get("alpha", {}) | alpha  # who is away keeps a past
        losses = {"loss": float(np.mean([r.numbers["loss"] for r in sources]))}
        numbers = {"distillation": target.numbers["loss"], "kept": target.numbers["kept"]}
        del sources, teachers, target, everyone, models  # K + 1 models; the mean is packed next
        return self.packed(model), MetricRecord(losses | numbers)

    def source_arrays(self, node: Node) -> dict[str, Packed]:
        """The model; with `kd3a.heads=local` under the source's own head of the last round."""
        if node.name not in self.kept:
            return {"model": self.model}
        own = self.global_model.unpack() | self.kept[node.name].unpack()
        return {"model": self.as_sent(pack(own, Kind.MODEL))}

    def _alpha(self, target: Reply, sources: list[Reply]) -> dict[str, float]:
        """The weights of this round by site, the target's first."""
        options, numbers = self.task.options, target.numbers
        names = [r.node.name for r in sources]
        counts = self.roster.counts
        examples = torch.tensor([counts[n] for n in names])
        target_examples = counts[target.node.name]
        part = min(max(float(numbers["kept"]), 0.0), 1.0)  # whatever the target claims
        kept = part if options.target_weight == "kept" else None

        def each(what: str) -> torch.Tensor:
            found = [float(numbers[f"{what}/{n}"]) for n in names]
            return torch.tensor(found, dtype=torch.float64)

        if options.weighting == "focus":
            focus, by_examples = each("focus"), options.focus_by_examples
            weights = kd3a.domain_weights(focus, examples, target_examples, by_examples, kept)
        else:
            by_data = target_examples / (int(examples.sum()) + target_examples)
            share = by_data if kept is None else kept / (len(sources) + 1)
            among = {
                "examples": lambda: examples.double(),
                "h-divergence": lambda: kd3a.divergence_weights(each("distance"), examples),
                "gap": lambda: gap.gap_weights(each("gain")),
            }[options.weighting]()
            weights = kd3a.with_target(among, share)
        return dict(zip([target.node.name, *names], weights.tolist(), strict=True))


def mix(models: list[Arrays], alpha: list[float], batchnorm: str) -> Arrays:
    """Line 13, theta = sum_k alpha_k theta_k, and eq. 18 for BatchNorm's running statistics.

    Integer buffers cannot be averaged and are the first model's, the target's.
    """
    form = "linear" if batchnorm == "linear" else "moments"
    mixed: Arrays = {}
    for name, first in models[0].items():
        if first.dtype.kind != "f":
            mixed[name] = first.copy()  # a view would hold the whole model that came
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


def _heads(model: Arrays) -> Arrays:
    return {name: a for name, a in model.items() if name.startswith("head.")}


STRATEGY = KD3A
