"""A few labels at a target: which images to label, and what they say of models.

    n       images, drawn at random from the target's training images without replacement
    right   how many of them a model gives the class that somebody gave them
    look    a count of the times that the labels were used so far: 1, 2, ..

Fifty random labels say more of an accuracy than anything without them. The interval is exact
for n labels (Clopper and Pearson, Biometrika 1934). Who labels some, looks, and labels more, takes
the best of several chances: the j-th look has an error of ERROR / (j (j + 1)), so that all looks
together have ERROR at most.
"""

import csv
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from scipy.stats import beta, binomtest

from fedda.data import columns
from fedda.errors import DataError, reason
from fedda.files import encoding, put
from fedda.train import generator

if TYPE_CHECKING:
    from fedda.data import Reading

ERROR = 0.05
ABOUT, LABELS = "about.json", "labels.csv"


@dataclass(frozen=True)
class Interval:
    """An accuracy, with the interval that holds it at a look's error."""

    right: int
    n: int
    low: float
    high: float

    @property
    def accuracy(self) -> float:
        return self.right / self.n

    def doubt(self, classes: int) -> str:
        """What is told where so many labels do not show more than chance; else nothing."""
        told = f"these labels do not show that it is better than guessing among {classes} classes"
        return told if self.low <= 1 / classes else ""


def error_of(look: int) -> float:
    """The error of one look; those of all looks sum to ERROR."""
    return ERROR / (look * (look + 1))


def interval(right: int, n: int, look: int = 0) -> Interval:
    """Clopper's and Pearson's interval, with look 0 at ERROR itself, for an n fixed before."""
    tail = (error_of(look) if look else ERROR) / 2
    low = float(beta.ppf(tail, right, n - right + 1)) if right else 0.0
    high = float(beta.ppf(1 - tail, right + 1, n - right)) if right < n else 1.0
    return Interval(right, n, low, high)


def differ(first: Sequence[bool], second: Sequence[bool]) -> float:
    """McNemar's exact test of two models' answers to the same images -> p of no difference."""
    won = sum(a and not b for a, b in zip(first, second, strict=True))
    lost = sum(b and not a for a, b in zip(first, second, strict=True))
    return float(binomtest(won, won + lost).pvalue) if won + lost else 1.0


@dataclass(frozen=True)
class Drawn:
    """Which images of a target are labelled."""

    seed: int  # of the draw
    total: int  # how many images the target has
    data: str  # a digest of them all, so that labels are not used with others
    images: tuple[int, ...]  # their indices, in random order
    looks: int = 0  # how often the labels were used

    @classmethod
    def of(cls, digests: Sequence[bytes], n: int, seed: int) -> "Drawn":
        """Draw n of a target's images.

        Raises:
            DataError: there are fewer.
        """
        if n > len(digests):
            raise DataError(
                f"--n is {n}, but the target has {len(digests)} images; give {len(digests)} or "
                "less."
            )
        import torch

        order = torch.randperm(len(digests), generator=generator("label", seed))[:n].tolist()
        return cls(seed, len(digests), digest(digests), tuple(order))

    def check(self, digests: Sequence[bytes]) -> None:
        """Check that these are the images that were drawn from.

        Raises:
            DataError: they are others.
        """
        if digest(digests) != self.data:
            raise DataError(
                f"The labels are for {self.total} images that are not these {len(digests)} read as "
                "now; give what they were drawn from, with the same --id, --columns and --split, "
                "or draw again."
            )

    def write(self, folder: Path) -> None:
        """Write it into a folder."""
        put(folder / ABOUT, json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> "Drawn":
        """Read what `write` wrote.

        Raises:
            DataError: it is not there, or damaged.
        """
        try:
            held = json.loads((folder / ABOUT).read_text())
            images = tuple(int(i) for i in held.pop("images"))
            return cls(images=images, **held)
        except (OSError, ValueError, TypeError, LookupError, AttributeError) as error:
            raise DataError(
                f"{folder} holds no images that fedda label has drawn ({reason(error)}); give "
                "its --out."
            ) from None


@dataclass(frozen=True)
class Labels:
    """What somebody has answered so far."""

    drawn: Drawn  # which images were to be labelled
    rows: Sequence[Mapping[str, str]]  # of labels.csv
    folder: Path  # where both are

    @classmethod
    def read(cls, folder: Path, digests: Sequence[bytes]) -> "Labels":
        """Read a folder's labels; reading them is a look.

        Args:
            folder: what `fedda label` has written, with labels filled in.
            digests: of each image of the target.

        Raises:
            DataError: there are none, or they are for other images.
        """
        drawn = Drawn.read(folder)
        drawn.check(digests)
        file = folder / LABELS
        try:
            with file.open(newline="", encoding=encoding(file)) as lines:
                rows = list(csv.DictReader(lines, delimiter=columns.delimiter(lines)))
        except (OSError, UnicodeError, csv.Error) as error:
            raise DataError(f"{file} cannot be read ({reason(error)}).") from None
        return cls(replace(drawn, looks=drawn.looks + 1), as_drawn(rows, len(drawn.images)), folder)

    def classes(self, names: Sequence[str]) -> list[int]:
        """The answers as a model's classes, see `answered`."""
        return answered(self.rows, len(self.drawn.images), names)

    def looked(self) -> None:
        """Count the look, when there was something to see."""
        self.drawn.write(self.folder)


def digest(digests: Sequence[bytes]) -> str:
    """One digest of all."""
    return hashlib.sha256(b"".join(digests)).hexdigest()


def widths(counts: Sequence[int], accuracy: float = 0.8) -> Mapping[int, float]:
    """How wide an interval of so many labels is, at an accuracy, by their number."""
    made = {n: interval(round(accuracy * n), n) for n in counts}
    return {n: i.high - i.low for n, i in made.items()}


def as_drawn(rows: Sequence[Mapping[str, str]], n: int) -> list[Mapping[str, str]]:
    """Rows by the numbers of their images, as somebody may have sorted or removed some."""
    numbers = [re.match(r"\d+", row.get("image") or "") for row in rows]
    by = {int(number[0]): row for number, row in zip(numbers, rows, strict=True) if number}
    return [by.get(i, {}) for i in range(1, n + 1)] if by else list(rows)


def answered(rows: Sequence[Mapping[str, str]], n: int, classes: Sequence[str]) -> list[int]:
    """The classes that somebody gave to the first images.

    The images are in random order, so the first ones are a random sample, too.

    Args:
        rows: of labels.csv.
        n: how many images were drawn.
        classes: the model's, by name.

    Raises:
        DataError: there are no answers, one is no class, or an image before others has none.
    """
    known = {name.strip().casefold(): i for i, name in enumerate(classes)}
    found: list[int] = []
    answers = [(row.get("label") or "").strip().lstrip("'").casefold() for row in rows[:n]]
    while answers and not answers[-1]:
        answers.pop()
    for number, said in enumerate(answers, start=1):
        if not said:
            raise DataError(
                f"{LABELS} has no label in row {number}, and some below: label all images from the "
                "top, as those that were easy are no random sample."
            )
        if said not in known:
            raise DataError(
                f"{LABELS} has the label '{said[:40]}' in row {number}, which is no class of the "
                f"model; its classes are {', '.join(classes[:20])}."
            )
        found.append(known[said])
    if not found:
        raise DataError(
            f"{LABELS} has no label in its first row; fill in the column `label`, from the top."
        )
    return found


def right(path: Path, target: Path, labels: Labels, reading: "Reading") -> list[bool]:
    """Which labelled images a model gives the class that somebody gave them."""
    from fedda import models  # torch takes seconds to import
    from fedda.data import load_target

    network, meta = models.load(path)
    y, drawn = labels.classes(meta.classes), labels.drawn
    x = load_target(target, **reading.form(meta.inputs)).x
    answers = models.predict(network, x[list(drawn.images[: len(y)])]).argmax(dim=1).tolist()
    return [a == b for a, b in zip(answers, y, strict=True)]
