"""The exchange inside one process: the same sums and rules, no network.

Sites are threads; `Turns` runs them in a repeatable order. An invitation to such a session is valid
in this process only.
"""

from collections.abc import Sequence

from fedda.errors import ExchangeError
from fedda.exchange import frames
from fedda.exchange.groups import Group, Invitation
from fedda.exchange.meeting import Meeting, Notice
from fedda.exchange.outliers import Outliers
from fedda.exchange.session import Session, ignore, invite
from fedda.exchange.stream import Stream
from fedda.exchange.sums import Vector
from fedda.exchange.turn_lock import CHANGED, wait_until

TICK_S = 0.1

_sessions: dict[str, "LocalSession"] = {}  # by ticket


class LocalHost:
    """Opens sessions for threads of this process."""

    def __init__(self, notice: Notice = ignore) -> None:
        self._notice = notice

    def open(
        self,
        groups: Sequence[Group],
        *,
        join: float,
        wait: float,
        rejoin: float = 0.0,
        outliers: Outliers | None = None,
    ) -> "LocalSession":
        """Open a session; the arguments are those of `Meeting`."""
        meeting = Meeting(
            groups, join=join, wait=wait, rejoin=rejoin, notice=self._notice, outliers=outliers
        )
        return LocalSession(meeting)


def give_up(ticket: str) -> None:
    """Stop waiting for the site with this ticket, which failed before or after it joined."""
    if session := _sessions.get(ticket):
        session.give_up(next(s for s, i in session.invitations.items() if i.ticket == ticket))


class LocalSession(Session):
    """A session that threads of this process join."""

    def __init__(self, meeting: Meeting) -> None:
        super().__init__(meeting)
        self.invitations = invite(meeting)
        _sessions.update({each.ticket: self for each in self.invitations.values()})

    def give_up(self, site: str) -> None:
        with CHANGED:
            self._meeting.give_up(site)
            CHANGED.notify_all()

    def close(self) -> None:
        with CHANGED:
            self._end_if_early()
            for each in self.invitations.values():
                _sessions.pop(each.ticket, None)
            CHANGED.notify_all()

    def join(self, site: str) -> None:
        with CHANGED:
            self._meeting.arrive(site)

    def leave(self, site: str) -> None:
        with CHANGED:
            self._meeting.leave(site)
            CHANGED.notify_all()

    def push(self, site: str, group: str, index: int, gradient: Vector, examples: int) -> None:
        with CHANGED:
            self._bytes_from[site] += len(frames.gradient(group, index, examples, gradient))
            try:
                # A copy: the sender may overwrite its array.
                self._meeting.add(site, group, index, examples, gradient.copy())
            finally:
                CHANGED.notify_all()

    def pull(self, site: str, group: str, index: int) -> Vector:
        with CHANGED:
            sums, meeting = self._meeting.sums[group], self._meeting
            wait_until(lambda: sums.index > index or bool(meeting.ended), TICK_S, meeting.tick)
            if sums.index <= index or sums.last is None:
                raise ExchangeError(meeting.ended)
            self._bytes_to[site] += len(frames.total(group, index, sums.last))
            return sums.last


class LocalStream(Stream):
    """One site's connection to a session in this process."""

    def __init__(self, invitation: Invitation) -> None:
        super().__init__(invitation)
        session = _sessions.get(invitation.ticket)
        if session is None:
            raise ExchangeError(
                "The invitation is for an exchange inside another process, or for one that is "
                "over: a site in a process of its own needs a server that listens."
            )
        self._session = session
        session.join(self.node)

    def close(self) -> None:
        self._session.leave(self.node)

    def _push(self, group: str, index: int, gradient: Vector, examples: int) -> None:
        self._session.push(self.node, group, index, gradient, examples)

    def _pull(self, group: str, index: int) -> Vector:
        return self._session.pull(self.node, group, index)
