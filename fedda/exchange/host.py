"""The server's end of the exchange: sessions that sites join over lanes of the run."""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from fedda.errors import ExchangeError
from fedda.exchange import frames
from fedda.exchange.groups import Group
from fedda.exchange.meeting import Meeting, Notice
from fedda.exchange.outliers import Outliers
from fedda.exchange.session import Session, ignore, invite
from fedda.exchange.sums import Sums
from fedda.exchange.tally import Tally
from fedda.lane.lane_end import LaneEnd
from fedda.lane.lane_host import LaneHost

log = logging.getLogger("fedda.exchange")

TICK_S = 0.1
GRACE_S = 2.0  # for what is on its way to sites when a session is closed
LOG_LEVELS = {"refused": logging.WARNING, "ended": logging.WARNING, "cut": logging.WARNING}


class Host:
    """Opens sessions that sites join over the network."""

    def __init__(self, lanes: LaneHost | Path, notice: Notice = ignore) -> None:
        """Set where sites come.

        Args:
            lanes: the run's; or a folder, in which each session opens lanes of its own.
            notice: called with each event (joined, cut, resumed, left, refused, ended), its site
                and a sentence about it; from several threads, one at a time.
        """
        self._lanes, self._notice = lanes, notice

    def open(
        self,
        groups: Sequence[Group],
        *,
        join: float,
        wait: float,
        rejoin: float,
        outliers: Outliers | None = None,
    ) -> "RemoteSession":
        """Open a session; the arguments are those of `Meeting`.

        Raises:
            ExchangeError: the groups are not valid.
        """

        def notice(what: str, site: str, text: str) -> None:
            log.log(LOG_LEVELS.get(what, logging.INFO), "%s", text)
            self._notice(what, site, text)

        meeting = Meeting(
            groups, join=join, wait=wait, rejoin=rejoin, notice=notice, outliers=outliers
        )
        if isinstance(self._lanes, LaneHost):
            return RemoteSession(meeting, self._lanes)
        return RemoteSession(meeting, LaneHost(self._lanes), own=True)


class RemoteSession(Session):
    """A session that sites join over the network.

    The threads of lanes, and the clock's, hold one lock while they use the meeting. The hash of a
    large frame takes as long as sending it, so it is computed without that lock.
    """

    def __init__(self, meeting: Meeting, lanes: LaneHost, own: bool = False) -> None:
        """Invite a meeting's sites to lanes, which end with the session if they are its own."""
        super().__init__(meeting)
        self._lanes, self._own = lanes, own
        self.invitations = invite(meeting, lanes.name, lanes.certificate, lanes.port)
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._tallies: defaultdict[tuple[str, str], Tally] = defaultdict(Tally)
        # By site, from the arrival of a frame until it is counted.
        self._taking = {site: threading.Lock() for site in meeting.sites}
        self._left: set[str] = set()
        self._announced = False
        self._lines: dict[str, LaneEnd] = {}
        for site, asked in self.invitations.items():
            line = LaneEnd(noted=partial(self._take, site), most=frames.most(asked.groups))
            self._lines[site] = line
            lanes.invite(asked.ticket, line, f"{site} in the exchange")
        self._clock = threading.Thread(target=self._tick, name="exchange-clock", daemon=True)
        self._clock.start()

    def tallies(self) -> Mapping[tuple[str, str], Tally]:
        """What has come, by site and group, with every gradient that was added so far."""
        for taking in self._taking.values():
            with taking:
                pass
        return dict(self._tallies)

    def give_up(self, site: str) -> None:
        with self._lock:
            self._meeting.give_up(site)
            self._announce_end()

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        with self._lock:
            self._end_if_early()
        for site, line in self._lines.items():
            line.end(self._meeting.ended or "The exchange is over.")
            self._lanes.forget(self.invitations[site].ticket)
        until = time.monotonic() + GRACE_S
        for line in self._lines.values():
            with line.lock:
                line.lock.wait_for(lambda line=line: line.is_silent, until - time.monotonic())
        self._clock.join()
        if self._own:
            self._lanes.close()

    def _tick(self) -> None:
        while not self._closed.wait(TICK_S):
            with self._lock:
                for site in self._lines:
                    self._attend(site)
                self._meeting.tick()
                self._announce_end()

    def _attend(self, site: str) -> None:
        """Note whether a site is connected."""
        is_there, known = self._lines[site].connected, self._meeting.is_connected(site)
        if is_there == known or site in self._left or self._meeting.ended:
            return
        if is_there:
            self._meeting.arrive(site)
        else:
            self._meeting.lose(site)

    def _take(self, site: str, data: frames.Note) -> None:
        """Take one frame; one that is not due ends the session."""
        with self._taking[site]:
            group = ""
            with self._lock:
                self._bytes_from[site] += len(data)
                try:
                    self._attend(site)
                    group = self._taken(site, data)
                except Exception as error:  # a defect of fedda: no site should wait for ever
                    log.exception("the exchange failed")
                    self._meeting.end(
                        f"The exchange failed at the server ({type(error).__name__})."
                    )
                self._announce_end()
            if group:
                self._tallies[site, group].add(data)

    def _taken(self, site: str, data: frames.Note) -> str:
        """Take one frame -> the group of a gradient, or nothing."""
        meeting = self._meeting
        if meeting.ended:
            return ""  # the frame was on its way when the session ended
        try:
            up, values = frames.up(data)
            kind = up.WhichOneof("kind")
            if kind == "gradient":
                head = up.gradient
                for sums in meeting.add(site, head.group, head.index, head.examples, values):
                    self._send(sums)
                return head.group
            if kind != "leave":
                raise ExchangeError(f"{site} sent a frame of kind '{kind}', which is not due.")
            self._left.add(site)
            meeting.leave(site)
            self._lines[site].end("This site has left the exchange.")
        except ExchangeError as error:
            meeting.refuse(site, str(error))
        return ""

    def _send(self, sums: Sums) -> None:
        assert sums.last is not None
        data = frames.total(sums.group.name, sums.index - 1, sums.last)
        for member in sums.group.members:
            self._bytes_to[member] += len(data)
            self._lines[member].post(data)

    def _announce_end(self) -> None:
        """Once a session ended early, say the reason to every site as its last frame."""
        if self._meeting.ended and not self._announced:
            self._announced = True
            for line in self._lines.values():
                line.end(self._meeting.ended)
