"""A filter in front of the SuperLink: which requests sites may make, and a count of them.

A SuperLink serves sites, operators and its own run-time on one port, and only the sites' part asks
for a key. The public listener therefore passes an exact list of paths and refuses everything else
before the SuperLink sees it. Paths are compared as bytes, as sent, so no spelling of another path
(doubled slashes, dots, percent-encoding) can pass.
"""

import json
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, MutableMapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedda.files import put
from fedda.flower import TRACING_LAYER, heartbeat_pb2
from fedda.flower import fleet_pb2 as fleet
from fedda.ops.refusal import REFUSED, Refusal

Scope = MutableMapping[str, Any]
Event = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Event]]
Send = Callable[[Event], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

FLEET_PREFIX = "/v1/fleet/"
FLEET = {  # what a site needs of Flower: sessions, and invitations to runs
    "register-node": fleet.RegisterNodeFleetRequest,
    "activate-node": fleet.ActivateNodeRequest,
    "deactivate-node": fleet.DeactivateNodeRequest,
    "unregister-node": fleet.UnregisterNodeFleetRequest,
    "send-node-heartbeat": heartbeat_pb2.SendNodeHeartbeatRequest,
    "pull-messages": fleet.PullMessagesRequest,
}
ALLOWED = {("POST", f"{FLEET_PREFIX}{name}") for name in FLEET} | {
    ("GET", "/health"),
    ("HEAD", "/health"),
}
MAX_BODY = 2**14  # a key, or a number


LOOKING = ("/live", "/metrics", "/health")  # where an account that is not the server's may look
OTHER_ACCOUNT = (
    "only the account that runs the server, and root, may do this: become it, as by `sudo -u`"
)


@dataclass
class Route:
    """Requests and body bytes of one path."""

    requests: int = 0
    bytes_in: int = 0
    bytes_out: int = 0
    errors: int = 0


# flwr passes every request through nine layers of middleware, at a quarter of a millisecond of
# processor time each. Of these, four do nothing outside /v1/control/, and two write event logs and
# traces, which are off here.
OPERATORS = {
    "ControlSensitiveResponseMiddleware",
    "ControlAuthenticationMiddleware",
    "ControlLicenseMiddleware",
    "ControlEventLogMiddleware",
}
SWITCHED_OFF = {"FleetEventLogMiddleware", TRACING_LAYER}
SIGNATURES = {"NodeAuthMiddleware"}  # `authentication` checks them, earlier
BUSY = (FLEET_PREFIX, "/v1/runtime/")  # the paths of many small requests


def shortened(app: Any, guarded: bool = False) -> App:
    """A SuperLink whose many small requests skip the layers that would only pass them on.

    Args:
        app: flwr's application.
        guarded: skip its check of signatures, too, because `authentication` has.
    """
    layers = app.user_middleware
    skipped = OPERATORS | SWITCHED_OFF | (SIGNATURES if guarded else set())
    needed = [m for m in layers if m.cls.__name__ not in skipped]
    app.user_middleware = needed
    short: App = app.build_middleware_stack()
    app.user_middleware = layers

    async def serve(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"].startswith(BUSY):
            scope["app"] = app
            await short(scope, receive, send)
        else:
            await app(scope, receive, send)

    return serve


class Traffic:
    """Requests and bytes by path, since the start."""

    def __init__(self) -> None:
        self.since = time.time()
        self.routes: dict[str, Route] = defaultdict(Route)
        self.refusals: dict[int, int] = defaultdict(int)  # by HTTP status

    @property
    def refused(self) -> int:
        return sum(self.refusals.values())

    def write(self, path: Path) -> None:
        """Write the counts as JSON; a reader never sees half a file."""
        routes = {
            name: {key.replace("_", "-"): value for key, value in asdict(route).items()}
            for name, route in sorted(self.routes.items())
        }
        total = {
            key: sum(route[key] for route in routes.values())
            for key in ("requests", "bytes-in", "bytes-out")
        }
        content = {
            "since": self.since,
            "written": time.time(),
            "refused": self.refused,
            "refusals": {str(status): n for status, n in sorted(self.refusals.items())},
            "total": total,
            "routes": routes,
        }
        put(path, json.dumps(content, indent=2) + "\n")


class FleetOnly:
    """Passes the Fleet API and /health to a SuperLink, and answers 403 to everything else."""

    def __init__(self, app: App, traffic: Traffic, max_body: int = MAX_BODY) -> None:
        self.app = app
        self.traffic = traffic
        self.max_body = max_body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":
            self.traffic.refusals[403] += 1
            await receive()
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            raise RuntimeError(f"the public listener got a {scope['type']} scope")
        hosts = [name for name, _ in scope["headers"] if name == b"host"]
        if len(hosts) != 1 or scope["http_version"] not in ("1.0", "1.1"):
            await refuse(send, self.traffic, 400, "a request needs HTTP/1.1 and a Host")
            return
        if not allowed(scope):
            await refuse(send, self.traffic, 403, "no site needs this path")
            return
        if (length(scope) or 0) > self.max_body:
            await refuse(send, self.traffic, 413, "body too large")
            return
        await self._pass(scope, receive, send)

    async def _pass(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self.traffic.routes[scope["path"]]
        route.requests += 1
        received = 0
        started = False

        async def counted_receive() -> Event:
            nonlocal received
            event = await receive()
            size = len(event.get("body", b""))
            received += size
            route.bytes_in += size
            if received > self.max_body:
                # To the application it looks as if the caller had hung up; nothing more is read.
                return {"type": "http.disconnect"}
            return event

        async def counted_send(event: Event) -> None:
            nonlocal started
            if received > self.max_body and not started:
                return
            if event["type"] == "http.response.start":
                started = True
                route.errors += event["status"] >= 400
            route.bytes_out += len(event.get("body", b""))
            await send(event)

        try:
            await self.app(scope, counted_receive, counted_send)
        except Exception:
            if received <= self.max_body:
                raise
        if received > self.max_body and not started:
            started = True
            await refuse(send, self.traffic, 413, "body too large")


class LocalOnly:
    """Passes an operator's requests, and none of a web page that a browser here has open.

    A page from anywhere can reach a port of this machine, under a host name of its own that leads
    here, or by a form. So the host must be this machine by its own names, and a browser's mark of
    the page that asks is refused. Other accounts of this machine may but look.
    """

    def __init__(self, app: App, port: int, strangers: Collection[int] = ()) -> None:
        """Take the application, the port, and those from which other accounts have connected."""
        self.app = app
        self.strangers = strangers
        names = ("127.0.0.1", "localhost", "[::1]")
        self.hosts = {f"{name}:{port}".encode() for name in names}
        if port in (80, 443):  # which clients leave out
            self.hosts |= {name.encode() for name in names}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = [(k, v.lower()) for k, v in scope["headers"] if k in (b"host", b"origin")]
            if len(headers) != 1 or headers[0][1] not in self.hosts:
                await refuse(send, Traffic(), 421, "only programs of this machine are served here")
                return
            of_others = (scope.get("client") or ("", 0))[1] in self.strangers
            if of_others and not scope["path"].startswith(LOOKING):
                await refuse(send, Traffic(), 403, OTHER_ACCOUNT)
                return
            if scope.get("path", "").startswith(FLEET_PREFIX):
                await refuse(send, Traffic(), 403, "no site's port", why=Refusal("port"))
                return
        await self.app(scope, receive, send)


async def refuse(
    send: Send,
    traffic: Traffic,
    status: int,
    text: str,
    *,
    close: bool = True,
    why: Refusal | None = None,
) -> None:
    """Answer a request with a sentence instead of passing it on, and end its connection.

    Args:
        send: of ASGI.
        traffic: counts the refusal.
        status: of HTTP.
        text: the sentence.
        close: end the connection; needed if the body was not read.
        why: the reason, which a site's program turns into a sentence of its own.
    """
    traffic.refusals[status] += 1
    body = text.encode() + b"\n"
    headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(body)).encode())]
    if close:
        headers.append((b"connection", b"close"))
    if why is not None:
        headers.append((REFUSED.encode(), why.header.encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def allowed(scope: Scope) -> bool:
    """Whether a request is in the list ALLOWED, spelled exactly as there."""
    path = scope["path"]
    raw = scope.get("raw_path")
    return (
        (scope["method"], path) in ALLOWED
        and (raw is None or raw.split(b"?")[0] == path.encode())
        and not scope.get("root_path")
    )


def length(scope: Scope) -> int | None:
    """The length of a request's body as announced, if it is."""
    for name, value in scope["headers"]:
        if name == b"content-length" and value.isdigit():
            return int(value)
    return None
