"""The requests of sites: only those that a registered site signed, and that it may make.

A request is refused by its headers before its body is read. Then its body is read as a whole, and
checked before the SuperLink sees it; `guard` says who calls, and `book` what the caller may do.
"""

import asyncio
import contextlib
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError

from fedda import __version__, flower
from fedda.flower import PROTOBUF_REQUEST_TYPES, fab_pb2, run_pb2
from fedda.flower import fleet_pb2 as fleet
from fedda.flower import message_pb2 as proto
from fedda.ops.refusal import OFFERS, REFUSED, Refusal, offered

from . import registered
from .book import Book, RefusedCall
from .filter import FLEET_PREFIX, App, Event, Receive, Scope, Send, Traffic, length, refuse
from .guard import Caller, Unwelcome
from .listener import CONNECTION
from .turned import Turned
from .waiting import WAITED, Waiting, wanted

SELF_MADE = ("register-node", "unregister-node")  # where sites have keys, this is the operator's
# Bytes of a body; those of a call without its piece are less than 2**9.
LARGEST = {"push-object": 16 * 2**20, "push-messages": 2**20}
LARGEST_OTHER = 2**14
AT_ONCE = 8  # requests of one site that are served at the same time; the others wait
# What a SuperNode needs to know of a run. The rest is the operator's: for one, paths in settings.
OF_A_RUN = ("run_id", "fab_id", "fab_version", "fab_hash", "primary_task_type")
NO_CONTENT = proto.PullObjectResponse(object_found=True, object_available=True).ByteSize()
MEDIA_TYPE = flower.PROTOBUF_MEDIA_TYPE.encode()

Who = Callable[[list[tuple[bytes, bytes]]], Caller | Unwelcome]


class SiteCalls:
    """Passes the calls that a site may make to a SuperLink, and refuses all others."""

    def __init__(
        self,
        app: App,
        traffic: Traffic,
        caller: Who | None,
        waiting: Waiting | None = None,
        turned: Turned | None = None,
    ) -> None:
        """Wrap a SuperLink.

        Args:
            app: the SuperLink.
            traffic: counts what is refused.
            caller: says by a request's headers which site signed it (`guard.Guard.caller`). With
                None any site may join, and the SuperLink itself checks the signatures.
            waiting: lets sites wait for work whose signatures `caller` has checked.
            turned: is told of sites that are refused.
        """
        self.app = app
        self.traffic = traffic
        self.caller = caller
        self.waiting = None if caller is None else waiting
        self.turned = turned
        self.book = Book()
        self._busy: dict[int, asyncio.Semaphore] = defaultdict(lambda: asyncio.Semaphore(AT_ONCE))

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
        size = length(scope)
        if size is None:
            raise RefusedCall(411, "the length of the body is needed")
        if size > LARGEST.get(name, LARGEST_OTHER):
            raise RefusedCall(413, "body too large")
        async with contextlib.nullcontext() if site is None else self._busy[site.node_id]:
            body = await _read(receive)
            if body is None:
                return
            request = PROTOBUF_REQUEST_TYPES["POST", scope["path"]]()
            try:
                request.ParseFromString(body)
            except DecodeError:
                raise RefusedCall(400, "not a protobuf message") from None
            if site is not None and not _is_own(request, site):
                raise RefusedCall(401, "signed by another site")
            if site is not None and isinstance(request, fleet.ActivateNodeRequest):
                self._check_offer(site, scope)
            try:
                await self._pass(site, request, len(body), scope, _replay(body, receive), send)
            except RefusedCall as refused:
                about = {"close": site is None, "why": refused.why}
                await refuse(send, self.traffic, refused.status, refused.text, **about)

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
        """Refuse a session to a site that no run would take; a stock SuperNode says nothing."""
        given = next((v for k, v in scope["headers"] if k == OFFERS.encode()), None)
        if given is None:
            return
        offer = offered(given.decode("latin-1"))
        why = registered.misfit(site.node_id, offer.get("name", ""), offer.get("role", ""))
        if offer.get("fedda") != __version__:
            why = Refusal("version", __version__)
        if why is not None:
            raise self._turned(403, why, site.node_id, scope)

    def _turned(self, status: int, why: Refusal, node_id: int, scope: Scope) -> RefusedCall:
        """Note that a site is refused -> what refuses it."""
        if self.turned is not None:
            self.turned.note(why, node_id, (scope.get("client") or ("?",))[0])
        return RefusedCall(status, f"refused: {why.code}", why)

    async def _pass(
        self,
        site: Caller | None,
        request: Any,
        size: int,
        scope: Scope,
        receive: Receive,
        send: Send,
    ) -> None:
        book, node_id = self.book, _node_id(request)
        answer = CallAnswer(send)
        match request:
            case fleet.ActivateNodeRequest():
                await self.app(scope, receive, answer.keep)
                if answer.status == 200:
                    joined = fleet.ActivateNodeResponse.FromString(answer.body).node_id
                    book.joined(joined)
                elif site is not None:
                    self._turned(answer.status, Refusal("in-use"), site.node_id, scope)
                    answer.headers.append((REFUSED.encode(), b"in-use"))
                await answer.release()
            case fleet.PullMessagesRequest():
                one_by_one = (b"user-agent", b"fedda") in scope["headers"]
                if (once_more := book.again(node_id, one_by_one)) is not None:
                    answer.give(once_more.SerializeToString())
                else:
                    await self._work(node_id, request, scope, receive, answer)
                await answer.release()
            case fleet.PushMessagesRequest():
                found = book.check_answer(node_id, request)
                try:
                    await self.app(scope, receive, answer.keep)
                finally:
                    taken = answer.status == 200
                    read = fleet.PushMessagesResponse.FromString
                    book.answered(found, read(answer.body) if taken else None)
                await answer.release()
            case proto.PushObjectRequest():
                book.take(node_id, request, size)
                await self.app(scope, receive, send)
            case proto.PullObjectRequest():
                book.check_fetch(node_id, request)
                await self.app(scope, receive, answer.count)
                if answer.size > NO_CONTENT:
                    book.fetched(node_id, request, answer.size)
            case proto.ConfirmMessageReceivedRequest():
                book.confirm(node_id, request)
                await self.app(scope, receive, send)
            case run_pb2.GetRunRequest():
                book.check_run(node_id, request.run_id)
                await self.app(scope, receive, answer.keep)
                if answer.status == 200:
                    answer.body = _of_a_run(answer.body)
                await answer.release()
            case fab_pb2.GetFabRequest():
                book.check_run(node_id, request.run_id)
                await self.app(scope, receive, send)
            case _:
                await self.app(scope, receive, send)

    async def _work(
        self, node_id: int, request: Any, scope: Scope, receive: Receive, answer: "CallAnswer"
    ) -> None:
        """Get the next request for a site, if there is one or comes while the site waits."""
        waiting, seconds, may = self.waiting, wanted(scope["headers"]), True
        if waiting is not None and seconds:
            waited, may = await waiting.for_work(node_id, seconds)
            answer.headers.append((WAITED, f"{waited:.3f}".encode()))
        line = scope.get(CONNECTION)
        hung_up = line is not None and not line.is_open  # nobody would read what it is handed
        if not may or hung_up:
            answer.give(b"")
            return
        await self.app(scope, receive, answer.keep)
        if answer.status == 200:
            handed = fleet.PullMessagesResponse.FromString(answer.body)
            self.book.handed(node_id, handed)
            if waiting is not None:
                waiting.handed(node_id, len(handed.messages_list))


class CallAnswer:
    """A SuperLink's answer on its way to a site."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Event = {}
        self.headers: list[tuple[bytes, bytes]] = []  # that `release` adds
        self.status = 0
        self.body = b""
        self.size = 0  # bytes of the body, also of one that is passed on at once

    async def keep(self, event: Event) -> None:
        """Hold the answer until `release`."""
        if event["type"] == "http.response.start":
            self._start, self.status = event, event["status"]
        else:
            self.body += event.get("body", b"")

    async def count(self, event: Event) -> None:
        """Pass the answer on."""
        self.size += len(event.get("body", b""))
        await self._send(event)

    def give(self, body: bytes) -> None:
        """Answer, at `release`, with a body of our own."""
        headers = [(b"content-type", MEDIA_TYPE)]
        self._start = {"type": "http.response.start", "status": 200, "headers": headers}
        self.body = body

    async def release(self) -> None:
        """Send the answer as it is now, if there is one."""
        if not self._start:
            return
        headers = [(k, v) for k, v in self._start["headers"] if k.lower() != b"content-length"]
        headers += [(b"content-length", str(len(self.body)).encode()), *self.headers]
        await self._send({**self._start, "headers": headers})
        await self._send({"type": "http.response.body", "body": self.body})


def _once(send: Send) -> Send:
    """Return what sends an answer and then ends the connection."""

    async def last(event: Event) -> None:
        if event["type"] == "http.response.start":
            event = {**event, "headers": [*event["headers"], (b"connection", b"close")]}
        await send(event)

    return last


def _node_id(request: Any) -> int:
    """The node that a request says it comes from; 0 if it says none."""
    return request.node.node_id if hasattr(request, "node") else getattr(request, "node_id", 0)


def _is_own(request: Any, site: Caller) -> bool:
    if isinstance(request, fleet.ActivateNodeRequest):
        return request.public_key == site.key
    return _node_id(request) == site.node_id


def _of_a_run(body: bytes) -> bytes:
    run = run_pb2.GetRunResponse.FromString(body).run
    kept = run_pb2.Run(**{name: getattr(run, name) for name in OF_A_RUN})
    return run_pb2.GetRunResponse(run=kept).SerializeToString()


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
