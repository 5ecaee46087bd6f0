"""FACT: two sources' heads that disagree about the target's images tell how to change the encoder.

Schrod et al., https://arxiv.org/abs/2306.00607, and the authors' code,
https://github.com/jonas-lippl/FACT.

    N, C        sizes    images of the target, classes
    G           network  encoder: the mean of the two sources' encoders, which the target changes
    C1, C2      layers   heads of the two sources, each refitted to that mean
    p1, p2      (N, C)   the probabilities that they give the target's images

In each round two sources are drawn. Both train the model on their labels, and each refits its head
to the mean of the two encoders for as many steps. The target then minimises what the two heads
differ in, by the encoder alone. The next model has that encoder, and the mean of the two heads.
The authors' program answers with the surer of the two heads, and with the model of the round in
which they differed least (`fact.answer`); the optimizers of its sites live for the whole run
(`train.carry-momentum`).

A head is one linear layer here; in the authors' network for digits it has three, with dropout.
There a source's learning rate falls after each of its trainings, so before it refits, and only in
rounds that it was drawn in; here with the run's rounds.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor

from fedda.algorithms import fedavg
from fedda.config.sections import Scalar, Section
from fedda.maths.mixture import Surest
from fedda.methods import Hop, Method, Phase
from fedda.wire import LOSS, MODEL, SECONDS, STEPS, Part, Rule
from fedda.wire.packing import Kind, Manifest

Softmax = Literal["once", "twice"]


class Config(Section):
    """FACT's settings."""

    softmax: Softmax = "once"
    """twice: the authors' network ends in a softmax, and both losses apply another"""
    answer: Literal["mean", "surer", "least"] = "mean"
    """what the target predicts with: the mean of the two heads; for each image the surer one, which
    stay at the target; or these of the round in which they differed least (the authors' code)"""
    refit: bool = True
    """whether sources refit their heads to the mean of the encoders"""


def answers(logits: Tensor, softmax: Softmax) -> Tensor:
    """What both losses take for logits -> (N, C)."""
    return logits if softmax == "once" else logits.softmax(dim=1)


def discrepancy(logits1: Tensor, logits2: Tensor, softmax: Softmax = "once") -> Tensor:
    """Mean |p1 - p2|, over images and classes -> scalar."""
    p1, p2 = (answers(each, softmax).softmax(dim=1) for each in (logits1, logits2))
    return (p1 - p2).abs().mean()


def extend(model: Any, settings: Mapping[str, Any]) -> None:
    """Replace a model's head by two, of which the surer one answers."""
    model.head = Surest(2, model.width, model.head.out_features)


def layouts(options: Config, model: Manifest) -> Mapping[str, Manifest]:
    """The layout of a head that is sent without its encoder."""
    return {"head": replace(model, entries=tuple(e for e in model.entries if is_head(e.name)))}


def is_head(name: str) -> bool:
    """Whether an entry of a model belongs to its head."""
    return name.startswith("head.")


HEAD = {"head": Kind.MODEL}
NUMBERS = frozenset({LOSS, STEPS, SECONDS})
REFIT: Hop = {"source": Part(Rule(MODEL), Rule(HEAD, NUMBERS), labels=True)}
# The model has one of the heads; the other comes beside it.
CROSS: Hop = {"target": Part(Rule(MODEL | HEAD), Rule(MODEL, NUMBERS))}

# The authors' script for Digit-Five: 1,000 rounds.
PRESETS: dict[str, dict[str, Scalar]] = {
    "official": {
        "softmax": "twice",
        "refit": True,
        "answer": "least",
        "train.optimizer": "sgd",
        "train.lr": 0.005,
        "train.momentum": 0.9,
        "train.weight-decay": 0.0005,
        "train.schedule": "ganin",
        "train.batch-size": 128,
        "train.carry-momentum": True,
    },
}

METHOD = Method(
    "fact",
    "FACT",
    Config,
    (Phase("cross", {"train": fedavg.TRAIN, "refit": REFIT, "cross": CROSS}, layouts=layouts),),
    PRESETS,
    stays=lambda options: options.answer != "mean",
    extend=extend,
)
