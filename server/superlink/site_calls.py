"""The calls of sites: only those that a registered site signed, for itself.

A site begins and ends sessions, says that it is there, and asks for invitations to runs. It sends
nothing else this way, and fetches nothing: what belongs to a run goes through its lane (`relay`).
A call is refused by its headers before its body is read; `authentication` says who calls.
"""

from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError

from fedda import __version__
from fedda.flower import fleet_pb2 as fleet
from fedda.ops.refusal import OFFERS, REFUSED, Refusal, offered

from . import registered
from .authentication import Caller, Unwelcome
from .filter import FLEET, FLEET_PREFIX, App, Event, Receive, Scope, Send, Traffic, refuse
from .listener import CONNECTION
from .rejections import Rejections
from .waiting import WAITED, Waiting, wanted

AGENT = b"fedda"  # how fedda's own client calls itself; another knows no lanes
SELF_MADE = ("register-node", "unregister-node")  # where sites have keys, this is the operator's

Who = Callable[[list[tuple[bytes, bytes]]], Caller | Unwelcome]


class RefusedCall(Exception):
    """A call that a site may not make, with its HTTP status, a sentence and maybe a reason."""

    def __init__(self, status: int, text: str, why: Refusal | None = None) -> None:
        super().__init__(text)
        self.status = status
        self.text = text
        self.why = why


class SiteCalls:
    """Passes the calls that a site may make to a SuperLink, and refuses all others."""

    def __init__(
        self,
        app: App,
        traffic: Traffic,
        caller: Who | None,
        waiting: Waiting | None = None,
        turned: Rejections | None = None,
    ) -> None:
        """Wrap a SuperLink.

        Args:
            app: the SuperLink.
            traffic: counts what is refused.
            caller: says by a request's headers which site signed it (`Guard.caller`). With
                None any site may join, and the SuperLink itself checks the signatures.
            waiting: lets sites wait for work whose signatures `caller` has checked.
            turned: is told of sites that are refused.
        """
        self.app = app
        self.traffic = traffic
        self.caller = caller
        self.waiting = None if caller is None else waiting
        self.turned = turned

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not scope["path"].startswith(FLEET_PREFIX):  # /health, which strangers may ask, too
            await self.app(scope, receive, _once(send))
            return
        try:
            await self._serve(scope, receive, send)
        except RefusedCall as refused:
            await refuse(send, self.traffic, refused.status, refused.text, why=refused.why)

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = scope["path"].removeprefix(FLEET_PREFIX)
        site = self._site(name, scope)
        body = await _read(receive)
        if body is None:
            return
        request = FLEET[name]()
        try:
            request.ParseFromString(body)
        except DecodeError:
            raise RefusedCall(400, "not a protobuf message") from None
        if site is not None and not _is_own(request, site):
            raise RefusedCall(401, "signed by another site")
        again = _replay(body, receive)
        if isinstance(request, fleet.ActivateNodeRequest):
            if (b"user-agent", AGENT) not in scope["headers"]:
                raise self._turned(403, Refusal("program"), site.node_id if site else 0, scope)
            if site is not None:
                self._check_offer(site, scope)
            await self._begin(site, scope, again, send)
        elif isinstance(request, fleet.PullMessagesRequest) and self.waiting is not None:
            await self._work(self.waiting, request.node.node_id, scope, again, send)
        else:
            await self.app(scope, again, send)

    def _site(self, name: str, scope: Scope) -> Caller | None:
        """The site that signed a request; None if signatures are not checked here."""
        if self.caller is None:
            return None
        if name in SELF_MADE:
            raise RefusedCall(403, "the operator registers sites")
        site = self.caller(scope["headers"])
        if isinstance(site, Unwelcome):
            # Flower's clients give up at a 401, but here the key may be registered a little later.
            status = 403 if name == "activate-node" else 401
            raise self._turned(status, site.why, site.node_id, scope)
        return site

    def _check_offer(self, site: Caller, scope: Scope) -> None:
        """Refuse a session to a site that no run would take."""
        given = next((v for k, v in scope["headers"] if k == OFFERS.encode()), b"")
        offer = offered(given.decode("latin-1"))
        why = registered.misfit(site.node_id, offer.get("name", ""), offer.get("role", ""))
        if offer.get("fedda") != __version__:
            why = Refusal("version", __version__)
        if why is not None and given:
            raise self._turned(403, why, site.node_id, scope)

    def _turned(self, status: int, why: Refusal, node_id: int, scope: Scope) -> RefusedCall:
        """Note that a site is refused -> what refuses it."""
        if self.turned is not None:
            self.turned.note(why, node_id, (scope.get("client") or ("?",))[0])
        return RefusedCall(status, f"refused: {why.code}", why)

    async def _begin(self, site: Caller | None, scope: Scope, receive: Receive, send: Send) -> None:
        """Begin a session, or say that another one of this site is open."""

        async def told(event: Event) -> None:
            if site and event["type"] == "http.response.start" and event["status"] != 200:
                self._turned(event["status"], Refusal("in-use"), site.node_id, scope)
                event = _with(event, (REFUSED.encode(), b"in-use"))
            await send(event)

        await self.app(scope, receive, told)

    async def _work(
        self, waiting: Waiting, node_id: int, scope: Scope, receive: Receive, send: Send
    ) -> None:
        """Hand a site its next invitation, if there is one or comes while the site waits."""
        waited, most = await waiting.for_work(node_id, wanted(scope["headers"]))
        line = scope.get(CONNECTION)
        if not most or (line is not None and not line.is_open):  # nobody would read it
            media = (b"content-type", b"application/protobuf")
            headers = [media, (b"content-length", b"0"), (WAITED, f"{waited:.3f}".encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            await send({"type": "http.response.body", "body": b""})
            return

        status, answer = 0, b""

        async def told(event: Event) -> None:
            nonlocal status, answer
            if event["type"] == "http.response.start":
                status, event = event["status"], _with(event, (WAITED, f"{waited:.3f}".encode()))
            else:
                answer += event.get("body", b"")
            await send(event)

        await self.app(scope, receive, told)
        if status == 200:
            handed = fleet.PullMessagesResponse.FromString(answer)
            waiting.handed(node_id, len(handed.messages_list), most)


def _with(event: Event, header: tuple[bytes, bytes]) -> Event:
    """The beginning of an answer with one more header."""
    return {**event, "headers": [*event["headers"], header]}


def _once(send: Send) -> Send:
    """Return what sends an answer and then ends the connection."""

    async def last(event: Event) -> None:
        if event["type"] == "http.response.start":
            event = _with(event, (b"connection", b"close"))
        await send(event)

    return last


def _is_own(request: Any, site: Caller) -> bool:
    """Whether a request says that it comes from the site that signed it."""
    if isinstance(request, fleet.ActivateNodeRequest):
        return request.public_key == site.key
    said = request.node.node_id if hasattr(request, "node") else getattr(request, "node_id", 0)
    return said == site.node_id


async def _read(receive: Receive) -> bytes | None:
    """The whole body, or None if the caller hung up."""
    pieces = []
    more = True
    while more:
        event = await receive()
        if event["type"] != "http.request":
            return None
        pieces.append(event.get("body", b""))
        more = event.get("more_body", False)
    return b"".join(pieces)


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return what gives an application a body that was read already."""
    left = [body]

    async def again() -> Event:
        if left:
            return {"type": "http.request", "body": left.pop(), "more_body": False}
        return await receive()

    return again
