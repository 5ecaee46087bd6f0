"""Scales down gradients that are much longer than those of the other sites: `guard.max-update`.

A session may name sites whose gradients are alike, as those of the sources of one method are,
whether all add up in one group or each with the target in a group of its own. Each of their
gradients is measured, and compared with the others' of the same sync. It is judged as soon as no
gradient still to come can change the verdict, which is at the latest when all have come.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

import numpy as np

from fedda.config import GuardConfig
from fedda.exchange.groups import Group
from fedda.maths.bounds import NAMED, Peers


@dataclass(frozen=True)
class Excess:
    """What was found in the gradients of one site."""

    clipped: int = 0  # how many were scaled down, by so much that the site is named
    # how long the longest of these was, in units of the longest of the others'
    longest: float = 0.0
    numberless: int = 0  # how many did not count, as they were not finite or their square was not


class Outliers:
    """Judges the gradients of one session.

    Args:
        guard: its `max_update`, above 0, and `liars` count.
        sites: those whose gradients are alike, three or more.

    Attributes:
        found: what was found in the gradients of a site, by site; only of those that did not count
            as they were.
    """

    def __init__(self, guard: GuardConfig, sites: Collection[str]) -> None:
        self.found: dict[str, Excess] = {}
        self._bound, self._sites = (guard.max_update, guard.liars), dict.fromkeys(sites)
        self._syncs: dict[int, Peers] = {}  # at most two: of the current sync, and of the next one

    def judged(self, group: Group) -> list[str]:
        """Return the members of a group that are judged: none if their gradients are masked."""
        return [] if group.masked else [m for m in group.members if m in self._sites]

    def measure(self, site: str, index: int, gradient: np.ndarray) -> None:
        """Take a site's gradient for one sync."""
        peers = self._syncs.setdefault(index, Peers(*self._bound, len(self._sites)))
        with np.errstate(over="ignore", invalid="ignore"):
            square = float(np.vdot(gradient, gradient))
        peers.add(site, math.sqrt(square) if math.isfinite(square) else math.inf)
        if not peers.missing:  # so each site has had its sum of the sync before
            self._syncs.pop(index - 1, None)

    def factor(self, site: str, index: int) -> float | None:
        """What a gradient is multiplied by; 0 if it is no numbers; None while that is open."""
        peers = self._syncs[index]
        return peers.factor(site) if math.isfinite(peers.lengths[site]) else 0.0

    def note(self, site: str, index: int) -> None:
        """Note that a gradient does not count as it is."""
        peers, was = self._syncs[index], self.found.get(site, Excess())
        if math.isfinite(peers.lengths[site]):
            if (peers.factor(site) or 0.0) >= NAMED:
                return
            longest = max(was.longest, peers.ratio(site))
            self.found[site] = replace(was, clipped=was.clipped + 1, longest=longest)
        else:
            self.found[site] = replace(was, numberless=was.numberless + 1)

    def decides(self, index: int) -> bool:
        """Whether enough gradients of a sync have come to judge any of them."""
        peers = self._syncs.get(index)
        return peers is not None and peers.decides

    def missing(self, index: int) -> list[str]:
        """Return the sites whose gradient for a sync has not come."""
        peers = self._syncs.get(index)
        return [site for site in self._sites if peers is None or site not in peers.lengths]
