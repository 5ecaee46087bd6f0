"""Reading variables from MATLAB files, and naming what a file holds instead."""

import warnings
from pathlib import Path
from typing import Any

import numpy as np

from fedda.data.naming import listed
from fedda.errors import DataError


def load(file: Path, names: set[str]) -> dict[str, Any]:
    """Those of the named variables that a .mat file has."""
    from scipy.io import loadmat

    try:
        with warnings.catch_warnings():  # whether a sparse matrix is an array makes no difference
            warnings.simplefilter("ignore", DeprecationWarning)
            return loadmat(file, variable_names=list(names))
    except MemoryError:
        raise
    except NotImplementedError as error:
        raise DataError(f"{file} is a MATLAB 7.3 file: save it again with -v7 in MATLAB") from error
    # On damaged bytes the parser may raise any exception.
    except Exception as error:
        raise DataError(f"{file} cannot be read as a .mat file ({error}): get it again") from error


def keys(file: Path) -> str:
    """The variables of a .mat file and their shapes, for a message."""
    from scipy.io import whosmat

    return listed([f"{name} {shape}" for name, shape, _ in whosmat(file)], 8) or "nothing"


def integers(y: np.ndarray, what: str) -> np.ndarray:
    """Whole numbers in a column, a row or a vector -> int64 (N,)."""
    if y.size != max(y.shape, default=0) or not np.array_equal(y, np.round(y)):
        raise DataError(f"{what} is {y.dtype} {y.shape}: one whole number per example is needed")
    return y.reshape(-1).astype(np.int64)
