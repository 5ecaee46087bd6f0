"""Which examples a domain trains on and which it is tested on, for image files and for arrays.

A target does not read its training labels, but the order of its examples could reveal them, so
arrays are always shuffled.
"""

from pathlib import Path

import numpy as np

from fedda.contrib.benchmarks.common import Arrays, ByClass, ImportedImages, ImportRequest
from fedda.data.naming import listed
from fedda.errors import ConfigError, DataError


def stratified(y: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """Which examples are for testing: round(share * n) of each class, at least one, never all.

    A class with a single example keeps it for training.
    """
    test = np.zeros(len(y), dtype=bool)
    for c in np.unique(y):
        rows = rng.permutation(np.flatnonzero(y == c))
        test[rows[: min(max(round(share * len(rows)), 1), len(rows) - 1)]] = True
    return test


def split_images(request: ImportRequest, domain: str, by_class: ByClass) -> ImportedImages:
    """Split the files of a domain that is published without a split."""
    if request.options.transductive:
        return limited(request, domain, ImportedImages(by_class, by_class))
    names = list(by_class)
    files = [(c, file) for c in range(len(names)) for file in by_class[names[c]]]
    y = np.array([c for c, _ in files])
    test = stratified(y, request.test_share, request.rng(domain))
    # An image of two classes is in one half only: trained on, if it is drawn for that in either.
    train = {file for (_, file), its in zip(files, test, strict=True) if not its}
    halves: tuple[ByClass, ByClass] = ({name: [] for name in names}, {name: [] for name in names})
    for c, file in files:
        halves[int(file not in train)][names[c]].append(file)
    return limited(request, domain, ImportedImages(*halves))


def limited(request: ImportRequest, domain: str, images: ImportedImages) -> ImportedImages:
    """At most `limit` training and `test_limit` test images, drawn at random."""
    rng = request.rng(domain)
    drawn = []
    for half, most in zip((images.train, images.test), _limits(request), strict=True):
        files = [(name, file) for name, each in half.items() for file in each]
        chosen: ByClass = {}
        for i in sorted(rng.permutation(len(files))[:most].tolist()):
            chosen.setdefault(files[i][0], []).append(files[i][1])
        drawn.append(chosen)
    empty = [name for name in images.train if name not in drawn[0]]
    if empty:
        raise ConfigError(
            f"--limit {request.options.limit} leaves {domain} without a training image of "
            f"{listed(empty)}: give a higher limit or another --seed"
        )
    return ImportedImages(*drawn)


def split_rows(request: ImportRequest, domain: str, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Split arrays published without a split -> row numbers for training and for testing."""
    rng = request.rng(domain)
    if request.options.transductive:
        train = test = np.arange(len(y))
    else:
        chosen = stratified(y, request.test_share, rng)
        train, test = np.flatnonzero(~chosen), np.flatnonzero(chosen)
    most, most_test = _limits(request)
    return rng.permutation(train)[:most], rng.permutation(test)[:most_test]


def shuffled(
    request: ImportRequest, domain: str, train: int, test: int
) -> tuple[np.ndarray, np.ndarray]:
    """Shuffle and limit arrays published with a split -> row numbers for training and testing."""
    rng = request.rng(domain)
    most, most_test = _limits(request)
    return rng.permutation(train)[:most], rng.permutation(test)[:most_test]


def complete(arrays: Arrays, what: str, classes: tuple[str, ...]) -> Arrays:
    """Add the class names to the arrays; every class must have a training example."""
    y = np.bincount(arrays["y_train"], minlength=len(classes))
    if absent := [classes[c] for c in np.flatnonzero(y == 0)]:
        raise DataError(
            f"{what} has no training example of the class {listed(absent)}: all of "
            f"{listed(classes)} are needed; take more examples (--limit) or mend the files"
        )
    return arrays | {"classes": np.array(classes)}


def unique_names(files: list[Path]) -> list[str]:
    """File names for one folder: a name that comes again is prefixed with its old folder's name."""
    names: list[str] = []
    taken: set[str] = set()
    for file in files:
        name, n = file.name, 1
        if name.lower() in taken:
            name = f"{file.parent.name}-{file.name}"
        while name.lower() in taken:
            n += 1
            name = f"{file.parent.name}-{n}-{file.name}"
        taken.add(name.lower())
        names.append(name)
    return names


def _limits(request: ImportRequest) -> tuple[int | None, int | None]:
    return request.options.limit, request.options.test_limit
