"""The site's own page, on this machine alone: `fedda-client --page`.

Its address holds a secret, so neither another user of the machine nor a web page that a browser has
open can read it or press its button: such a page knows no secret, comes under a host name of its
own, or with its own origin. Nothing here reaches the server that the site dials.
"""

import asyncio
import secrets
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.routing import Route
from uvicorn.protocols.http.h11_impl import H11Protocol

from fedda.errors import ConfigError
from fedda.page.at_site import page

from ..policy.seen import Seen
from .ending import Ending
from .standing import Standing

HERE = "127.0.0.1"
HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "frame-ancestors 'none'",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "same-origin",  # a form's origin is null under no-referrer
    "x-content-type-options": "nosniff",
}
MOST = 32  # connections, as this process needs its files for the site's work
AGAIN = {"refresh": "10"}  # seconds until a browser asks for it anew


class OwnPage:
    """Answers who knows the page's address.

    Args:
        name: the site's.
        seen: what its audit log says.
        standing: how it stands with its server.
        ending: what the button asks to end.
        port: where it is served, as its own origin.
    """

    def __init__(
        self, name: str, seen: Seen, standing: Standing, ending: Ending, port: int
    ) -> None:
        self._name, self._seen, self._standing, self._ending = name, seen, standing, ending
        self._secret = secrets.token_urlsafe(24)
        self._origins = {f"http://{host}:{port}" for host in (HERE, "localhost")}
        self._one = threading.Lock()  # handlers run in threads, and share what was read
        self.address = f"http://{HERE}:{port}/{self._secret}"
        routes = [
            Route("/{secret}", self._show, methods=["GET"]),
            Route("/{secret}/stop", self._stop, methods=["POST"]),
        ]
        hosts = Middleware(TrustedHostMiddleware, allowed_hosts=[HERE, "localhost"])
        self.app = Starlette(routes=routes, middleware=[hosts])

    def _show(self, asked: Request) -> Response:
        if not self._knows(asked):
            return _refused("open the address that fedda-client wrote when it started")
        with self._one:
            now = self._seen.look(self._standing.text)
        stop = f"/{self._secret}/stop"
        text = page(self._name, now, stop, self._ending.asked)
        return HTMLResponse(text, headers=HEADERS | AGAIN)

    def _stop(self, asked: Request) -> Response:
        if not self._knows(asked) or asked.headers.get("origin") not in self._origins:
            return _refused("only the button of this site's own page stops it")
        self._ending.ask()
        return RedirectResponse(f"/{self._secret}", 303, HEADERS)

    def _knows(self, asked: Request) -> bool:
        given = asked.path_params["secret"].encode()
        return secrets.compare_digest(given, self._secret.encode())


class FewConnections(H11Protocol):
    """Closes what is beyond MOST connections: any user of the machine may begin some."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take a connection, or close it at once."""
        super().connection_made(transport)
        if len(self.connections) > MOST:
            transport.close()


@contextmanager
def served(
    name: str, seen: Seen, standing: Standing, ending: Ending, port: int
) -> Iterator[OwnPage]:
    """Serve the page while the `with` block runs, in a thread.

    Args:
        name: as of OwnPage, like the next three.
        seen: see there.
        standing: see there.
        ending: see there.
        port: of this machine; 0: a free one.

    Raises:
        ConfigError: another program uses the port.
    """
    try:
        listens = socket.create_server((HERE, port))
    except OSError as error:
        raise ConfigError(
            f"--page {port} cannot be used ({error.strerror}); give another port, or 0 for any"
        ) from None
    with listens:
        made = OwnPage(name, seen, standing, ending, listens.getsockname()[1])
        settings = uvicorn.Config(
            made.app,
            http=FewConnections,
            log_config=None,
            log_level="error",  # a warning for each odd request would fill the site's log
            access_log=False,
            server_header=False,
            lifespan="off",
            ws="none",
        )
        server = uvicorn.Server(settings)
        thread = threading.Thread(target=server.run, args=([listens],), daemon=True)
        thread.start()
        try:
            yield made
        finally:
            server.should_exit = True
            thread.join(2.0)


def _refused(text: str) -> Response:
    return PlainTextResponse(f"{text}\n", 403, HEADERS)
