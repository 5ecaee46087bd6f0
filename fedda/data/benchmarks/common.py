"""What the readers of all benchmarks share: how they are asked, what they give, how they refuse."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

import numpy as np

from fedda.data.folder import listing
from fedda.data.sets import listed
from fedda.errors import ConfigError, DataError

Arrays = dict[str, np.ndarray]
ByClass = dict[str, list[Path]]
TEST_SHARE = 0.2


@dataclass(frozen=True)
class Images:
    """Image files of one domain, by class name."""

    train: ByClass
    test: ByClass

    def __len__(self) -> int:
        return sum(len(files) for half in (self.train, self.test) for files in half.values())


@dataclass(frozen=True)
class Lazy:
    """Arrays of one domain, made when they are written: one domain at a time is in memory.

    With `files` above 0, `make` is given a function to call after each of so many files.
    """

    make: Callable[..., Arrays]
    files: int = 0

    def __len__(self) -> int:
        return self.files or 1

    def __call__(self, step: Callable[[], None]) -> Arrays:
        if self.files:
            return self.make(step)
        arrays = self.make()
        step()
        return arrays


Site = Images | Lazy
Sites = dict[str, Site]


@dataclass(frozen=True)
class Options:
    """How to import. None leaves a choice to the benchmark; one that it does not take is refused.

    Attributes:
        domains: the domains to import; all of them without it.
        seed: of every random draw.
        test_share: how much of a benchmark without a split becomes test data, class by class.
        transductive: every example is in the training and in the test set.
        limit: at most so many training examples per domain, drawn at random.
        test_limit: at most so many test examples per domain.
        files: image files are linked (copied where that is impossible), linked by name, or copied.
        features: keep only the first so many columns.
        angles: degrees, one domain each.
        mels: rows of a spectrogram made from a recording.
        seconds: length that every recording is cut or padded to.
    """

    domains: tuple[str, ...] | None = None
    seed: int = 0
    test_share: float | None = None
    transductive: bool | None = None
    limit: int | None = None
    test_limit: int | None = None
    files: Literal["link", "symlink", "copy"] | None = None
    features: int | None = None
    angles: tuple[int, ...] | None = None
    mels: int | None = None
    seconds: float | None = None

    @property
    def given(self) -> set[str]:
        """The names of the options that were set."""
        named = {f.name for f in fields(self)} - {"seed"}
        return {name for name in named if getattr(self, name) not in (None, False)}


@dataclass(frozen=True)
class Benchmark:
    """One benchmark as its authors publish it.

    Attributes:
        name: what it is called on the command line.
        title: what papers call it.
        domains: each domain with the other names that its folder or files go by.
        classes: the names of the classes, or how many there are if folders name them.
        layout: what a folder must hold, in a line.
        url: where the real files are published.
        used_by: papers on federated or multi-source adaptation with results on it.
        split: which examples are for training and which for testing.
        takes: the options that mean something here.
        read: finds the files and gives one site per domain.
        aliases: other names of classes, as `key` writes them.
        broken: files that the authors' lists name and that are known to be unusable.
    """

    name: str
    title: str
    domains: Mapping[str, tuple[str, ...]]
    classes: int | tuple[str, ...]
    layout: str
    url: str
    used_by: str
    split: str
    takes: frozenset[str]
    read: "Callable[[Request], Sites]"
    aliases: Mapping[str, str] = field(default_factory=dict)
    broken: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Request:
    """One import; readers add `notes` on what a user should know."""

    benchmark: Benchmark
    source: Path
    options: Options
    notes: list[str]

    def __post_init__(self) -> None:
        odd = sorted(self.options.given - self.benchmark.takes)
        if odd:
            raise ConfigError(
                f"{self.benchmark.title} takes no {_flag(odd[0])}: leave it out; it takes "
                f"{listed([_flag(name) for name in sorted(self.benchmark.takes)], 9) or 'none'}"
            )
        share = self.options.test_share
        if share is not None and not 0 < share < 1:
            raise ConfigError(f"--test-share is {share}: give a number between 0 and 1")
        if share is not None and self.options.transductive:
            raise ConfigError("--transductive tests on every example: leave out --test-share")
        unknown = [d for d in self.options.domains or () if d not in self.benchmark.domains]
        if unknown:
            raise ConfigError(
                f"{self.benchmark.title} has no domain {unknown[0]!r}: choose from "
                f"{listed(list(self.benchmark.domains), 12)}"
            )

    @property
    def domains(self) -> dict[str, tuple[str, ...]]:
        """Of the domains wanted, every name as `key` writes it."""
        wanted = self.options.domains or tuple(self.benchmark.domains)
        return {d: tuple(map(key, (d, *self.benchmark.domains[d]))) for d in wanted}

    @property
    def test_share(self) -> float:
        return TEST_SHARE if self.options.test_share is None else self.options.test_share

    def rng(self, domain: str) -> np.random.Generator:
        """Random numbers of one domain, the same whichever others are imported."""
        return np.random.default_rng([self.options.seed, *domain.encode()])

    def wrong(self, found: str) -> DataError:
        """The error for files that are not there: found, needed, and where they are published."""
        return DataError(
            f"{found}; needed for {self.benchmark.title}: {self.benchmark.layout}; the real files "
            f"are published at {self.benchmark.url}"
        )


def key(name: str) -> str:
    """A name without the differences that do not matter: case, spaces, `_`, `-`."""
    return re.sub(r"[^0-9a-z]", "", name.lower())


def levels(top: Path, depth: int = 2, skip: frozenset[Path] = frozenset()) -> Iterator[Path]:
    """`top` and the folders in it, level by level."""
    now = [top]
    for _ in range(depth + 1):
        deeper: list[Path] = []
        for folder in now:
            yield folder
            try:
                deeper += [f for f in listing(folder).folders if f not in skip]
            except DataError:
                if folder == top:
                    raise
        now = deeper


def domain_folders(request: Request) -> dict[str, Path]:
    """The folder of every domain, in SOURCE or up to two levels below it."""
    best: dict[str, Path] = {}
    wanted = request.domains
    for folder in levels(request.source):
        # Every name is looked up, so that a listing is made once per folder.
        inside = {key(f.name): f for f in reversed(_folders(folder))}
        found = {
            d: next(inside[n] for n in names if n in inside)
            for d, names in wanted.items()
            if any(n in inside for n in names)
        }
        if len(found) > len(best):
            best = found
        if len(best) == len(wanted):
            return best
    missing = [d for d in wanted if d not in best]
    there = f"has folders for {listed(list(best))} and " if best else "has "
    raise request.wrong(f"{request.source} {there}no folder for {listed(missing, 12)}")


def _folders(folder: Path) -> list[Path]:
    try:
        return listing(folder).folders
    except DataError:
        return []


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"
