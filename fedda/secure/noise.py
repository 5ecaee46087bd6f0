"""Which settings of a training would not hide single examples, although it adds noise for that."""

from fedda.config import ModelConfig, PrivacyConfig, TrainConfig
from fedda.config.inputs import OWN, REFUSE, Missing
from fedda.errors import ConfigError
from fedda.methods import Method


def is_private(method: Method) -> bool:
    """Whether sources train on nothing but a loss per example, by DP-SGD where a run asks for it.

    BatchNorm mixes the examples of a batch, so a method that adapts such layers is not.
    """
    parts = [
        part
        for phase in method.phases
        for hop in phase.hops.values()
        for name, part in hop.items()
        if name != "target"
    ]
    return all(part.private for part in parts) and not method.batchnorm


def check(
    method: Method,
    privacy: PrivacyConfig,
    model: ModelConfig,
    train: TrainConfig,
    window: str,
    missing: Missing,
) -> None:
    """Refuse settings of a training with which single examples would not be private.

    Raises:
        ConfigError: naming the setting.
    """
    if not privacy.noise:
        return
    asked = f"privacy.noise is {privacy.noise:g}"
    if not is_private(method):
        raise ConfigError(
            f"{asked}, but sources of {method.name} send more than what they train on single "
            "examples; set it to 0, or choose fedavg, fedprox or kd3a. (exchange.noise is for "
            "gradients that are exchanged.)"
        )
    if model.norm != "group":
        raise ConfigError(
            f"{asked}, but model.norm is {model.norm}, which mixes the examples of a batch; "
            "set it to group."
        )
    if window == OWN:
        raise ConfigError(
            f"{asked}, but input.window is own, so that each example changes the scale of all; "
            "leave it empty."
        )
    if missing != REFUSE:
        raise ConfigError(
            f"{asked}, but input.missing is {missing}, so that each example changes what fills the "
            f"gaps of all; set it to {REFUSE}."
        )
    others = {"sampler": "shuffle", "accumulate": 1, "precision": "float32"}
    for key, needed in others.items():
        if (found := getattr(train, key)) != needed:
            raise ConfigError(
                f"{asked}, but train.{key} is {found}; DP-SGD draws and clips single examples "
                f"in full precision, so set it to {needed}."
            )
