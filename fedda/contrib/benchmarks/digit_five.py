"""Digit-Five: the MATLAB files of five digit domains, as M3SDA and KD3A distribute them.

    mnist_data.mat          train_32 (N, 32, 32), label_train (N, 10), test_32, label_test
    mnistm_with_label.mat   train (N, 28, 28, 3), label_train (N, 10), test, label_test
    svhn_train_32x32.mat    X (32, 32, 3, N), y (N, 1) with 10 for the digit 0; svhn_test_32x32.mat
    synth_train_32x32.mat   X (32, 32, 3, N), y (N, 1); synth_test_32x32.mat
    syn_number.mat          train_data (N, 32, 32, 3), train_label (N, 1), test_data, test_label
    usps_28x28.mat          dataset {2, 2}: (N, 1, 28, 28) in [0, 1] and (N, 1); the test set below

Published results draw 25,000 training and 9,000 test images of each domain. USPS has fewer: KD3A
repeats its training images four times, this import does not.
"""

from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from fedda.contrib.benchmarks import matlab
from fedda.contrib.benchmarks.common import Arrays, ImportRequest, Lazy, Sites, only, strays
from fedda.contrib.benchmarks.splits import complete, shuffled
from fedda.errors import DataError

DIGITS = tuple("0123456789")


class DatasetHalf(NamedTuple):
    """The training or the test set of a digit domain."""

    files: tuple[str, ...]
    x: tuple[str, ...]
    y: str
    order: str  # the axes of x
    cell: int = -1  # the row of the 2 x 2 cell array that holds x and y; -1 for plain variables


Halves = tuple[DatasetHalf, DatasetHalf]

DIGIT_FILES: dict[str, tuple[Halves, ...]] = {
    "mnist": ((
        DatasetHalf(("mnist_data.mat",), ("train_32", "train_28"), "label_train", "NHW"),
        DatasetHalf(("mnist_data.mat",), ("test_32", "test_28"), "label_test", "NHW"),
    ),),
    "mnist-m": ((
        DatasetHalf(("mnistm_with_label.mat",), ("train",), "label_train", "NHWC"),
        DatasetHalf(("mnistm_with_label.mat",), ("test",), "label_test", "NHWC"),
    ),),
    "svhn": ((
        DatasetHalf(("svhn_train_32x32.mat", "train_32x32.mat"), ("X",), "y", "HWCN"),
        DatasetHalf(("svhn_test_32x32.mat", "test_32x32.mat"), ("X",), "y", "HWCN"),
    ),),
    "syn": (
        (
            DatasetHalf(("synth_train_32x32.mat",), ("X",), "y", "HWCN"),
            DatasetHalf(("synth_test_32x32.mat",), ("X",), "y", "HWCN"),
        ),
        (
            DatasetHalf(("syn_number.mat",), ("train_data",), "train_label", "NHWC"),
            DatasetHalf(("syn_number.mat",), ("test_data",), "test_label", "NHWC"),
        ),
    ),
    "usps": ((
        DatasetHalf(("usps_28x28.mat",), ("dataset",), "dataset", "NCHW", 0),
        DatasetHalf(("usps_28x28.mat",), ("dataset",), "dataset", "NCHW", 1),
    ),),
}  # fmt: skip


def read_digits(request: ImportRequest) -> Sites:
    """Digit-Five as KD3A and M3SDA distribute it."""
    files = strays(request)
    sites: Sites = {}
    for domain in request.domains:
        for halves in DIGIT_FILES[domain]:
            paths = [path for half in halves if (path := _named(files, half))]
            if len(paths) == len(halves):
                sites[domain] = Lazy(partial(_digits, request, domain, halves, paths))
                break
        else:
            wanted = [half.files[0] for half in DIGIT_FILES[domain][0] if not _named(files, half)]
            raise request.wrong(
                f"{request.source} has no {' and '.join(dict.fromkeys(wanted))} for {domain}"
            )
    return sites


def _named(files: dict[str, list[Path]], half: DatasetHalf) -> Path | None:
    return next((file for name in half.files if (file := only(files, name))), None)


def _digits(
    request: ImportRequest, domain: str, halves: tuple[DatasetHalf, DatasetHalf], paths: list[Path]
) -> Arrays:
    arrays: Arrays = {}
    for s, (split, half, path) in enumerate(zip(("train", "test"), halves, paths, strict=True)):
        x, y = _half(path, half)
        labels = digit_labels(y, f"{half.y} in {path}")
        n = x.shape[half.order.index("N")]
        if len(labels) != n:
            raise DataError(
                f"{path} has {n} images and {len(labels)} labels in {half.y}: one label per image "
                f"is needed; get the file again"
            )
        rows = shuffled(request, domain, n, n)[s]
        chosen = np.take(x, rows, axis=half.order.index("N"))
        arrays[f"x_{split}"] = pixels(chosen, half.order, f"{path}")
        arrays[f"y_{split}"] = labels[rows]
    return complete(arrays, f"{domain} in {request.source}", DIGITS)


def _half(path: Path, half: DatasetHalf) -> tuple[np.ndarray, np.ndarray]:
    if half.cell < 0:
        variables = matlab.load(path, {*half.x, half.y})
        x = next((variables[name] for name in half.x if name in variables), None)
        y = variables.get(half.y)
    else:
        cells = matlab.load(path, {"dataset"}).get("dataset")
        x = y = None
        if isinstance(cells, np.ndarray) and cells.shape == (2, 2) and cells.dtype == object:
            x, y = cells[half.cell]
    if not isinstance(x, np.ndarray) or not isinstance(y, np.ndarray):
        kind = "a 2 x 2 cell array 'dataset'" if half.cell >= 0 else f"{half.x[0]} and {half.y}"
        raise DataError(f"{path} holds {matlab.keys(path)}; needed: {kind}")
    if half.order == "NHW" and x.ndim == 4 and x.shape[3] == 1:
        x = x[..., 0]
    if x.ndim != len(half.order) or x.dtype.kind not in "fiub" or y.dtype.kind not in "fiub":
        raise DataError(
            f"{half.x[0]} in {path} is {x.dtype} {x.shape}: numbers with the axes "
            f"{', '.join(half.order)} are needed"
        )
    return x, y


def pixels(x: np.ndarray, order: str, what: str) -> np.ndarray:
    """Images in any order of axes -> uint8 (N, H, W) or (N, H, W, 3).

    Floats from 0 to 1 are scaled to 0 to 255; other numbers must be 0 to 255 already.
    """
    to = "NHWC" if "C" in order else "NHW"
    x = x.transpose([order.index(axis) for axis in to])
    if to == "NHWC" and x.shape[3] == 1:
        x = x[..., 0]
    if x.ndim == 4 and x.shape[3] != 3:
        raise DataError(f"images in {what} have {x.shape[3]} channels: 1 or 3 are needed")
    if x.dtype != np.uint8:
        low, high = (float(x.min()), float(x.max())) if x.size else (0.0, 0.0)
        if not (low >= 0 and high <= 255):
            raise DataError(
                f"images in {what} go from {low} to {high}: 0 to 1 or 0 to 255 is needed"
            )
        scale = 255 if x.dtype.kind == "f" and high <= 1 else 1
        x = np.round(x * scale).astype(np.uint8)
    return np.ascontiguousarray(x)


def digit_labels(y: np.ndarray, what: str) -> np.ndarray:
    """Labels as (N, 10) with one 1 per row, or as digits with 10 for 0 -> int64 (N,), 0 to 9."""
    if y.ndim == 2 and y.shape[1] == 10 and y.shape[0] != 1:
        if not (np.isin(y, (0, 1)).all() and (y.sum(axis=1) == 1).all()):
            raise DataError(
                f"{what} is {y.shape} without exactly one 1 per row: one label per image is needed"
            )
        return y.argmax(axis=1).astype(np.int64)
    labels = matlab.integers(y, what)
    if len(labels) and not 0 <= labels.min() <= labels.max() <= 10:
        raise DataError(
            f"{what} goes from {labels.min()} to {labels.max()}: 0 to 9 is needed, or 10 for 0"
        )
    return labels % 10
