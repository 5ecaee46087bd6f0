"""f-WDGRL: like f-DANN, but it lowers the Wasserstein distance between sources and target.

Shen et al., AAAI 2018, https://arxiv.org/abs/1707.01217; federated by the exchange.

    DI, f    network  critic, with identical copies at all sites; with `pairs` K of them
    W        float    mean over the sources of E f(z_S), minus E f(z_T): eq. 14 of FRUDA
    gamma    float    weight of the gradient penalty, computed on each side's own samples
    u        (N, d)   points between features of one side; both sides' never meet
    lambda   float    weight of W for the encoders (`fwdgrl.reversal.strength`)

Each step begins with a few sums of the critic's gradients, which raise W. Each sum is over p
batches of its own and moves the critic p times (`fedda.adversarial.lazy`). Then the encoders make
one step to lower W, on the last of these batches (`fedda.adversarial.discriminators`). So a round
reads p times `critic-steps` as many batches as it has steps: with large batches p is small.
"""

from fedda.adversarial.discriminators import Critic, DiscriminatorConfig, Reversal
from fedda.algorithms import fdann, fedavg
from fedda.config.sections import Scalar
from fedda.methods import Method


class Config(Critic, fedavg.Config):
    """f-WDGRL's settings, and FedAvg's for the weights of sites."""

    discriminator: DiscriminatorConfig = DiscriminatorConfig()
    reversal: Reversal = Reversal()
    pairs: bool = False
    """one critic per source, instead of one for all sources"""


# As in the authors' code, where the weight is constant: 1 for Amazon, .01 for digits.
PRESETS: dict[str, dict[str, Scalar]] = {
    "paper": {
        "discriminator.sizes": "100",
        "discriminator.optimizer": "adam",
        "discriminator.lr": 0.0001,
        "discriminator.beta1": 0.9,
        "discriminator.beta2": 0.999,
        "critic-steps": 5,
        "penalty": 10.0,
        "spectral": False,
        "reversal.strength": 1.0,
        "reversal.schedule": "constant",
    }
}

METHOD = Method(
    "fwdgrl",
    "f-WDGRL",
    Config,
    (fdann.ALIGN,),
    PRESETS,
    on_features=fdann.ON_FEATURES,
    loss=lambda options: "wassda",
)
