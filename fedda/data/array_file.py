"""A site whose data are arrays: in an .npz or HDF5 file, or a table of numbers; which are what."""

import logging
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from fedda import plugins
from fedda.data import categories, naming
from fedda.data.cache import key_of
from fedda.data.form import AS_IT_IS, Form, Reading, conform
from fedda.data.naming import listed
from fedda.data.npz import Npz
from fedda.data.number_table import NumberTable
from fedda.data.odd_values import Values
from fedda.data.own_columns import Gaps, warnings_of
from fedda.data.reader import SiteData
from fedda.data.sets import Description, Labelled, Progress, Role, Unlabelled, odd_classes
from fedda.data.which_files import FILES
from fedda.errors import DataError

logger = logging.getLogger("fedda.data")


def readers() -> dict[str, type[Npz]]:
    """What reads files of arrays, beside .npz files, by their ending."""
    return {f".{name}": each.value for name, each in plugins.installed("arrays").items()}


class ArrayFile(SiteData):
    """One site's .npz or HDF5 file, or its table of numbers.

    Args:
        path: the file.
        reading: as the site says; its `split` S trains on `x_S` and `y_S`.
    """

    def __init__(self, path: Path, reading: Reading = AS_IT_IS) -> None:
        self.path = path
        self._reading = reading
        self._split = reading.split

    def opened(self) -> Npz:
        """The arrays.

        Raises:
            DataError: the file names other columns than the run or the model takes.
        """
        ending = self.path.suffix.lower()
        if ending in FILES:
            npz: Npz = NumberTable(self.path, self._reading)
        else:
            npz = readers().get(ending, Npz)(self.path)
        if not (needs := self._reading.needs):
            return npz
        own, named = naming.brief(npz.named), npz.named
        if named and own != needs and categories.taken(needs, named) == named:
            fills = self._reading.fills
            npz.coding = categories.Coding(named, needs, npz.texts, self.path, fills)
        elif own and (other := naming.unlike(own, categories.taken(needs, own))):
            with npz:
                raise DataError(
                    f"{self.path} has {other}, and the model takes columns by name: "
                    "give them the names that they have elsewhere, or name those to take, in their "
                    "order, with --columns values=age+weight"
                )
        return npz

    def source(self, form: Form, progress: Progress | None) -> Labelled:
        with self.opened() as npz:
            x = _train(npz, self._split)
            y, classes = _source_labels(npz, x)
            _source_test_labels(npz, x, classes)
            return Labelled(_read(npz, x, form, progress), y, classes)

    def target(self, form: Form, progress: Progress | None) -> Unlabelled:
        with self.opened() as npz:
            return Unlabelled(_read(npz, _train(npz, self._split), form, progress))

    def evaluation(self, form: Form, progress: Progress | None) -> Labelled | None:
        with self.opened() as npz:
            y = _test_labels(npz, _train(npz, self._split))
            if y is None:
                return None
            classes = npz.classes("y_test", y)
            return Labelled(_read(npz, "x_test", form, progress), y, classes)

    def identities(self, role: Role) -> Iterator[bytes]:
        with self.opened() as npz:
            x = _train(npz, self._split)
            y, classes = _source_labels(npz, x) if role == "source" else (None, ())
            done = 0
            for some in npz.examples(x):
                its = None if y is None else y[done : done + len(some)]
                examples = Unlabelled(some) if its is None else Labelled(some, its, classes)
                yield from examples.digests()
                done += len(some)

    def tests(self) -> list[bytes]:
        with self.opened() as npz:
            if _test_labels(npz, _train(npz, self._split)) is None:
                return []
            return [one for some in npz.examples("x_test") for one in Unlabelled(some).digests()]

    def names(self) -> list[str]:
        with self.opened() as npz:
            x = _train(npz, self._split)
            before = f"{x}/" if npz.has("x_test") and not self._split else ""
            return [f"{before}{i}" for i in range(npz.shape(x)[0])]

    def keys(self) -> list[str]:
        with self.opened() as npz:
            return npz.row_keys(_train(npz, self._split))

    def columns(self, d: int) -> tuple[str, ...]:
        """The names of the columns of vectors of d numbers."""
        with self.opened() as npz:
            return npz.columns(d)

    def check(self, progress: Progress | None, notice: Callable[[str], object]) -> None:
        """Read every value of the training and the test set once, and keep none.

        Args:
            progress: called with how many examples were read.
            notice: called with a sentence if the values are odd (`fedda.data.odd_values`).

        Raises:
            DataError: the file is damaged, or a value is not finite.
        """
        with self.opened() as npz:
            x = _train(npz, self._split)
            for name in (x,) if _test_labels(npz, x) is None else (x, "x_test"):
                n, done, seen = npz.shape(name)[0], 0, Values()
                for some in npz.examples(name):
                    seen.add(some)
                    done += len(some)
                    if progress:
                        progress(done, n)
                if name == x:
                    seen.report(notice, npz.named)

    def describe(self, role: Role) -> Description:
        with self.opened() as npz:
            x = _train(npz, self._split)
            y, classes = _source_labels(npz, x) if role == "source" else (None, ())
            n, *shape = npz.shape(x)
            train, names = npz.gaps(x), npz.columns(shape[-1])
            own = npz.named if len(shape) == 1 else ()
            if own and len(own) != shape[0]:
                raise DataError(
                    f"{self.path} has {len(own)} names of columns for vectors of {shape[0]} "
                    "numbers: name each of them in the array columns, or leave it out"
                )
            counts: dict[str, int] = {}
            if y is not None:
                y_test = _source_test_labels(npz, x, classes)
                numbers = torch.bincount(y, minlength=len(classes)).tolist()
                counts = dict(zip(classes, numbers, strict=True))
            else:
                y_test = _test_labels(npz, x)
                classes = () if y_test is None else _present(npz.classes("y_test", y_test), y_test)
            warnings = odd_classes(counts) if counts else []
            warnings += npz.odd_columns(x, y)
            if texts := npz.listed_texts:
                warnings.append(f"{categories.refused(self.path, texts)}")
            test = Gaps.none(len(train.seen)) if y_test is None else npz.gaps("x_test")
            warnings += warnings_of(train, test, names)
            if npz.has("x_test") and x != "x_test":
                warnings += _test_warnings(npz, (n, *shape))
            used = (
                {"classes", "columns", "texts", "y_test", f"y{x[1:]}"}
                | npz.used(x)
                | npz.used("x_test")
            )
            if unused := [key for key in npz.keys if key not in used]:
                warnings.append(f"{self.path}: these arrays are passed over: {listed(unused)}")
        return Description(
            path=self.path,
            role=role,
            kind="image" if len(shape) == 3 else "vector",
            shape=tuple(shape),
            train=n,
            test=0 if y_test is None else len(y_test),
            classes=classes,
            counts=counts,
            warnings=tuple(warnings),
            gaps=train.rows + test.rows,
            empty=tuple(names[i] for i in train.empty),
            columns=naming.brief(own),
            texts=texts,
        )


def _read(npz: Npz, x: str, form: Form, progress: Progress | None) -> Tensor:
    """The examples `x` in a form, in memory or in the form's cache."""
    if not form.blank_texts:
        npz.check_texts()
    n, *one = npz.shape(x)
    if len(one) == 3:
        one = [form.channels or one[0], *([form.size] * 2 if form.size else one[1:])]
    shape = (n, *one)

    def stored() -> Iterator[Tensor]:
        # Not afterwards: examples that lie in a cache's file cannot be changed.
        for examples in npz.examples(x):
            yield npz.without_texts(examples) if form.blank_texts else examples

    def some(notice: Callable[[str], object]) -> Iterator[Tensor]:
        done, seen = 0, Values()
        for examples in stored():
            seen.add(examples)
            fitted = conform(Unlabelled(examples), form.channels, form.size, form.resize)
            yield fitted.x
            done += len(examples)
            if progress:
                progress(done, n)
        seen.report(notice, npz.named)

    notice = form.notice or logger.warning
    if form.cache is not None and form.cache.takes(shape):
        contents = (one for examples in stored() for one in Unlabelled(examples).digests())
        key = key_of(contents, "array", *shape[1:], form.size, form.resize)
        return form.cache.get(key, shape, lambda said: map(Tensor.numpy, some(said)), notice)
    dtype = torch.uint8 if len(one) == 3 else torch.float32
    npz.check_room(x, math.prod(shape) * dtype.itemsize)
    whole, done = torch.empty(shape, dtype=dtype), 0
    for examples in some(notice):
        whole[done : done + len(examples)] = examples
        done += len(examples)
    return whole


def _train(npz: Npz, split: str) -> str:
    """The name of the array of training examples: "x_train" or "x", or that of the split."""
    if split and npz.has(f"x_{split}"):
        return f"x_{split}"
    if split:
        raise DataError(
            f"{npz.path} has no array x_{split} (found: {listed(npz.keys, 12)}): give --split "
            f"the name of another split, or leave it out"
        )
    names = [x for x in ("x_train", "x") if npz.has(x)]
    if len(names) == 1:
        return names[0]
    if names:
        raise DataError(
            f"{npz.path} has both x_train and x, and only one can be the training set: "
            f"keep x_train, y_train, x_test, y_test, or keep x, y"
        )
    raise DataError(
        f"{npz.path} has no training examples; found: {listed(npz.keys, 12) or 'nothing'}; "
        f"needed: x_train, y_train, x_test, y_test, or x, y (a target needs no y), or the CSR "
        f"pieces x_train_data, x_train_indices, x_train_indptr, x_train_shape"
    )


def _source_labels(npz: Npz, x: str) -> tuple[torch.Tensor, tuple[str, ...]]:
    """A source's training labels and class names."""
    name = f"y{x[1:]}"
    if name not in npz.keys:
        raise npz.unlabelled(x)
    y = npz.labels(name, npz.shape(x)[0])
    return y, npz.classes(name, y)


def _test_labels(npz: Npz, x: str) -> torch.Tensor | None:
    """The test labels, or None without a labelled test set; another shape is refused."""
    if x == "x_test" or not npz.has("x_test") or "y_test" not in npz.keys:
        return None
    train, test = npz.shape(x)[1:], npz.shape("x_test")[1:]
    if len(train) != len(test) or (len(train) == 1 and train != test):
        raise DataError(
            f"examples in {npz.path} have the shape {train} in {x}, but {test} in x_test: "
            f"the same is needed in both; save the arrays again with one shape"
        )
    return npz.labels("y_test", npz.shape("x_test")[0])


def _present(names: tuple[str, ...], y: torch.Tensor) -> tuple[str, ...]:
    """The names of the labels that occur."""
    return tuple(names[label] for label in y.unique().tolist())


def _source_test_labels(npz: Npz, x: str, classes: tuple[str, ...]) -> torch.Tensor | None:
    """As `_test_labels`; every label must be one of the training classes."""
    y = _test_labels(npz, x)
    its = () if y is None else _present(npz.classes("y_test", y), y)
    if odd := [name for name in its if name not in classes]:
        raise DataError(
            f"y_test in {npz.path} has the class {odd[-1]}, which the training set does not have "
            f"(its classes are {listed(classes)}): remove these test examples, or add training "
            f"examples of it"
        )
    return y


def _test_warnings(npz: Npz, train: tuple[int, ...]) -> list[str]:
    if "y_test" not in npz.keys:
        return [f"{npz.path} has x_test but no y_test: nothing is evaluated at this site"]
    if npz.shape("x_test")[1:] != train[1:]:
        return [
            f"one test example is {npz.shape('x_test')[1:]} and one training example {train[1:]} "
            f"(channels, height, width): a run needs input.channels and input.size to use both"
        ]
    return []
