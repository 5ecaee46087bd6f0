"""What all benchmark readers share: a `Request` in, `Sites` out, and the errors for wrong files."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Literal

import numpy as np

from fedda.data.file_lists import key
from fedda.data.image_folder import listing
from fedda.data.naming import listed
from fedda.errors import ConfigError, DataError
from fedda.results.read import counted

Arrays = dict[str, np.ndarray]
ByClass = dict[str, list[Path]]
TEST_SHARE = 0.2
_PACKED = (".zip", ".tar", ".tar.gz", ".tgz", ".7z", ".rar")


@dataclass(frozen=True)
class ImportedImages:
    """Image files of one domain, by class name."""

    train: ByClass
    test: ByClass

    def __len__(self) -> int:
        return count(self.train) + count(self.test)


@dataclass(frozen=True)
class Lazy:
    """Makes one domain's arrays when they are written, so that memory holds one domain at a time.

    With `files` above 0, `make` takes a function, which it calls after each of that many files.
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


Site = ImportedImages | Lazy
Sites = dict[str, Site]


@dataclass(frozen=True)
class Options:
    """How to import. None leaves it to the benchmark; options that it does not take are refused.

    Attributes:
        domains: the domains to import; None imports all.
        seed: of every random draw.
        test_share: the share of each class that becomes test data, if no split is published.
        transductive: every example is both in the training set and in the test set.
        limit: the most training examples per domain, drawn at random.
        test_limit: the most test examples per domain, drawn at random.
        files: whether image files are hard-linked (copied where that fails), symlinked or copied.
        features: how many columns to keep, counted from the first.
        angles: whole degrees, one domain for each.
        mels: rows of the spectrogram that is made from a recording.
        seconds: the length to which every recording is cut or padded.
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
        name: its name on the command line.
        title: its name in papers.
        domains: each domain, with the other names that its folder or files may have.
        classes: the names of the classes, or how many there are if folders name them.
        layout: what the folder must hold, in one sentence.
        url: where the real files are published.
        used_by: papers on federated or multi-source adaptation that report results on it.
        split: which examples train and which test, in words.
        takes: the names of the options that apply.
        read: finds the files and returns one site per domain.
        aliases: other names of classes, as `key` writes them.
        broken: files in the authors' lists that are known to be unusable.
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
    read: "Callable[[ImportRequest], Sites]"
    aliases: Mapping[str, str] = field(default_factory=dict)
    broken: frozenset[str] = frozenset()


@dataclass(frozen=True)
class ImportRequest:
    """One import; readers add to `notes` what a user should know."""

    benchmark: Benchmark
    source: Path
    options: Options
    notes: list[str]

    def __post_init__(self) -> None:
        refused = sorted(self.options.given - self.benchmark.takes)
        if refused:
            raise ConfigError(
                f"{self.benchmark.title} takes no {_flag(refused[0])}: leave it out; it takes "
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
        """Each requested domain with all its names, as `key` writes them."""
        wanted = self.options.domains or tuple(self.benchmark.domains)
        return {d: tuple(map(key, (d, *self.benchmark.domains[d]))) for d in wanted}

    @property
    def test_share(self) -> float:
        return TEST_SHARE if self.options.test_share is None else self.options.test_share

    def rng(self, domain: str) -> np.random.Generator:
        """Random numbers for one domain, the same whichever other domains are imported."""
        return np.random.default_rng([self.options.seed, *domain.encode()])

    def passed_over(self, where: Path, entries: list[Path], kinds: Collection[str]) -> None:
        """Add a note if files and folders of a domain are left out, as they are of no such kind."""
        if names := listed([entry.relative_to(where).as_posix() for entry in entries], 3):
            self.notes.append(
                f"{where}: {counted(len(entries), 'item')} passed over ({names}): only "
                f"{listed(sorted(kinds), 9)} files in the class folders are read"
            )

    def wrong(self, found: str) -> DataError:
        """The error for missing files: what was found, what is needed and where it is published."""
        files = strays(self, lambda file: file.name) if self.source.is_dir() else [self.source.name]
        if packed := [name for name in files if name.lower().endswith(_PACKED)]:
            found = f"{found} (unpack it first: {listed(packed, 3)})"
        return DataError(
            f"{found}; needed for {self.benchmark.title}: {self.benchmark.layout}; the real files "
            f"are published at {self.benchmark.url}"
        )


def levels(top: Path, depth: int = 2, skip: frozenset[Path] = frozenset()) -> Iterator[Path]:
    """`top` and the folders in it, level by level, down to `depth` levels below it."""
    level = [top]
    for _ in range(depth + 1):
        below: list[Path] = []
        for folder in level:
            yield folder
            try:
                below += [f for f in listing(folder).folders if f not in skip]
            except DataError:
                if folder == top:
                    raise
        level = below


def strays(
    request: ImportRequest,
    named: Callable[[Path], str] = lambda file: file.name.lower(),
    skip: frozenset[Path] = frozenset(),
) -> dict[str, list[Path]]:
    """Files in SOURCE, down to two levels below it, that are no images, by name."""
    found: dict[str, list[Path]] = {}
    for folder in levels(request.source, skip=skip):
        for file in listing(folder).strays:
            found.setdefault(named(file), []).append(file)
    return found


def only(files: Mapping[str, list[Path]], name: str) -> Path | None:
    """The file of a name, if there is one; of several in one folder the first.

    Raises:
        DataError: several folders have one.
    """
    found = files.get(name, [])
    if len(places := dict.fromkeys(str(file.parent) for file in found)) > 1:
        raise DataError(
            f"{found[0].name} is in {len(places)} folders ({listed([*places])}): give one of them, "
            f"or move the others elsewhere"
        )
    return found[0] if found else None


def count(by_class: ByClass) -> int:
    """How many files there are."""
    return sum(map(len, by_class.values()))


def domain_folders(request: ImportRequest) -> dict[str, Path]:
    """The folder of every domain, in SOURCE or up to two levels below it."""
    best: dict[str, Path] = {}
    wanted = request.domains
    for folder in levels(request.source):
        # Names are looked up in a dict, so that each folder is listed once.
        folders = _folders(folder)
        inside = {key(f.name): f for f in reversed(folders)}
        matches = {
            d: next(inside[n] for n in names if n in inside)
            for d, names in wanted.items()
            if any(n in inside for n in names)
        }
        if len(matches) > len(best):
            best = matches
        if len(best) == len(wanted):
            for domain, names in wanted.items():
                alike = [f.name for f in folders if key(f.name) in names]
                if len(alike) > 1:
                    raise DataError(
                        f"{folder} has several folders for {domain} ({listed(alike)}): move all "
                        f"but one of them elsewhere"
                    )
            return best
    missing = [d for d in wanted if d not in best]
    others = f"folders for {listed(list(best))} and " if best else ""
    raise request.wrong(f"{request.source} has {others}no folder for {listed(missing, 12)}")


def _folders(folder: Path) -> list[Path]:
    try:
        return listing(folder).folders
    except DataError:
        return []


def _flag(option: str) -> str:
    return f"--{option.replace('_', '-')}"
