"""The rules of one session: which sites take part, what is due by when, and why it ended.

    arrive, lose, leave   a site joins or comes back, loses its connection, leaves
    add                   a gradient comes in
    tick                  time passes

The module has no network, no thread and no clock of its own: the server and the exchange inside a
process call the same rules, one call at a time. A broken rule ends the session for all sites. The
reason is one sentence, which names sites and never contains a value.
"""

import math
import time
from collections.abc import Callable, Sequence

from fedda.errors import ExchangeError
from fedda.exchange.groups import KEYS, Group, check_groups
from fedda.exchange.outliers import Outliers
from fedda.exchange.sums import Sums, Vector

Notice = Callable[[str, str, str], None]  # takes the event, its site and a sentence about it


class Meeting:
    """One session.

    Attributes:
        sites: the members of all groups.
        sums: by name of the group.
        ended: why the session ended early; empty if it did not.
        blamed: the sites because of which it ended early.
        fewest: the smallest number of examples that a gradient summed over, by site.
        outliers: what scales down gradients that are too long; None: all count as they are.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        *,
        join: float,
        wait: float,
        rejoin: float,
        notice: Notice,
        outliers: Outliers | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open the session.

        Args:
            groups: which sites sum gradients together.
            join: seconds within which all sites must join.
            wait: seconds that a sync may take from its first gradient on.
            rejoin: seconds that a site has to come back after its connection broke; 0: the session
                ends at once.
            notice: called with every event, for logs and reports.
            outliers: what scales down gradients that are too long; None: all count as they are.
            clock: returns the time in seconds.
        """
        self.sums = {group.name: Sums(group, outliers) for group in check_groups(groups)}
        self.sites = tuple(dict.fromkeys(m for group in groups for m in group.members))
        self.fewest: dict[str, int] = {}
        self.ended = ""
        self.blamed: tuple[str, ...] = ()
        self.join, self.wait, self.rejoin = join, wait, rejoin
        self.notice, self._clock = notice, clock
        self.outliers = outliers
        self._join_by = clock() + join
        self._arrived: set[str] = set()
        self._return_by: dict[str, float] = {}  # deadlines of sites whose connection broke
        self._left: set[str] = set()
        self._began: dict[str, float] = {}  # when a group's sync got its first gradient
        self._complete_since = math.inf  # when the last site joined or came back

    def sums_of(self, site: str) -> list[Sums]:
        """The sums of all groups that a site is a member of."""
        return [sums for sums in self.sums.values() if site in sums.group.members]

    def arrive(self, site: str) -> None:
        """A site joins, or comes back after its connection broke.

        Raises:
            ExchangeError: the site is connected already, has left, or the session is over.
        """
        if self.ended:
            raise ExchangeError(self.ended)
        if site in self._left:
            raise ExchangeError(f"{site} has left this session of the exchange already.")
        if self.is_connected(site):
            raise ExchangeError(f"{site} takes part already: a ticket is good for one connection.")
        returned = self._return_by.pop(site, None) is not None
        self._arrived.add(site)
        if self._is_complete():
            self._complete_since = self._clock()
        event, verb = ("resumed", "came back to") if returned else ("joined", "joined")
        self.notice(event, site, f"{site} {verb} the exchange.")

    def is_connected(self, site: str) -> bool:
        return site in self._arrived and site not in self._return_by and site not in self._left

    def lose(self, site: str) -> None:
        """The connection of a site broke."""
        if self.ended or not self.is_connected(site):
            return
        # A site whose syncs are all done delays nobody: it may come back for its last sum any time.
        done = all(sums.over for sums in self.sums_of(site))
        self._return_by[site] = math.inf if done else self._clock() + self.rejoin
        self.notice("cut", site, f"The connection of {site} to the exchange broke.")
        self.tick()

    def leave(self, site: str) -> None:
        """A site leaves by itself; the session ends if another site waits for its gradient."""
        if self.is_connected(site):
            self._left.add(site)
            self.notice("left", site, f"{site} left the exchange.")
            self._end_if_a_missing_site_left()

    def add(self, site: str, group: str, index: int, examples: int, values: Vector) -> list[Sums]:
        """Take a gradient -> the groups whose sum is complete by it.

        These are its own group, if all members' gradients are in, and others that waited for a
        verdict.

        Raises:
            ExchangeError: the gradient is refused, which ends the session.
        """
        if self.ended:
            raise ExchangeError(self.ended)
        try:
            sums = self._checked_sums(site, group, examples)
            total = sums.add(site, index, values)
        except ExchangeError as error:
            self.refuse(site, str(error))
            raise ExchangeError(self.ended) from None
        if group != KEYS:
            self.fewest[site] = min(examples, self.fewest.get(site, examples))
        done = ([] if total is None else [sums]) + self._released(sums, index)
        if sums not in done:
            self._began.setdefault(group, self._clock())
            self._end_if_a_missing_site_left()
        for each in done:
            self._began.pop(each.group.name, None)
        return done

    def refuse(self, site: str, text: str) -> None:
        """End the session because of what a site sent."""
        self.notice("refused", site, text)
        self.end(f"The exchange ended, because a frame was refused: {text}", site)

    def tick(self) -> None:
        """End the session if a site is late."""
        now = self._clock()
        late = sorted(site for site, by in self._return_by.items() if now >= by)
        if late:
            self.end(
                f"The connection of {listed(late)} to the exchange broke and was not made again "
                f"within {self.rejoin:g} s (exchange.rejoin): see the log of {listed(late)}.",
                *late,
            )
        missing = [site for site in self.sites if site not in self._arrived]
        if missing and now >= self._join_by:
            self.end(
                f"Still missing after {self.join:g} s (exchange.join): {listed(missing)}. All "
                f"{len(self.sites)} sites of the exchange must run at the same time: start them, "
                "give a simulation one slot for each, or allow more time.",
                *missing,
            )
        for group, began in self._began.items():
            if self._is_complete() and now >= max(began, self._complete_since) + self.wait:
                sums, missing = self.sums[group], self._missing(self.sums[group])
                self.end(
                    f"Sync {sums.index + 1} of {sums.group.syncs} of group '{group}' waited "
                    f"{self.wait:g} s (exchange.wait) for {listed(missing)}: see the logs "
                    "of the missing sites, or allow more time.",
                    *missing,
                )
                break

    def give_up(self, site: str) -> None:
        """A site will not come, or not come back, as the server learned outside the exchange."""
        if site in self.sites and not all(sums.over for sums in self.sums_of(site)):
            self.end(f"{site} stopped before its last sync: see the log of {site}.", site)

    def end(self, reason: str, *sites: str) -> None:
        """End the session early, maybe because of some sites; the first reason stays."""
        if not self.ended:
            self.ended, self.blamed = reason, sites
            self.notice("ended", "", reason)

    def _checked_sums(self, site: str, group: str, examples: int) -> Sums:
        sums = self.sums.get(group)
        if sums is None:  # the sentence omits the group's name, which could be any text
            raise ExchangeError(f"{site} sent a gradient for a group that does not exist.")
        if site not in sums.group.members:
            raise ExchangeError(
                f"{site} sent a gradient for group '{group}', of which it is not a member."
            )
        if examples < 1:
            raise ExchangeError(f"{site} sent group '{group}' a gradient over no examples.")
        return sums

    def _released(self, added: Sums, index: int) -> list[Sums]:
        """The groups whose sum a gradient of another group completes, as it settles a verdict."""
        if self.outliers is None or not self.outliers.decides(index):
            return []
        held = [sums for sums in self.sums.values() if sums.held and sums is not added]
        return [sums for sums in held if sums.go_on() is not None]

    def _missing(self, sums: Sums) -> list[str]:
        """The sites for whose gradients a group waits, members or not."""
        if sums.held and self.outliers is not None:
            return sums.missing() or self.outliers.missing(sums.index)
        return sums.missing()

    def _is_complete(self) -> bool:
        """Whether all sites have joined, and none with syncs to come has lost its connection."""
        cut = any(by < math.inf for by in self._return_by.values())
        return not cut and len(self._arrived) == len(self.sites)

    def _end_if_a_missing_site_left(self) -> None:
        for sums in self.sums.values() if self._left else ():
            gone = [m for m in self._missing(sums) if m in self._left] if sums.begun else []
            if gone:
                self.end(
                    f"{listed(gone)} left the exchange after {sums.index} of {sums.group.syncs} "
                    f"syncs of group '{sums.group.name}': see the log of {listed(gone)}.",
                    *gone,
                )


def listed(names: Sequence[str]) -> str:
    """Names as in a sentence: `a, b and c`."""
    *head, last = names
    return f"{', '.join(head)} and {last}" if head else last
