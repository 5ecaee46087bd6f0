"""A node's calls to the Fleet API of a SuperLink: it begins a session, and asks for invitations.

It sends nothing but its own state: all that a run is told goes through its lane.

flwr's own connection object ends the process when something fails: it calls `sys.exit`, starts a
timer that kills the process, and raises SIGINT on a refused heartbeat. This module asks over HTTP
itself, and raises the exceptions of `failures`.
"""

import base64
import contextlib
import logging
import random
import threading
import time
from collections.abc import Callable, Generator
from datetime import UTC, datetime
from typing import Any, TypeVar

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Message
from google.protobuf.message import Message as Answer

from fedda import flower
from fedda.errors import KeyFileError
from fedda.flower import fleet_pb2 as fleet
from fedda.flower import heartbeat_pb2, http_api
from fedda.lane.invitation import sign
from fedda.ops import keys
from fedda.ops.refusal import OFFERS

from .failures import Refused, RunOver, SessionLost, Unreachable, ask

log = logging.getLogger("fedda.client")

# The server counts a node as dead after twice this time without a heartbeat (its minimum is 10 s).
HEARTBEAT_S = 30.0
# Seconds between heartbeats, and for the answer to one: at a quiet server, and at most. Two of the
# longest that are not answered still come before the server gives this node up.
BEAT_EVERY_S = (5.0, 15.0)
BEAT_TIMEOUT_S = (5.0, 20.0)
SOON_S = 1.0  # until a heartbeat that failed is sent again
WAIT_S = 25  # for how long a server may hold a request for work until there is some
# Seconds until an unused connection is closed. After 5, as by default, each heartbeat would begin
# with a new handshake.
IDLE_S = 60.0

A = TypeVar("A", bound=Answer)


class Signed(httpx.Auth):
    """Signs the time of each request with a node's key, as Flower's servers want it."""

    def __init__(self, key: ec.EllipticCurvePrivateKey) -> None:
        self._key = key
        self._public = base64.b64encode(keys.pem(key.public_key())).decode()

    def auth_flow(self, request: httpx.Request) -> Generator[httpx.Request, httpx.Response, None]:
        stamp = datetime.now(UTC).isoformat()
        request.headers["flwr-public-key"] = self._public
        request.headers["flwr-timestamp"] = stamp
        request.headers["flwr-signature"] = sign(self._key, stamp.encode())
        yield request


class Fleet:
    """A session of this node at a SuperLink, with heartbeats from a thread."""

    def __init__(
        self,
        address: str,
        *,
        insecure: bool,
        root_certificates: bytes | None,
        key: ec.EllipticCurvePrivateKey | None,
        known_as: int | None = None,
        on_lost: Callable[[], None] = lambda: None,
        offers: str = "",
    ) -> None:
        """Open a session.

        Args:
            address: host:port of the SuperLink.
            insecure: speak plain HTTP.
            root_certificates: the authority's certificate; None means the system's authorities.
            key: the registered private key; None registers a throw-away key.
            known_as: the node id that this key had before on this machine. With it, a session that
                a killed process left open is ended. Without it, the server refuses a second session
                until the first one has timed out.
            on_lost: called from a thread when the server does not know this session any more.
            offers: what the site says of itself, as `fedda.ops.refusal.offers` writes it.
        """
        self.node_id = 0
        self.waited = 0.0  # seconds for which the server held the last request for work
        self._on_lost = on_lost
        self._offers = offers
        self._self_registered = key is None
        # Of this session: the site's, or one to throw away.
        self.key = ec.generate_private_key(keys.CURVE) if key is None else key
        self._public = keys.pem(self.key.public_key())
        self._client = http_api.client(
            *(address, "fleet"),
            insecure=insecure,
            authority=root_certificates,
            auth=Signed(self.key),
            limits=httpx.Limits(keepalive_expiry=IDLE_S),
            # The version of the library is left out. A server of Flower's own does not know
            # `prefer`, and answers at once; so do other calls.
            headers={"user-agent": "fedda", "prefer": f"wait={WAIT_S}"},
            event_hooks={"response": [self._note]},
        )
        self._lost: Exception | None = None
        self._ended = threading.Event()
        try:
            self.node_id = self._activate(known_as)
        except BaseException:
            self._client.close()
            raise
        self._node: Any = {"node_id": self.node_id}
        self._beats = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._beats.start()

    def receive(self) -> Message | None:
        """Return the next message, of which only the metadata come, or None."""
        if self._lost is not None:
            raise self._lost
        self.waited = 0.0
        try:
            request = fleet.PullMessagesRequest(node=self._node)
            held = httpx.Timeout(http_api.TIMEOUT_S, read=WAIT_S + http_api.TIMEOUT_S)
            answer = self._ask("pull-messages", request, fleet.PullMessagesResponse, timeout=held)
        except RunOver as error:  # no run is concerned yet, and the session is known
            raise Unreachable(str(error)) from error
        if not answer.messages_list:
            return None
        try:
            return flower.message_from_proto(answer.messages_list[0])
        except ValueError:  # flwr does not know this kind of message
            log.exception("a message cannot be read and is dropped")
            return None

    def _note(self, response: httpx.Response) -> None:
        """Note how long the server held a request for work."""
        if (told := response.headers.get("x-fedda-waited")) is not None:
            with contextlib.suppress(ValueError):
                self.waited = min(float(told), float(WAIT_S))

    def close(self) -> None:
        """End the session, so that the server does not wait for this node until it times out."""
        self._ended.set()
        failed = Unreachable, SessionLost, RunOver, KeyFileError, RuntimeError
        with contextlib.suppress(*failed):
            self._deactivate(self.node_id)
        if self._self_registered:
            gone = fleet.UnregisterNodeFleetRequest(node_id=self.node_id)
            with contextlib.suppress(*failed):
                self._ask("unregister-node", gone, fleet.UnregisterNodeFleetResponse)
        self._client.close()

    def _activate(self, known_as: int | None) -> int:
        if self._self_registered:
            try:
                request = fleet.RegisterNodeFleetRequest(public_key=self._public)
                self._ask("register-node", request, fleet.RegisterNodeFleetResponse)
            except RunOver as error:
                raise KeyFileError(
                    "the server wants a registered key from every site: give yours with --key "
                    "(`fedda keys request` makes it, and the server's operator admits it)"
                ) from error
        try:
            return self._start_session()
        except RunOver as error:
            if error.why is not None and error.why.code != "in-use":
                raise Refused(True, error.why) from error
            if known_as is None:
                raise Refused(False, error.why) from error
        try:
            self._deactivate(known_as)
            return self._start_session()
        except SessionLost as error:
            raise Refused(True, error.why) from error
        except RunOver as error:
            raise Refused(False, error.why) from error

    def _start_session(self) -> int:
        """Begin a session -> this node's id; only this request says what the site is."""
        request = fleet.ActivateNodeRequest(public_key=self._public, heartbeat_interval=HEARTBEAT_S)
        said = {OFFERS: self._offers} if self._offers else {}
        answer = self._ask("activate-node", request, fleet.ActivateNodeResponse, headers=said)
        return answer.node_id

    def _deactivate(self, node_id: int) -> None:
        request = fleet.DeactivateNodeRequest(node_id=node_id)
        self._ask("deactivate-node", request, fleet.DeactivateNodeResponse)

    def _ask(self, call: str, request: Any, answer: type[A], **more: Any) -> A:
        """Make one call, whose failure is one of `failures`; `more` is for httpx."""
        return ask(lambda sent: http_api.call(self._client, call, sent, answer, **more), request)

    def _beat(self) -> None:
        heard = heartbeat_pb2.SendNodeHeartbeatResponse
        request = heartbeat_pb2.SendNodeHeartbeatRequest(
            node=self._node, heartbeat_interval=HEARTBEAT_S
        )
        _, limit = pace(0.0)
        while not self._ended.is_set():
            asked, failed = time.monotonic(), False
            try:
                answer = self._ask("send-node-heartbeat", request, heard, timeout=limit)
                if not answer.success:
                    self._lost = SessionLost()
            except Unreachable:
                failed = True
            except (SessionLost, RunOver) as error:
                self._lost = SessionLost(str(error))
            except KeyFileError as error:
                self._lost = error
            except Exception:  # without heartbeats the server would call this site dead
                if not self._ended.is_set():  # else the client was closed meanwhile
                    log.exception("a heartbeat failed; trying again")
                failed = True
            if self._lost is not None:
                if not self._ended.is_set():
                    self._on_lost()
                return
            pause, limit = pace(time.monotonic() - asked)
            self._ended.wait((SOON_S if failed else pause) * random.uniform(0.8, 1.0))


def pace(took: float) -> tuple[float, float]:
    """Seconds until the next heartbeat, and for its answer: a slow answer means a busy server.

    Args:
        took: how long the last one was on its way, answered or not.
    """
    (least, most), (shortest, longest) = BEAT_EVERY_S, BEAT_TIMEOUT_S
    return min(max(10 * took, least), most), min(max(2 * took, shortest), longest)
