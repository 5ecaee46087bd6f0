"""Sparse vectors in compressed sparse rows (CSR), made dense.

data     (nnz,)    the values
indices  (nnz,)    their columns
indptr   (N + 1,)  row i holds data[indptr[i] : indptr[i + 1]]
"""

import numpy as np


def mismatch(data: np.ndarray, indices: np.ndarray, indptr: np.ndarray, n: int, d: int) -> str:
    """What is wrong with the pieces of an (N, d) matrix, in words; empty if nothing is."""
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


def densify(
    data: np.ndarray, indices: np.ndarray, indptr: np.ndarray, n: int, d: int
) -> np.ndarray:
    """The dense matrix, which takes N * d * 4 bytes -> float32 (N, d).

    `indptr` may begin above 0: `data` and `indices` are then those of some rows of a matrix.
    """
    dense = np.zeros((n, d), dtype=np.float32)
    rows = np.repeat(np.arange(n), np.diff(indptr.astype(np.int64)))  # (nnz,)
    # add.at, not assignment: entries at the same row and column add up, as in scipy.
    np.add.at(dense, (rows, indices.astype(np.int64)), data.astype(np.float32))
    return dense
