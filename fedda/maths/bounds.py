"""Bounds on a model that a site sent, relative to the model that it was sent."""

import math
from collections.abc import Mapping
from statistics import median

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


def too_long(lengths: Mapping[str, float], times: float) -> dict[str, float]:
    """Find updates that are much longer than the others' -> how long, by site.

    A liar can lengthen its own update, but not the others' median.

    Args:
        lengths: of the updates, by site.
        times: `guard.max-update`; 0: any.

    Returns:
        Of each update longer than `times` the median of the others', its length in units of that
        median. Nothing if a median is 0, or of fewer than `LEAST_OTHERS`.
    """
    if not times or len(lengths) <= LEAST_OTHERS:
        return {}
    middle = {s: median(v for other, v in lengths.items() if other != s) for s in lengths}
    return {s: v / middle[s] for s, v in lengths.items() if 0 < times * middle[s] < v}


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
