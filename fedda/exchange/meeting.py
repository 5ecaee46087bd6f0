"""The rules of one session: who is there, what is due until when, and why it ended.

    arrive, lose, leave   a participant joins or comes back, loses its connection, goes
    add                   a gradient comes in
    tick                  time passes

No network, no thread and no clock of its own: the server and the exchange inside a process drive
the same rules, one call at a time. What breaks a rule ends the session for everybody, with one
sentence that names sites and never holds a value.
"""

import math
import time
from collections.abc import Callable, Sequence

from fedda.errors import ExchangeError
from fedda.exchange.groups import Group, check_groups
from fedda.exchange.sums import Sums, Vector

Notice = Callable[[str, str, str], None]  # what happened, to which site, in one sentence


class Meeting:
    """One session.

    Attributes:
        sites: the members of all groups.
        sums: by name of the group.
        ended: the reason, once the session is over early; empty until then.
        fewest: by site, the fewest examples that one of its gradients summed over.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        *,
        join: float,
        wait: float,
        rejoin: float,
        notice: Notice,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Open it.

        Args:
            groups: who sums what.
            join: seconds until everybody must have arrived.
            wait: seconds that a sync may take from its first gradient on.
            rejoin: seconds that a participant has to come back after its connection broke; 0: the
                session ends at once.
            notice: told what happens, for logs and reports.
            clock: seconds.
        """
        self.sums = {group.name: Sums(group) for group in check_groups(groups)}
        self.sites = tuple(dict.fromkeys(m for group in groups for m in group.members))
        self.fewest: dict[str, int] = {}
        self.ended = ""
        self.join, self.wait, self.rejoin = join, wait, rejoin
        self.notice, self._clock = notice, clock
        self._join_by = clock() + join
        self._arrived: set[str] = set()
        self._back_by: dict[str, float] = {}  # those whose connection broke
        self._left: set[str] = set()
        self._since: dict[str, float] = {}  # when a group's sync got its first gradient
        self._complete_since = math.inf  # when the last one arrived or came back

    def of(self, site: str) -> list[Sums]:
        """The groups of a site."""
        return [sums for sums in self.sums.values() if site in sums.group.members]

    def arrive(self, site: str) -> None:
        """A participant joins, or comes back.

        Raises:
            ExchangeError: it is here already, has left, or the session is over.
        """
        if self.ended:
            raise ExchangeError(self.ended)
        if site in self._left:
            raise ExchangeError(f"{site} has left this session of the exchange already.")
        if self.is_here(site):
            raise ExchangeError(f"{site} takes part already: a ticket is good for one connection.")
        back = self._back_by.pop(site, None) is not None
        self._arrived.add(site)
        if not self._absent():
            self._complete_since = self._clock()
        self.notice("resumed" if back else "joined", site, f"{site} {_HERE[back]} the exchange.")

    def is_here(self, site: str) -> bool:
        return site in self._arrived and site not in self._back_by and site not in self._left

    def lose(self, site: str) -> None:
        """The connection of a participant broke."""
        if self.ended or not self.is_here(site):
            return
        done = all(sums.over for sums in self.of(site))  # it may still come back for the last sum
        self._back_by[site] = math.inf if done else self._clock() + self.rejoin
        self.notice("cut", site, f"The connection of {site} to the exchange broke.")
        self.tick()

    def leave(self, site: str) -> None:
        """A participant goes by itself; who still waits for a gradient of it is told."""
        if self.is_here(site):
            self._left.add(site)
            self.notice("left", site, f"{site} left the exchange.")
            self._without_those_who_left()

    def add(
        self, site: str, group: str, index: int, examples: int, values: Vector
    ) -> Vector | None:
        """Take a gradient -> the sum, if it was the last to come.

        Raises:
            ExchangeError: it is refused, which ends the session.
        """
        if self.ended:
            raise ExchangeError(self.ended)
        try:
            sums = self._sums(site, group, examples)
            total = sums.add(site, index, values)
        except ExchangeError as error:
            self.refuse(site, str(error))
            raise ExchangeError(self.ended) from None
        self.fewest[site] = min(examples, self.fewest.get(site, examples))
        if total is not None:
            self._since.pop(group, None)
        else:
            self._since.setdefault(group, self._clock())
            self._without_those_who_left()
        return total

    def refuse(self, site: str, text: str) -> None:
        """End the session because of what a participant sent."""
        self.notice("refused", site, text)
        self.end(f"The exchange ended, because a frame was refused: {text}")

    def tick(self) -> None:
        """End the session if something took too long."""
        now = self._clock()
        late = sorted(site for site, by in self._back_by.items() if now >= by)
        if late:
            self.end(
                f"The connection of {listed(late)} to the exchange broke and was not made again "
                f"within {self.rejoin:g} s (exchange.rejoin): see the log of {listed(late)}."
            )
        absent = [site for site in self.sites if site not in self._arrived]
        if absent and now >= self._join_by:
            self.end(
                f"Still missing after {self.join:g} s (exchange.join): {listed(absent)}. All "
                f"{len(self.sites)} participants of the exchange must run at the same time: start "
                "them, give a simulation one slot for each, or allow more time."
            )
        for group, since in self._since.items():
            if not self._absent() and now >= max(since, self._complete_since) + self.wait:
                sums = self.sums[group]
                self.end(
                    f"Sync {sums.index + 1} of {sums.group.syncs} of group '{group}' waited "
                    f"{self.wait:g} s (exchange.wait) for {listed(sums.missing())}: see the log "
                    "there, or allow more time."
                )
                break

    def give_up(self, site: str) -> None:
        """A participant will not come, or not come back: the server heard so by another way."""
        if site in self.sites and not all(sums.over for sums in self.of(site)):
            self.end(f"{site} stopped before its last sync: see the log there.")

    def end(self, reason: str) -> None:
        """End the session early; the first reason stays."""
        if not self.ended:
            self.ended = reason
            self.notice("ended", "", reason)

    def _sums(self, site: str, group: str, examples: int) -> Sums:
        sums = self.sums.get(group)
        if sums is None:  # the name is not repeated: it could be anything
            raise ExchangeError(f"{site} sent a gradient for a group that does not exist.")
        if site not in sums.group.members:
            raise ExchangeError(
                f"{site} sent a gradient for group '{group}', of which it is not a member."
            )
        if examples < 1:
            raise ExchangeError(f"{site} sent group '{group}' a gradient over no examples.")
        return sums

    def _absent(self) -> bool:
        cut = any(by < math.inf for by in self._back_by.values())
        return cut or len(self._arrived) < len(self.sites)

    def _without_those_who_left(self) -> None:
        for sums in self.sums.values():
            gone = [m for m in sums.missing() if m in self._left] if sums.begun else []
            if gone:
                self.end(
                    f"{listed(gone)} left the exchange after {sums.index} of {sums.group.syncs} "
                    f"syncs of group '{sums.group.name}': see the log there."
                )


_HERE = {False: "joined", True: "came back to"}


def listed(names: Sequence[str]) -> str:
    """Names as one says them."""
    *head, last = names
    return f"{', '.join(head)} and {last}" if head else last
