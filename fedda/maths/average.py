"""The weighted mean of models, added up as they arrive.

    theta = sum_k w_k theta_k / sum_k w_k

Replies come in any order, and a resumed run must give the same bits as an uninterrupted one. So
every term is rounded to a grid. The grid is so coarse that sums of terms are exact in float64, in
any order, and so fine (about 2^-44 of the model's largest value) that float32 hides the rounding.
"""

import math

import numpy as np

from fedda.wire.packing import PIECE, Arrays, pieces

STATISTICS = ("running_mean", "running_var")  # of BatchNorm

# Bits: sums stay exact until they exceed 2^8 times the largest value of the model sent. Of the 52
# bits of a float64 behind the leading one, 44 are left for a term.
HEADROOM = 8

STEP = 2**14  # values added at a time; their float64 fit into a processor's cache


def heads_of(model: Arrays) -> Arrays:
    """Return the arrays of a model's head."""
    return {name: a for name, a in model.items() if name.startswith("head.")}


def statistics_of(model: Arrays) -> Arrays:
    """Return a copy of the means and variances in a model's BatchNorm layers."""
    return {name: a.copy() for name, a in model.items() if name.endswith(STATISTICS)}


class RunningMean:
    """Adds up models one at a time, in the memory of two models however many come.

    Args:
        like: the model that was sent, (name -> array), for its names, dtypes and grid.
    """

    def __init__(self, like: Arrays) -> None:
        self._weights: list[float] = []
        self._dtypes = {name: a.dtype for name, a in like.items()}
        self._grid = {n: _rounder(a) for n, a in like.items() if a.dtype.kind == "f"}
        self._sums: Arrays = {
            n: np.zeros(a.shape, np.float64 if n in self._grid else a.dtype)
            for n, a in like.items()
        }

    def add(self, arrays: Arrays, weight: float, site: str = "") -> None:
        """Add one model; only the ratios of weights count, and each is at most 1.

        The site that it came from is not needed, as the order of arrival changes nothing.
        """
        self._weights.append(weight)
        memory = np.empty(STEP)  # made once: new memory costs more than the sums
        for name, sums in self._sums.items():
            if name in self._grid:
                for total, values in pieces(sums, arrays[name], size=STEP):
                    term = memory[: len(values)]
                    np.multiply(values, weight, out=term, dtype=np.float64)
                    term += self._grid[name]
                    term -= self._grid[name]
                    total += term
            else:
                np.maximum(sums, arrays[name], out=sums)

    def result(self) -> Arrays:
        """The mean; call it once and last, as it overwrites the sums.

        For integer buffers (BatchNorm's counters) it is the largest value.
        """
        total = math.fsum(self._weights)  # exact, so the order does not matter here either
        if total <= 0:
            raise ValueError("no model with a positive weight was added")
        return {
            name: _divided(sums, total, self._dtypes[name]) if name in self._grid else sums
            for name, sums in self._sums.items()
        }


def _divided(sums: np.ndarray, total: float, dtype: np.dtype) -> np.ndarray:
    """Divide by the total, in a dtype of at most 8 bytes and the memory of sums already read."""
    flat = sums.reshape(-1)
    mean = flat.view(dtype)[: flat.size]
    for start in range(0, flat.size, PIECE):
        mean[start : start + PIECE] = flat[start : start + PIECE] / total
    return mean.reshape(sums.shape)


def _rounder(values: np.ndarray) -> float:
    """A number that rounds a float64 to the grid when it is added and subtracted again."""
    largest = max(float(values.max(initial=1.0)), -float(values.min(initial=0.0)))
    return 1.5 * 2.0 ** (np.ceil(np.log2(largest)) + HEADROOM)
