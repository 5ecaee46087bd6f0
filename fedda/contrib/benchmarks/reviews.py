"""Amazon Review: bags of words of four kinds of goods, negative 0 and positive 1.

    GRAAL's DANN    books_train.svmlight, books_test.svmlight, ...: `-1 0:2 7:1 ...`, columns from 0
    MDAN and KD3A   amazon.npz: xx in coordinates, transposed (xx_data; xx_row, the terms; xx_col,
                    the reviews; xx_shape), yy (N, 1) of -1 and 1, offset: where each domain begins
    mSDA            amazon.mat with xx (d, N) sparse, yy, offset
    400 terms       books_400.mat, ...: see feature_files.py

The second and third layouts store the four domains one after the other. MDAN and KD3A shuffle each
domain and train on its first 2,000 reviews, and so does this import, with the seed. GRAAL's files
fix which 2,000 reviews train.
"""

import math
import zipfile
import zlib
from functools import partial
from pathlib import Path

import numpy as np

from fedda.contrib.benchmarks import feature_files, matlab
from fedda.contrib.benchmarks.common import Arrays, ImportRequest, Lazy, Sites, only, strays
from fedda.contrib.benchmarks.splits import complete, shuffled
from fedda.errors import ConfigError, DataError, reason

TRAIN = 2000  # labelled reviews of a domain
CLASSES = ("negative", "positive")

# A sparse matrix as (rows, columns, values), with its number of rows and of columns.
Coordinates = tuple[np.ndarray, np.ndarray, np.ndarray, int, int]


def read(request: ImportRequest) -> Sites:
    """Read whichever of the four layouts SOURCE holds."""
    files = strays(request)
    splitting = request.options.given & {"test_share", "transductive"}
    pairs = {
        d: [_either(files, names, split) for split in ("train", "test")]
        for d, names in request.domains.items()
    }
    if any(file for pair in pairs.values() for file in pair):
        sites: Sites = _svmlight(request, pairs)
    elif (whole := only(files, "amazon.npz") or only(files, "amazon.mat")) is not None:
        sites = {d: Lazy(partial(_part, request, d, whole)) for d in request.domains}
    elif mats := feature_files.feature_files(request):
        return feature_files.read_files(request, mats)
    else:
        raise request.wrong(f"{request.source} holds no reviews")
    if splitting:
        raise ConfigError(
            f"{request.source} has training and test reviews: leave out "
            f"--{splitting.pop().replace('_', '-')}"
        )
    return sites


def _either(files: dict[str, list[Path]], names: tuple[str, ...], split: str) -> Path | None:
    return next((f for n in names if (f := only(files, f"{n}_{split}.svmlight"))), None)


# ---- svmlight ----------------------------------------------------------------------------------


def _svmlight(request: ImportRequest, pairs: dict[str, list[Path | None]]) -> Sites:
    for domain, pair in pairs.items():
        for file, split in zip(pair, ("train", "test"), strict=True):
            if file is None:
                raise request.wrong(f"{request.source} has no {domain}_{split}.svmlight")
    parsed = {
        domain: [parse(file) for file in pair if file is not None] for domain, pair in pairs.items()
    }
    # All domains share one vocabulary: first column (0 or 1) and width are taken over all files.
    all_columns = [columns for pair in parsed.values() for (_, columns, _, _) in pair]
    first = min((int(c.min()) for c in all_columns if len(c)), default=0)
    first = min(first, 1)
    width = max((int(c.max()) for c in all_columns if len(c)), default=0) + 1 - first
    return {d: Lazy(partial(_halves, request, d, pair, first, width)) for d, pair in parsed.items()}


Parsed = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]


def parse(file: Path) -> Parsed:
    """Rows, columns and values of the entries, and for each line a label, 0 or 1."""
    rows: list[int] = []
    columns: list[int] = []
    values: list[float] = []
    labels: list[int] = []
    try:
        lines = file.read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(
            f"{file} cannot be read ({reason(error)}): an svmlight file is needed"
        ) from error
    for n, line in enumerate(lines, start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        try:
            label = float(words[0])
            entries = [word.split(":") for word in words[1:]]
            columns += [int(column) for column, _ in entries]
            values += [float(value) for _, value in entries]
        except ValueError as error:
            raise DataError(
                f"{file}, line {n}: {line[:60]!r} is not svmlight ({error}): a label and entries "
                f"such as 17:2 are needed"
            ) from error
        if label not in (-1, 0, 1):
            raise DataError(f"{file}, line {n}: the label is {words[0]}; 1, and -1 or 0, is needed")
        if any(c < 0 for c in columns[-len(entries) :] if entries):
            raise DataError(f"{file}, line {n}: a column is negative; columns count from 0 or 1")
        if not all(math.isfinite(v) for v in values[-len(entries) :] if entries):
            raise DataError(f"{file}, line {n}: a value is not finite; remove or mend the entry")
        rows += [len(labels)] * len(entries)
        labels.append(int(label > 0))
    if not labels:
        raise DataError(f"{file} holds no reviews: one line per review is needed")
    integers = np.array(rows, np.int64), np.array(columns, np.int64)
    return *integers, np.array(values, np.float32), np.array(labels, np.int64)


def _halves(
    request: ImportRequest, domain: str, pair: list[Parsed], first: int, width: int
) -> Arrays:
    arrays: Arrays = {}
    numbers = shuffled(request, domain, *(len(labels) for *_, labels in pair))
    for split, (rows, columns, values, labels), chosen in zip(
        ("train", "test"), pair, numbers, strict=True
    ):
        whole = (rows, columns - first, values, len(labels), width)
        arrays |= csr(f"x_{split}", whole, chosen, request.options.features)
        arrays[f"y_{split}"] = labels[chosen]
    return complete(arrays, f"{domain} in {request.source}", CLASSES)


# ---- all domains in one file -------------------------------------------------------------------


def _part(request: ImportRequest, domain: str, file: Path) -> Arrays:
    """One domain's arrays, from a file of all domains."""
    (rows, columns, values, n, d), y, offset = _whole(file)
    domains = list(request.benchmark.domains)
    labels = matlab.integers(y, f"yy in {file}")
    edges = matlab.integers(offset, f"offset in {file}")
    fits = len(edges) == len(domains) + 1 and edges[0] == 0 and edges[-1] == n == len(labels)
    if not fits or (np.diff(edges) <= 0).any() or not np.isin(labels, (-1, 0, 1)).all():
        raise DataError(
            f"{file} has {n} reviews, {len(labels)} labels and offset {edges.tolist()}: yy of -1 "
            f"and 1 is needed, and where each of {', '.join(domains)} begins and the last one ends"
        )
    begin, end = edges[domains.index(domain) : domains.index(domain) + 2]
    if end - begin <= TRAIN:
        raise DataError(
            f"{file} has {end - begin} reviews of {domain}: more than {TRAIN} are needed"
        )
    inside = (rows >= begin) & (rows < end)
    reviews = (rows[inside] - begin, columns[inside], values[inside], int(end - begin), d)
    labels = (labels[begin:end] > 0).astype(np.int64)
    order = request.rng(domain).permutation(len(labels))
    train, test = (
        part[rows]
        for part, rows in zip(
            (order[:TRAIN], order[TRAIN:]),
            shuffled(request, domain, TRAIN, len(labels) - TRAIN),
            strict=True,
        )
    )
    arrays = {"y_train": labels[train], "y_test": labels[test]}
    for split, chosen in (("train", train), ("test", test)):
        arrays |= csr(f"x_{split}", reviews, chosen, request.options.features)
    return complete(arrays, f"{domain} in {file}", CLASSES)


def _whole(file: Path) -> tuple[Coordinates, np.ndarray, np.ndarray]:
    """Matrix of reviews by terms, labels and offsets, from amazon.npz or amazon.mat."""
    if file.suffix.lower() == ".npz":
        names = ("xx_data", "xx_row", "xx_col", "xx_shape", "yy", "offset")
        try:
            with np.load(file, allow_pickle=False) as npz:
                if missing := [name for name in names if name not in npz.files]:
                    raise DataError(
                        f"{file} has no {', '.join(missing)}; needed: {', '.join(names)}"
                    )
                data, terms, reviews, shape, y, offset = (npz[name] for name in names)
        except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
            raise DataError(f"{file} cannot be read ({reason(error)}): get it again") from error
        d, n = (int(size) for size in shape.reshape(-1))
    else:
        stored = matlab.load(file, {"xx", "yy", "offset"})
        if len({"xx", "yy", "offset"} & set(stored)) < 3 or not hasattr(stored["xx"], "tocoo"):
            raise DataError(f"{file} holds {matlab.keys(file)}; needed: xx (sparse), yy, offset")
        xx, y, offset = stored["xx"].tocoo(), stored["yy"], stored["offset"]
        data, terms, reviews, (d, n) = xx.data, xx.row, xx.col, xx.shape
    if not len(data) == len(terms) == len(reviews) or not (
        len(data) == 0
        or (0 <= terms.min() <= terms.max() < d and 0 <= reviews.min() <= reviews.max() < n)
    ):
        raise DataError(f"xx in {file} does not fit its shape ({d}, {n}): get the file again")
    if not np.isfinite(data).all():
        raise DataError(f"xx in {file} has a value that is not finite: get the file again")
    return (reviews.astype(np.int64), terms.astype(np.int64), data, n, d), y, offset


# ---- sparse rows -------------------------------------------------------------------------------


def csr(name: str, whole: Coordinates, chosen: np.ndarray, most: int | None) -> Arrays:
    """The chosen rows and the first `most` columns, as the four CSR pieces that sites read."""
    rows, columns, values, n, d = whole
    width = min(d, most or d)
    new = np.full(n, -1)
    new[chosen] = np.arange(len(chosen))
    keep = (new[rows] >= 0) & (columns < width)
    rows, columns, values = new[rows[keep]], columns[keep], values[keep]
    order = np.lexsort((columns, rows))
    return {
        f"{name}_data": values[order].astype(np.float32),
        f"{name}_indices": columns[order].astype(np.int32),
        f"{name}_indptr": np.concatenate([[0], np.bincount(rows, minlength=len(chosen)).cumsum()]),
        f"{name}_shape": np.array([len(chosen), width]),
    }
