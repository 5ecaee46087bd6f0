"""Naive twin of fedda.maths.coarse: rows as whole numbers with a scale, value by value."""

import struct

import numpy as np


def rounded(values: np.ndarray) -> tuple[list[float], list[list[int]]]:
    """The scale of each row, and its whole numbers."""
    scales, whole = [], []
    for row in values.reshape(len(values), -1).tolist():
        scale = struct.unpack("f", struct.pack("f", max(abs(x) for x in row) / 127))[0]
        scales.append(scale)
        whole.append([max(-127, min(127, round(x / scale))) if scale else 0 for x in row])
    return scales, whole


def coarse(values: np.ndarray) -> np.ndarray:
    """What is read of an array after it was rounded, of the same shape."""
    scales, whole = rounded(values)
    pairs = zip(scales, whole, strict=True)
    rows = [[np.float32(q) * np.float32(s) for q in row] for s, row in pairs]
    return np.array(rows, np.float32).reshape(values.shape)
