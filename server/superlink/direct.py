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
from collections.abc import Callable
from typing import Any

from google.protobuf.message import DecodeError

from fedda import flower
from fedda.flower import fleet_pb2 as fleet
from fedda.flower import message_pb2 as proto
from fedda.flower import runtime_pb2 as runtime

from .filter import App, Event, Receive, Scope, Send

MEDIA_TYPE = flower.PROTOBUF_MEDIA_TYPE.encode()
GIVEN_KEPT = 1024  # replies that a run's program may ask for once more
LARGE = 2**16  # bytes; to hash a larger piece takes long enough to be worth a thread

Handler = Callable[[Any, Any], Any]


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

    def __init__(self, state: Any, threads: bool) -> None:
        """Take flwr's LinkState; with `threads` no call blocks the loop, as a database's would."""
        self._state = state
        self._threads = threads
        self._given: OrderedDict[tuple[int, str], tuple[Any, Any]] = (
            OrderedDict()
        )  # by run, request
        self._giving = threading.Lock()

    async def of_site(self, request: Any) -> bytes | None:
        """Return the answer to a site's request, or None if the whole stack has to answer it."""
        handler = HANDLERS.get(type(request))
        return None if handler is None else await self._call(handler, request)

    async def of_run(self, name: str, token: str, body: bytes) -> bytes | None:
        """Return the answer to a request of a run's program, or None as `of_site` does.

        Args:
            name: the call's.
            token: by which the SuperLink knows the program.
            body: the request.
        """
        kind, handler = OF_A_RUN[name]
        try:
            request = kind.FromString(body)
        except DecodeError:
            return None
        once_more: Callable[..., Any] = self._pull if name == "pull-messages" else handler
        return await self._call(lambda *given: once_more(*given, self._task(token)), request)

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

    async def _call(self, handler: Handler, request: Any) -> bytes | None:
        try:
            if self._threads or len(getattr(request, "object_content", b"")) > LARGE:
                answer = await asyncio.to_thread(handler, request, self._state)
            else:
                answer = handler(request, self._state)
        except Exception:
            return None
        return answer.SerializeToString()

    def _task(self, token: str) -> Any:
        task = self._state.get_task_by_token(token)
        if task is None:
            raise PermissionError
        return task


class RunCalls:
    """Answers the frequent calls of runs' programs, and passes all others to a SuperLink."""

    def __init__(self, app: App, direct: Direct) -> None:
        self.app = app
        self.direct = direct

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        name = scope["path"].removeprefix(RUNTIME) if scope["type"] == "http" else ""
        if name not in OF_A_RUN or scope["path"] != RUNTIME + name or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        header = flower.TASK_TOKEN_HEADER.lower().encode()
        tokens = [value for key, value in scope["headers"] if key == header]
        body = await read(receive)
        if body is None:
            return
        answer = None
        if len(tokens) == 1:
            answer = await self.direct.of_run(name, tokens[0].decode("latin-1"), body)
        if answer is None:
            await self.app(scope, replay(body, receive), send)
        else:
            await give(answer, send)


async def give(body: bytes, send: Send, *headers: tuple[bytes, bytes]) -> None:
    """Send an answer of protobuf."""
    headers += ((b"content-type", MEDIA_TYPE), (b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": 200, "headers": [*headers]})
    await send({"type": "http.response.body", "body": body})


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
