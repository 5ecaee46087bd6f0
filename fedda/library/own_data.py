"""Arrays and datasets of a program, written as the .npz files that simulated sites read.

So a run on them gives the numbers of a run on the same files, to the last bit.
"""

import hashlib
import json
from bisect import bisect_right
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedda.config import is_site_name
from fedda.data import categories, naming
from fedda.data.npz import check_highest
from fedda.errors import DataError, RunError, reason
from fedda.files import put

from .program_inputs import as_array, columns_of, frame, images

CONTENTS = ".contents.json"  # beside the files: a digest of each


@dataclass(frozen=True)
class Split:
    """Examples and their labels; y is None, or one class number or name per example.

    x is uint8 (N, H, W) or (N, H, W, 3), or float32 (N, d), whose columns may have names; `texts`
    says of those that have texts which text each number means.
    """

    x: np.ndarray
    y: np.ndarray | None
    classes: tuple[str, ...] = ()
    columns: tuple[str, ...] = ()
    texts: categories.Texts = field(default_factory=dict)


def folder_of(data: Any, place: Path, targets: Collection[str] = ()) -> Path:
    """The folder of a run's sites: the one that was given, or `place` with what a program has.

    Args:
        data: a folder, or the sites by name (`fedda.simulate` says which).
        place: a folder to write to.
        targets: sites of whose training data no label is written, even if there are some.

    Raises:
        DataError: a site's data cannot be used.
        RunError: `place` holds other data.
    """
    if isinstance(data, str | Path):
        return Path(data).absolute()
    if not isinstance(data, Mapping) or not data:
        raise DataError(
            f"data is a {type(data).__name__}; give a folder of sites, or a dict with each site's "
            "arrays or dataset by its name"
        )
    for name in data:
        if not isinstance(name, str) or not is_site_name(name):
            raise DataError(
                f"{name!r} cannot be a site's name: give 1 to 64 printable characters without /"
            )
    links = {n: Path(v).absolute() for n, v in data.items() if isinstance(v, str | Path)}
    parts = {name: _site(name, value) for name, value in data.items() if name not in links}
    for name in parts.keys() & set(targets):
        parts[name] = (replace(parts[name][0], y=None), parts[name][1])
    first = next((train.columns for train, _ in parts.values() if train.columns), ())
    parts = {
        name: (_in_order(train, first), test and _in_order(test, first))
        for name, (train, test) in parts.items()
    }
    known = _classes(parts)
    arrays = {name: _arrays(name, *site, known) for name, site in parts.items()}
    contents = {name: _digest(found) for name, found in arrays.items()}
    _keep(place, contents | {name: str(path) for name, path in links.items()}, arrays)
    for name, path in links.items():
        if not path.exists():
            raise DataError(f"{name} is {path}: give an existing folder or file of data")
        link = place / (name if path.is_dir() else f"{name}{path.suffix}")
        link.unlink(missing_ok=True)
        link.symlink_to(path)
    return place


def _in_order(split: Split, columns: tuple[str, ...]) -> Split:
    """The same examples with their columns in this order, if they are the same columns."""
    if split.columns == columns or sorted(split.columns) != sorted(columns):
        return split
    return replace(split, x=split.x[:, [*map(split.columns.index, columns)]], columns=columns)


def _site(name: str, given: Any) -> tuple[Split, Split | None]:
    """The training and the test set of a site, in one of the forms that `simulate` takes."""
    if isinstance(given, torch.utils.data.Dataset):
        return _dataset(name, given), None
    if isinstance(given, tuple | list) and len(given) == 2:
        if all(isinstance(each, torch.utils.data.Dataset) for each in given):
            return _dataset(name, given[0]), _dataset(name, given[1])
        return _pair(name, *given), None
    if isinstance(given, tuple | list) and len(given) == 3:
        x, y, test = given
        if test is None:
            return _pair(name, x, y), None
        if isinstance(test, tuple | list) and len(test) == 2 and test[1] is not None:
            return _pair(name, x, y), _pair(f"the test of {name}", *test)
    raise DataError(
        f"{name} is a {type(given).__name__}: give (x, y), (x, y, (x_test, y_test)), a "
        "torch.utils.data.Dataset, two of them (training, test), or a folder"
    )


def _pair(name: str, x: Any, y: Any) -> Split:
    columns, texts = columns_of(x), dict[str, Sequence[str]]()
    if columns:
        x, texts = frame(x, f"x of {name}")
    found = images(x, f"x of {name}")
    if y is None:
        return Split(found, None, columns=columns, texts=texts)
    if isinstance(y, np.ma.MaskedArray):
        hidden = np.ma.getmaskarray(y).tolist()
        y = [None if gone else v for v, gone in zip(y.data.tolist(), hidden, strict=True)]
    try:
        array = y.detach().cpu().numpy() if isinstance(y, torch.Tensor) else np.asarray(y)
    except ValueError:  # some are lists
        array = np.empty(len(y), object)
        array[:] = list(y)
    if array.shape != found.shape[:1]:
        raise DataError(
            f"y of {name} is {array.dtype} {array.shape} for {len(found)} examples: give one "
            "whole number from 0, or one class name, per example"
        )
    named = naming.names(array.tolist(), f"y of {name}", lambda i: f"place {i}")
    if all(label.isdecimal() and label == str(int(label)) for label in named):  # 01 is a name
        numbers = [*map(int, named)]
        check_highest(f"y of {name}", max(numbers))
        return Split(found, np.array(numbers, np.int64), columns=columns, texts=texts)
    return Split(found, np.array(named), columns=columns, texts=texts)


def _dataset(name: str, dataset: Any) -> Split:
    """All items of a dataset: (x, label) or x alone."""
    if not hasattr(dataset, "__len__") or not len(dataset):
        raise DataError(f"the dataset of {name} is empty or has no length: give one with a length")
    items = [dataset[i] for i in range(len(dataset))]
    paired = isinstance(items[0], tuple | list)
    inputs = [as_array(item[0] if paired else item) for item in items]
    shapes = {tuple(np.shape(each)) for each in inputs}
    if len(shapes) > 1:
        raise DataError(
            f"the dataset of {name} has items of shapes {', '.join(map(str, sorted(shapes)[:3]))}: "
            "one shape is needed; resize its images in its transform"
        )
    tensors = isinstance(inputs[0], torch.Tensor)
    x = torch.stack(inputs) if tensors else np.stack(inputs)
    if not paired:
        return _pair(name, x, None)
    if any(np.size(item[1]) != 1 for item in items):
        raise DataError(
            f"the dataset of {name} has items whose second part is no label, as with masks or "
            "several labels: give (x, label)"
        )
    y = [item[1].item() if isinstance(item[1], torch.Tensor) else item[1] for item in items]
    named = _named(name, dataset, y)
    if named is None:
        return _pair(name, x, y)
    naming.check(dict.fromkeys(named), f"the dataset of {name}")
    return Split(images(x, f"x of {name}"), np.array(named), _order(dataset))


def _named(name: str, dataset: Any, numbers: Sequence[Any]) -> list[str] | None:
    """The classes' names of a dataset's labels, as the dataset itself numbers them; else None.

    Every dataset numbers the classes that it has, so that only the names can be compared.
    """
    known = [_classes_at(dataset, i) for i in range(len(numbers))]
    if not any(known):
        return None
    if not all(known):
        raise DataError(
            f"the dataset of {name} joins some that name their classes and some that number them: "
            "give all of them `classes`"
        )
    for label, classes in zip(numbers, known, strict=True):
        if not isinstance(label, Integral) or int(label) not in range(len(classes)):
            raise DataError(
                f"the dataset of {name} names {len(classes)} classes and has the label {label!r}: "
                "give labels that number its `classes` from 0, or a dataset without `classes`"
            )
    return [classes[int(label)] for label, classes in zip(numbers, known, strict=True)]


def _classes_at(dataset: Any, i: int) -> tuple[str, ...]:
    """The classes that the label of item i numbers; none if the dataset does not name them."""
    data = torch.utils.data
    if isinstance(dataset, data.ConcatDataset):
        part = bisect_right(dataset.cumulative_sizes, i)
        before = dataset.cumulative_sizes[part - 1] if part else 0
        return _classes_at(dataset.datasets[part], i - before)
    if isinstance(dataset, data.Subset):
        return _classes_at(dataset.dataset, dataset.indices[i])
    return tuple(map(str, getattr(dataset, "classes", ())))


def _order(dataset: Any) -> tuple[str, ...]:
    """The classes that a dataset names, in its own order, also those of which it has no example."""
    data = torch.utils.data
    if isinstance(dataset, data.ConcatDataset):
        return tuple(dict.fromkeys(c for part in dataset.datasets for c in _order(part)))
    if isinstance(dataset, data.Subset):
        return _order(dataset.dataset)
    return tuple(map(str, getattr(dataset, "classes", ())))


def _classes(sites: Mapping[str, tuple[Split, Split | None]]) -> tuple[str, ...]:
    """The names of the classes that sources without an order of their own share."""
    count, numbered, names = 0, False, dict[str, Sequence[str]]()
    for site, (train, test) in sites.items():
        y = test.y if train.y is None and test else train.y  # of a target that of its tests
        if y is not None and y.dtype.kind != "U":
            numbered = True
            count = max(count, 0 if train.y is None else int(y.max()) + 1)
        elif train.y is not None and not train.classes:
            names[site] = sorted({*map(str, train.y)})
    if names and numbered:
        raise DataError("some sites name their classes and others number them: do the same in all")
    return naming.united(names) or tuple(map(str, range(count)))


def _arrays(
    name: str, train: Split, test: Split | None, known: Sequence[str]
) -> dict[str, np.ndarray]:
    """The arrays of one site's file, whose sets number their classes alike."""
    if test is not None:
        _check_alike(name, train, test)
    texts = _united(train.texts, {} if test is None else test.texts)
    train, test = _renumbered(train, texts), test and _renumbered(test, texts)
    splits = {"": train} if test is None else {"_train": train, "_test": test}
    labels = {key: split.y for key, split in splits.items() if split.y is not None}
    words = {str(y) for own in labels.values() if own.dtype.kind == "U" for y in own}
    if words and any(own.dtype.kind != "U" for own in labels.values()):
        raise DataError(
            f"{name} names the classes of one set and numbers those of the other: name or number "
            "them in both"
        )
    ordered = tuple(dict.fromkeys(c for key in labels for c in splits[key].classes))
    shared = ordered or (tuple(known) if words <= set(known) else ())
    classes = shared + tuple(sorted(words - set(shared)))
    found: dict[str, np.ndarray] = {}
    for key, split in splits.items():
        found[f"x{key}"] = split.x
        if (y := split.y) is None:
            continue
        if y.dtype.kind == "U":
            number = {label: i for i, label in enumerate(classes)}
            y = np.array([number[str(label)] for label in y])
        if classes and y.max() >= len(classes):
            raise DataError(
                f"{name} has labels from {y.min()} to {y.max()}, but the sources' classes are "
                f"numbered from 0 to {len(classes) - 1}: number them alike at all sites"
            )
        found[f"y{key}"] = y.astype(np.int64)
    if classes and labels:
        found["classes"] = np.array(classes)
    if train.columns:
        if test and (other := naming.unlike(test.columns or train.columns, train.columns)):
            raise DataError(f"beside its training set, the test of {name} has {other}: order it so")
        found["columns"] = np.array(train.columns)
        if texts:
            found["texts"] = np.array(["\n".join((column, *its)) for column, its in texts.items()])
    return found


def _check_alike(name: str, *sets: Split) -> None:
    """Refuse a column that has texts in one set and numbers in the other, which mean no text."""
    for column in {**sets[0].texts, **sets[1].texts}:
        for each in (each for each in sets if column in each.columns and column not in each.texts):
            if not np.isnan(each.x[:, each.columns.index(column)]).all():
                raise DataError(
                    f"{name} has texts in the column {naming.escaped(column)} of one set and "
                    "numbers in that of the other: write them alike"
                )


def _united(a: categories.Texts, b: categories.Texts) -> dict[str, tuple[str, ...]]:
    """The texts of the columns of two sets, in one order."""
    every = {name: [*a.get(name, ()), *b.get(name, ())] for name in [*a, *b]}
    alike = {name: {naming.plain(text): text for text in texts} for name, texts in every.items()}
    return {name: tuple(of[key] for key in sorted(of)) for name, of in alike.items()}


def _renumbered(split: Split, texts: categories.Texts) -> Split:
    """The same set with other numbers for its texts."""
    x = split.x.copy() if split.texts else split.x
    for name, its in split.texts.items():
        column, place = split.columns.index(name), [*map(naming.plain, texts[name])]
        known = split.x[:, column]
        for i, text in enumerate(its):
            x[known == i, column] = place.index(naming.plain(text))
    return replace(split, x=x, texts={})


def _digest(arrays: Mapping[str, np.ndarray]) -> str:
    total = hashlib.blake2b(digest_size=16)
    for key, array in sorted(arrays.items()):
        total.update(f"{key} {array.dtype} {array.shape}".encode())
        total.update(np.ascontiguousarray(array).tobytes())
    return total.hexdigest()


def _keep(
    place: Path, contents: Mapping[str, str], arrays: Mapping[str, Mapping[str, np.ndarray]]
) -> None:
    """Write the folder's files, but those that it holds already of the same data."""
    note = place / CONTENTS
    try:
        place.mkdir(parents=True, exist_ok=True)
        held = json.loads(note.read_text()) if note.is_file() else None
        if held not in (None, contents):
            raise RunError(
                f"{place} holds other data than these sites'; give another folder as dir, or the "
                "data that it was begun with."
            )
        for name, found in arrays.items():
            if held is None or not (place / f"{name}.npz").is_file():
                np.savez(place / f"{name}.npz", allow_pickle=False, **found)
        if held is None:
            put(note, json.dumps(contents))
    except (OSError, ValueError) as error:
        raise RunError(
            f"{place} cannot be used ({reason(error)}); give another folder as dir."
        ) from None
