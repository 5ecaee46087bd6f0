"""AdaBN: FedAvg with BatchNorm statistics estimated on the target's images, without labels.

Li et al., ICLR workshop 2017, https://arxiv.org/abs/1603.04779

    mean, variance  (d,)  mu^T and (sigma^T)^2 of a layer's d channels over the target's images
                          (`fedda.models.own_statistics`)
    weight, bias    (d,)  gamma and beta, learnt by the sources

Training normalises by each batch's own statistics, so in every round the parameters are FedAvg's to
the last bit: AdaBN's gain over FedAvg comes from the statistics alone.
"""

from collections.abc import Iterable

from fedda.algorithms import fedavg
from fedda.errors import ConfigError
from fedda.methods import Hop, Method, Phase
from fedda.wire import MODEL, SECONDS, STEPS, Part, Rule


class Config(fedavg.Config):
    """FedAvg's setting; the estimate has no settings."""


def check_batchnorm(entries: Iterable[str], model: str) -> None:
    """Check that a model has BatchNorm statistics to adapt.

    Raises:
        ConfigError: the model has no BatchNorm layer.
    """
    if not any(name.endswith("running_mean") for name in entries):
        raise ConfigError(
            f"model.name is {model}, which has no BatchNorm layer, and adabn adapts nothing else; "
            "choose a model with BatchNorm, such as digit-cnn, mlp or resnet18, or another method."
        )


# The second hop of each round, under the mean of the sources' models.
ESTIMATE: Hop = {"target": Part(Rule(MODEL), Rule(MODEL, frozenset({STEPS, SECONDS})))}

METHOD = Method(
    "adabn",
    "AdaBN",
    Config,
    (Phase("train", {"train": fedavg.AVERAGED, "estimate": ESTIMATE}),),
    batchnorm=True,
)
