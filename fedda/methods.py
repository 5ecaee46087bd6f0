"""What a method is: its settings, its phases, and what may cross the wire in each of them.

    Method   a name, settings and phases; `METHOD` of the method's module in fedda/algorithms
    Phase    consecutive rounds that are alike, such as `pretrain`, then `adapt`
    hop      one question of the server to some sites and their answers; a round has one or more
    Part     what a site does in a hop (`fedda.wire`): `source`, `target` or `collaborator`
    Stage    a phase as it falls on the rounds of one training

The server asks in the order of `Phase.hops`. The hop's name is the name of the function that
answers, and the part's name that of its class: `adapt` asked of a `collaborator` is
`Collaborator.adapt` in the method's clients. A site that has no part in a phase is a bystander: it
gets no message.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fedda.config import Scalar, Section
from fedda.errors import ConfigError
from fedda.wire import TEST, Manifest, Part

PartName = Literal["source", "target", "collaborator"]
Hop = Mapping[PartName, Part]
Layouts = Callable[[Any, Manifest], Mapping[str, Manifest]]
Presets = Mapping[str, Mapping[str, Scalar]]


def no_layouts(options: Any, model: Manifest) -> Mapping[str, Manifest]:
    """Of a phase in which only models of the run's own layout cross."""
    return {}


@dataclass(frozen=True)
class Phase:
    """Rounds that are alike.

    Attributes:
        name: unique in the method.
        hops: what the server asks for in a round, by name and in order, and of whom.
        rounds: from the method's settings and the run's rounds, how many of these the phase has;
            None in a method's last phase: all that are left.
        layouts: from the method's settings and the run's model, the layouts of what crosses or is
            summed beside the run's model; arrays are named after one, with `/SITE` behind it if
            there are several.
        test: what the target is sent to test, and the numbers it reports.
        test_layouts: those of the test's arrays, where they differ from `layouts`.
        prepares: whether the phase only makes the model that later phases adapt; a run that starts
            from a finished model leaves it out.
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
        """The hop that a round begins with."""
        return next(iter(self.hops))

    @property
    def parts(self) -> frozenset[str]:
        """Every part that is given to a site in one hop or another."""
        return frozenset(part for hop in self.hops.values() for part in hop)

    @property
    def gradients(self) -> bool:
        """Whether sites sum gradients in mid-round."""
        return any(part.gradients for hop in self.hops.values() for part in hop.values())

    def part(self, hop: str, part: str) -> Part | None:
        """What a site does that is given a part in a hop; None if there is no such part."""
        return self.hops.get(hop, {}).get(part)  # type: ignore[call-overload]


@dataclass(frozen=True)
class Stage:
    """A phase of a training: its rounds are `first` to `last`, both included, counted from 1."""

    phase: Phase
    first: int
    last: int

    def rounds_before(self, server_round: int) -> int:
        """How many rounds of this phase are over when a round begins."""
        return server_round - self.first


@dataclass(frozen=True)
class Method:
    """Everything about a method that is not a formula.

    Attributes:
        name: as `fedda run` takes it; the same in fedda/algorithms, strategies and clients.
        title: as reports show it.
        config: its own settings, under `NAME.` in the run's.
        phases: in the order in which they come.
        presets: settings by the name that `--preset` takes.
        stays: from the settings, whether the adapted model stays at the target.
        extend: adds the method's own layers to a model, from settings that JSON can hold; what it
            adds is built, sent, saved, loaded and exported like the rest.
        extension: from the method's settings, those that `extend` gets for the training's model;
            None leaves that model as it is.
    """

    name: str
    title: str
    config: type[Section]
    phases: tuple[Phase, ...]
    presets: Presets = field(default_factory=dict)
    stays: Callable[[Any], bool] = lambda options: False
    extend: Callable[[Any, Mapping[str, Any]], None] | None = None
    extension: Callable[[Any], Mapping[str, Any] | None] = lambda options: None

    def __post_init__(self) -> None:
        names = [phase.name for phase in self.phases]
        assert names and len(set(names)) == len(names), "phases need names of their own"
        assert all(phase.rounds for phase in self.phases[:-1]), "only the last phase is open-ended"

    @property
    def gradients(self) -> bool:
        """Whether sites sum gradients in mid-round in any phase."""
        return any(phase.gradients for phase in self.phases)

    def phase(self, name: str) -> Phase:
        """The phase of a name.

        Raises:
            ConfigError: there is none.
        """
        for phase in self.phases:
            if phase.name == name:
                return phase
        known = ", ".join(phase.name for phase in self.phases)
        raise ConfigError(f"{self.name} has no phase '{name[:40]}'; it has {known}.")

    def schedule(self, options: Any, rounds: int, prepared: bool = False) -> tuple[Stage, ...]:
        """How the phases fall on the rounds of a training; phases without a round are left out.

        Args:
            options: the method's settings.
            rounds: of the training.
            prepared: the training starts from a finished model.
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
    """A schedule as text, `pretrain 10, adapt 30`; the form that travels."""
    return ", ".join(f"{s.phase.name} {s.last - s.first + 1}" for s in stages)


def read_schedule(method: Method, text: str) -> tuple[Stage, ...]:
    """What `write_schedule` wrote.

    Raises:
        ConfigError: it names a phase that the method does not have, or counts no rounds.
    """
    stages, first = [], 1
    for item in text.split(", ") if text else []:
        name, _, count = item.rpartition(" ")
        if not count.isdecimal() or len(count) > 9 or int(count) < 1:
            raise ConfigError(f"The training's schedule '{text[:80]}' cannot be read.")
        stages.append(Stage(method.phase(name), first, first + int(count) - 1))
        first += int(count)
    return tuple(stages)
