"""What can be set: typed, frozen, flat on the wire.

Flower's run configuration is a flat table of text and numbers with dotted keys, so every setting
is a leaf reached by a dotted kebab-case key: `train.lr-end`, `kd3a.gate.low`. Here are the sections
that all methods share; a method's own is its `Config`, and `fedda.settings` puts them together.
"""

from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedda.errors import ConfigError

Scalar = bool | int | float | str
Flat = dict[str, Scalar]
S = TypeVar("S", bound=BaseModel)

# Networks that fedda brings; other packages may add some (`fedda.plugins`).
NETWORKS = ("digit-cnn", "lenet", "mlp", "identity", "resnet18", "resnet50", "resnet101", "alexnet")


class Section(BaseModel):
    """A frozen group of settings; unknown keys are refused."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=lambda name: name.replace("_", "-"),
        populate_by_name=True,
        allow_inf_nan=False,
    )

    def flat(self) -> Flat:
        """Every setting under its dotted key."""
        return flatten(self.model_dump(by_alias=True))


class InputConfig(Section):
    """The shape all sites' images are brought to; 0 keeps what the sites have."""

    channels: Literal[0, 1, 3] = Field(
        default=0, description="1 for grayscale, 3 for RGB, 0 as the data"
    )
    size: int = Field(
        default=0, ge=0, le=4096, description="height and width in pixels, 0 as the data"
    )


class ModelConfig(Section):
    """Which network, and where its weights come from."""

    name: str = Field(
        default="digit-cnn",
        pattern=r"^[\w.:-]{1,100}$",
        description=f"architecture: {', '.join(NETWORKS)}, or one that an installed package adds",
    )
    sizes: str = Field(default="", description="hidden layers of the mlp, for example 1000,500,100")
    weights: str = Field(
        default="none", description="none, a torchvision name, or a local weights file"
    )


class TrainConfig(Section):
    """Local training at every site."""

    batch_size: int = Field(default=50, ge=2, description="images per step")
    rounds_per_epoch: float = Field(
        default=1.0,
        ge=0.01,
        le=1000,
        description="below 1: several epochs a round; above: part of one",
    )
    optimizer: Literal["sgd", "adam"] = Field(
        default="sgd", description="sgd as in the papers, or adam"
    )
    lr: float = Field(default=0.05, gt=0, description="learning rate of the first round")
    lr_end: float = Field(default=0.001, ge=0, description="learning rate of the last round")
    schedule: Literal["cosine", "linear", "constant"] = Field(
        default="cosine", description="how the learning rate goes from lr to lr-end over the rounds"
    )
    momentum: float = Field(default=0.9, ge=0, lt=1, description="of sgd")
    carry_momentum: bool = Field(
        default=False, description="keep the optimizer's state from round to round, at the site"
    )
    weight_decay: float = Field(default=0.0, ge=0, description="L2 penalty of the optimizer")


class WireConfig(Section):
    """How models travel."""

    dtype: Literal["float32", "float16"] = Field(
        default="float32", description="of values on the wire"
    )


class WaitConfig(Section):
    """How long the server waits, in seconds, and for whom."""

    min_sources: int = Field(
        default=1, ge=1, description="fewer sources than this do not make a round"
    )
    sites: float = Field(
        default=120.0, gt=0, description="for the sites to join, at the start or again"
    )
    settle: float = Field(default=1.0, ge=0, description="for more sites, once enough have joined")
    train: float = Field(default=3600.0, gt=0, description="for a reply to a training request")
    evaluate: float = Field(default=600.0, gt=0, description="for a reply to an evaluation request")

    tries: int = Field(default=3, ge=1, description="of a round that does not come about")


class GuardConfig(Section):
    """What a site's reply may look like before it is refused."""

    max_change: float = Field(
        default=5.0,
        ge=0,
        description="largest change of a model, in norms of the model sent; 0: any",
    )
    max_statistics: float = Field(
        default=1e6,
        ge=0,
        description="growth of BatchNorm's running statistics in a round; 0: any",
    )
    max_examples: float = Field(
        default=5.0,
        ge=0,
        description="a site counts at most so many times the sources' median; 0: any",
    )


FEATURES_HIDE = 256  # a gradient summed over fewer examples gives their features away


def steps_per_window(examples: int, batch: int) -> int:
    """Steps of a batch each after which a gradient is over so many examples -> p."""
    return -(-examples // batch)


class LazyConfig(Section):
    """How often discriminator gradients are exchanged, and over what; sites are told."""

    p: int = Field(
        default=0, ge=0, description="steps per exchange; 0: as few as exchange.min-examples takes"
    )
    overlap: bool = Field(
        default=False, description="compute the next steps while a sum travels: staler by p steps"
    )
    min_examples: int = Field(
        default=FEATURES_HIDE, ge=1, description="a gradient leaves only summed over so many"
    )
    expose_features: bool = Field(
        default=False,
        description="allow exchange.min-examples below 256, from where features can be computed",
    )
    clip: float = Field(default=10.0, gt=0, description="largest norm of a site's mean gradient")
    noise: float = Field(
        default=0.0, ge=0, description="Gaussian noise on it, in multiples of exchange.clip"
    )


class ExchangeConfig(LazyConfig):
    """The server of the exchange, too."""

    host: str = Field(default="", description="name that sites reach it by; empty: the SuperLink's")
    bind: str = Field(default="", description="its address on the server; empty: the SuperLink's")
    port: int = Field(
        default=0, ge=0, le=65535, description="0: as fedda superlink says, or any that is free"
    )
    join: float = Field(default=60.0, gt=0, description="seconds for all to connect")
    wait: float = Field(default=120.0, gt=0, description="seconds for the last one's gradient")
    rejoin: float = Field(
        default=30.0, ge=0, description="seconds for one that lost its connection; 0: none"
    )

    @property
    def lazy(self) -> LazyConfig:
        """The part that sites are told."""
        return LazyConfig.model_validate(self.model_dump(include=set(LazyConfig.model_fields)))


class RunSection(Section):
    """The run as a whole; never sent to a site."""

    name: str = Field(
        default="run", pattern=r"^[\w-][\w.-]*$", description="results go to DIR/NAME"
    )
    dir: str = Field(default="runs", description="folder of all runs, on the server")
    seeds: str = Field(
        default="0", pattern=r"^\d+(,\d+)*$", description="one training per seed: 0,1,2"
    )
    start_from: str = Field(
        default="",
        description="a finished run's folder, or a model file, whose model to start from; phases "
        "that only prepare a model are left out",
    )
    target: str = Field(
        default="",
        description="name of the target to adapt to; empty: each that has joined, in turn",
    )
    baseline: str = Field(
        default="", description="a method to run beside it on the same seeds: fedavg"
    )
    resume: bool = Field(default=False, description="go on with the run that DIR/NAME holds")
    expect: int = Field(
        default=0, ge=0, description="wait for this many sites, 0: the least a run needs"
    )
    evaluate: bool = Field(
        default=True, description="let the target test each round, if it has labels"
    )


class TrackSection(Section):
    """Where a run's curves are shown besides its results; the server's alone, like the run's."""

    tensorboard: bool = Field(
        default=True, description="curves for TensorBoard in each training's folder"
    )
    mlflow: str = Field(
        default="",
        description="MLflow: a server's address, or a folder, within run.dir unless absolute; "
        "needs fedda[mlflow]",
    )
    experiment: str = Field(
        default="fedda", min_length=1, description="MLflow's experiment, made if need be"
    )


def is_site_name(name: str) -> bool:
    """Whether a name can be a part of array names, file names and one-line messages."""
    plain = name.isprintable() and "/" not in name and not name.startswith(".")
    return plain and 1 <= len(name) <= 64


def validate(section: type[S], tree: Any, prefix: str = "") -> S:
    """Build a section, turning pydantic's report into one sentence."""
    try:
        return section.model_validate(tree)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join([prefix, *map(str, first["loc"])]).lstrip(".")
        if first["type"] == "extra_forbidden":
            raise ConfigError(f"There is no setting '{key}'; see fedda settings.") from None
        raise ConfigError(
            f"{key} is {first['input']!r}, which cannot be: {first['msg']}."
        ) from None


def flatten(tree: Mapping[str, Any], prefix: str = "") -> Flat:
    """Nested tables -> one table with dotted keys."""
    flat: Flat = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def unflatten(flat: Mapping[str, Any]) -> dict[str, Any]:
    """One table with dotted keys -> nested tables."""
    tree: dict[str, Any] = {}
    for key, value in flat.items():
        *path, leaf = key.split(".")
        node = tree
        for part in path:
            node = node.setdefault(part, {})
            if not isinstance(node, dict):
                raise ConfigError(f"'{key}' is given beside a value for '{part}' itself.")
        if leaf in node:
            raise ConfigError(f"'{key}' is given beside values for keys below it.")
        node[leaf] = value
    return tree
