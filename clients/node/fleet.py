"""A node's calls to the Fleet API of a SuperLink; nearly all use of flwr's internals is in here.

flwr's own connection object ends the process when something fails: it calls `sys.exit`, starts a
timer that kills the process, and raises SIGINT on a refused heartbeat. This module talks through
the HTTP client one layer below it, and raises the exceptions of `failures`.
"""

import contextlib
import io
import logging
import ssl
import threading
from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any, BinaryIO, Protocol

import httpx
from cryptography.hazmat.primitives.asymmetric import ec
from flwr.app import Array, Message

from fedda import flower
from fedda.errors import KeyFileError, WireError
from fedda.flower import fleet_pb2 as fleet
from fedda.flower import message_pb2 as proto
from fedda.flower.batches import CALLS, MOST, SMALL, CallBatch
from fedda.flower.freed import freeing
from fedda.flower.pieces import HalfSent, cut
from fedda.ops.refusal import OFFERS

from .failures import Refused, RunOver, SessionLost, Unreachable, ask, insist

log = logging.getLogger("fedda.client")

# The server counts a node as dead after twice this time without a heartbeat (its minimum is 10 s).
HEARTBEAT_S = 30.0
BEAT_EVERY_S = 5.0
WAIT_S = 10  # for how long a server may hold a request for work until there is some
# Seconds until an unused connection is closed. After 5, as by default, each heartbeat would begin
# with a new handshake.
IDLE_S = 60.0
KEPT_SIZE = 2**16  # the largest piece of a message that is kept for the next one, in bytes


MORE = 2  # times the bytes that came may the arrays of a request have, whatever its settings
MostBytes = Callable[[Message], int]


class FleetConnection(Protocol):
    """The members that the resident node needs; the fake server of the tests has them, too."""

    node_id: int
    waited: float  # seconds for which the server held the last request for work

    def receive(self) -> tuple[Message, flower.ObjectTree] | None: ...

    def fetch(self, head: Message, tree: flower.ObjectTree) -> Message: ...

    def send(self, reply: Message) -> None: ...


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
        most_bytes: MostBytes | None = None,
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
            most_bytes: how many bytes the arrays of a request may have, by all else that it says.
        """
        self.node_id = 0
        self.waited = 0.0
        self._on_lost = on_lost
        self._offers = offers
        self._most_bytes = most_bytes or (lambda _: 0)
        self._seen: dict[str, bytes] = {}
        self._is_fedda = False  # whether the server is known to be fedda's
        self._self_registered = key is None
        private, public = flower.generate_key_pairs() if key is None else (key, key.public_key())
        self._public = flower.public_key_to_bytes(public)
        authorities = not insecure and _authorities(root_certificates)
        self._client = flower.FleetHttpClient(
            f"http{'s' * (not insecure)}://{address}",
            interceptors=[
                flower.RuntimeVersionHttpInterceptor(component_name="SuperNode"),
                flower.NodeAuthHttpInterceptor(private, public),
            ],
            verify=authorities,
        )
        self._client._client = freeing(
            httpx.Client(
                verify=authorities,
                timeout=self._client._client.timeout,
                limits=httpx.Limits(keepalive_expiry=IDLE_S),
                # The version of the library is left out. The name tells the server that a node
                # which asks for a request has none (`server.superlink.book`). A server of Flower's
                # own does not know `prefer`, and answers at once; so do other calls.
                headers={"user-agent": "fedda", "prefer": f"wait={WAIT_S}"},
                event_hooks={"response": [self._note]},
            )
        )
        self._lost: Exception | None = None
        self._ended = threading.Event()
        try:
            self.node_id = self._activate(known_as)
        except BaseException:
            self._client.close()
            raise
        self._node = flower.Node(node_id=self.node_id)
        self._beats = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
        self._beats.start()

    def receive(self) -> tuple[Message, flower.ObjectTree] | None:
        """Return the next message, still without content, and the tree of its pieces, or None."""
        if self._lost is not None:
            raise self._lost
        self.waited = 0.0
        try:
            answer = ask(self._client.PullMessages, fleet.PullMessagesRequest(node=self._node))
        except RunOver as error:  # no run is concerned yet, and the session is known
            raise Unreachable(str(error)) from error
        if not answer.messages_list:
            return None
        try:
            head = flower.message_from_proto(answer.messages_list[0])
        except ValueError:
            # flwr does not know this kind of message, so not even a refusal can be built.
            log.exception("a message cannot be read and is dropped")
            return None
        return head, answer.message_object_trees[0]

    def _note(self, response: httpx.Response) -> None:
        """Note how long the server held a request for work."""
        if (told := response.headers.get("x-fedda-waited")) is not None:
            self._is_fedda = True
            with contextlib.suppress(ValueError):
                self.waited = min(float(told), float(WAIT_S))

    def fetch(self, head: Message, tree: flower.ObjectTree) -> Message:
        """Pull a message's content; each piece is freed as soon as it is part of the message."""
        run_id = head.metadata.run_id
        pull = flower.make_pull_object_fn_protobuf(
            partial(insist, self._client.PullObject), self._node, run_id
        )
        names = [piece.object_id for piece in flower.iterate_object_tree(tree)]
        contents = {name: self._seen[name] for name in names if name in self._seen}
        if self._is_fedda:
            contents |= self._fetch_small(tree, {*names} - {*contents}, run_id)
        try:
            contents |= flower.pull_objects(
                [name for name in names if name not in contents],
                pull,
                # By default flwr waits 1 s for a piece that is still being pushed: most of a round.
                initial_backoff=0.01,
                backoff_cap=0.5,
            )
        except flower.ObjectPullError as error:
            raise RunOver from error
        flower.make_confirm_message_received_fn_protobuf(
            partial(insist, self._client.ConfirmMessageReceived), self._node, run_id
        )(head.metadata.message_id)
        # A piece is named by the hash of its content, and the task's pieces do not change in a run.
        self._seen = {n: c for n in names if len(c := contents[n]) <= KEPT_SIZE}
        below = [record for records in tree.children for record in records.children]
        whole = dict.fromkeys(array.object_id for record in below for array in record.children)
        halves = {name: HalfSent(contents.pop(name)) for name in whole}
        uses = Counter(chain.from_iterable(half.pieces for half in halves.values()))
        if any(flower.get_object_id(contents[name]) != name for name in uses):
            raise WireError("A piece of a request is not what its name says.")

        def piece(name: str) -> BinaryIO:
            uses[name] -= 1
            return io.BytesIO(contents[name] if uses[name] else contents.pop(name))

        def inflated(arrays: dict[str, flower.InflatableObject]) -> Message:
            about = tree.object_id, {**contents}  # which it empties
            made = flower.inflate_object_from_contents(*about, objects=arrays)
            if not isinstance(made, Message):
                raise RunOver
            return made

        came = sum(len(contents[name]) for name in uses)
        # A request may name a piece a million times, so what it says decides how much is joined.
        said = inflated(dict.fromkeys(halves, Array("uint8", (0,), "", b"")))
        left, arrays = max(self._most_bytes(said), MORE * came), {}
        for name, half in halves.items():
            arrays[name] = half.join(piece, left)
            left -= len(arrays[name].data)
        message = inflated(arrays)
        message.metadata.__dict__["_message_id"] = tree.object_id
        return message

    def send(self, reply: Message) -> None:
        """Push a reply; pushing the same reply twice is harmless."""
        run_id = reply.metadata.run_id
        cut(reply)
        with flower.no_object_id_recompute():
            reply.metadata.__dict__["_message_id"] = reply.object_id
            head = flower.remove_content_from_message(reply) if reply.has_content() else reply
            answer = ask(
                self._client.PushMessages,
                fleet.PushMessagesRequest(
                    node=self._node,
                    messages_list=[flower.message_to_proto(head)],
                    message_object_trees=[flower.get_object_tree(reply)],
                ),
            )
            push = flower.make_push_object_fn_protobuf(
                partial(insist, self._client.PushObject), self._node, run_id, answer.session_id
            )
            pieces, wanted = flower.get_all_nested_objects(reply), set(answer.objects_to_push)
            if self._is_fedda:
                wanted -= self._bring_small(pieces, wanted, run_id, answer.session_id)
            try:
                flower.push_objects(pieces, push, object_ids_to_push=wanted)
            except flower.ObjectPushError as error:
                raise RunOver from error

    def _fetch_small(
        self, tree: flower.ObjectTree, names: set[str], run_id: int
    ) -> dict[str, bytes]:
        """Fetch a request's small pieces with one call -> those that came; the rest come singly."""
        arrays = (a for r in tree.children for record in r.children for a in record.children)
        # Of an array in several pieces, none is small.
        large = {piece.object_id for a in arrays if len(a.children) > 1 for piece in a.children}
        chosen = sorted(names - large)[:CALLS]
        asked = [
            proto.PullObjectRequest(node=self._node, run_id=run_id, object_id=n) for n in chosen
        ]
        answers = self._together("Pull", asked, proto.PullObjectResponse)
        given = zip(chosen, answers, strict=False)
        return {name: each.object_content for name, each in given if each.object_available}

    def _bring_small(
        self, pieces: dict[str, flower.InflatableObject], names: set[str], run_id: int, session: str
    ) -> set[str]:
        """Bring a reply's small pieces with one call -> their names; the rest are brought singly.

        Raises:
            RunOver: the server does not want them.
        """
        room, brought = MOST, []
        for name in sorted(names)[:CALLS]:
            piece = pieces[name]
            if isinstance(piece, flower.ArrayChunk) and len(piece.data) > SMALL:
                continue
            content = piece.deflate()
            room -= len(content)
            if room < 0:
                break
            about = {"node": self._node, "run_id": run_id, "session_id": session}
            brought.append(proto.PushObjectRequest(**about, object_id=name, object_content=content))
        answers = self._together("Push", brought, proto.PushObjectResponse)
        if not all(each.stored for each in answers):
            raise RunOver
        return {each.object_id for each, _ in zip(brought, answers, strict=False)}

    def _together(self, what: str, requests: list[Any], kind: Any) -> list[Any]:
        """Make several calls at once -> their answers; none if there is but one."""
        if len(requests) < 2:
            return []
        unary: Any = self._client._unary_unary

        def call(batch: CallBatch) -> Any:
            return unary(
                path=f"/v1/fleet/{what.lower()}-objects",
                rpc_method=f"/flwr.proto.Fleet/{what}Objects",
                request=batch,
                response_type=lambda: CallBatch(kind),
            )

        return insist(call, CallBatch(type(requests[0]), requests)).messages

    def close(self) -> None:
        """End the session, so that the server does not wait for this node until it times out."""
        self._ended.set()
        self._quietly(
            self._client.DeactivateNode, fleet.DeactivateNodeRequest(node_id=self.node_id)
        )
        if self._self_registered:
            self._quietly(
                self._client.UnregisterNode, fleet.UnregisterNodeFleetRequest(node_id=self.node_id)
            )
        self._client.close()

    def _activate(self, known_as: int | None) -> int:
        if self._self_registered:
            try:
                ask(
                    self._client.RegisterNode,
                    fleet.RegisterNodeFleetRequest(public_key=self._public),
                )
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
            ask(self._client.DeactivateNode, fleet.DeactivateNodeRequest(node_id=known_as))
            return self._start_session()
        except SessionLost as error:
            raise Refused(True, error.why) from error
        except RunOver as error:
            raise Refused(False, error.why) from error

    def _start_session(self) -> int:
        """Begin a session -> this node's id; only this request says what the site is."""
        request = fleet.ActivateNodeRequest(public_key=self._public, heartbeat_interval=HEARTBEAT_S)
        headers = self._client._client.headers
        if self._offers:
            headers[OFFERS] = self._offers
        try:
            return ask(self._client.ActivateNode, request).node_id
        finally:
            headers.pop(OFFERS, None)

    def _beat(self) -> None:
        request = flower.SendNodeHeartbeatRequest(node=self._node, heartbeat_interval=HEARTBEAT_S)
        while not self._ended.is_set():
            try:
                if not ask(self._client.SendNodeHeartbeat, request).success:
                    self._lost = SessionLost()
            except Unreachable:
                self._ended.wait(1.0)
                continue
            except (SessionLost, RunOver) as error:
                self._lost = SessionLost(str(error))
            except KeyFileError as error:
                self._lost = error
            except Exception:  # without heartbeats the server would call this site dead
                if not self._ended.is_set():  # else the client was closed meanwhile
                    log.exception("a heartbeat failed; trying again")
                self._ended.wait(1.0)
                continue
            if self._lost is not None:
                if not self._ended.is_set():
                    self._on_lost()
                return
            self._ended.wait(BEAT_EVERY_S)

    def _quietly(self, call: Callable[[Any], object], request: object) -> None:
        with contextlib.suppress(Unreachable, SessionLost, RunOver, KeyFileError, RuntimeError):
            ask(call, request)


def _authorities(certificate: bytes | None) -> ssl.SSLContext:
    """Trust the server's own authority, or, without its certificate, the system's.

    Raises:
        KeyFileError: it is not a certificate.
    """
    if certificate is None:
        return httpx.create_ssl_context()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        context.load_verify_locations(cadata=certificate.decode("ascii"))
    except (ssl.SSLError, UnicodeDecodeError) as error:
        raise KeyFileError(
            "the file given with --ca is not a PEM certificate: give the ca.crt of the server"
        ) from error
    return context
