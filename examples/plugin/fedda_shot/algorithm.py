"""SHOT-IM: the sources' model adapts at the target alone, by information maximisation.

Liang et al., ICML 2020, https://arxiv.org/abs/2002.08546, section 3.2. Bottleneck, weight
normalisation and label smoothing are left out: they belong to the network and the sources.

    logits  (N, C)  of a batch of the target's images
    p       (N, C)  softmax(logits), the predictions
"""

from pydantic import Field
from torch import Tensor

from fedda.algorithms import fedavg
from fedda.methods import Hop, Method, Phase
from fedda.wire import MODEL, Part, Rule


class Config(fedavg.Config):
    """FedAvg's setting for the sources, and two settings of SHOT-IM."""

    source_rounds: int = Field(default=10, ge=0, description="first rounds: FedAvg of the sources")
    diversity: float = Field(default=1.0, ge=0, description="weight of the mean's entropy")


def entropy(p: Tensor) -> Tensor:
    """H(p) = -sum_c p_c log p_c -> (...)."""
    return -(p * p.clamp_min(1e-12).log()).sum(dim=-1)


def information_loss(logits: Tensor, diversity: float = 1.0) -> Tensor:
    """L_IM: low if the model is sure of each image but not of one class for all -> scalar."""
    p = logits.softmax(dim=1)
    return entropy(p).mean() - diversity * entropy(p.mean(dim=0))


ADAPT: Hop = {"target": Part(Rule(MODEL), fedavg.TRAINED)}
PHASES = (
    Phase("source", {"train": fedavg.TRAIN}, lambda o, _: o.source_rounds, prepares=True),
    Phase("adapt", {"adapt": ADAPT}),
)
PRESETS = {"paper": {"diversity": 1.0}, "entropy": {"diversity": 0.0}}

METHOD = Method("shot-im", "SHOT-IM", Config, PHASES, PRESETS)
