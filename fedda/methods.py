"""Describe a method: its settings, its phases, and what may cross the wire in each of them.

    Method   a name, settings and phases; `METHOD` of the method's module in fedda/algorithms
    Phase    consecutive rounds with the same hops, such as `pretrain`, then `adapt`
    hop      a request of the server to some sites and their replies; a round has one or more
    Part     what a site does in a hop (`fedda.wire`): `source`, `target` or `collaborator`
    Stage    a phase with its first and last round in one training

The server sends requests in the order of `Phase.hops`. In the method's client module, the class is
named after the part and its function after the hop: a request `adapt` to a `collaborator` calls
`Collaborator.adapt`. A site that has no part in a phase is a bystander: it gets no message.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import EntryPoint
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal

from fedda.config import MOST_SHRINKING, NEW_LAYERS, ModelConfig, TrainConfig
from fedda.config.sections import Scalar, Section, flatten, unflatten, validate
from fedda.errors import ConfigError
from fedda.wire import TEST, Part
from fedda.wire.packing import Kind, Manifest

if TYPE_CHECKING:  # what describes methods needs no torch
    from torch import Generator, Tensor

PartName = Literal["source", "target", "collaborator"]
Hop = Mapping[PartName, Part]
Layouts = Callable[[Any, Manifest], Mapping[str, Manifest]]
Presets = Mapping[str, Mapping[str, Scalar]]
# A run's settings beside those of its method.
SECTIONS = frozenset(
    {"run", "input", "model", "privacy", "train", "wire", "wait", "guard", "exchange", "track"}
    | {"refine"}
)
MODELS = {Kind.MODEL, Kind.MASKED, Kind.SEALED}
Signature = Callable[["Tensor"], "Tensor"]  # indices of a site's examples -> what they tell (D,)


def no_layouts(options: Any, model: Manifest) -> Mapping[str, Manifest]:
    """No layouts: in the phase only models with the layout of the run's model cross."""
    return {}


@dataclass(frozen=True)
class Phase:
    """Consecutive rounds with the same hops.

    Attributes:
        name: unique in the method.
        hops: the requests of a round, by name and in order; each says which parts receive it.
        rounds: a function of the method's settings and the run's rounds; it returns how many rounds
            the phase has. None in a method's last phase, which has all remaining rounds.
        layouts: a function of the method's settings and the run's model; it returns the layouts of
            all other arrays that cross or are summed, by name. An array is named after its layout;
            if several have the same one, each is named `LAYOUT/SITE`.
        test: the arrays that the target is sent to test, and the numbers it reports.
        test_layouts: like `layouts`, for the arrays of the test; None if they are the same.
        prepares: whether the phase only makes the model that later phases adapt; a run that starts
            from a finished model skips it.
    """

    name: str
    hops: Mapping[str, Hop]
    rounds: Callable[[Any, int], int] | None = None
    layouts: Layouts = no_layouts
    test: Part = TEST
    test_layouts: Layouts | None = None
    prepares: bool = False

    @property
    def first_hop(self) -> str:
        """The first hop of a round."""
        return next(iter(self.hops))

    @property
    def sending_hop(self) -> str:
        """The hop in which sources send their models, hidden or not; empty if there is none."""
        for hop, parts in self.hops.items():
            if "source" in parts and MODELS & set(parts["source"].leaves.arrays.values()):
                return hop
        return ""

    @property
    def parts(self) -> frozenset[str]:
        """All parts of the phase, over its hops."""
        return frozenset(part for hop in self.hops.values() for part in hop)

    @property
    def gradients(self) -> bool:
        """Whether sites sum gradients in mid-round."""
        return any(part.gradients for hop in self.hops.values() for part in hop.values())

    @property
    def tells(self) -> str:
        """What sites of this phase show that those of others do not, in words; or nothing."""
        leaves = (part.leaves.arrays for hop in self.hops.values() for part in hop.values())
        if not any(Kind.ATOMS in arrays.values() for arrays in leaves):
            return ""
        return (
            "each point that a site sends went straight to one example: the server, and from the "
            "mean other sites, can compute features of single ones (SECURITY.md); a site's policy "
            "forbids it by leaving.atoms = false"
        )

    def layouts_for(self, test: bool) -> Layouts:
        """The layouts of what crosses in a hop, or in the target's test."""
        return (self.test_layouts if test else None) or self.layouts

    def part(self, hop: str, part: str) -> Part | None:
        """The rules of a part in a hop; None if the hop does not have this part."""
        return self.hops.get(hop, {}).get(part)  # type: ignore[call-overload]


@dataclass(frozen=True)
class Stage:
    """A phase of a training: its rounds are `first` to `last`, both included, counted from 1."""

    phase: Phase
    first: int
    last: int

    def rounds_before(self, server_round: int) -> int:
        """How many rounds of this phase are finished when a round begins."""
        return server_round - self.first


@dataclass(frozen=True)
class Extent:
    """What decides how many windows of gradients a training sums, if no round is repeated.

    Attributes:
        p: steps of a window.
        steps: of a round, at the site with the most examples.
        rounds: of each phase in which sites sum gradients, by name.
        sources: number of sources.
        sites: number of sites, of all roles.
    """

    p: int
    steps: int
    rounds: Mapping[str, int]
    sources: int
    sites: int

    @property
    def all_rounds(self) -> int:
        """The rounds of all these phases, at least 1."""
        return max(1, sum(self.rounds.values()))


def whole_windows(options: Any, about: Extent) -> int:
    """The windows of a site whose rounds are whole windows, one group or a group per source."""
    pairs = max(1, about.sources) if getattr(options, "pairs", False) else 1
    critic = getattr(options, "critic_steps", 1)
    return about.all_rounds * math.ceil(about.steps / about.p) * pairs * critic


@dataclass(frozen=True)
class Method:
    """Everything about a method except its formulas and its code on server and sites.

    Attributes:
        name: the name that `fedda run` takes, and the name of its files in fedda/algorithms,
            strategies and clients.
        title: the name that reports show.
        config: the class of its settings, which have keys `NAME.*` in the run's settings.
        phases: its phases, in order.
        presets: its presets, by the name that `--preset` takes; keys are the method's own, or
            those of a section that all methods share, such as `train.lr`.
        on_features: the method's own settings where most of the network gives finished features:
            what it adds to the presets `photos`, `vectors` and `table`.
        stays: a function of the settings: whether the adapted model stays at the target.
        sums: a function of the settings: whether a training sums gradients, if a phase can.
        extend: adds the method's layers to a model, given settings that JSON can hold. The added
            layers are sent, saved, loaded and exported like all others.
        extension: a function of the method's settings; it returns the settings that `extend` gets
            for the training's model, or None to leave that model as it is.
        chain: None if the trainings of one seed are independent of each other. Otherwise each of
            them also has the sites and models of the targets before it, and the function of the
            settings returns the targets' names in order; if it returns none, all are adapted to.
        batchnorm: whether all that it adapts are BatchNorm layers, so that it needs a network with
            some.
        open: a function of the settings: whether a chain goes on with targets that join later.
        loss: a function of the settings: the loss of the discriminator of which sites sum gradients
            (`fedda.adversarial.discriminators.HALVES`); its network is the setting `discriminator`.
            None if the method has no discriminator. `fedda audit` attacks its gradients.
        windows: a function of the settings and of what decides it: the most windows of gradients
            that a site sends in a training, on which epsilon depends.
        vote: a function of the settings and of p (N, K, C), the sources' predictions for a target's
            images: the numbers (D,) that the target's reply tells of them, which `fedda audit`
            attacks. None if it tells none.
        coordinates: a function of the settings, a site's features (N, d), the atoms' z (K, n, d)
            and y (K, n, C), and a generator: where the site comes to lie among the atoms, as a
            function from indices of features to (K,), which `fedda audit` attacks. None if the
            method has no atoms.
    """

    name: str
    title: str
    config: type[Section]
    phases: tuple[Phase, ...]
    presets: Presets = field(default_factory=dict)
    on_features: Mapping[str, Scalar] = field(default_factory=dict, kw_only=True)
    stays: Callable[[Any], bool] = lambda options: False
    sums: Callable[[Any], bool] = lambda options: True
    extend: Callable[[Any, Mapping[str, Any]], None] | None = None
    extension: Callable[[Any], Mapping[str, Any] | None] = lambda options: None
    chain: Callable[[Any], Sequence[str]] | None = None
    batchnorm: bool = False
    open: Callable[[Any], bool] = lambda options: False
    loss: Callable[[Any], str] | None = None
    windows: Callable[[Any, Extent], int] = whole_windows
    vote: Callable[[Any, "Tensor"], "Tensor"] | None = None
    coordinates: "Callable[[Any, Tensor, Tensor, Tensor, Generator], Signature] | None" = None

    def __post_init__(self) -> None:
        assert isinstance(self.phases, tuple), "phases must be a tuple of Phase"
        assert all(isinstance(phase, Phase) for phase in self.phases), "each phase must be a Phase"
        assert self.phases, "a method needs a phase"
        assert isinstance(self.presets, Mapping), "presets must be a dict of settings by name"
        assert isinstance(self.on_features, Mapping), "on_features must be a dict of settings"
        names = [phase.name for phase in self.phases]
        assert len(set(names)) == len(names), "phases need names of their own"
        assert all(phase.rounds for phase in self.phases[:-1]), "only the last phase is open-ended"
        assert not self.phases[-1].prepares, "the last phase is what the others prepare a model for"

    @property
    def gradients(self) -> bool:
        """Whether sites sum gradients in mid-round in any phase."""
        return any(phase.gradients for phase in self.phases)

    @property
    def adapts(self) -> bool:
        """Whether the target computes anything with its training images, in any phase."""
        return any("target" in phase.parts for phase in self.phases)

    def check_steps(self, options: Any, model: ModelConfig, train: TrainConfig) -> None:
        """Refuse settings whose steps wipe the model.

        What a site sends would then be its last steps' gradients alone, which show what these steps
        were over.

        Raises:
            ConfigError: naming the settings.
        """
        rate = max(train.lr, train.lr_end) * max(1.0, getattr(options, "target_pace", 1.0))
        if model.weights != "none" and model.train != "bottleneck":
            rate *= NEW_LAYERS
        back = float(getattr(options, "pull", 0.0))  # to the weights that were sent
        pulls = {"train.weight-decay": train.weight_decay, f"{self.name}.mu": back}
        for key, pull in pulls.items():
            if (shrinks := rate * pull) > MOST_SHRINKING * (1 + 1e-9):
                raise ConfigError(
                    f"{key} is {pull:g} and the largest learning rate {rate:g}, so a step would "
                    f"take away {shrinks:.3g} of each weight, and a model would show its last "
                    f"steps' images; lower one of them until the product is {MOST_SHRINKING}."
                )

    def check_encoder(self, options: Any, model: ModelConfig) -> None:
        """Refuse a network without an encoder where sites are to align what the encoder gives.

        Raises:
            ConfigError: there is nothing to align.
        """
        adapts = self.gradients and self.sums(options)
        if adapts and model.name == "identity" and not (model.hidden or model.bottleneck):
            raise ConfigError(
                f"model.name is identity, so there is no encoder, but {self.name} adapts one; set "
                "model.bottleneck or model.hidden."
            )

    def phase(self, name: str) -> Phase:
        """Return the phase with a name.

        Raises:
            ConfigError: the method has no phase with this name.
        """
        for phase in self.phases:
            if phase.name == name:
                return phase
        known = ", ".join(phase.name for phase in self.phases)
        raise ConfigError(f"{self.name} has no phase '{name[:40]}'; it has {known}.")

    def schedule(self, options: Any, rounds: int, prepared: bool = False) -> tuple[Stage, ...]:
        """Give each phase its rounds of a training; phases without rounds are left out.

        Args:
            options: the method's settings.
            rounds: number of rounds of the training.
            prepared: whether the training starts from a finished model.
        """
        stages, first = [], 1
        for phase in self.phases:
            left = rounds - first + 1
            wanted = left if phase.rounds is None else phase.rounds(options, rounds)
            count = 0 if phase.prepares and prepared else max(0, min(wanted, left))
            if count:
                stages.append(Stage(phase, first, first + count - 1))
                first += count
        return tuple(stages)


def write_schedule(stages: Sequence[Stage]) -> str:
    """Write a schedule as the text that is sent to sites, such as `pretrain 10, adapt 30`."""
    return ", ".join(f"{s.phase.name} {s.last - s.first + 1}" for s in stages)


def read_schedule(method: Method, text: str) -> tuple[Stage, ...]:
    """Read what `write_schedule` wrote.

    Raises:
        ConfigError: the text names a phase that the method does not have, or lacks a number of
            rounds.
    """
    stages, first = [], 1
    for item in text.split(", ") if text else []:
        name, _, count = item.rpartition(" ")
        if not count.isdecimal() or len(count) > 9 or int(count) < 1:
            raise ConfigError(f"The training's schedule '{text[:80]}' cannot be read.")
        stages.append(Stage(method.phase(name), first, first + int(count) - 1))
        first += int(count)
    return tuple(stages)


def check_added(package: Any, point: EntryPoint) -> None:
    """Check the `METHOD` of another package, whose settings every run holds.

    Args:
        package: what its entry point names.
        point: that entry point, whose name is the method's.

    Raises:
        ConfigError: there is none, or something about it is not as it must be.
    """
    if not isinstance(package, ModuleType) or not hasattr(package, "__path__"):
        raise ConfigError(f"{point.value} is not a package with a module 'algorithm'.")
    module = f"{package.__name__}.algorithm"
    if find_spec(module) is None:
        raise ConfigError(f"{package.__name__} has no module 'algorithm'.")
    made = getattr(import_module(module), "METHOD", None)
    if not isinstance(made, Method):
        raise ConfigError(f"{module} has no METHOD, a fedda.methods.Method.")
    if made.name != point.name:
        raise ConfigError(f"the METHOD of {module} is named '{made.name}'.")
    if not isinstance(made.title, str):
        raise ConfigError(f"its title is {made.title!r}; it must be a text.")
    if not (isinstance(made.config, type) and issubclass(made.config, Section)):
        raise ConfigError("its config is not a class derived from fedda.config.sections.Section.")
    defaults = flatten(validate(made.config, {}, made.name).model_dump(by_alias=True))
    odd = [key for key, value in defaults.items() if not isinstance(value, Scalar)]
    if odd:
        raise ConfigError(f"the default of '{odd[0]}' is not a text, number or truth value.")
    for preset in made.presets.values():
        own = {k: v for k, v in preset.items() if k.partition(".")[0] not in SECTIONS}
        validate(made.config, unflatten(own), made.name)
    validate(made.config, unflatten(made.on_features), made.name)
