"""DILS: one collaborator and the target adapt by the gradients of a shared discriminator.

Gan et al., FRUDA, https://arxiv.org/abs/2112.13381, algorithm 1; the losses are in
`fedda.adversarial.discriminators`, the lazy synchronisation in `fedda.adversarial.lazy`.

    E_opt, E_T   encoders     the collaborator's, trained on its labels, and the target's, which
                              starts as a copy of E_opt
    DI           network      discriminator, with identical copies at both sites
    p            int          steps between two exchanges (`exchange.p`)
    G, g_sync    gradients    what a site has gathered over p steps, and what moves both copies

The first rounds train the collaborator's model on its labels. In all later rounds no model is sent
between the sites: E_T stays at the target, and each site keeps its optimizers and the gradients
that it has gathered for the next exchange. With the loss `cada`, E_opt adapts as well, and the
collaborator's classifier is trained on the features that E_opt gives (see
`fedda.adversarial.discriminators.HALVES`). So with `cada` each round ends with the
collaborator's model going to the target, which takes over its classifier.
"""

from collections.abc import Mapping

from pydantic import Field

from fedda.adversarial import discriminators
from fedda.adversarial.discriminators import BETA1, BETA2, HALVES, Critic, DiscriminatorConfig, Loss
from fedda.algorithms import fedavg
from fedda.config.sections import Scalar
from fedda.methods import Extent, Method, Phase
from fedda.wire import LOSS, MODEL, SECONDS, STEPS, TEST, Part, Rule
from fedda.wire.packing import Manifest


class Adaptation(Critic):
    """How a pair adapts; the settings of a critic have a meaning with `wassda` alone."""

    loss: Loss = "adda"
    """adda, grl (gradient reversal), wassda (Wasserstein) or cada (both encoders)"""
    pretrain: int = Field(default=10, ge=0, le=100_000)
    """rounds at the beginning that train the collaborator on labels"""
    epochs: int = Field(default=3, ge=1, le=1000)
    """an adapting round has this many times the steps of a round of pretraining; it sends no
    models, so long rounds save messages"""
    discriminator: DiscriminatorConfig = DiscriminatorConfig(sizes="100,100", lr=0.0005)
    lr: float = Field(default=5e-5, gt=0, le=1)
    """learning rate of an adapting encoder, by Adam; if too high, it collapses: 2e-4 is too much
    for a few hundred images, and for cada"""
    beta1: float = Field(default=BETA1, ge=0, lt=1)
    """Adam's average of that encoder's gradients"""
    beta2: float = Field(default=BETA2, ge=0, lt=1)
    """and its average of their squares"""

    def steps_of_discriminator(self, p: int) -> int:
        """How many steps DI takes per step of the encoders -> int."""
        critic = HALVES[self.loss, "target"].critic
        return max(1, self.critic_steps * p) if critic else 1


class Config(Adaptation):
    """DILS's settings."""

    head_lr: float = Field(default=0.001, gt=0, le=1)
    """learning rate of the collaborator's classifier with cada"""
    share: bool = False
    """let the target's model go to the server after each round"""
    collaborator: str = ""
    """name of the source that takes part; needed if there are several"""


# FRUDA, appendix F.0.2: learning rates of the target's encoder and of the discriminators. FRUDA
# does not say which optimizers it uses for them, nor what layers its discriminators have.
# Adam's betas are those that Adam's own paper proposes.
ADAM: dict[str, Scalar] = {
    "loss": "adda",
    "penalty": 10.0,
    "spectral": False,
    "beta1": 0.9,
    "beta2": 0.999,
    "discriminator.optimizer": "adam",
    "discriminator.beta1": 0.9,
    "discriminator.beta2": 0.999,
}
PRESETS: dict[str, dict[str, Scalar]] = {
    # Rotated MNIST and Mic2Mic
    "paper": ADAM | {"lr": 1e-3, "discriminator.lr": 1e-2},
    "paper-digits": ADAM | {"lr": 1e-6, "discriminator.lr": 1e-4},
    "paper-office-caltech": ADAM | {"lr": 1e-6, "discriminator.lr": 1e-5},
}


def layouts(options: Adaptation, model: Manifest) -> Mapping[str, Manifest]:
    """The layout of the discriminator whose gradients are summed."""
    sizes = options.discriminator.hidden
    return {"discriminator": discriminators.layout(discriminators.width(model), sizes)}


def windows(options: Config, about: Extent) -> int:
    """The most windows of a training: one may span several rounds, and a critic has longer ones."""
    steps = about.steps * options.epochs * options.steps_of_discriminator(about.p)
    return max(1, about.all_rounds * steps // about.p)


NUMBERS = discriminators.NUMBERS | {LOSS, STEPS, SECONDS}

# The model is sent to the sites in the first of these rounds. The collaborator sends it back with
# `cada`, and the target with `share`.
ADAPT = Part(
    Rule(numbers=frozenset({"steps"}), optional=MODEL),
    Rule(numbers=NUMBERS, optional=MODEL),
    frozenset({"discriminator"}),
)

METHOD = Method(
    "dils",
    "DILS",
    Config,
    (
        Phase(
            "pretrain",
            {"train": {"collaborator": Part(Rule(MODEL), fedavg.TRAINED, labels=True)}},
            rounds=lambda options, rounds: options.pretrain,
            prepares=True,
        ),
        Phase(
            "adapt",
            {
                "adapt": {"collaborator": ADAPT, "target": ADAPT},
                # With `cada` alone: the target takes over the classifier.
                "take": {"target": Part(Rule(MODEL), Rule(numbers=frozenset({SECONDS, STEPS})))},
            },
            layouts=layouts,
            # The target is sent no model: it tests the one that it has adapted.
            test=Part(Rule(numbers=TEST.enters.numbers), TEST.leaves),
        ),
    ),
    PRESETS,
    stays=lambda options: not options.share,
    loss=lambda options: options.loss,
    windows=windows,
)
