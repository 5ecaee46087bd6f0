"""f-WDGRL: as f-DANN, but sources and target are brought together in Wasserstein distance.

Shen et al., AAAI 2018, https://arxiv.org/abs/1707.01217; federated by the exchange.

    DI, f    network critic, a copy at every site, always alike; per pair: K of them
    W        float   mean over the sources of E f(z_S), minus E f(z_T): eq. 14 of FRUDA
    gamma    float   weight of the gradient penalty, taken on each side's own samples

In each step the critic first makes a few of its own, each on a batch of its own, to follow W, then
the encoders make one to lower it (`fedda.adversarial.discriminators`).
"""

from pydantic import Field

from fedda.algorithms import fdann
from fedda.config import Scalar
from fedda.methods import Method


class Config(fdann.Config):
    """f-WDGRL's choices beside f-DANN's."""

    critic_steps: int = Field(
        default=5, ge=1, description="steps of the critic in each of the encoders'"
    )
    penalty: float = Field(
        default=10.0, ge=0, description="gamma, on each side's own samples; 0 turns it off"
    )


# As in the authors' code. The weight does not grow there: 1 for Amazon, .01 for digits.
PRESETS: dict[str, dict[str, Scalar]] = {
    "paper": {
        "discriminator.sizes": "100",
        "discriminator.optimizer": "adam",
        "discriminator.lr": 0.0001,
        "critic-steps": 5,
        "penalty": 10.0,
        "reversal.strength": 1.0,
        "reversal.schedule": "constant",
    }
}

METHOD = Method("fwdgrl", "f-WDGRL", Config, (fdann.ALIGN,), PRESETS)
