"""What a site's values look like, in numbers of which no few examples decide one.

Ours. Nothing here is differential privacy: `docs/trust/statistics.md` says what two answers tell.

    N, d, k     sizes     examples, columns, values of a column in an example
    v           (N, k)    one column: k pixels of a channel, from 0 to 1, or one value; a gap is NaN
    low, high   float     means of the FLOOR examples next to the lowest and to the highest ones
    w           (N, k)    v between low and high, so that one example moves the mean by
                          (high - low) / N at most
    share       (BINS,)   of the values, by bin; 0 in a bin that fewer than FLOOR examples reach
    m, s        (d,)      mean and deviation of features
    D           float     drift between two sites
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

LEAST = 64  # examples of which means are told
FLOOR = 10  # counts are told in steps of it, and no number is about fewer examples
BINS = 8
TAIL = 0.05  # the share of examples beyond low, and beyond high
STEPS = 100  # of means between low and high; of fewer examples `tens` of them
GRID = 4  # cells of an image's side, for its features
FAR = 10.0  # the most that one feature counts in a drift


class Column(NamedTuple):
    """One column of a site; all zeros if fewer than LEAST examples have a value."""

    low: float
    high: float
    mean: float
    deviation: float
    missing: float  # share of the examples without a value
    share: Tensor  # (BINS,)


def tens(count: float) -> int:
    """A count as it is told: rounded down to a multiple of FLOOR -> int."""
    return int(count) // FLOOR * FLOOR


def edge(x: Tensor) -> Tensor:
    """Mean of the FLOOR values above the lowest max(FLOOR, TAIL n) of x (n,) -> float64 scalar.

    No value that fewer than FLOOR examples reach is in it.
    """
    first = max(FLOOR, int(TAIL * len(x)))
    return x.double().sort().values[first : first + FLOOR].mean()


def column(
    v: Tensor,
    bounds: tuple[float, float] | None,
    noise: float = 0.0,
    draws: np.random.Generator | None = None,
) -> Column:
    """Summarise v (N, k) -> Column.

    Args:
        v: the values.
        bounds: where the first bin begins and the last ends; None: at low and high.
        noise: of each number, in units of what one example may change a mean by.
        draws: draws it; not by torch, of whose seeds 32 bits count, few enough to try them all.
    """
    seen = v[~v.isnan().any(dim=1)].double()
    n, missing = len(seen), min(tens(len(v) - len(seen)) / max(tens(len(v)), FLOOR), 1.0)
    if n < LEAST:
        return Column(0, 0, 0, 0, missing, torch.zeros(BINS))
    inner = int(TAIL * v.shape[1])  # an example's own tails, where it has many values
    ordered = seen.sort(dim=1).values
    low, high = float(edge(ordered[:, inner])), -float(edge(-ordered[:, -1 - inner]))
    w = seen.clamp(low, high)
    drawn = np.zeros(4 + BINS) if draws is None else draws.standard_normal(4 + BINS)
    z = torch.from_numpy(drawn) * noise / n
    numbers = (low, high, float(w.mean()), float(w.std(correction=0)))
    unit = high - low
    low, high, mean, deviation = (
        x + unit * r for x, r in zip(numbers, z[:4].tolist(), strict=True)
    )
    step = max(high - low, 0) / min(tens(n), STEPS) or 1.0
    return Column(
        _digits(low),
        _digits(high),
        _digits(low + step * round((mean - low) / step)),
        _digits(step * round(deviation / step)),
        missing,
        histogram(w if bounds is None else seen, bounds or (low, high), z[4:]),
    )


def histogram(v: Tensor, bounds: tuple[float, float], z: Tensor) -> Tensor:
    """Share of v (n, k) by bin, in tens of examples or in percent, 0 below FLOOR -> (BINS,).

    As n is told in tens, shares are of that many: in units of 1 / n they would tell n itself.

    Args:
        v: the values; pixels are told in percent, as an example has many.
        bounds: where the first bin begins and the last ends.
        z: (BINS,) noise on each share.
    """
    begin, end = bounds
    place = ((v - begin) / max(end - begin, 1e-300) * BINS).floor().clamp(0, BINS - 1)
    tabular = v.shape[1] == 1
    step = FLOOR / len(v) if tabular else 0.01
    inside = torch.stack([place == b for b in range(BINS)])  # (BINS, n, k)
    steps = ((inside.double().mean(dim=(1, 2)) + z) / step).round()
    share = (steps * (FLOOR / tens(len(v)) if tabular else step)).clamp(0, 1)
    return torch.where(inside.any(dim=2).sum(dim=1) >= FLOOR, share, 0).float()


def features(x: Tensor) -> Tensor:
    """Brightness and edges of images x (N, channels, H, W) on a grid -> (N, 2 GRID^2).

    Colours count as their mean, so that gray and coloured images compare.
    """
    gray = x.float().mean(dim=1, keepdim=True) / 255  # (N, 1, H, W)
    across, down = gray.diff(dim=3).abs(), gray.diff(dim=2).abs()
    edges = F.pad(across, (0, 1)) + F.pad(down, (0, 0, 0, 1))
    return torch.cat([F.adaptive_avg_pool2d(t, GRID).flatten(1) for t in (gray, edges)], dim=1)


def drift(m: Sequence[Tensor], s: Sequence[Tensor]) -> float:
    """D^2 = mean_j min(|m_j - m'_j| / sqrt((s_j^2 + s'_j^2) / 2), FAR)^2 -> float.

    About 0 where two sites are alike; 1: features differ by a deviation.

    Args:
        m: both sites' means.
        s: their deviations. A feature that varies at neither counts as 0 or FAR.
    """
    (m1, m2), (s1, s2) = ([t.double() for t in two] for two in (m, s))  # as squares may be large
    gap, pooled = (m1 - m2).abs(), ((s1**2 + s2**2) / 2).sqrt()
    z = torch.where(pooled > 0, gap / pooled, torch.where(gap > 0, FAR, 0.0)).clamp(max=FAR)
    return float((z**2).mean().sqrt())


def _digits(value: float) -> float:
    """Three digits."""
    return float(f"{value:.3g}") if math.isfinite(value) else 0.0
