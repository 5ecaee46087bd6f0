"""Bounds on what a site sent, beside the model that it was sent and what other sites sent."""

import math
from bisect import bisect_left, insort
from collections.abc import Mapping

import numpy as np

from fedda.errors import WireError
from fedda.wire import Arrays, Packed, pieces

# A model whose weights are smaller than this, in the root of their mean square, counts as if they
# were so large. A new head is small, and it grows by many times its norm in its first round.
SMALL = 0.2
LEAST_OTHERS = 3  # of fewer, one liar can be the median


class Bounds:
    """Refuses models that no training on the model that was sent can have made.

    Args:
        change: `guard.max-change`; 0: any.
        statistics: `guard.max-statistics`; 0: any.
    """

    def __init__(self, change: float, statistics: float) -> None:
        self._most = change
        self._statistics = statistics

    def begin(self, sent: Packed) -> None:
        """Set the model that the sites were sent."""
        self._sent = sent.unpack()
        self._unit = max(norm(self._sent), SMALL * math.sqrt(weights(self._sent)))

    def check(self, who: str, name: str, model: Arrays) -> None:
        """Check one model.

        Args:
            who: where it comes from, for the error message.
            name: what the message calls it.
            model: its arrays, with the names and shapes of the model that was sent.

        Raises:
            WireError: it is out of bounds.
        """
        most = self._most
        for entry, values in model.items():
            if entry.endswith("running_var") and (values < 0).any():
                raise WireError(f"{entry} of '{name}' from {who} is a negative variance.")
            if "running_" in entry and self._statistics:
                largest = max(1.0, float(np.abs(self._sent[entry]).max()))
                bound = self._statistics * largest
                if np.abs(values).max() > bound:
                    raise WireError(
                        f"{entry} of '{name}' from {who} exceeds {bound:g}, the most that "
                        "guard.max-statistics allows."
                    )
        if not most:
            return
        change = norm(model, self._sent) / self._unit
        if change > most:
            raise WireError(
                f"'{name}' from {who} is {change:.1f} norms away from the model that was "
                f"sent; guard.max-change allows {most:g}."
            )


class Peers:
    """How long what each of some sites sent is, beside what the others sent.

    A liar can lengthen what it sends itself, but not the others' median.

    Args:
        times: `guard.max-update`; 0: any.
        sites: how many sites are to send something.

    Attributes:
        lengths: of what has come, by site.
    """

    def __init__(self, times: float, sites: int) -> None:
        self.lengths: dict[str, float] = {}
        self._times, self._sites = times, sites
        self._sorted: list[float] = []

    def add(self, site: str, length: float) -> None:
        """Note how long what a site sent is."""
        self.lengths[site] = length
        insort(self._sorted, length)

    def counts(self, site: str) -> bool | None:
        """Whether what a site sent is not too long; None while that depends on what is to come.

        It is too long if it is more than `times` the median of the others', unless that is 0 or of
        fewer than `LEAST_OTHERS`.
        """
        length, middle = self.lengths[site], self._median_beside(site)
        if not self._times or self._sites <= LEAST_OTHERS:
            return True
        if 0 < length <= self._times * middle:  # what is to come counts as 0, and can only add
            return True
        return None if self.missing else not 0 < self._times * middle < length

    def ratio(self, site: str) -> float:
        """How long what a site sent is, in units of the median of the others'."""
        return self.lengths[site] / self._median_beside(site)

    @property
    def missing(self) -> int:
        """How many sites have sent nothing yet."""
        return self._sites - len(self.lengths)

    def _median_beside(self, site: str) -> float:
        own, others = bisect_left(self._sorted, self.lengths[site]), self._sites - 1

        def ranked(k: int) -> float:
            k -= self.missing
            return 0.0 if k < 0 else self._sorted[k + (k >= own)]

        return (ranked((others - 1) // 2) + ranked(others // 2)) / 2 if others else 0.0


def too_long(lengths: Mapping[str, float], times: float) -> dict[str, float]:
    """Find updates that are much longer than the others' -> how long, by site.

    Args:
        lengths: of the updates, by site.
        times: `guard.max-update`; 0: any.

    Returns:
        Of each update longer than `times` the median of the others', its length in units of that
        median.
    """
    peers = Peers(times, len(lengths))
    for site, length in lengths.items():
        peers.add(site, length)
    return {site: peers.ratio(site) for site in lengths if not peers.counts(site)}


def norm(arrays: Arrays, minus: Arrays | None = None) -> float:
    """Return the Euclidean norm of a model's weights, or of their difference from another's.

    BatchNorm's running statistics are left out: they follow the data, not the training.
    """
    total = 0.0
    for name, values in arrays.items():
        if _is_weight(name, values):
            for part, other in pieces(values, values if minus is None else minus[name]):
                with np.errstate(over="ignore"):  # an infinite norm is beyond every bound
                    moved = part if minus is None else part - other
                    total += float(np.vdot(moved, moved))
    return math.sqrt(total)


def weights(arrays: Arrays) -> int:
    """Return how many numbers `norm` is over."""
    return sum(values.size for name, values in arrays.items() if _is_weight(name, values))


def _is_weight(name: str, values: np.ndarray) -> bool:
    return values.dtype.kind == "f" and "running_" not in name
