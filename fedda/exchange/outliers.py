"""Finds gradients that are much longer than those of the other sites: `guard.max-update`.

A session may name sites whose gradients are alike, as those of the sources of one method are,
whether all add up in one group or each with the target in a group of its own. Each of their
gradients is measured, and compared with the others' of the same sync. It is judged as soon as no
gradient still to come can change the verdict, which is at the latest when all have come.
"""

import math
from collections.abc import Collection

import numpy as np

from fedda.exchange.groups import Group
from fedda.maths.bounds import Peers


class Outliers:
    """Judges the gradients of one session.

    Args:
        times: `guard.max-update`, above 0.
        sites: those whose gradients are alike, four or more.

    Attributes:
        found: how many gradients of a site were left out, and how long the longest of them was in
            units of the median of the others' (infinite: not finite); by site.
    """

    def __init__(self, times: float, sites: Collection[str]) -> None:
        self.found: dict[str, tuple[int, float]] = {}
        self._times, self._sites = times, dict.fromkeys(sites)
        self._syncs: dict[int, Peers] = {}  # at most two: of the current sync, and of the next one

    def judged(self, group: Group) -> list[str]:
        """Return the members of a group that are judged: none if their gradients are masked."""
        return [] if group.masked else [m for m in group.members if m in self._sites]

    def measure(self, site: str, index: int, gradient: np.ndarray) -> None:
        """Take a site's gradient for one sync."""
        peers = self._syncs.setdefault(index, Peers(self._times, len(self._sites)))
        with np.errstate(over="ignore", invalid="ignore"):
            square = float(np.vdot(gradient, gradient))
        peers.add(site, math.sqrt(square) if math.isfinite(square) else math.inf)
        if not peers.missing:  # so each site has had its sum of the sync before
            self._syncs.pop(index - 1, None)

    def counts(self, site: str, index: int) -> bool | None:
        """Whether a gradient counts; None while that depends on what is still to come."""
        peers = self._syncs[index]
        return peers.counts(site) if math.isfinite(peers.lengths[site]) else False

    def note(self, site: str, index: int) -> None:
        """Note that a gradient is left out."""
        peers, (count, longest) = self._syncs[index], self.found.get(site, (0, 0.0))
        times = peers.ratio(site) if math.isfinite(peers.lengths[site]) else math.inf
        self.found[site] = (count + 1, max(longest, times))

    def decides(self, index: int) -> bool:
        """Whether enough gradients of a sync have come to judge any of them."""
        peers = self._syncs.get(index)
        return peers is not None and 2 * len(peers.lengths) > len(self._sites)

    def missing(self, index: int) -> list[str]:
        """Return the sites whose gradient for a sync has not come."""
        peers = self._syncs.get(index)
        return [site for site in self._sites if peers is None or site not in peers.lengths]
