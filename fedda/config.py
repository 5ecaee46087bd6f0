"""What a run may be told: typed, frozen, flat on the wire.

Flower's run configuration is a flat table of text and numbers with dotted keys, so every setting
here is a leaf reached by a dotted kebab-case key: `train.lr-end`, `kd3a.gate.low`. The defaults
stand once more in pyproject.toml, where Flower reads them; a test compares the two.

    RunConfig   everything an operator decides; stays on the server
    Task        the part of it that a site is told with each message
"""

import difflib
import pkgutil
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedda import algorithms
from fedda.errors import ConfigError
from fedda.wire import Manifest

Scalar = bool | int | float | str
Flat = dict[str, Scalar]
S = TypeVar("S", bound=BaseModel)


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

    def told(self) -> Self:
        """What of it a site is told: all, unless a section keeps something at the server."""
        return self


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

    name: Literal[
        "digit-cnn", "lenet", "mlp", "identity", "resnet18", "resnet50", "resnet101", "alexnet"
    ] = Field(default="digit-cnn", description="architecture")
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


def methods() -> list[str]:
    """Names of the methods that are there: one module each in fedda/algorithms."""
    return sorted(m.name for m in pkgutil.iter_modules(algorithms.__path__))


def method_module(method: str) -> Any:
    """The pure maths, `Config`, `CONTRACT` and `PRESETS` of one method."""
    if method not in methods():
        raise ConfigError(f"There is no method '{method}'; choose one of {', '.join(methods())}.")
    return import_module(f"fedda.algorithms.{method}")


def layouts(
    method: str, options: Any, model: Manifest, tested: bool = False
) -> Mapping[str, Manifest]:
    """What else a method sends or sums gradients of, by name, given the run's model.

    Args:
        method: its name.
        options: its settings.
        model: the run's.
        tested: in evaluation requests, not in training.
    """
    hook = "tested_layouts" if tested else "layouts"
    found = getattr(method_module(method), hook, None)
    return {} if found is None else found(options, model)


class Task(Section):
    """What a site is told: enough to do its part of any round, nothing about the server."""

    run: str = Field(default="run", pattern=r"^[\w.-]+$")
    method: str = "kd3a"
    seed: int = Field(default=0, ge=0)
    rounds: int = Field(default=20, ge=1)
    shape: str = Field(
        default="", pattern=r"^(\d{1,7}|\d,\d{1,4},\d{1,4})?$", description="one input: C,H,W or d"
    )
    class_names: str = Field(default="", description="one line per class, in the labels' order")
    sites: int = Field(default=0, ge=0, le=10_000, description="how many take part, all roles")
    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()
    wire: WireConfig = WireConfig()
    options: Any = None

    @property
    def training(self) -> str:
        """What a site calls its own files of this training; it may serve several runs at once."""
        return f"{self.run}.{self.method}-{self.seed}"

    @property
    def names(self) -> tuple[str, ...]:
        """Class names in the order of the labels."""
        return tuple(self.class_names.split("\n")) if self.class_names else ()

    @property
    def classes(self) -> int:
        """How many classes there are."""
        return len(self.names)

    @property
    def dims(self) -> tuple[int, ...]:
        """The shape of one input: (channels, height, width) or (d,)."""
        return tuple(int(n) for n in self.shape.split(","))

    @classmethod
    def parse(cls, flat: Mapping[str, Any]) -> Self:
        """Read what `flat` wrote.

        Raises:
            ConfigError: a key is unknown or a value out of range.
        """
        tree = unflatten(flat)
        options = method_module(str(tree.get("method", ""))).Config
        tree["options"] = validate(options, tree.get("options", {}))
        return validate(cls, tree)


class RunConfig(Section):
    """Everything an operator decides about a run."""

    method: str = Field(default="kd3a", description="the method; `fedda methods` lists them")
    rounds: int = Field(default=20, ge=1, description="communication rounds")
    sources_per_round: int = Field(
        default=0, ge=0, description="so many sources, drawn anew each round; 0: all"
    )
    run: RunSection = RunSection()
    input: InputConfig = InputConfig()
    model: ModelConfig = ModelConfig()
    train: TrainConfig = TrainConfig()
    wire: WireConfig = WireConfig()
    wait: WaitConfig = WaitConfig()
    guard: GuardConfig = GuardConfig()
    exchange: ExchangeConfig = ExchangeConfig()
    track: TrackSection = TrackSection()
    options: dict[str, Any] = Field(default_factory=dict, exclude=True)

    @classmethod
    def parse(cls, flat: Mapping[str, Any]) -> Self:
        """Check a flat table and fill in the defaults.

        Raises:
            ConfigError: a key is unknown, or a value has the wrong type or range.
        """
        tree = unflatten(flat)
        if "options" in tree:  # what the methods' own sections are kept in, and no setting
            raise ConfigError("There is no setting 'options'; see fedda settings.")
        options = {m: validate(method_module(m).Config, tree.pop(m, {}), m) for m in methods()}
        config = validate(cls, tree).model_copy(update={"options": options})
        for method in config.trainings:
            method_module(method)
        config.check()
        return config

    def check(self) -> None:
        """Settings that contradict themselves or each other.

        Raises:
            ConfigError: naming them.
        """
        if len(set(self.seeds)) < len(self.seeds):  # no second training, and a spread of 0
            raise ConfigError(f"run.seeds is '{self.run.seeds}'; name each seed once.")
        if 0 < self.sources_per_round < self.wait.min_sources:
            raise ConfigError(
                f"sources-per-round is {self.sources_per_round}, but wait.min-sources asks for "
                f"{self.wait.min_sources}; lower the one or raise the other."
            )
        few, lazy = self.exchange.min_examples, self.exchange
        if few < FEATURES_HIDE and not lazy.expose_features:
            raise ConfigError(
                f"exchange.min-examples is {few}, but from a gradient over fewer than "
                f"{FEATURES_HIDE} examples their features can be computed (fedda audit gradients "
                "shows it); raise it, or accept that with exchange.expose-features=true."
            )
        batch, p = self.train.batch_size, self.summing.p
        if batch * p < few and any(method_module(m).CONTRACT.gradients for m in self.trainings):
            raise ConfigError(
                f"exchange.p is {p} and train.batch-size {batch}, so a gradient is over "
                f"{batch * p} examples, but exchange.min-examples asks for {few}; raise "
                f"exchange.p to {-(-few // batch)} or train.batch-size to {-(-few // p)}."
            )

    @property
    def summing(self) -> ExchangeConfig:
        """How gradients are summed, with p as it is where it was left open."""
        p = self.exchange.p or steps_per_window(self.exchange.min_examples, self.train.batch_size)
        return self.exchange.model_copy(update={"p": p})

    @property
    def seeds(self) -> list[int]:
        return [int(s) for s in self.run.seeds.split(",")]

    @property
    def trainings(self) -> list[str]:
        """The methods to train, the baseline first."""
        baseline = [self.run.baseline] if self.run.baseline not in ("", self.method) else []
        return [*baseline, self.method]

    def task(
        self, method: str, seed: int, shape: tuple[int, ...], classes: Sequence[str], sites: int
    ) -> Task:
        """What sites are told for one training with the sites that joined."""
        return Task(
            run=self.run.name,
            method=method,
            seed=seed,
            rounds=self.rounds,
            shape=",".join(map(str, shape)),
            class_names="\n".join(classes),
            sites=sites,
            model=self.model,
            train=self.train,
            wire=self.wire,
            options=self.options[method].told(),
        )

    def flat(self) -> Flat:
        """Every setting under its dotted key, the methods' own sections included."""
        own = flatten(self.model_dump(by_alias=True))
        return own | flatten({m: o.model_dump(by_alias=True) for m, o in self.options.items()})


def defaults() -> Flat:
    """Every key there is, with its default: the table `[tool.flwr.app.config]` repeats."""
    return RunConfig.parse({}).flat()


# Where results go and how long the server waits: they change no result.
_FREE = ("run.dir", "run.name", "run.resume", "run.expect", "wait.", "track.")
_FREE += tuple(f"exchange.{name}" for name in ("host", "bind", "port", "join", "wait", "rejoin"))


def lasting(flat: Mapping[str, Any], trained: Sequence[str]) -> Flat:
    """The settings on which the results of these methods depend."""
    others = tuple(f"{method}." for method in methods() if method not in trained)
    return {k: v for k, v in flat.items() if not k.startswith((*_FREE, *others))}


def overrides(method: str, pairs: list[str]) -> Flat:
    """Read `key=value` texts; a method's own keys may leave out its name -> dotted keys.

    Raises:
        ConfigError: a text has no `=`, or the key does not exist (the nearest ones are named).
    """
    known, found = defaults(), {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise ConfigError(f"'{pair}' is not a setting; write it as key=value.")
        full = next((k for k in (key, f"{method}.{key}") if k in known), None)
        if full is None:
            short = [k.removeprefix(f"{method}.") for k in known]
            near = difflib.get_close_matches(key, short, n=3, cutoff=0.5)
            hint = f"; did you mean {' or '.join(near)}?" if near else "; see fedda settings."
            raise ConfigError(f"There is no setting '{key}'{hint}")
        found[full] = _read(full, text, known[full])
    return found


def _read(key: str, text: str, like: Scalar) -> Scalar:
    """Text as the type of the key's default."""
    if isinstance(like, bool):
        if text.lower() not in ("true", "false"):
            raise ConfigError(f"{key} is '{text}', but must be true or false.")
        return text.lower() == "true"
    if isinstance(like, int | float):
        try:
            return type(like)(text)
        except ValueError:
            kind = "a whole number" if isinstance(like, int) else "a number"
            raise ConfigError(f"{key} is '{text}', but must be {kind}.") from None
    return text


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
