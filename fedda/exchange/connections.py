"""The server's connections to the sites of a session: threads around a `Meeting`.

Each connection has two threads: one reads what the site sends, the other writes the frames in the
connection's queue. All these threads, and the clock's, hold one lock while they use the meeting.
The hash of a large frame takes as long as sending it, so it is computed without that lock.
"""

import logging
import queue
import threading
from collections import defaultdict
from collections.abc import Iterator

import grpc

from fedda.errors import ExchangeError
from fedda.exchange import frames
from fedda.exchange.exchange_pb2 import Down, Gradient, Hello, Position, Welcome
from fedda.exchange.meeting import Meeting
from fedda.exchange.sums import Vector
from fedda.exchange.tally import Tally

log = logging.getLogger("fedda.exchange")

# Unknown tickets that a session reports: with more, anyone who reaches the port could fill disks.
MAX_REPORTED = 10


class Connection:
    """The connection of one site, with the queue of frames for it; None in the queue ends it."""

    def __init__(self, site: str) -> None:
        self.site = site
        self.greeted = False  # its Hello has come
        self.ended = False  # the frame that ends it is in the queue
        self.out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()


class Connections:
    """All connections of one session."""

    def __init__(
        self, meeting: Meeting, bytes_to: dict[str, int], bytes_from: dict[str, int]
    ) -> None:
        """Serve a meeting, and add the bytes to and from each site to the two tables."""
        self.lock = threading.Lock()
        self._meeting = meeting
        self._bytes_to, self._bytes_from = bytes_to, bytes_from
        self._tallies: defaultdict[tuple[str, str], Tally] = defaultdict(Tally)
        # By site, from the arrival of a frame until it is counted: also over a site's connections.
        self._taking = {site: threading.Lock() for site in bytes_from}
        self._connected: dict[str, Connection] = {}
        self._strangers = 0
        self._closing = False

    def tallies(self) -> dict[tuple[str, str], Tally]:
        """What has come, by site and group, with every gradient that was added so far."""
        for taking in self._taking.values():
            with taking:
                pass
        return dict(self._tallies)

    def tick(self) -> None:
        with self.lock:
            self._meeting.tick()
            self._announce_end()

    def give_up(self, site: str) -> None:
        with self.lock:
            self._meeting.give_up(site)
            self._announce_end()

    def close(self) -> None:
        """Send what is in the queues, and end all connections."""
        with self.lock:
            self._closing = True
            self._announce_end()
            for connection in self._connected.values():
                connection.out.put(None)

    def serve(self, site: str | None, incoming: Iterator[bytes]) -> Iterator[bytes]:
        """Serve one connection from its ticket to its last frame -> the frames to send.

        Args:
            site: that the ticket belongs to; None: the ticket is unknown.
            incoming: frames from the site.
        """
        connection = Connection(site or "")
        with self.lock:
            refusal = self._admit(connection)
        if refusal is not None:
            yield refusal
            return
        reader = threading.Thread(target=self._read, args=(connection, incoming), daemon=True)
        reader.start()
        while (data := connection.out.get()) is not None:
            yield data

    def _admit(self, connection: Connection) -> bytes | None:
        """Let a site join -> None, or the frame that says why not."""
        site, meeting = connection.site, self._meeting
        if not site or self._closing:
            text = "A connection whose ticket this session of the exchange does not know is refused"
            self._strangers += 1
            if self._strangers <= MAX_REPORTED:
                last = self._strangers == MAX_REPORTED
                more = "; further ones are not reported" if last else ""
                meeting.notice("refused", "", f"{text}{more}.")
            return frames.ended(f"{text}: the session may be over, or its server was restarted.")
        connected = meeting.is_connected(site)
        try:
            meeting.arrive(site)
        except ExchangeError as error:
            meeting.notice("refused", site, str(error))
            return frames.ended(str(error), again=connected and not meeting.ended)
        self._connected[site] = connection
        return None

    def _read(self, connection: Connection, incoming: Iterator[bytes]) -> None:
        """Read all that a site sends, until it leaves or its connection breaks."""
        try:
            for data in incoming:
                with self._taking[connection.site]:
                    with self.lock:
                        self._bytes_from[connection.site] += len(data)
                        group = self._take(connection, data)
                        self._announce_end()
                    if group is not None:
                        self._tallies[connection.site, group].add(data)
        except grpc.RpcError:
            pass  # the connection broke
        except Exception as error:  # a defect of fedda: no site should wait for ever
            log.exception("the exchange failed")
            with self.lock:
                self._meeting.end(f"The exchange failed at the server ({type(error).__name__}).")
        finally:
            with self.lock:
                if not self._closing:
                    self._meeting.lose(connection.site)
                    self._announce_end()
                self._connected.pop(connection.site)
            connection.out.put(None)

    def _take(self, connection: Connection, data: bytes) -> str | None:
        """Take one frame -> the group of a gradient; a frame that is not due ends the session."""
        site, meeting = connection.site, self._meeting
        if meeting.ended:
            return None  # the frame was on its way when the session ended
        try:
            up, values = frames.up(data)
            kind = up.WhichOneof("kind")
            if kind == "gradient" and connection.greeted:
                self._add(site, up.gradient, values)
                return up.gradient.group
            if kind == "leave":
                meeting.leave(site)
                connection.out.put(None)
            elif kind == "hello" and not connection.greeted:
                connection.greeted = True
                self._welcome(site, up.hello)
            else:
                raise ExchangeError(f"{site} sent a frame of kind '{kind}', which is not due.")
        except ExchangeError as error:
            meeting.refuse(site, str(error))
        return None

    def _add(self, site: str, head: Gradient, values: Vector) -> None:
        for sums in self._meeting.add(site, head.group, head.index, head.examples, values):
            assert sums.last is not None
            data = frames.total(sums.group.name, sums.index - 1, sums.last)
            for member in sums.group.members:
                self._send(member, data)

    def _welcome(self, site: str, hello: Hello) -> None:
        """Say how many of its gradients are in, and send again the sums that it did not receive."""
        groups = self._meeting.sums_of(site)
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
                    f"but {sent} of its gradients have come in."
                )
            if has < sent == sums.index and sums.last is not None:
                self._send(site, frames.total(name, sent - 1, sums.last))

    def _send(self, site: str, data: bytes) -> None:
        connection = self._connected.get(site)
        # A site that has not sent its Hello yet gets the sum right after its Welcome.
        if connection is not None and connection.greeted:
            self._bytes_to[site] += len(data)
            connection.out.put(data)

    def _announce_end(self) -> None:
        """Once a session ended early, send the reason to every site as its last frame."""
        if self._meeting.ended:
            for connection in self._connected.values():
                if not connection.ended:
                    connection.ended = True
                    connection.out.put(frames.ended(self._meeting.ended))
                    connection.out.put(None)
