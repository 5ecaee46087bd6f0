"""A site's lanes: one stream to each run that invited it, beside Flower's messages.

`Lanes` stands between the node and its session at the server. One thread asks the server for
messages and opens a stream for each invitation; every stream has a thread, which connects again
when the connection breaks. The node gets all requests from one queue, one at a time.
"""

import contextlib
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import ConfigRecord, Error, Message, RecordDict

from fedda.errors import FeddaError, WireError, code_of
from fedda.flower import SUPERLINK_NODE_ID, ObjectTree
from fedda.lane import invitation
from fedda.lane.dialer import Dialer
from fedda.lane.invitation import LaneInvitation
from fedda.lane.lane_end import Ended, LaneEnd
from fedda.lane.parcels import Incoming

from .failures import RunOver, Unreachable
from .fleet import FleetConnection, MostBytes
from .patience import OnEvent, persist

log = logging.getLogger("fedda.client")

GONE_S = 60.0  # a run that cannot be reached for so long is over
LOOK_S = 1.0  # seconds for which the node waits for a request
UNCLEAR = 2**28  # bytes that a request may have whose settings do not say how many it may
MOST_LANES = 64


class Lane:
    """This site's stream of one run."""

    def __init__(
        self,
        invited: LaneInvitation,
        address: str,
        signature: str,
        requests: "queue.SimpleQueue[Any]",
    ) -> None:
        """Begin to connect.

        Args:
            invited: the run's invitation.
            address: host:port of the server that this site dials.
            signature: of this node's key, for the invitation.
            requests: takes each request as it begins to come, with this lane.
        """
        self.name = invited.name
        self.over = False  # no request of it is waited for any more
        self._requests = requests
        self._asked: set[str] = set()  # requests with arrays that the node knows of
        self._keeps: dict[str, bool] = {}  # which of these arrays it wants
        self.line = LaneEnd(self._admit, self._came)
        self._dialer = Dialer(self.line, invited, address, self._gone, GONE_S, signature)

    def fetch(self, incoming: Incoming, keeps: bool, ends: float) -> Message | None:
        """Let a request's arrays come -> the request; None if it is not wanted.

        Raises:
            RunOver: the run is over, or waits no longer.
        """
        with self.line.lock:
            self._keeps[incoming.name] = keeps
            self.line.lock.notify_all()
            done = self.line.lock.wait_for(
                lambda: incoming.whole or self.over, max(0.0, ends - time.monotonic())
            )
            self._keeps.pop(incoming.name, None)
            self._asked.discard(incoming.name)
        if not keeps:
            return None
        if self.over or not done:
            raise RunOver("the run is over")
        return incoming.message()

    def settle(self, incoming: Incoming) -> None:
        """Let the arrays go by of a request that the node is done with."""
        with self.line.lock:
            if incoming.name in self._asked:
                self._asked.discard(incoming.name)
                self._keeps[incoming.name] = False
                self.line.lock.notify_all()

    def send(self, reply: Message, ends: float) -> None:
        """Send a reply, and wait until the run's program has it.

        Raises:
            RunOver: the run is over, or waits no longer.
        """
        name = reply.metadata.reply_to_message_id
        self.line.send(reply, name)
        with self.line.lock:
            done = self.line.lock.wait_for(
                lambda: self.line.is_sent(name) or self.over, max(0.0, ends - time.monotonic())
            )
        if self.over or not done:
            self.line.drop(name)
            raise RunOver("the run is over")

    def close(self) -> None:
        """Hang up."""
        self._dialer.close()
        self._end()

    def _gone(self, why: Exception) -> None:
        if isinstance(why, WireError):
            log.error("a run's stream is closed: %s", why)
        elif isinstance(why, Ended):
            log.info("a run's stream has ended: %s", why)
        self._end()

    def _end(self) -> None:
        with self.line.lock:
            self.over = True
            self.line.lock.notify_all()

    def _admit(self, incoming: Incoming, is_open: Callable[[], bool]) -> bool:
        """Tell the node of a request, and wait until it says whether it wants the arrays."""
        if incoming.answers or incoming.head.has_error():
            raise WireError("a message came that is no request")
        name = incoming.name
        if not incoming.size:
            return True
        with self.line.lock:
            if name not in self._asked:
                self._asked.add(name)
                self._requests.put((self, incoming))
            self.line.lock.wait_for(lambda: name in self._keeps or self.over or not is_open())
            return self._keeps.get(name, False)

    def _came(self, incoming: Incoming) -> None:
        if not incoming.size:
            self._requests.put((self, incoming))


class Lanes:
    """All lanes of a node; with a session at the server it is a `FleetConnection`."""

    def __init__(
        self,
        address: str,
        key: ec.EllipticCurvePrivateKey | None,
        tell: OnEvent,
        most_bytes: MostBytes | None = None,
    ) -> None:
        """Prepare for invitations.

        Args:
            address: host:port of the server that this site dials; no lane leads elsewhere.
            key: the node's, which signs for each lane; None: the node has none.
            tell: called with (kind, sentence) for everything that a user may want to see.
            most_bytes: how many bytes the arrays of a request may have, by all else that it says.
        """
        self._address, self._key, self._tell = address, key, tell
        self._most_bytes = most_bytes or (lambda _: UNCLEAR)
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lanes: dict[str, Lane] = {}
        self._mine: dict[str, tuple[Lane, float]] = {}  # requests of lanes, and until when
        self._last: tuple[Lane, Incoming] | None = None  # the request that the node works on
        self._fleet: FleetConnection | None = None
        self._session = itertools.count()
        self._now = -1
        self._free = threading.Event()  # the node has done what Flower's messages asked for
        self.node_id, self.waited = 0, 0.0

    def over(self, fleet: FleetConnection) -> "Lanes":
        """Take a new session at the server; lanes go on, unless the node is another now."""
        if self.node_id not in (0, fleet.node_id):
            self.close()
        self._fleet, self.node_id, self._now = fleet, fleet.node_id, next(self._session)
        about = (fleet, self._now)
        threading.Thread(target=self._poll, args=about, name="messages", daemon=True).start()
        return self

    def receive(self) -> tuple[Message, Any] | None:
        """The next request, of any lane or by Flower's messages; its arrays come with `fetch`."""
        self._free.set()
        if self._last is not None:
            self._last[0].settle(self._last[1])
        began, self._last = time.monotonic(), None
        try:
            lane, found = self._requests.get(timeout=LOOK_S)
        except queue.Empty:
            self.waited = time.monotonic() - began
            return None
        if isinstance(lane, int):  # of a session
            if lane != self._now:
                return None
            if isinstance(found, Exception):
                raise found
            return found
        if lane.over:
            return None
        meta = found.head.metadata
        ends = time.monotonic() + max(0.0, meta.created_at + meta.ttl - time.time())
        self._mine = {n: m for n, m in self._mine.items() if m[1] > time.monotonic()}
        self._mine[found.name], self._last = (lane, ends), (lane, found)
        if meta.dst_node_id != self.node_id:
            log.warning("a request came that is for another node")
            lane.fetch(found, False, ends)
            return None
        return found.head, found

    def fetch(self, head: Message, tree: Any) -> Message:
        """A request with its arrays."""
        if not isinstance(tree, Incoming):
            assert self._fleet is not None
            return self._fleet.fetch(head, tree)
        lane, ends = self._mine[tree.name]
        most = self._most_bytes(tree.message(empty=True)) or UNCLEAR if tree.size else 0
        keeps = tree.size <= most
        message = lane.fetch(tree, keeps, ends)
        if message is None:
            raise WireError(
                f"A request has {tree.size:,} bytes of arrays, but the run's model and settings "
                f"leave it {most:,}."
            )
        return message

    def send(self, reply: Message) -> None:
        """Send a reply on the way on which its request came."""
        lane, ends = self._mine.get(reply.metadata.reply_to_message_id, (None, 0.0))
        if lane is None:
            assert self._fleet is not None
            self._fleet.send(reply)
            return
        lane.send(reply, ends)

    def close(self) -> None:
        """Hang up on all runs."""
        for lane in self._lanes.values():
            lane.close()
        self._lanes = {}

    # ---- the thread that asks the server for messages ------------------------------------------

    def _poll(self, fleet: FleetConnection, session: int) -> None:
        while session == self._now:
            try:
                received = persist(fleet.receive, self._tell)
                if received is None:
                    time.sleep(0.05 if fleet.waited else 0.5)
                    continue
                head, tree = received
                if head.metadata.message_type == invitation.KIND:
                    self._invited(fleet, head, tree)
                    continue
                self._free.clear()
                self._requests.put((session, received))
                self._free.wait()
            except Exception as error:
                self._requests.put((session, error))
                return

    def _invited(self, fleet: FleetConnection, head: Message, tree: ObjectTree) -> None:
        """Open the stream of a run that invites this site, and answer."""
        meta = head.metadata
        if meta.src_node_id != SUPERLINK_NODE_ID:
            self._tell("refused", f"an invitation of node {meta.src_node_id}, not of the server")
            return
        ends = time.monotonic() + max(0.0, meta.created_at + meta.ttl - time.time())
        reply = Message(RecordDict(), reply_to=head)
        try:
            message = persist(lambda: fleet.fetch(head, tree), self._tell, ends)
            table = message.content.get(invitation.TABLE)
            invited = LaneInvitation.parse(table if isinstance(table, ConfigRecord) else {})
            self._open(invited)
        except FeddaError as error:
            log.error("%s", error)
            code = code_of(error)
            reply = Message(Error(int(code), code.public), reply_to=head)
        except (RunOver, Unreachable):
            return
        with contextlib.suppress(RunOver, Unreachable):
            persist(lambda: fleet.send(reply), self._tell, ends)

    def _open(self, invited: LaneInvitation) -> None:
        self._lanes = {n: lane for n, lane in self._lanes.items() if not lane.over}
        if invited.name in self._lanes:
            return
        if len(self._lanes) >= MOST_LANES:
            raise WireError(f"This site serves {MOST_LANES} runs already, which is as many as may.")
        signature = ""
        if self._key is not None:
            signature = invitation.sign(self._key, invited.claim(self.node_id))
        self._lanes[invited.name] = Lane(invited, self._address, signature, self._requests)
