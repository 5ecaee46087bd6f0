"""A site's examples, in two types: `Labelled` for a source, `Unlabelled` for a target.

`Unlabelled` has no field for labels, so no code can read a target's by mistake.

Images are uint8 (N, channels, H, W) and become float32 / 255 per batch; vectors are float32 (N, d).
Those of a large set may stay in a file (`fedda.data.cache`): index them, or go through them by
`split`, since other operations read them all.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import torch
from torch import Tensor

from fedda.config.inputs import REFUSE, Missing
from fedda.data.cache import DIGEST, take_rows
from fedda.data.categories import check_coded, check_listed
from fedda.data.naming import listed, plain
from fedda.data.samples import NEEDS_WINDOW
from fedda.errors import ConfigError, DataError
from fedda.wire import Role

Kind = Literal["image", "vector"]
Progress = Callable[[int, int], None]  # images read so far, images in all
FILLING = "-c input.missing=mean, median or indicator"  # how runs take vectors with gaps
UNEVEN = 10  # the largest class may be so many times the smallest before `check` warns
_SOME = 64  # examples read at a time


@dataclass(frozen=True, eq=False, repr=False)
class Examples:
    """N examples x: uint8 (N, channels, H, W) or float32 (N, d)."""

    x: Tensor

    def __len__(self) -> int:
        return len(self.x)

    def __repr__(self) -> str:
        # Never the values: a repr ends up in logs.
        return f"{type(self).__name__}({len(self)} x {self.shape})"

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one example: (channels, H, W) or (d,)."""
        return tuple(self.x.shape[1:])

    @property
    def kind(self) -> Kind:
        return "image" if self.x.ndim == 4 else "vector"

    def take(self, chosen: Tensor) -> Self:
        """The examples at some indices (n,), in that order."""
        return replace(self, x=take_rows(self.x, chosen))

    def digests(self) -> list[bytes]:
        """A digest of each example, which tells whether two are the same."""
        return [
            hashlib.blake2b(one.tobytes(), digest_size=DIGEST).digest()
            for some in self.x.split(_SOME)  # they may lie in a file
            for one in some.contiguous().numpy()
        ]


AnySet = TypeVar("AnySet", bound=Examples)


@dataclass(frozen=True, eq=False, repr=False)
class Unlabelled(Examples):
    """A target's training set."""


@dataclass(frozen=True, eq=False, repr=False)
class Labelled(Examples):
    """A source's training set, or the test set of any site: y int64 (N,) indexes `classes`."""

    y: Tensor
    classes: tuple[str, ...]

    def take(self, chosen: Tensor) -> Self:
        return replace(self, x=take_rows(self.x, chosen), y=self.y[chosen])

    def digests(self) -> list[bytes]:
        """A digest of each example and its class's name."""
        names = [self.classes[y].encode() for y in self.y.tolist()]
        inputs = super().digests()
        return [
            hashlib.blake2b(one + name, digest_size=DIGEST).digest()
            for one, name in zip(inputs, names, strict=True)
        ]


@dataclass(frozen=True)
class Description:
    """What a site's files hold, as far as can be told without decoding images.

    Attributes:
        path: the folder or .npz file that was read.
        role: the role in which the site would take part.
        kind: "image" or "vector".
        shape: of one training example: (channels, H, W) or (d,); (channels, 0, 0) where the
            images have several sizes, so that a run has to set `input.size`.
        train: number of training examples.
        test: number of labelled test examples; 0 when the site has no test set.
        classes: a source's class names, or those of a target's test set, which only evaluation
            reads; () for a target without one.
        counts: training examples per class of a source; empty for a target.
        warnings: sentences about files that were passed over or look odd.
        gray: what happens to gray of more than 8 bits; empty if there is none.
        needs_window: whether some images cannot be read without `input.window`.
        gaps: how many vectors, of training and test, have missing values.
        empty: the columns of which no training vector has a value.
        columns: names of the columns of vectors, as sites compare them (`naming.brief`); none: the
            file gives none.
        texts: columns of texts with their values, `COLUMN=VALUE|VALUE`; they stay at the site.
    """

    path: Path
    role: Role
    kind: Kind
    shape: tuple[int, ...]
    train: int
    test: int
    classes: tuple[str, ...]
    counts: dict[str, int]
    warnings: tuple[str, ...]
    gray: str = ""
    needs_window: bool = False
    gaps: int = 0
    empty: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()

    @property
    def form(self) -> str:
        """What one training example is, in words."""
        if self.kind == "vector":
            return f"vectors of {self.shape[0]} numbers"
        channels, height, width = self.shape
        size = f"{width} x {height} pixels" if width else "of several sizes (a run sets input.size)"
        return f"{'colour' if channels == 3 else 'grayscale'} images, {size}"

    def check_fit(
        self,
        classes: Sequence[str],
        window: str,
        missing: Missing = REFUSE,
        columns: Sequence[str] = (),
    ) -> None:
        """Check that a run can use the data.

        Args:
            classes: of the run.
            window: its `input.window`.
            missing: its `input.missing`.
            columns: the names of the columns that its model takes.

        Raises:
            DataError: a target's tests are of other classes, images need a window, vectors have
                gaps, or columns have texts that the run does not code.
        """
        check_coded(self.path, self.texts, columns)
        if missing == REFUSE:
            check_listed(self.path, self.texts, columns)
        if self.gaps and missing == REFUSE:
            raise refused_gaps(self.path, self.gaps)
        if self.needs_window and not window:
            raise DataError(f"{self.path} {NEEDS_WINDOW}")
        odd = [name for name in self.classes if name not in classes]
        if self.role == "target" and odd:
            like = {plain(name): name for name in classes}
            near = like.get(plain(odd[0]))
            hint = f"; '{near}' differs from it only in case or spaces" if near else ""
            raise DataError(
                f"{self.path} has labelled tests of the class '{odd[0]}', which is not among the "
                f"run's classes ({listed(classes)}{hint}): rename it, or remove these tests"
            )

    def check_size(self, least: int) -> None:
        """Check that there are images enough to train on.

        Raises:
            DataError: there are fewer.
        """
        if self.train < least:
            lower = ", or lower --min-images" if least > 2 else ""
            raise DataError(
                f"{self.path} has {self.train} training examples, but a site trains on {least} or "
                f"more, as a model reveals too much about a few: add some{lower}"
            )

    def to_json(self) -> dict[str, Any]:
        """The description as plain JSON types."""
        return asdict(self) | {"path": str(self.path)}


def refused_gaps(where: object, rows: int) -> DataError:
    """The error of a run that does not fill gaps, for so many vectors that have some."""
    return DataError(
        f"{where} has missing values (NaN) in {rows} {'row' if rows == 1 else 'rows'}, and "
        f"input.missing is {REFUSE}: fill or remove them, or train with {FILLING}"
    )


def align(labelled: Labelled, classes: Sequence[str]) -> Labelled:
    """Renumber the labels so that they index `classes`, the class names of a run, by name."""
    if labelled.classes == tuple(classes):
        return labelled
    present = labelled.y.unique().tolist()
    unknown = [labelled.classes[i] for i in present if labelled.classes[i] not in classes]
    if unknown:
        raise DataError(
            f"the class {unknown[0]!r} of this site is not among the run's classes "
            f"({listed(classes)}): rename it, or remove its examples"
        )
    index = {name: i for i, name in enumerate(classes)}
    new = torch.tensor([index.get(name, -1) for name in labelled.classes], dtype=torch.int64)
    return replace(labelled, y=new[labelled.y], classes=tuple(classes))


def poison(labelled: Labelled, percent: float, generator: torch.Generator) -> Labelled:
    """Flip exactly round(percent% of N) labels, each to a uniformly drawn other class."""
    if not 0 <= percent <= 100:
        raise ConfigError(f"{percent} percent of labels to flip: give a number from 0 to 100")
    flips = round(len(labelled) * percent / 100)
    if flips == 0:
        return labelled
    n_classes = len(labelled.classes)
    if n_classes < 2:
        raise DataError("labels cannot be flipped with one class only: two are needed")
    chosen = torch.randperm(len(labelled), generator=generator)[:flips]
    shift = torch.randint(1, n_classes, (flips,), generator=generator)  # never 0: always changes
    y = labelled.y.clone()
    y[chosen] = (y[chosen] + shift) % n_classes
    return replace(labelled, y=y)


def odd_classes(counts: Mapping[str, int]) -> list[str]:
    """Warn of a source's classes: absent, one alone, uneven numbers, or names nearly equal."""
    absent = [name for name, count in counts.items() if not count]
    counts = {name: count for name, count in counts.items() if count}
    warnings, seen = [], dict[str, str]()
    if absent:
        warnings.append(f"the training set has no example of the class {listed(absent)}")
    if len(counts) == 1:
        return [*warnings, f"there is one class only: {next(iter(counts))}"]
    for name in counts:
        other = seen.setdefault(plain(name), name)
        if other != name:
            warnings.append(
                f"the classes '{other}' and '{name}' differ only in case or spaces: give both the "
                "same name if they are one class"
            )
    if counts and max(counts.values()) > UNEVEN * min(counts.values()):
        most, least = max(counts, key=counts.__getitem__), min(counts, key=counts.__getitem__)
        warnings.append(
            f"the classes are uneven: '{most}' has {counts[most]} examples and '{least}' "
            f"{counts[least]}; train.sampler=balanced shows the model all classes equally often"
        )
    return warnings
