"""FRUDA: targets arrive one after another, each chooses whom to adapt from, and adapts by DILS.

Gan et al., FRUDA, https://arxiv.org/abs/2112.13381, section 3.3; the choice is in
`fedda.maths.ocs`, the adaptation in `fedda.algorithms.dils`.

    Z           candidates   the labelled sources, and the targets that have adapted before
    DI_c        network      a critic for each candidate c, with identical copies at c and target
    v           (N,)         values of a critic
    eps, theta, W1           what eq. 5 is made of, see `fedda.maths.ocs`

The trainings of one seed follow one another, a target each. In the first the sources train a model
each, on their own labels; the later ones start from those models. In one round, `select`, all
candidates are measured at once: each computes features by its own model and trains a critic with
the target, which has been sent all candidates' models. Gradients of the critics are summed, and the
mean values of the critics go to the server: no features, and nothing about a single image. Then the
target adapts from the chosen collaborator as in DILS; no other site takes part. In the last round
both measure their distance once more, from which the target's own error follows (`ocs.carried`),
as it has no labels. The target's model then goes to the server, for the targets that come later.

A source reports its own error, and nobody can verify it: a candidate that claims an error of 0 is
believed. Its critic's mean it cannot change alone, as its gradients tell the target what that is
(`fedda.adversarial.critic_estimate`); whoever makes up all gradients as well is believed. With
`keep=better` the target goes back to the collaborator's model if the adaptation made its own
predictions worse by infomax, which needs no label. That also limits the harm of a bad choice, but
does not prevent it.

With the selector `all`, the baseline Multi-Collaborator of appendix D.2, every candidate takes part
in the adaptation, with a discriminator of its own. That is MDAN without its classification errors,
as candidates have no labels:

    m         (K,)        the target's mapping losses, one per discriminator
    loss      scalar      log(mean_k exp(gamma m_k)) / gamma, a soft maximum

So the candidate that the target resembles least has the largest weight, softmax(gamma m)_k. Each
candidate keeps its own encoder. The paper does not say from which model the target starts; here it
is that of the source with the smallest bound.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Literal, Self

import torch
from pydantic import Field, model_validator
from torch import Tensor

from fedda.adversarial import discriminators
from fedda.adversarial.discriminators import DiscriminatorConfig
from fedda.algorithms import dils, fedavg
from fedda.config import is_site_name
from fedda.config.sections import Scalar
from fedda.maths.ocs import Selector
from fedda.methods import Extent, Method, Phase
from fedda.wire import INFOMAX, MODEL, REFUSED, SECONDS, TEST, Number, Part, Rule
from fedda.wire.packing import Kind, Manifest


class Measure(DiscriminatorConfig):
    """How distances are measured: the critic of a candidate and a target, and its training."""

    sizes: str = Field(default="100", pattern=discriminators.SIZES)
    """hidden layers of a critic, such as 100,50; empty: it is linear"""
    lr: float = Field(default=0.02, gt=0, le=1)
    """learning rate of a critic"""
    steps: int = Field(default=100, ge=1, le=100_000)
    """sums of gradients, each over exchange.p batches, that train a critic"""
    penalty: float = Field(default=0.0, ge=0, le=1000)
    """gamma, a critic's gradient penalty on each side; 0: none. Without `spectral` it gives
    distances several times too long"""
    spectral: bool = True
    """after each step no layer's spectral norm is above 1: the critic is then 1-Lipschitz also
    between the domains, where no site can compute a penalty"""


class Config(dils.Adaptation):
    """FRUDA's settings: DILS's, and those of the choice."""

    sequence: str = ""
    """targets in the order in which they arrive, separated by commas; empty: all, by name"""
    open: bool = False
    """after its last target the run waits for targets that join, and adapts each of them; it ends
    when it is stopped"""
    select: Selector = "ocs"
    """which candidate becomes the collaborator: ocs (smallest bound), source (smallest bound among
    the sources), random, pad (smallest proxy A-distance); all: every candidate takes part"""
    gamma: float = Field(default=10.0, gt=0, le=1000)
    """with all: sharpness of the maximum over the candidates' losses"""
    keep: Literal["better", "adapted"] = "better"
    """better: the target keeps the collaborator's model if infomax is lower after the adaptation
    than before; adapted: never"""
    refine: bool = False
    """after it has adapted, the target takes its last step (`fedda.refining`) and its classifier
    learns the refined answers, before later targets adapt from its model"""
    measure: Measure = Measure()

    @model_validator(mode="after")
    def _possible(self) -> Self:
        if self.loss == "cada":
            raise ValueError(
                "loss is cada, which trains the collaborator's classifier on labels, but an "
                "adapted target that is the collaborator has none; set it to adda, grl or wassda"
            )
        if len(set(self.targets)) < len(self.targets) or not all(map(is_site_name, self.targets)):
            raise ValueError(f"sequence is '{self.sequence}'; name each target once")
        return self

    @property
    def targets(self) -> Sequence[str]:
        """The targets in the order of `sequence`; none if it is empty."""
        return [name.strip() for name in self.sequence.split(",")] if self.sequence else []

    @property
    def bare(self) -> str:
        """What is told of models without noise on tests, and what to do."""
        return "means of critics, which have no bound to measure noise by; choose another method"


# Appendix D.1: the critic is kept 1-Lipschitz by a gradient penalty. Its weight is not named; 10 is
# that of Shen et al. Appendix F.0.2: every layer of the encoder has a bound, found by a search and
# not named. 4 is ours: with 2 and less the kernels of LeNet's first layer become so alike that
# sites refuse the model as one made to read images.
PAPER: dict[str, Scalar] = {
    "measure.penalty": 10.0,
    "measure.spectral": False,
    "train.lipschitz": 4.0,
}
PRESETS = {name: preset | PAPER for name, preset in dils.PRESETS.items()}


def layouts(options: Config, model: Manifest) -> Mapping[str, Manifest]:
    """The layouts of the discriminator and of a critic, whose gradients are summed."""
    sizes = options.measure.hidden
    critic = discriminators.layout(discriminators.width(model), sizes)
    return {**dils.layouts(options, model), "critic": critic}


def soft_maximum(m: Tensor, gamma: float) -> Tensor:
    """Appendix D.2: log(mean_k exp(gamma m_k)) / gamma, of losses m (K,) -> scalar."""
    return (torch.logsumexp(gamma * m, dim=0) - math.log(len(m))) / gamma


CRITICS = frozenset({"critic/*"})
# One discriminator; with `all` one per candidate.
SHARED = frozenset({"discriminator", "discriminator/*"})
ADAPT = Part(dils.ADAPT.enters, Rule(numbers=dils.NUMBERS), SHARED)
# Means of the critic's values over two halves of a site's images: a candidate's own, and at the
# target one pair per candidate. With `pad`, shares of images that the discriminator takes wrongly.
OWN = frozenset({Number("first", 0.01), Number("second", 0.01), discriminators.CLIPPED, SECONDS})
PER_CANDIDATE = frozenset(Number(f"{half}/*", 0.01) for half in ("first", "second"))
PER_CANDIDATE |= {Number("theta/*"), discriminators.CLIPPED, SECONDS}
# The candidate's mean as its gradients tell it, and how far off that may be.
PER_CANDIDATE |= {Number("mean/*", 0.01), Number("mean-slack/*", 0.01)}
ERROR, MOVED = Number("error", 0.01), Number("moved", 0.01)
BEFORE_AND_AFTER = frozenset(Number(f"{INFOMAX}-{when}", 0.01) for when in ("before", "after"))
ADAPTED = BEFORE_AND_AFTER | {Number("kept", 0.01), MOVED}


def windows(options: Config, about: Extent) -> int:
    """The most windows of a target: of its adaptation, and of a critic per candidate and after."""
    steps = about.steps * options.epochs * options.steps_of_discriminator(about.p)
    critics = max(1, about.sites - 1) + 1
    return about.rounds.get("adapt", 0) * steps // about.p + critics * options.measure.steps


METHOD = Method(
    "fruda",
    "FRUDA",
    Config,
    (
        Phase(
            "pretrain",
            {"train": fedavg.TRAIN},
            rounds=lambda options, rounds: options.pretrain,
            prepares=True,
        ),
        Phase(
            "select",
            {
                "select": {
                    # `error` comes from candidates with labels.
                    "collaborator": Part(
                        Rule(MODEL), Rule(numbers=OWN | {ERROR}), CRITICS, judges=True
                    ),
                    "target": Part(
                        Rule({"model/*": Kind.MODEL}),
                        Rule(numbers=PER_CANDIDATE | {REFUSED}),
                        CRITICS,
                        judges=True,
                    ),
                }
            },
            rounds=lambda options, rounds: 1,
            layouts=layouts,
        ),
        Phase(
            "adapt",
            {
                "adapt": {
                    "collaborator": ADAPT,
                    "target": ADAPT,
                },
                # In the last round alone: the target's model goes to the server for later targets.
                "measure": {
                    "collaborator": Part(Rule(MODEL), Rule(numbers=OWN), CRITICS, judges=True),
                    "target": Part(
                        Rule(MODEL), Rule(MODEL, PER_CANDIDATE | ADAPTED), CRITICS, judges=True
                    ),
                },
            },
            layouts=layouts,
            # The target tests its own model; after the last round it is sent the one it keeps.
            test=Part(Rule(optional=MODEL), TEST.leaves),
        ),
    ),
    PRESETS,
    chain=lambda options: options.targets,
    open=lambda options: options.open,
    loss=lambda options: options.loss,
    windows=windows,
)
