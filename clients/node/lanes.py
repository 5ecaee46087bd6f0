"""A site's lanes: one stream to each run that invited it.

One thread asks the server for invitations and opens a stream for each; every stream has a thread,
which connects again when the connection breaks. The node gets all requests from one queue, one at a
time. A run whose program is away does not hold up another's request: what came of its own request
is kept, and so is a reply to it. A message that is no invitation is dropped: a site serves no
request that Flower brings.
"""

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message

from fedda.errors import WireError
from fedda.flower import SUPERLINK_NODE_ID
from fedda.lane import invitation
from fedda.lane.dialer import Dialer
from fedda.lane.invitation import LaneInvitation
from fedda.lane.lane_end import Ended, LaneEnd
from fedda.lane.parcels import Incoming

from .failures import Away, RunOver
from .fleet import Fleet
from .patience import OnEvent, persist

FLOWERS = "a run with run.transport=flower needs `fedda-client --stock`"

log = logging.getLogger("fedda.client")

GONE_S = 60.0  # a run that cannot be reached for so long is over
LOOK_S = 1.0  # seconds for which the node waits for a request
UNCLEAR = 2**28  # bytes that a request may have whose settings do not say how many it may
MOST_LANES = 64
PAUSE_S, POLL_S = 0.05, 0.5  # between two looks, if the server holds requests for work or not
# A server that answers slowly is asked less often, but a site whose system stopped it for an hour,
# or which got no answer for so long, does not wait for another one: an invitation lasts 20 s.
MOST_PAUSE_S = 5.0

MostBytes = Callable[[Message], int]


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
        self._later: set[str] = set()  # which of them it has waited for, and will not until whole
        self.line = LaneEnd(self._admit, self._came)
        self._dialer = Dialer(self.line, invited, address, self._gone, GONE_S, signature)

    def fetch(self, incoming: Incoming, keeps: bool, ends: float) -> Message | None:
        """Let a request's arrays come -> the request; None if it is not wanted.

        Raises:
            Away: another run asks, and this one cannot be reached; the request is brought again.
            RunOver: the run is over, or waits no longer.
        """
        if not keeps:
            self.settle(incoming)
            return None
        with self.line.lock:
            self._keeps[incoming.name] = True
            self.line.lock.notify_all()
            self._wait(lambda: incoming.whole, ends)
            if self._is_away and not incoming.whole:
                self._later.add(incoming.name)
                raise Away
            self._keeps.pop(incoming.name, None)
            self._asked.discard(incoming.name)
        if self.over or not incoming.whole:
            raise RunOver("the run is over")
        return incoming.message()

    def settle(self, incoming: Incoming) -> None:
        """Let the arrays go by of a request that the node is done with."""
        with self.line.lock:
            if incoming.name in self._asked - self._later:
                self._asked.discard(incoming.name)
                self._keeps[incoming.name] = False
                self.line.lock.notify_all()

    def send(self, reply: Message, ends: float) -> None:
        """Send a reply, and wait until the run's program has it.

        If that cannot be reached while another run asks, it gets the reply once it can be.

        Raises:
            RunOver: the run is over, or waits no longer.
        """
        name = reply.metadata.reply_to_message_id
        self.line.send(reply, name)
        with self.line.lock:
            self._wait(lambda: self.line.is_sent(name), ends)
            done = self.line.is_sent(name) or self._is_away
        if self.over or not done:
            self.line.drop(name)
            raise RunOver("the run is over")

    @property
    def _is_away(self) -> bool:
        """Whether this run cannot be reached while another one asks."""
        return not (self.line.connected or self.over or self._requests.empty())

    def _wait(self, done: Callable[[], bool], ends: float) -> None:
        """Wait until it is done, the run is over or waits no longer, or others come first."""
        while not (done() or self.over or self._is_away) and (left := ends - time.monotonic()) > 0:
            self.line.lock.wait(min(left, LOOK_S))

    def close(self) -> None:
        """Hang up."""
        self._end()
        self._dialer.close()

    def _gone(self, why: Exception) -> None:
        if isinstance(why, WireError):
            log.error("a run's stream is closed: %s", why)
        elif isinstance(why, Ended):
            log.info("a run's stream has ended: %s", why)
        elif not self.line.met and not self.over:
            log.warning("a run invites this site and cannot be reached (%s)", why)
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
            if name not in self._asked and name not in self._keeps:
                self._asked.add(name)
                self._requests.put((self, incoming))
            self.line.lock.wait_for(lambda: name in self._keeps or self.over or not is_open())
            return self._keeps.get(name, False)

    def _came(self, incoming: Incoming) -> None:
        if not incoming.size or incoming.name in self._later:
            self._later.discard(incoming.name)
            self._requests.put((self, incoming))


class Lanes:
    """All lanes of a node."""

    def __init__(
        self,
        address: str,
        tell: OnEvent,
        most_bytes: MostBytes | None = None,
    ) -> None:
        """Prepare for invitations.

        Args:
            address: host:port of the server that this site dials; no lane leads elsewhere.
            tell: called with (kind, sentence) for everything that a user may want to see.
            most_bytes: how many bytes the arrays of a request may have, by all else that it says.
        """
        self._address, self._tell = address, tell
        self._most_bytes = most_bytes or (lambda _: UNCLEAR)
        self._requests: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._lanes: dict[str, Lane] = {}
        self._mine: dict[str, tuple[Lane, float]] = {}  # requests of lanes, and until when
        self._last: tuple[Lane, Incoming] | None = None  # the request that the node works on
        self._session = itertools.count()
        self._now = -1
        self.node_id = 0

    def over(self, fleet: Fleet) -> None:
        """Take a new session at the server; lanes go on, unless the node is another now."""
        if self.node_id not in (0, fleet.node_id):
            self.close()
        self.node_id, self._now = fleet.node_id, next(self._session)
        about = (fleet, self._now)
        threading.Thread(target=self._poll, args=about, name="messages", daemon=True).start()

    def receive(self) -> tuple[Message, Incoming] | None:
        """The next request, of any lane; its arrays come with `fetch`.

        Raises:
            SessionLost: the server forgot this node.
        """
        if self._last is not None:
            self._last[0].settle(self._last[1])
        self._last = None
        try:
            lane, found = self._requests.get(timeout=LOOK_S)
        except queue.Empty:
            return None
        if isinstance(lane, int):  # why a session has ended
            if lane == self._now:
                raise found
            return None
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

    def fetch(self, incoming: Incoming) -> Message:
        """A request with its arrays.

        Raises:
            RunOver: the run is over, or waits no longer.
            WireError: it is larger than a request of such settings may be.
        """
        lane, ends = self._mine[incoming.name]
        most = self._most_bytes(incoming.message(empty=True)) or UNCLEAR if incoming.size else 0
        message = lane.fetch(incoming, incoming.size <= most, ends)
        if message is None:
            raise WireError(
                f"A request has {incoming.size:,} bytes of arrays, but the run's model and "
                f"settings leave it {most:,}."
            )
        return message

    def send(self, reply: Message) -> None:
        """Send a reply on the lane on which its request came.

        Raises:
            RunOver: the run is over, or waits no longer.
        """
        lane, ends = self._mine[reply.metadata.reply_to_message_id]
        lane.send(reply, ends)

    def close(self) -> None:
        """Hang up on all runs."""
        for lane in self._lanes.values():
            lane.close()
        self._lanes = {}

    # ---- the thread that asks the server for invitations ---------------------------------------

    def _poll(self, fleet: Fleet, session: int) -> None:
        while session == self._now:
            try:
                asked = time.monotonic()
                message = persist(fleet.receive, self._tell)
                if message is None:
                    # A slow answer means a busy server, unless it only held the request.
                    pause = 2 * (time.monotonic() - asked - fleet.waited)
                    least = PAUSE_S if fleet.waited else POLL_S
                    time.sleep(min(max(pause, least), MOST_PAUSE_S))
                else:
                    self._invited(message, fleet.key)
            except Exception as error:
                self._requests.put((session, error))
                return

    def _invited(self, message: Message, key: ec.EllipticCurvePrivateKey) -> None:
        """Open the stream of a run that invites this site."""
        meta = message.metadata
        if meta.src_node_id != SUPERLINK_NODE_ID:
            self._tell("refused", f"a message of node {meta.src_node_id}, not of the server")
        elif meta.message_type != invitation.KIND:
            self._tell("refused", f"a message that is no invitation of fedda's; {FLOWERS}")
        else:
            try:
                self._open(LaneInvitation.parse(meta.group_id), key)
            except WireError as error:
                self._tell("refused", str(error))

    def _open(self, invited: LaneInvitation, key: ec.EllipticCurvePrivateKey) -> None:
        self._lanes = {n: lane for n, lane in self._lanes.items() if not lane.over}
        if invited.name in self._lanes:
            return
        if len(self._lanes) >= MOST_LANES:
            raise WireError(f"This site serves {MOST_LANES} runs already, which is as many as may.")
        signature = invitation.sign(key, invited.claim(self.node_id))
        self._lanes[invited.name] = Lane(invited, self._address, signature, self._requests)
