"""DILS: one collaborator and the target adapt by the gradients of a shared discriminator.

Gan et al., FRUDA, https://arxiv.org/abs/2112.13381, algorithm 1; the losses are in
`fedda.adversarial.discriminators`, the lazy synchronisation in `fedda.adversarial.lazy`.

    E_opt, E_T   encoders     the collaborator's, trained on its labels, and the target's, which
                              starts as a copy of it
    DI           network      discriminator, a copy at each of the two, always alike
    p            int          steps between two exchanges (`exchange.p`)

The first rounds train the collaborator's model on its labels. In all others no model moves between
the sites: E_T stays at the target, as do the optimizers and what the exchange has gathered. CADA
moves E_opt too and goes on training the collaborator's classifier on what E_opt gives (see
`fedda.adversarial.discriminators.HALVES`), so there the target is sent the collaborator's model, to
take its classifier.
"""

from collections.abc import Mapping

from pydantic import Field

from fedda.adversarial import discriminators
from fedda.adversarial.discriminators import Loss, Network
from fedda.algorithms import fedavg
from fedda.config import Scalar, Section
from fedda.methods import Method, Phase
from fedda.wire import MODEL, TEST, Manifest, Part, Rule


class Config(Section):
    """DILS's choices."""

    loss: Loss = Field(
        default="adda",
        description="adda, grl (gradient reversal), wassda (Wasserstein) or cada (both encoders)",
    )
    pretrain: int = Field(
        default=10, ge=0, description="first rounds, which train the collaborator on its labels"
    )
    discriminator: Network = Network()
    lr: float = Field(
        default=0.00001,
        gt=0,
        description="learning rate of an encoder that adapts, by Adam; too high, it collapses",
    )
    penalty: float = Field(
        default=10.0, ge=0, description="gamma of wassda, on each side's own samples"
    )
    share: bool = Field(
        default=False, description="let the target's model go to the server after each round"
    )
    collaborator: str = Field(
        default="", description="name of the source that takes part; needed if there are several"
    )


# FRUDA, appendix F.0.2: learning rates of the target's encoder and the discriminators. It gives no
# optimizer for either, and no discriminator's layers.
PRESETS: dict[str, dict[str, Scalar]] = {
    # Rotated MNIST and Mic2Mic
    "paper": {"loss": "adda", "lr": 1e-3, "discriminator.lr": 1e-2},
    "paper-digits": {"loss": "adda", "lr": 1e-6, "discriminator.lr": 1e-4},
    "paper-office-caltech": {"loss": "adda", "lr": 1e-6, "discriminator.lr": 1e-5},
}


def layouts(options: Config, model: Manifest) -> Mapping[str, Manifest]:
    """The discriminator whose gradients are summed."""
    sizes = options.discriminator.hidden
    return {"discriminator": discriminators.layout(discriminators.width(model), sizes)}


NUMBERS = frozenset({"loss", "steps", "seconds", "discriminator-loss", "discriminator-accuracy"})

# The model comes in the first round. It goes back from the collaborator with CADA, and from the
# target with `share`.
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
            {"adapt": {"collaborator": ADAPT, "target": ADAPT}},
            layouts=layouts,
            # The target tests the model that it has adapted, and is sent none.
            test=Part(Rule(), TEST.leaves),
        ),
    ),
    PRESETS,
    stays=lambda options: not options.share,
)
