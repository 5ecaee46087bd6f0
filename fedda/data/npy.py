"""The .npy format, in which .npz files and numpy keep one array: its start, then its values.

start    shape, order and type
values   row by row (C order), or in Fortran order, where the first index runs fastest

Sparse vectors are three arrays, in compressed sparse rows (CSR): data (nnz,) are the values,
indices (nnz,) their columns, and row i holds data[indptr[i] : indptr[i + 1]], indptr (N + 1,).
"""

import math
from collections.abc import Iterator
from typing import IO, NamedTuple

import numpy as np

PIECE = 1 << 21  # bytes of rows that are read at a time


class Start(NamedTuple):
    """What the first bytes of an array say."""

    shape: tuple[int, ...]  # of the array, (N, ...)
    fortran: bool  # whether its values are in Fortran order, so that a row's lie apart
    dtype: np.dtype  # of its values

    @property
    def size(self) -> int:
        """The bytes of all values."""
        return math.prod(self.shape) * self.dtype.itemsize


def start(stream: IO[bytes]) -> Start:
    """Read the first bytes of an array; the stream is then at its values."""
    version = np.lib.format.read_magic(stream)
    if version == (1, 0):
        return Start(*np.lib.format.read_array_header_1_0(stream))
    return Start(*np.lib.format.read_array_header_2_0(stream))


def rows(stream: IO[bytes], about: Start, many: int) -> Iterator[np.ndarray]:
    """Read the values of an array in C order, `many` rows at a time -> (n, ...).

    Raises:
        EOFError: there are fewer values than the start says.
    """
    n, *one = about.shape
    for first in range(0, n, many):
        found = np.empty((min(many, n - first), *one), about.dtype)
        into = found.reshape(-1).view(np.uint8)
        if stream.readinto(into.data) != into.size:  # type: ignore[attr-defined]
            raise EOFError("it ends early")
        yield found


def at_a_time(shape: tuple[int, ...], itemsize: int, batch: int = 1) -> int:
    """How many rows of an array to read at a time: `PIECE` bytes of them, in whole batches."""
    return batch * max(1, PIECE // max(1, batch * math.prod(shape[1:]) * itemsize))


def mismatch(data: np.ndarray, indices: np.ndarray, indptr: np.ndarray, n: int, d: int) -> str:
    """What is wrong with the CSR pieces of an (N, d) matrix, in words; empty if nothing is."""
    if any(piece.ndim != 1 for piece in (data, indices, indptr)):
        return "data, indices and indptr are not all one-dimensional"
    if data.dtype.kind not in "fiub":
        return f"data are {data.dtype}, not numbers"
    if indices.dtype.kind not in "iu" or indptr.dtype.kind not in "iu":
        return f"indices are {indices.dtype} and indptr {indptr.dtype}, not integers"
    if len(indptr) != n + 1:
        return f"indptr has {len(indptr)} entries, but {n} rows need {n + 1}"
    if len(data) != len(indices) or indptr[0] != 0 or indptr[-1] != len(data):
        return (
            f"data has {len(data)} entries, indices {len(indices)}, and indptr goes from "
            f"{indptr[0]} to {indptr[-1]}"
        )
    if (np.diff(indptr.astype(np.int64)) < 0).any():
        return "indptr goes down somewhere"
    if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < d:
        return f"indices go from {indices.min()} to {indices.max()}, but there are {d} columns"
    return ""
