"""Means of models: the weighted one, and those that a few lying sites cannot move far.

Blanchard et al., NeurIPS 2017, https://arxiv.org/abs/1703.02757 (multi-Krum).
Yin et al., ICML 2018, https://arxiv.org/abs/1803.01498 (coordinate median, trimmed mean).
Sun et al., 2019, https://arxiv.org/abs/1911.07963 (bound on an update's norm).

    K         int     models that came
    theta_0   (P,)    the model that was sent
    theta_k   (P,)    model of site k; theta_k - theta_0 is its update
    w         (K,)    weights of the sites, such as their shares of the examples
    f         int     sites that may lie: liars * K, rounded up

    weighted  sum_k w_k theta_k / sum_k w_k
    bounded   theta_0 + sum_k w_k c_k (theta_k - theta_0), where c_k = min(1, m / |theta_k -
              theta_0|) and m is the median of the updates' norms: a long one gains nothing by it
    median    of the K values of each parameter; of an even number the mean of the middle two
    trimmed   mean of each parameter's values without the f largest and the f smallest
    krum      plain mean of the K - f models with the smallest sum of squared distances to their
              K - f - 2 nearest models; it needs K >= 2 f + 3

Only the first two use the weights, because a site could claim any number of examples.
BatchNorm's running statistics are values as all others, and of its counters the largest is taken.
The order in which models arrive changes nothing: a resumed run gives the same bits.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fedda.config import Rule
from fedda.wire.packing import PIECE, Arrays, pieces

Matrix = NDArray[np.floating]

STATISTICS = ("running_mean", "running_var")  # of BatchNorm

# Bits: sums stay exact until they exceed 2^8 times the largest value of the model sent. Of the 52
# bits of a float64 behind the leading one, 44 are left for a term.
HEADROOM = 8

STEP = 2**14  # values added at a time; their float64 fit into a processor's cache
COLUMNS = 2**16  # parameters that are sorted at a time


def heads_of(model: Arrays) -> Arrays:
    """Return the arrays of a model's head."""
    return {name: a for name, a in model.items() if name.startswith("head.")}


def statistics_of(model: Arrays) -> Arrays:
    """Return a copy of the means and variances in a model's BatchNorm layers."""
    return {name: a.copy() for name, a in model.items() if name.endswith(STATISTICS)}


class RunningMean:
    """The weighted mean, added up one model at a time, in the memory of two however many come.

    So that their order changes nothing, every term is rounded to a grid. It is so coarse that sums
    of terms are exact in float64, and so fine (about 2^-44 of the model's largest value) that
    float32 hides the rounding.

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


def liars_of(share: float, K: int) -> int:
    """How many of K sites may lie, rounded up -> f."""
    return math.ceil(share * K - 1e-9)


def least_for(rule: Rule, share: float) -> int:
    """The smallest number of models of which a rule tells anything -> K."""
    if rule == "krum":
        return next(K for K in range(3, 10_000) if 2 * liars_of(share, K) + 3 <= K)
    if rule == "trimmed":
        return next(K for K in range(2, 10_000) if 2 * liars_of(share, K) < K)
    return {"weighted": 1, "bounded": 2, "median": 3}[rule]


def factors(norms: Sequence[float]) -> list[float]:
    """Factors c (K,) by which updates of these norms are shortened to the median norm."""
    most = float(np.median(norms))
    return [1.0 if norm <= most else most / norm for norm in norms]


def middle(values: Matrix, cut: int) -> tuple[Matrix, Matrix]:
    """Mean of each column without `cut` values at each end; a row's share is over all columns."""
    K = len(values)
    order = np.argsort(values, axis=0, kind="stable")[cut : K - cut]
    mean = np.take_along_axis(values, order, axis=0).mean(axis=0, dtype=np.float64)
    shares = np.bincount(order.ravel(), minlength=K) / max(1, order.size)
    return mean, shares


def krum(distances: Matrix, f: int) -> list[int]:
    """Indices of the K - f models that multi-Krum keeps, ascending.

    Args:
        distances: (K, K) squared distances between models.
        f: how many may lie; K is at least 2 f + 3.
    """
    K = len(distances)
    if 2 * f + 3 > K:
        raise ValueError(f"{K} models are too few if {f} of them may lie: {2 * f + 3} are needed")
    others = np.sort(distances + np.diag(np.full(K, np.inf)), axis=1)
    scores = others[:, : K - f - 2].sum(axis=1)
    return sorted(np.argsort(scores, kind="stable")[: K - f].tolist())


class RobustMean:
    """Gathers models, sorted by site name, and takes a robust mean of them; see `RunningMean`.

    Args:
        like: the model that was sent, theta_0 (name -> array).
        rule: the mean.
        liars: share of the sites that may lie.

    Attributes:
        shares: after `result`, how much of it comes from each site; they sum to 1.
    """

    def __init__(self, like: Arrays, rule: Rule, liars: float) -> None:
        self._like = like
        self._rule: Rule = rule
        self._liars = liars
        self._models: dict[str, Arrays] = {}
        self._weights: dict[str, float] = {}
        self.shares: dict[str, float] = {}

    def add(self, arrays: Arrays, weight: float, site: str) -> None:
        """Add one model, which is copied.

        Args:
            arrays: the model (name -> array).
            weight: at least 0; only the ratios of weights count.
            site: the name of the site that it came from.
        """
        self._models[site] = {name: a.copy() for name, a in arrays.items()}
        self._weights[site] = weight

    def result(self) -> Arrays:
        """The mean of the models that came, of which there are `least_for` or more."""
        self._keys = sorted(self._models)
        K, rule = len(self._keys), self._rule
        if (least := least_for(rule, self._liars)) > K:
            raise ValueError(f"{K} models came, but {rule} needs {least}")
        if rule in ("median", "trimmed"):
            return self._by_parameter(
                (K - 1) // 2 if rule == "median" else liars_of(self._liars, K)
            )
        w = np.array([self._weights[key] for key in self._keys])
        if rule == "krum":
            kept = krum(self._distances(), liars_of(self._liars, K))
            w = np.isin(np.arange(K), kept).astype(np.float64)
        if not w.sum() > 0:
            raise ValueError("no model with a positive weight was added")
        w = w / w.sum()
        norms = (math.sqrt(self._squared(self._models[key], self._like)) for key in self._keys)
        c = factors([*norms]) if rule == "bounded" else [1.0] * K
        self.shares = dict(zip(self._keys, (float(share) for share in w), strict=True))
        return {name: self._moved(name, w, c) for name in self._like}

    def _moved(self, name: str, w: Matrix, c: Sequence[float]) -> Matrix:
        start = self._like[name]
        if start.dtype.kind != "f":
            return self._largest(name)
        moved = np.zeros(start.shape)
        for key, weight, factor in zip(self._keys, w, c, strict=True):
            moved += weight * factor * (self._models[key][name].astype(np.float64) - start)
        return (start + moved).astype(start.dtype)

    def _by_parameter(self, cut: int) -> Arrays:
        made, shares, size = {}, np.zeros(len(self._keys)), 0
        for name, start in self._like.items():
            if start.dtype.kind != "f":
                made[name] = self._largest(name)
                continue
            stacked = [self._models[key][name].reshape(-1) for key in self._keys]
            mean = np.empty(start.size)
            for first in range(0, start.size, COLUMNS):
                part = slice(first, first + COLUMNS)
                mean[part], of_each = middle(np.stack([a[part] for a in stacked]), cut)
                shares += of_each * len(mean[part])
            size += start.size
            made[name] = mean.astype(start.dtype).reshape(start.shape)
        self.shares = dict(zip(self._keys, (shares / size).tolist(), strict=True))
        return made

    def _largest(self, name: str) -> Matrix:
        return np.max([self._models[key][name] for key in self._keys], axis=0)

    def _distances(self) -> Matrix:
        K = len(self._keys)
        distances = np.zeros((K, K))
        for i in range(K):
            for j in range(i):
                first, second = self._models[self._keys[i]], self._models[self._keys[j]]
                distances[i, j] = distances[j, i] = self._squared(first, second)
        return distances

    def _squared(self, one: Arrays, other: Arrays) -> float:
        """Squared distance of two models over their parameters and statistics."""
        return sum(
            float(np.square(one[name].astype(np.float64) - other[name]).sum())
            for name, a in self._like.items()
            if a.dtype.kind == "f"
        )
