"""The calls that are made in great numbers, answered by flwr's own handlers without its web stack.

Of a small request's processor time at the server, flwr's layers of middleware, FastAPI and a change
of thread take more than half. Here the handlers are called at once: for sites, whose signature and
content `guard` and `book` have checked, and for a run's program, whose token is checked here. What
a handler refuses goes through the whole stack after all, which makes the right error of it: none of
these calls does harm if it is made twice.
"""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Hashable
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

from google.protobuf.message import DecodeError

from fedda import flower
from fedda.flower import fleet_pb2 as fleet
from fedda.flower import message_pb2 as proto
from fedda.flower import runtime_pb2 as runtime
from fedda.flower.batches import MOST, SMALL, joined, parted

from . import near
from .filter import App, Event, Receive, Scope, Send
from .waiting import Waiting, wanted

MEDIA_TYPE = flower.PROTOBUF_MEDIA_TYPE.encode()
GIVEN_KEPT = 4096  # replies that a run's program may ask for once more
SLICE = 2**18  # bytes of an answer that are encrypted and sent at once
NOT_YET = proto.PullObjectResponse(object_found=True).SerializeToString()
LARGE = 2**16  # bytes; to hash a larger piece takes long enough to be worth a thread

Handler = Callable[[Any, Any], Any]
R = TypeVar("R")


def _stored(handler: Callable[..., Any]) -> Handler:
    """A handler that needs the store of objects, too."""
    return lambda request, state: handler(request, state, state.object_store)


HANDLERS: dict[type, Handler] = {
    flower.SendNodeHeartbeatRequest: flower.fleet_handlers.send_node_heartbeat,
    fleet.PullMessagesRequest: _stored(flower.fleet_handlers.pull_messages),
    fleet.PushMessagesRequest: flower.fleet_handlers.push_messages,
    proto.PullObjectRequest: flower.fleet_handlers.pull_object,
    proto.PushObjectRequest: flower.fleet_handlers.push_object,
    proto.ConfirmMessageReceivedRequest: _stored(flower.fleet_handlers.confirm_message_received),
}


RUNTIME = "/v1/runtime/"
OF_A_RUN: dict[str, tuple[Any, Callable[..., Any]]] = {
    "push-messages": (runtime.PushAppMessagesRequest, flower.runtime_handlers.push_messages),
    "pull-messages": (runtime.PullAppMessagesRequest, flower.runtime_handlers.pull_messages),
    "push-object": (proto.PushObjectRequest, flower.runtime_handlers.push_object),
    "pull-object": (proto.PullObjectRequest, flower.runtime_handlers.pull_object),
    "confirm-message-received": (
        proto.ConfirmMessageReceivedRequest,
        flower.runtime_handlers.confirm_message_received,
    ),
}


class Direct:
    """Answers frequent calls from a SuperLink's state."""

    def __init__(self, state: Any, threads: bool, waiting: Waiting | None = None) -> None:
        """Take flwr's LinkState.

        Args:
            state: flwr's.
            threads: whether no call may block the loop, as a database's would.
            waiting: lets callers wait for pieces and replies that are on their way.
        """
        self._state = state
        self._threads = threads
        self._waiting = waiting
        self._given: OrderedDict[tuple[int, str], tuple[Any, Any]] = (
            OrderedDict()
        )  # by run, request
        self._giving = threading.Lock()

    async def of_site(self, request: Any, wait: float = 0.0) -> bytes | None:
        """Return the answer to a site's request, or None if the whole stack has to answer it.

        Args:
            request: the request.
            wait: seconds for which the site would wait for a piece.
        """
        handler = HANDLERS.get(type(request))
        return None if handler is None else await self._call(handler, request, wait)

    async def of_run(self, name: str, token: str, body: bytes, wait: float = 0.0) -> bytes | None:
        """Return the answer to a request of a run's program, or None as `of_site` does.

        Args:
            name: the call's.
            token: by which the SuperLink knows the program.
            body: the request.
            wait: seconds for which it would wait for a piece, or for replies.
        """
        kind, handler = OF_A_RUN[name]
        try:
            request = kind.FromString(body)
        except DecodeError:
            return None
        task = await self._aside(lambda: self._task(token))
        if task is None:
            return None
        if name != "pull-messages":
            return await self._call(lambda *given: handler(*given, task), request, wait)
        ask = partial(self._ask, partial(self._pull, task=task), request)
        return await self._until_there(task.run_id, ask, wait if request.message_ids else 0.0)

    async def piece(self, token: str, name: str, wait: float) -> bytes | None:
        """Return a piece for a run's program; empty: not yet; None: it will not come, or no token.

        Args:
            token: by which the SuperLink knows the program.
            name: the piece.
            wait: seconds for which it would wait for it.
        """

        def look() -> bytes | None:
            task = self._task(token)
            return None if task is None else self._state.get_object(task.run_id, name)

        return await self._until_there(name, partial(self._aside, look), wait)

    async def take(self, token: str, name: str, session: str, content: bytes) -> bool:
        """Store a piece that a run's program brings -> whether it is wanted, and its token holds.

        Args:
            token: by which the SuperLink knows the program.
            name: the piece.
            session: in which the SuperLink awaits it.
            content: the piece.
        """

        def store() -> bool:
            task = self._task(token)
            return task is not None and self._state.store_object(
                task.run_id, session, name, content
            )

        return await self._aside(store, len(content) > LARGE)

    async def drop(self, name: str) -> None:
        """Delete an answer whose site brings no more pieces, so that its run stops waiting."""
        await asyncio.to_thread(self._state.object_store.delete, name)

    def _pull(self, request: Any, state: Any, task: Any) -> Any:
        """Give a run's program the replies that came, once more also those that it asks for again.

        flwr gives each reply once. On a busy machine the program's request may time out before it
        is answered, and the program then asks again.
        """
        with self._giving:
            names = [(task.run_id, name) for name in request.message_ids]
            again = [self._given[name] for name in names if name in self._given]
            new = [name for run, name in names if (run, name) not in self._given]
            if self._waiting is not None:
                new = self._waiting.replied(task.run_id, new)
            answer = flower.runtime_handlers.pull_messages(
                runtime.PullAppMessagesRequest(message_ids=new), state, task
            )
            for head, tree in zip(answer.messages_list, answer.message_object_trees, strict=True):
                self._given[task.run_id, head.metadata.reply_to_message_id] = head, tree
            while len(self._given) > GIVEN_KEPT:
                self._given.popitem(last=False)
            for head, tree in again:
                answer.messages_list.append(head)
                answer.message_object_trees.append(tree)
            return answer

    async def _call(self, handler: Handler, request: Any, wait: float) -> bytes | None:
        ask = partial(self._ask, handler, request)
        if not isinstance(request, proto.PullObjectRequest):
            return await ask()
        return await self._until_there(request.object_id, ask, wait, NOT_YET)

    async def _until_there(
        self,
        what: Hashable,
        ask: Callable[[], Awaitable[bytes | None]],
        wait: float,
        not_yet: bytes = b"",
    ) -> bytes | None:
        if self._waiting is None:
            return await ask()
        return await self._waiting.until_there(what, ask, wait, not_yet)

    async def _ask(self, handler: Handler, request: Any) -> bytes | None:
        given, large = request, False
        if isinstance(request, proto.PushObjectRequest):
            given = read_once(request)
            large = len(given.object_content) > LARGE
        try:
            answer = await self._aside(lambda: handler(given, self._state), large)
        except Exception:
            return None
        return answer.SerializeToString()

    async def _aside(self, do: Callable[[], R], long: bool = False) -> R:
        """Do something, in a thread if it may take long."""
        return await asyncio.to_thread(do) if self._threads or long else do()

    def _task(self, token: str) -> Any:
        """The task of a run's program; None if no program has this token."""
        return self._state.get_task_by_token(token)


def read_once(request: Any) -> SimpleNamespace:
    """The same fields as those of a request, each of which would be copied at every look."""
    return SimpleNamespace(
        **{each.name: getattr(request, each.name) for each in request.DESCRIPTOR.fields}
    )


class RunCalls:
    """Answers the frequent calls of runs' programs, and passes all others to a SuperLink."""

    def __init__(self, app: App, direct: Direct) -> None:
        self.app = app
        self.direct = direct

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope["path"] if scope["type"] == "http" else ""
        name = path.removeprefix(RUNTIME)
        runs = path == RUNTIME + name and name in OF_A_RUN and scope["method"] == "POST"
        if not runs and path != near.PIECES and not path.startswith(near.PIECE):
            await self.app(scope, receive, send)
            return
        header = flower.TASK_TOKEN_HEADER.lower().encode()
        tokens = [value for key, value in scope["headers"] if key == header]
        token = tokens[0].decode("latin-1") if len(tokens) == 1 else ""
        body = await read(receive)
        if body is None:
            return
        if path == near.PIECES:
            await self._together(scope, token, body, send)
            return
        if not runs:
            await self._near(scope, token, path.removeprefix(near.PIECE), body, send)
            return
        wait = wanted(scope["headers"])
        answer = await self.direct.of_run(name, token, body, wait) if token else None
        if answer is None:
            await self.app(scope, replay(body, receive), send)
        else:
            await give(answer, send)

    async def _together(self, scope: Scope, token: str, body: bytes, send: Send) -> None:
        """Give or take several small pieces."""
        parts, left = list(parted(body)), MOST
        answers: list[bytes] = []
        if scope["method"] == "PUT":
            session = dict(scope["headers"]).get(near.SESSION.encode(), b"").decode("latin-1")
            for name, piece in zip(parts[::2], parts[1::2], strict=True):
                taken = await self.direct.take(token, name.decode(), session, piece)
                answers.append(b"1" * taken)
        else:
            for name in parts:
                piece = (await self.direct.piece(token, name.decode(), 0)) or b"" if left else b""
                left = left - len(piece) if len(piece) <= min(left, SMALL) else 0
                answers.append(piece if left else b"")
        await give(joined(answers), send)

    async def _near(self, scope: Scope, token: str, name: str, body: bytes, send: Send) -> None:
        """Give or take a piece."""
        if scope["method"] == "PUT":
            session = dict(scope["headers"]).get(near.SESSION.encode(), b"").decode("latin-1")
            taken = await self.direct.take(token, name, session, body)
            await give(b"", send, status=200 if taken else near.GONE)
            return
        piece = await self.direct.piece(token, name, wanted(scope["headers"]))
        status = near.GONE if piece is None else near.NOT_YET if piece == b"" else 200
        await give(piece or b"", send, status=status)


async def give(body: bytes, send: Send, *headers: tuple[bytes, bytes], status: int = 200) -> None:
    """Send an answer, of protobuf or a piece."""
    headers += ((b"content-type", MEDIA_TYPE), (b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": [*headers]})
    last = max(0, len(body) - 1) // SLICE * SLICE
    for start in range(0, last, SLICE):
        part = body[start : start + SLICE]
        await send({"type": "http.response.body", "body": part, "more_body": True})
    await send({"type": "http.response.body", "body": body[last:]})


async def read(receive: Receive) -> bytes | None:
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


def replay(body: bytes, receive: Receive) -> Receive:
    """Return what gives an application a body that was read already."""
    left = [body]

    async def again() -> Event:
        if left:
            return {"type": "http.request", "body": left.pop(), "more_body": False}
        return await receive()

    return again
