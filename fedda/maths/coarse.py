"""Floating-point values in fewer bytes: bfloat16, and whole numbers with a scale per row.

    w_i   (n,)  row i of an array: all values of one output channel
    s_i   float its scale, max |w_i| / 127, in float32
    q_i   (n,)  round(w_i / s_i), int8, from -127 to 127

    w_i ~ s_i q_i, at most s_i / 2 away

numpy has neither, so both travel as bits of types that it has.
"""

import numpy as np
from numpy.typing import NDArray

MOST = 127  # of a whole number; the scale is symmetric, so -128 does not occur
SCALE = 4  # bytes of a scale
BLOCK = 2**18  # values processed at a time, in whole rows


def to_bfloat16(values: NDArray[np.floating]) -> NDArray[np.uint16]:
    """The bits of the nearest bfloat16, the even one of two, as in torch; NaN stays NaN."""
    bits = values.astype(np.float32, copy=False).view(np.uint32)
    near = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype(np.uint16)
    return np.where(np.isnan(values), np.uint16(0x7FC0), near)


def from_bfloat16(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """The values of bfloat16s, exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def largest(floats: str) -> float:
    """The largest value of a type in which floating-point values are sent."""
    if floats == "bfloat16":
        return float(from_bfloat16(np.array([0x7F7F], np.uint16))[0])
    return float(np.finfo("float32" if floats == "int8" else floats).max)


def row_bytes(shape: tuple[int, ...]) -> int:
    """How many bytes an array takes with a scale per row; 0 if float32 takes no more."""
    if len(shape) < 2 or 0 in shape:
        return 0
    rows, size = shape[0], int(np.prod(shape, dtype=object))
    short = SCALE * rows + size
    return short if short < 4 * size else 0


def fill_rows(values: NDArray[np.floating], into: NDArray[np.uint8]) -> None:
    """Write s (m,), then q (m, n), of an array of m rows.

    A row that holds NaN or infinity gets such a scale.

    Args:
        values: the array.
        into: where the bytes go, as many as `row_bytes` says.
    """
    rows = values.reshape(len(values), -1)
    scales, whole = _parts(into, rows.shape)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        scales[:] = np.maximum(rows.max(1), -rows.min(1)) / MOST
        step = max(1, BLOCK // rows.shape[1])
        for start in range(0, len(rows), step):
            part = slice(start, start + step)
            scale = scales[part, None].astype(np.float64)
            found = np.rint(rows[part] / np.where(scale > 0, scale, np.inf))
            whole[part] = np.nan_to_num(found.clip(-MOST, MOST), nan=0)


def read_rows(given: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.float32]:
    """S_i q_i of every row -> an array of this shape."""
    scales, whole = _parts(given, (shape[0], -1))
    with np.errstate(invalid="ignore", over="ignore"):  # `scales_of` shows what is no scale
        return np.multiply(whole, scales[:, None], dtype=np.float32).reshape(shape)


def scales_of(given: NDArray[np.uint8], shape: tuple[int, ...]) -> NDArray[np.float32]:
    """The scales s of the rows -> (m,)."""
    return _parts(given, (shape[0], -1))[0]


def _parts(
    given: NDArray[np.uint8], shape: tuple[int, int]
) -> tuple[NDArray[np.float32], NDArray[np.int8]]:
    """The scales (m,) and the whole numbers (m, n), as views of their bytes."""
    end = SCALE * shape[0]
    return given[:end].view(np.float32), given[end:].view(np.int8).reshape(shape)
