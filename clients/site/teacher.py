"""A teacher that a target already has: class probabilities of its images, from a file of its own.

    NAME.csv            a table as `fedda predict` writes it: file, p_CLASS...
    NAME.npz            arrays `p` (N, C), `classes` (C,) and, but for rows of arrays, `names` (N,)
    NAME.safetensors    a model of fedda's, of any network; or .onnx that `fedda export` wrote

An old model of the clinic, or a network that knows pictures and words. It is one more voice in
KD3A's vote and in Co-MDA's consensus, a prior of SHOT's and DECISION's first labels, and a member
of what the last step refines and of what models are compared with. It never leaves the site, and no
number is about it alone.
"""

import logging
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from fedda import data
from fedda.data import probabilities
from fedda.data.naming import listed
from fedda.data.probabilities import Rows
from fedda.errors import ConfigError, DataError, FeddaError
from fedda.models.answers import EXPORTED, answers

logger = logging.getLogger("fedda.site")

MODELS = (".safetensors", *EXPORTED)
BATCH = 256
SUM = 0.01  # how far from 1 the probabilities of one image may sum
RELATED = 0.1  # Cohen's kappa of a teacher's and a model's answers, below which they seem unrelated


class Teacher:
    """The site's own teacher, if it has one.

    Args:
        file: where its answers are, or itself; None if the site has none.
        path: the site's data.
        reading: what the site says of its files.
        device: on which a model computes.
    """

    def __init__(
        self, file: Path | None, path: Path, reading: data.Reading, device: torch.device
    ) -> None:
        self._file, self._path, self._reading, self._device = file, path, reading, device
        self._known: tuple[tuple[str, ...], Tensor] | None = None
        self._refused = ""

    def answers(self, classes: Sequence[str], chosen: Tensor, count: int) -> Tensor | None:
        """What it says of the site's images -> (N, C) float32 on the CPU; None if it has no say.

        A teacher that does not fit the run is named in the site's log, and the run goes on.

        Args:
            classes: of the run, in its order.
            chosen: (N,) indices of the images among all that the target has.
            count: how many the target has.
        """
        if self._file is None:
            return None
        try:
            own, p = self.check(classes)
            if len(p) != count:
                raise DataError(
                    f"the teacher was asked about {len(p)} examples, and the site has {count} "
                    "now: start the client anew"
                )
        except FeddaError as error:
            if str(error) != self._refused:  # once, though every round asks
                logger.error("the teacher is not heard: %s", error)
                self._refused = str(error)
            return None
        return p[chosen][:, [own.index(name) for name in classes]]

    def forget(self) -> None:
        """Ask anew, of data that have changed."""
        self._known = None

    def check(self, classes: Sequence[str] = ()) -> tuple[tuple[str, ...], Tensor]:
        """Its classes, and (N, C) what it says of all that the target has, in their order.

        Args:
            classes: of the run; none: not known yet.

        Raises:
            DataError: the file cannot be used, says nothing of some examples, or has other classes.
            ModelError: the model cannot be read.
        """
        assert self._file is not None
        if self._known is None:
            names = data.names(self._path, self._reading)
            its, rows = self._rows(names)
            keys = [*map(probabilities.key, names)]
            if missing := [key for key in keys if key not in rows]:
                raise DataError(
                    f"{self._file} says nothing of {len(missing)} of the {len(keys)} examples "
                    f"({listed(missing)}): write it for this site's data, as `fedda predict "
                    "MODEL DATA --out FILE.csv` does"
                )
            self._known = its, _checked(torch.stack([rows[k] for k in keys]), self._file, keys)
        if classes and sorted(self._known[0]) != sorted(classes):
            raise DataError(
                f"{self._file} knows the classes {listed(self._known[0])}, and the run has "
                f"{listed(classes)}: give a teacher of the same classes"
            )
        return self._known

    def _rows(self, names: Sequence[str]) -> Rows:
        file = self._file
        assert file is not None
        ending = file.suffix.lower()
        if ending in MODELS:
            classes, found = answers(file, self._path, BATCH, self._device, self._reading)
            return classes, {
                probabilities.key(name): p
                for some in found
                for name, p in zip(some.names, some.p, strict=True)
            }
        if ending not in probabilities.READERS:
            raise DataError(
                f"{file} is no teacher: give class probabilities (.csv, .npz) or a model "
                f"({', '.join(MODELS)})"
            )
        try:
            return probabilities.READERS[ending](file, names)
        except Exception as error:  # the libraries raise errors of many kinds for damaged files
            raise DataError(
                f"{file} cannot be read as class probabilities ({error}): give a table with the "
                "columns file and p_CLASS for each class, as `fedda predict` writes it, or an .npz "
                "file with p, classes and names"
            ) from error


@cache
def shared(file: Path | None, path: Path, reading: data.Reading, device: torch.device) -> Teacher:
    """The one that all of a process asks, so that what was read before the site joined is kept."""
    return Teacher(file, path, reading, device)


def checked(
    file: Path,
    role: str,
    path: Path,
    reading: data.Reading,
    device: torch.device,
    classes: Sequence[str] = (),
) -> str:
    """Check a site's teacher before the site joins -> what it knows, in words.

    Args:
        file: the teacher.
        role: of the site.
        path: the site's data.
        reading: what the site says of its files.
        device: on which a model computes.
        classes: of the run, where they are known before.

    Raises:
        ConfigError: the site is no target.
        DataError: it cannot be used.
        ModelError: it cannot be read.
    """
    if role != "target":
        raise ConfigError(
            f"--teacher {file} is for a target, and a source learns from its labels; leave it out."
        )
    teacher = shared(file.absolute(), path.absolute(), reading, device)
    teacher.forget()
    own, p = teacher.check(classes)
    return f"{len(p)} examples, classes {listed(own)}"


def unrelated(taught: Tensor, p: Tensor) -> str:
    """What is odd if a teacher and a model hardly agree more than by chance; else nothing.

    Rows that a table only numbers fit any data of as many examples, so those of other images, or in
    another order, look like a teacher that knows nothing.

    Args:
        taught: (N, C) what the teacher says of the site's images.
        p: (N, C) what the adapted model says of them.
    """
    its, own = taught.argmax(dim=1), p.argmax(dim=1)
    share, other = (x.bincount(minlength=p.shape[1]).double() / len(p) for x in (its, own))
    agree, chance = float((its == own).double().mean()), float(share @ other)
    if agree - chance > RELATED * (1 - chance):
        return ""
    return (
        f"the teacher and the trained model have the same class for {agree:.0%} of the images, and "
        f"by chance {chance:.0%}: either knows nothing here, or the teacher's file is of other "
        "images or in another order; compare a few rows by hand"
    )


def _checked(p: Tensor, file: Path, keys: Sequence[str]) -> Tensor:
    """Probabilities that sum to 1, if these are almost so."""
    total = p.double().sum(dim=1)
    good = p.isfinite().all(dim=1) & (p >= 0).all(dim=1) & ((total - 1).abs() <= SUM)
    if not good.all():
        first = int((~good).nonzero()[0])
        raise DataError(
            f"{file} gives {keys[first]} the probabilities "
            f"{listed([f'{v:g}' for v in p[first].tolist()])}, which must be 0 or more and sum "
            "to 1: write probabilities, not scores"
        )
    return (p / total[:, None]).float()
