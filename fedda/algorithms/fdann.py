"""f-DANN: sources and target train one classifier against a shared domain discriminator.

Ganin et al., JMLR 2016, https://arxiv.org/abs/1505.07818; federated by the exchange.

    K        size    sources
    DI       network discriminator, a copy at every site, always alike; per pair: K of them
    lambda   float   weight of the reversed gradient, growing with the training

Every source minimises cross entropy + lambda times minus its half of DI's loss, the target the
latter alone, so with Adam, whose steps are as long whatever lambda is, nothing holds it: use sgd.
DI's loss is FRUDA's eq. 8, averaged over sources, plus eq. 9 (`fedda.adversarial.discriminators`).
After each round encoders are averaged over all sites, classifiers over the sources; so DI faces one
encoder when a round begins, and from there on every site's own. A round is a whole number of
windows (`fedda.adversarial.lazy`), and the next one goes on from its discriminator, which travels
with the model (`fedda.adversarial.travelling`).
"""

from collections.abc import Mapping

from pydantic import Field

from fedda.adversarial import discriminators
from fedda.adversarial.discriminators import Network, Reversal
from fedda.adversarial.travelling import travelling_layout
from fedda.algorithms import fedavg
from fedda.config import Scalar
from fedda.methods import Method, Phase
from fedda.wire import MODEL, Kind, Manifest, Part, Rule


class Config(fedavg.Config):
    """f-DANN's choices beside how sites are weighed."""

    discriminator: Network = Network()
    reversal: Reversal = Reversal()
    pairs: bool = Field(
        default=False, description="a discriminator per source and the target, not one for all"
    )


# Ganin et al., section 5.2: its network for MNIST; for all others two layers of 1024.
PRESETS: dict[str, dict[str, Scalar]] = {
    "paper": {
        "discriminator.sizes": "100",
        "discriminator.optimizer": "sgd",
        "discriminator.lr": 0.01,
        "discriminator.momentum": 0.9,
        "reversal.strength": 1.0,
        "reversal.schedule": "ganin",
    }
}


def layouts(options: Config, model: Manifest) -> Mapping[str, Manifest]:
    """The discriminator as it travels beside the model, and as its gradients are summed."""
    d, network = discriminators.width(model), options.discriminator
    return {
        "discriminator": travelling_layout(d, network),
        "gradient": discriminators.layout(d, network.hidden),
    }


# One for all, or per pair one named after the source. In the first round sites make it themselves.
DISCRIMINATORS = {"discriminator": Kind.MODEL, "discriminator/*": Kind.MODEL}
GROUPS = frozenset({"gradient", "gradient/*"})
NUMBERS = frozenset({"loss", "steps", "seconds", "discriminator-loss", "discriminator-accuracy"})
SENT = Rule(MODEL, frozenset({"steps"}), DISCRIMINATORS)

ALIGN = Phase(
    "align",
    {
        "align": {
            "source": Part(SENT, Rule(MODEL, NUMBERS), GROUPS, labels=True),
            "target": Part(SENT, Rule(MODEL, NUMBERS, DISCRIMINATORS), GROUPS),
        }
    },
    layouts=layouts,
)

METHOD = Method("fdann", "f-DANN", Config, (ALIGN,), PRESETS)
