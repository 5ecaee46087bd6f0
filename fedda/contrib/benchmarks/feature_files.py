"""Features in MATLAB files, one per domain: fts or feas (N, d), and labels (N, 1) from 1.

Office-Caltech10's files are amazon_SURF_L10.mat, Caltech10_SURF_L10.mat and so on, or
amazon_zscore_SURF_L10.mat with Xt and Yt, or amazon_decaf.mat, or
features/GoogleNet1024/amazon.mat; those of Amazon Review with 400 terms are books_400.mat,
elec_400.mat.
"""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedda.contrib.benchmarks import class_folders, matlab
from fedda.contrib.benchmarks.common import (
    Arrays,
    ImportRequest,
    Lazy,
    Sites,
    domain_folders,
    key,
    levels,
)
from fedda.contrib.benchmarks.splits import complete, split_rows
from fedda.data.image_folder import listing
from fedda.data.naming import listed
from fedda.errors import DataError
from fedda.results.read import human

_X = ("fts", "feas", "Xt")
_Y = ("labels", "label", "Yt")
_DENSE = 1 << 30  # bytes of sparse features that are made dense


def read_office_caltech(request: ImportRequest) -> Sites:
    """Class folders of images, or one .mat of features per domain."""
    try:
        domain_folders(request)
    except DataError:
        if files := feature_files(request):
            return read_files(request, files)
        raise
    if refused := request.options.given & {"features"}:
        raise request.wrong(
            f"{request.source} holds images, which have no columns for --{refused.pop()}"
        )
    return class_folders.read(request)


def feature_files(request: ImportRequest) -> dict[str, Path]:
    """One .mat per domain, named after it, in one folder; empty if no folder has them all."""
    candidates: dict[Path, dict[str, list[Path]]] = {}
    for folder in levels(request.source):
        mats = [f for f in listing(folder).strays if f.suffix.lower() == ".mat"]
        mats = [f for f in mats if not f.stem.lower().endswith("_imgs")]
        matches = {
            d: [f for f in mats if key(f.stem).startswith(names)]
            for d, names in request.domains.items()
        }
        if all(matches.values()):
            candidates[folder] = matches
    if not candidates:
        return {}
    several = [
        f for matches in candidates.values() for fs in matches.values() if len(fs) > 1 for f in fs
    ]
    if len(candidates) > 1 or several:
        kinds = [str(folder) for folder in candidates] if len(candidates) > 1 else map(str, several)
        raise DataError(
            f"{request.source} holds features of several kinds ({listed(list(kinds), 4)}): give a "
            f"folder with one .mat per domain"
        )
    (matches,) = candidates.values()
    return {d: files[0] for d, files in matches.items()}


def read_files(request: ImportRequest, files: dict[str, Path]) -> Sites:
    """One domain per file; all need the same columns."""
    widths: dict[int, Path] = {}
    return {d: Lazy(partial(_domain, request, d, file, widths)) for d, file in files.items()}


def _domain(request: ImportRequest, domain: str, file: Path, widths: dict[int, Path]) -> Arrays:
    """The features and labels of one domain, split; `widths` has the file of each width so far."""
    from scipy.sparse import issparse

    variables = matlab.load(file, {*_X, *_Y})
    x: Any = next((variables[name] for name in _X if name in variables), None)
    y = next((variables[name] for name in _Y if name in variables), None)
    if not (isinstance(x, np.ndarray) or issparse(x)) or not isinstance(y, np.ndarray):
        raise DataError(
            f"{file} holds {matlab.keys(file)}; needed: fts, feas or Xt, and labels or Yt"
        )
    labels = matlab.integers(y, f"labels in {file}")
    if x.ndim != 2 or x.dtype.kind not in "fiub" or x.shape[0] != len(labels):
        raise DataError(
            f"{file} has features {x.shape} and {len(labels)} labels: (N, d) and N are needed; get "
            f"the file again"
        )
    classes = request.benchmark.classes
    assert isinstance(classes, tuple)
    if set(np.unique(labels)) == {-1, 1}:
        labels = (labels + 1) // 2
    labels -= 0 if 0 in labels else 1
    if not 0 <= labels.min() <= labels.max() < len(classes):
        raise DataError(
            f"labels in {file} go from {y.min()} to {y.max()}: 1 to {len(classes)}, or 0 to "
            f"{len(classes) - 1}, is needed"
        )
    widths.setdefault(x.shape[1], file)
    if len(widths) > 1:
        (d, other), (its, _) = widths.items()
        raise DataError(
            f"{file} has {its} columns and {other} has {d}: all domains need features of one kind; "
            f"get the files again"
        )
    x = x[:, : request.options.features]
    if issparse(x):
        if (size := 4 * x.shape[0] * x.shape[1]) > _DENSE:
            raise DataError(
                f"{file} has sparse features {x.shape}, {human(size)} when dense: at most "
                f"{human(_DENSE)} are read; give a lower number of columns (--features)"
            )
        x = x.toarray()
    with np.errstate(over="ignore"):
        x = np.asarray(x, dtype=np.float32)
    if len(rows := np.flatnonzero(~np.isfinite(x).all(axis=1))):
        raise DataError(
            f"{file} has a value in row {rows[0] + 1} that is not finite: mend it, or get the file "
            f"again"
        )
    train, test = split_rows(request, domain, labels)
    arrays = {"x_train": x[train], "y_train": labels[train]}
    arrays |= {"x_test": x[test], "y_test": labels[test]}
    return complete(arrays, f"{domain} in {file}", classes)
