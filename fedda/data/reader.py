"""Readers: what fedda asks of a site's data, and those that other packages add.

A package adds one by an entry point `fedda.data` (`fedda.plugins`): a function that looks at the
path given by `--data` and returns a reader of it, or None if the path is not for it. It is asked
about every file and folder but .npz files, before fedda takes a folder for its own; looking must be
quick, as it happens whenever data are opened.

    def open_dicom(path: Path) -> Reader | None:
        return DicomFolder(path) if (path / "DICOMDIR").is_file() else None

Examples are uint8 (N, channels, H, W) with 1 or 3 channels, or float32 (N, d); labels are int64.
"""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch

from fedda import plugins
from fedda.data import naming
from fedda.data.form import Form, conform
from fedda.data.odd_values import Values
from fedda.data.sets import AnySet, Description, Examples, Labelled, Progress, Role, Unlabelled
from fedda.errors import DataError, FeddaError

logger = logging.getLogger("fedda.data")

_SOME = 4096  # examples looked at together


class SiteData(Protocol):
    """One site's data as fedda uses them: a folder, arrays, a table, or what a reader brings."""

    path: Path

    def describe(self, role: Role) -> Description:
        """What is there; of a target's training data no label is read."""
        ...

    def source(self, form: Form, progress: Progress | None) -> Labelled:
        """The training set with its labels."""
        ...

    def target(self, form: Form, progress: Progress | None) -> Unlabelled:
        """The training set of a site whose labels, if there are any, nobody may read."""
        ...

    def evaluation(self, form: Form, progress: Progress | None) -> Labelled | None:
        """The labelled test set, apart from the training set; None if there is none."""
        ...

    def identities(self, role: Role) -> Iterable[bytes]:
        """A digest of each training example; a source's covers its class, too."""
        ...

    def tests(self) -> list[bytes]:
        """A digest of each labelled test example, without its label."""
        ...

    def names(self) -> list[str]:
        """What predictions call each example that a target trains on, in the order of `target`."""
        ...

    def keys(self) -> list[str]:
        """What the data themselves call these examples; empty if they do not."""
        return []

    def broken(self, role: Role) -> list[str]:
        """A sentence for each image that cannot be read, those of the test included."""
        return []


class Reader(Protocol):
    """What another package's reader of a site's data has to have.

    `channels` and `size` are the shape that a run wants of images, 0 for what the data have: a
    reader that can decode at that size saves memory, and what it leaves fedda brings to the shape.
    `progress` is called with the number of examples read so far and the number of all.
    """

    def describe(self, role: Role) -> Description:
        """What is there, without decoding it; of a target's training data no label is read."""
        ...

    def source(self, channels: int, size: int, progress: Progress | None) -> Labelled:
        """The training set with its labels."""
        ...

    def target(self, channels: int, size: int, progress: Progress | None) -> Unlabelled:
        """The training set of a site whose labels, if there are any, nobody may read."""
        ...

    def evaluation(self, channels: int, size: int, progress: Progress | None) -> Labelled | None:
        """The labelled test set, apart from the training set; None if there is none."""
        ...


class Checked(SiteData):
    """A reader of another package, whose answers are what they should be."""

    def __init__(self, reader: Reader, origin: str, path: Path) -> None:
        self.path = path
        self._reader = reader
        self._called = f"the reader of {origin}"

    def describe(self, role: Role) -> Description:
        with self._asking():
            found = self._reader.describe(role)
        return self._typed(found, Description)

    def source(self, form: Form, progress: Progress | None) -> Labelled:
        """As the reader gives it, in the shape that is asked for."""
        return self._fitted(self._asked(self._reader.source, form, progress), Labelled, form)

    def target(self, form: Form, progress: Progress | None) -> Unlabelled:
        """As the reader gives it; a set with labels is refused, as they would be at hand."""
        return self._fitted(self._asked(self._reader.target, form, progress), Unlabelled, form)

    def evaluation(self, form: Form, progress: Progress | None) -> Labelled | None:
        """As the reader gives it, if it gives any."""
        found = self._asked(self._reader.evaluation, form, progress)
        return None if found is None else self._fitted(found, Labelled, form)

    def identities(self, role: Role) -> list[bytes]:
        return (self.source if role == "source" else self.target)(Form(), None).digests()

    def tests(self) -> list[bytes]:
        found = self.evaluation(Form(), None)
        return [] if found is None else Unlabelled(found.x).digests()

    def names(self) -> list[str]:
        return [str(i) for i in range(len(self.target(Form(), None)))]

    @contextmanager
    def _asking(self) -> Iterator[None]:
        try:
            yield
        except FeddaError:
            raise
        except Exception as error:  # another's code, on files that nobody has checked
            raise self._error(f"failed ({type(error).__name__}: {error})") from error

    def _typed(self, found: Any, kind: type[Any]) -> Any:
        if type(found) is not kind:
            raise self._error(f"gave a {type(found).__name__} where a {kind.__name__} is needed")
        return found

    def _asked(self, what: Callable[..., Any], form: Form, progress: Progress | None) -> Any:
        # What is cropped must come in its own proportions.
        size = 0 if form.resize == "crop" else form.size
        with self._asking():
            return what(form.channels, size, progress)

    def _fitted(self, given: Any, kind: type[AnySet], form: Form) -> AnySet:
        found: AnySet = self._typed(given, kind)
        self._check_inputs(found)
        seen = Values()
        for some in found.x.split(_SOME):
            seen.add(some)
        seen.report(form.notice or logger.warning)
        if isinstance(found, Labelled):
            self._check_labels(found)
        return conform(found, form.channels, form.size, form.resize)

    def _check_inputs(self, found: Examples) -> None:
        x = found.x
        image = x.dtype == torch.uint8 and x.ndim == 4 and x.shape[1] in (1, 3)
        if not len(x) or not (image or (x.dtype == torch.float32 and x.ndim == 2)):
            raise self._error(
                f"gave examples of type {x.dtype} and shape {tuple(x.shape)}, but needed are uint8 "
                "(N, channels, H, W) with 1 or 3 channels, or float32 (N, d), and one or more"
            )
        if not image and bool(x.isinf().any()):
            raise self._error("gave values that are not finite, or too large for single precision")

    def _check_labels(self, found: Labelled) -> None:
        y = found.y
        if y.dtype != torch.int64 or y.shape != (len(found),):
            raise self._error(
                f"gave labels of type {y.dtype} and shape {tuple(y.shape)} for {len(found)} "
                f"examples, but needed are int64 ({len(found)},)"
            )
        if int(y.min()) < 0 or int(y.max()) >= len(found.classes):
            raise self._error(
                f"gave labels from {int(y.min())} to {int(y.max())}, but names "
                f"{len(found.classes)} classes, counted from 0"
            )
        naming.check(found.classes, f"{self._called} at {self.path}")

    def _error(self, what: str) -> DataError:
        return DataError(f"{self._called} {what} at {self.path}: ask who wrote it, or use another")


def added(path: Path) -> Checked | None:
    """The reader of another package for a path; None if none takes it.

    Raises:
        DataError: several take it, or one fails.
    """
    taken: dict[str, Checked] = {}
    for name, reader in plugins.installed("data").items():
        try:
            found = reader.value(path)
        except FeddaError:
            raise
        except Exception as error:  # as above
            raise DataError(
                f"the reader {name} of {reader.origin} failed to look at {path} "
                f"({type(error).__name__}: {error}): mend or uninstall it"
            ) from error
        if found is not None:
            taken[f"{name} of {reader.origin}"] = Checked(found, reader.origin, path)
    if len(taken) > 1:
        raise DataError(
            f"{path} is taken by {len(taken)} readers ({', '.join(taken)}): uninstall all but one"
        )
    return next(iter(taken.values()), None)
