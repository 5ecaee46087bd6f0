"""f-DANN: sources and target train one classifier against a shared domain discriminator.

Ganin et al., JMLR 2016, https://arxiv.org/abs/1505.07818; federated by the exchange.

    K        size     sources
    DI       network  discriminator, with identical copies at all sites; with `pairs` K of them
    z        (N, d)   features of images; DI(z), the probability of being a source's
    lambda   float    weight of the adversarial loss; s is `fdann.reversal.strength`, 1 in the
                      paper, and q the share of the training that is over

Each source minimises its cross entropy plus lambda times an adversarial loss, the target the second
term alone. With `reversal.loss=inverted` that loss is its half of DI's loss with the other side's
label, with `reversal`, as in the paper, minus its half. The first is never below 0. The second has
no bound: once the target's features deceive DI, its gradient is the largest, and they grow without
end. With Adam the length of a step does not depend on lambda, so nothing would limit the target's
steps: use sgd. DI's loss is FRUDA's eq. 8, averaged over the sources, plus eq. 9
(`fedda.adversarial.discriminators`). After each round encoders are averaged over all sites,
and classifiers over the sources. So when a round begins all sites have the same encoder, and during
the round each site changes its own. A round is a whole number of windows
(`fedda.adversarial.lazy`). The next round continues with the same discriminator, which is sent with
the model (`fedda.adversarial.travelling`).
"""

from collections.abc import Mapping

from fedda.adversarial import discriminators
from fedda.adversarial.discriminators import Deceived, DiscriminatorConfig
from fedda.adversarial.travelling import travelling_layout
from fedda.algorithms import fedavg
from fedda.config.sections import Scalar
from fedda.methods import Method, Phase
from fedda.wire import LOSS, MODEL, SECONDS, STEPS, Part, Rule
from fedda.wire.packing import Kind, Manifest


class Config(fedavg.Config):
    """f-DANN's settings, and FedAvg's for the weights of sites."""

    discriminator: DiscriminatorConfig = DiscriminatorConfig()
    reversal: Deceived = Deceived()
    pairs: bool = False
    """one discriminator per source, instead of one for all sources"""


# Ganin et al., section 5.2: the network for MNIST; for other data they use two layers of 1024.
# Section 5.2.2: the rate of all layers falls as (1 + 10 q)^-.75, and momentum is .9.
PRESETS: dict[str, dict[str, Scalar]] = {
    "paper": {
        "discriminator.sizes": "100",
        "discriminator.optimizer": "sgd",
        "discriminator.lr": 0.01,
        "discriminator.momentum": 0.9,
        "reversal.strength": 1.0,
        "reversal.schedule": "ganin",
        "reversal.loss": "reversal",
        "train.optimizer": "sgd",
        "train.lr": 0.01,
        "train.momentum": 0.9,
        "train.schedule": "ganin",
    }
}


def layouts(options: Config, model: Manifest) -> Mapping[str, Manifest]:
    """Layouts of the discriminator as it is sent beside the model, and of its gradients."""
    d, network = discriminators.width(model), options.discriminator
    return {
        "discriminator": travelling_layout(d, network),
        "gradient": discriminators.layout(d, network.hidden),
    }


# One for all, or with `pairs` one per source, named after it. In the first round sites make them.
DISCRIMINATORS = {"discriminator": Kind.MODEL, "discriminator/*": Kind.MODEL}
GROUPS = frozenset({"gradient", "gradient/*"})
NUMBERS = discriminators.NUMBERS | {LOSS, STEPS, SECONDS}
SENT = Rule(MODEL, frozenset({"steps"}), DISCRIMINATORS)

ALIGN = Phase(
    "align",
    {
        "align": {
            "source": Part(SENT, Rule(MODEL, NUMBERS), GROUPS, labels=True, needed="mean"),
            "target": Part(SENT, Rule(MODEL, NUMBERS, DISCRIMINATORS), GROUPS),
        }
    },
    layouts=layouts,
)


def reverses(options: Config) -> discriminators.Loss:
    """DI's loss, whichever of its two forms the encoders meet."""
    return "grl"


# As in the paper: where features are finished, what the encoder can learn is one layer.
ON_FEATURES: dict[str, Scalar] = {"reversal.strength": 1.0}

METHOD = Method(
    "fdann", "f-DANN", Config, (ALIGN,), PRESETS, on_features=ON_FEATURES, loss=reverses
)
