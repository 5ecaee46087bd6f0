"""Bounds on what a site sent, beside the model that it was sent and what other sites sent."""

import math
from bisect import bisect_left, insort
from collections.abc import Mapping

import numpy as np

from fedda.errors import WireError
from fedda.maths.average import liars_of
from fedda.wire.packing import Arrays, Packed, pieces

# A model whose weights are smaller than this, in the root of their mean square, counts as if they
# were so large. A new head is small, and it grows by many times its norm in its first round.
SMALL = 0.2
NAMED = 0.5  # who is scaled to less than this is named: some honest update is always the longest
LEAST = 3  # sites whose lengths are compared: of two, nobody knows which one lies


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
    """How long what each of some sites sent is, beside the longest of what the others sent.

    Of K sites f may lie. So what a site sends is compared with the f-th longest of the others': if
    it lies itself, f - 1 others do, and so that is no longer than the longest honest one. It is not
    compared with the median: honest sites that are near their optimum hardly move, and if these are
    half of all, what each of the others sends would be too long for ever.

    Args:
        times: `guard.max-update`; 0: any length.
        liars: `guard.liars`, f / K.
        sites: how many sites are to send something, K.

    Attributes:
        lengths: of what has come, by site.
    """

    def __init__(self, times: float, liars: float, sites: int) -> None:
        self.lengths: dict[str, float] = {}
        self._times, self._sites, self._f = times, sites, liars_of(liars, sites)
        self._sorted: list[float] = []

    def add(self, site: str, length: float) -> None:
        """Note how long what a site sent is."""
        self.lengths[site] = length
        insort(self._sorted, length)

    def factor(self, site: str) -> float | None:
        """What a site's update is multiplied by, 1 or less; None while it depends on what comes.

        One that is longer than `times` the others' f-th longest is scaled down to that, unless this
        is 0 or fewer than `LEAST` sites were asked.
        """
        if not self._times or self._sites < LEAST:
            return 1.0
        length, bound = self.lengths[site], self._times * self._beside(site)
        if 0 < length <= bound:  # what is to come counts as 0, and can only add
            return 1.0
        if self.missing:
            return None
        return bound / length if 0 < bound < length else 1.0

    def ratio(self, site: str) -> float:
        """How long what a site sent is, in units of the others' f-th longest."""
        return self.lengths[site] / self._beside(site)

    @property
    def missing(self) -> int:
        """How many sites have sent nothing yet."""
        return self._sites - len(self.lengths)

    @property
    def decides(self) -> bool:
        """Whether enough sites have sent something to judge any of it."""
        return len(self.lengths) > self._f

    def _beside(self, site: str) -> float:
        """The f-th longest of the others'; of fewer than f that have come, 0."""
        own, place = bisect_left(self._sorted, self.lengths[site]), len(self._sorted) - 1 - self._f
        return self._sorted[place + (place >= own)] if place >= 0 else 0.0


def too_long(
    lengths: Mapping[str, float], times: float, liars: float
) -> dict[str, tuple[float, float]]:
    """Find updates that are much longer than the others' -> how long and by what to scale, by site.

    Args:
        lengths: of the updates, by site.
        times: `guard.max-update`; 0: any length.
        liars: `guard.liars`.

    Returns:
        Of each update that is too long, its length in units of what it is compared with (`Peers`),
        and the factor that makes it `times` as long as that.
    """
    peers = Peers(times, liars, len(lengths))
    for site, length in lengths.items():
        peers.add(site, length)
    factors = {site: peers.factor(site) for site in lengths}
    return {site: (peers.ratio(site), f) for site, f in factors.items() if f is not None and f < 1}


def scaled(model: Arrays, sent: Arrays, factor: float) -> Arrays:
    """Scale an update down: the model that was sent plus a part of the way to the one that came.

    BatchNorm's running statistics go the same part of the way; counters stay as they came.

    Args:
        model: the one that came.
        sent: the one that was sent, with arrays of the same names and shapes.
        factor: the part, from 0 to 1.
    """
    return {
        name: (1 - factor) * sent[name] + factor * values if values.dtype.kind == "f" else values
        for name, values in model.items()
    }


def norm(arrays: Arrays, minus: Arrays | None = None) -> float:
    """Return the Euclidean norm of a model's weights, or of their difference from another's.

    BatchNorm's running statistics are left out: they follow the data, not the training.
    """
    total = 0.0
    for name, values in arrays.items():
        if is_weight(name, values):
            for part, other in pieces(values, values if minus is None else minus[name]):
                with np.errstate(over="ignore"):  # an infinite norm is beyond every bound
                    moved = part if minus is None else part - other
                    total += float(np.vdot(moved, moved))
    return math.sqrt(total)


def weights(arrays: Arrays) -> int:
    """Return how many numbers `norm` is over."""
    return sum(values.size for name, values in arrays.items() if is_weight(name, values))


def is_weight(name: str, values: np.ndarray) -> bool:
    """Whether an array of a model is trained, and no counter or running statistic."""
    return values.dtype.kind == "f" and "running_" not in name
