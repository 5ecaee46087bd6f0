"""What the server does with each connection: threads around a `Meeting`.

A connection has two threads: one reads what comes, the other writes what lies in the connection's
queue. All of them, and the clock, hold one lock while they touch the meeting.
"""

import logging
import queue
import threading
from collections.abc import Iterator

import grpc

from fedda.errors import ExchangeError
from fedda.exchange import frames
from fedda.exchange.exchange_pb2 import Down, Gradient, Hello, Position, Welcome
from fedda.exchange.meeting import Meeting
from fedda.exchange.sums import Vector

log = logging.getLogger("fedda.exchange")

STRANGERS = 10  # told of in a session: anyone who reaches the port could fill disks with more


class Line:
    """The connection of one participant, and the frames on their way to it; None ends it."""

    def __init__(self, site: str) -> None:
        self.site = site
        self.greeted = False  # its Hello has come
        self.told = False  # that the session ended early
        self.out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()


class Desk:
    """All connections of one session."""

    def __init__(self, meeting: Meeting, to: dict[str, int], sent: dict[str, int]) -> None:
        """Serve a meeting; bytes to and from each site are added to the two counts."""
        self.lock = threading.Lock()
        self._meeting = meeting
        self._to, self._from = to, sent
        self._lines: dict[str, Line] = {}
        self._strangers = 0
        self._closing = False

    def tick(self) -> None:
        with self.lock:
            self._meeting.tick()
            self._tell()

    def give_up(self, site: str) -> None:
        with self.lock:
            self._meeting.give_up(site)
            self._tell()

    def close(self) -> None:
        """Send what is on its way, and end all connections."""
        with self.lock:
            self._closing = True
            self._tell()
            for line in self._lines.values():
                line.out.put(None)

    def serve(self, site: str | None, incoming: Iterator[bytes]) -> Iterator[bytes]:
        """One connection, from its ticket to its last frame; site is whose ticket it showed."""
        line = Line(site or "")
        with self.lock:
            refusal = self._admit(line)
        if refusal is not None:
            yield refusal
            return
        reader = threading.Thread(target=self._read, args=(line, incoming), daemon=True)
        reader.start()
        while (data := line.out.get()) is not None:
            yield data

    def _admit(self, line: Line) -> bytes | None:
        """Take a participant in, or say why not."""
        site, meeting = line.site, self._meeting
        if not site or self._closing:
            text = "A connection whose ticket this session of the exchange does not know is refused"
            self._strangers += 1
            if self._strangers <= STRANGERS:
                more = "; further ones are not told of" if self._strangers == STRANGERS else ""
                meeting.notice("refused", "", f"{text}{more}.")
            return frames.ended(f"{text}: the session may be over, or its server started anew.")
        here = meeting.is_here(site)
        try:
            meeting.arrive(site)
        except ExchangeError as error:
            meeting.notice("refused", site, str(error))
            return frames.ended(str(error), again=here and not meeting.ended)
        self._lines[site] = line
        return None

    def _read(self, line: Line, incoming: Iterator[bytes]) -> None:
        """Everything that a participant sends, until it leaves or its connection breaks."""
        try:
            for data in incoming:
                with self.lock:
                    self._from[line.site] += len(data)
                    self._take(line, data)
                    self._tell()
        except grpc.RpcError:
            pass  # the connection broke
        except Exception as error:  # a defect of ours: nobody should wait for what will not come
            log.exception("the exchange failed")
            with self.lock:
                self._meeting.end(f"The exchange failed at the server ({type(error).__name__}).")
        finally:
            with self.lock:
                if not self._closing:
                    self._meeting.lose(line.site)
                    self._tell()
                self._lines.pop(line.site)
            line.out.put(None)

    def _take(self, line: Line, data: bytes) -> None:
        """One frame; whatever is not due ends the session."""
        site, meeting = line.site, self._meeting
        if meeting.ended:
            return  # it was under way
        try:
            up, values = frames.up(data)
            kind = up.WhichOneof("kind")
            if kind == "gradient" and line.greeted:
                self._add(site, up.gradient, values)
            elif kind == "leave":
                meeting.leave(site)
                line.out.put(None)
            elif kind == "hello" and not line.greeted:
                line.greeted = True
                self._welcome(line, up.hello)
            else:
                raise ExchangeError(f"{site} sent a frame of kind '{kind}', which is not due.")
        except ExchangeError as error:
            meeting.refuse(site, str(error))

    def _add(self, site: str, sent: Gradient, values: Vector) -> None:
        total = self._meeting.add(site, sent.group, sent.index, sent.examples, values)
        if total is not None:
            data = frames.total(sent.group, sent.index, total)
            for member in self._meeting.sums[sent.group].group.members:
                self._send(member, data)

    def _welcome(self, line: Line, hello: Hello) -> None:
        """Say what is in, and send again the sums that a participant had no time to receive."""
        site, groups = line.site, self._meeting.of(line.site)
        received = {position.group: position.count for position in hello.received}
        taken = [Position(group=s.group.name, count=s.taken(site)) for s in groups]
        welcome = Welcome(taken=taken, rejoin=self._meeting.rejoin)
        self._send(site, Down(welcome=welcome).SerializeToString())
        for sums in groups:
            name, sent = sums.group.name, sums.taken(site)
            has = received.get(name, max(sent - 1, 0))
            if not sent - 1 <= has <= sent:
                raise ExchangeError(
                    f"{site} came back to group '{name}' with {has} sums, "
                    f"but {sent} of its gradients are in."
                )
            if has < sent == sums.index and sums.last is not None:
                self._send(site, frames.total(name, sent - 1, sums.last))

    def _send(self, site: str, data: bytes) -> None:
        line = self._lines.get(site)
        if line is not None and line.greeted:  # who is not yet gets the sum after its Welcome
            self._to[site] += len(data)
            line.out.put(data)

    def _tell(self) -> None:
        """Once a session is over early, say so to everybody, as the last word."""
        if self._meeting.ended:
            for line in self._lines.values():
                if not line.told:
                    line.told = True
                    line.out.put(frames.ended(self._meeting.ended))
                    line.out.put(None)
