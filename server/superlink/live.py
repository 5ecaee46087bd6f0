"""The live page, its events and the metrics, at the operator's port only: nothing is changed."""

import asyncio
import contextlib
import hashlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from urllib.parse import parse_qs

from prometheus_client import CONTENT_TYPE_LATEST

from fedda.results.read import JOURNAL
from fedda.results.snapshot import Run, Snapshot
from fedda.results.story import Story

from .filter import App, Receive, Scope, Send
from .metrics import metrics
from .pages import Pages, TooSlowError

PAGE, EVENTS, SITES, METRICS = "/live", "/live/events", "/live/sites.json", "/metrics"
LOOK_S = 1.0  # between two looks for a change
ALIVE_S = 15.0  # between two comments that keep a quiet stream open
STREAMS = 32  # at a time; one more ends the oldest
HTML, JSON = b"text/html; charset=utf-8", b"application/json"
STREAM, TEXT = b"text/event-stream", b"text/plain; charset=utf-8"
HEADERS = [
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"frame-ancestors 'none'"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"referrer-policy", b"no-referrer"),
    (b"x-content-type-options", b"nosniff"),
]

Asked = dict[str, str]  # what an address asks for, after the question mark
Answer = tuple[int, bytes, bytes]  # status, type, body


class Live:
    """Answers the addresses of those who watch, and passes all others on."""

    def __init__(
        self,
        app: App,
        watched: Callable[[], Snapshot],
        newest: Callable[[], tuple[Run | None, Story]],
    ) -> None:
        """Wrap an application.

        Args:
            app: what serves all other addresses.
            watched: says which sites and runs there are; called in threads.
            newest: says which run is the newest, and its story so far; called in threads.
        """
        self.app = app
        self.watched = watched
        self.newest = newest
        self._answers: dict[str, Callable[[Asked], Awaitable[Answer]]] = {
            PAGE: self._page,
            SITES: self._sites,
            METRICS: self._metrics,
        }
        self._pages = Pages()
        self._streams: dict[asyncio.Event, bool] = {}  # what ends each, and whether a page asked
        self._closing = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "")
        if scope["type"] != "http" or not (path in self._answers or path == EVENTS):
            await self.app(scope, receive, send)
            return
        asked = {k: v[-1] for k, v in parse_qs(scope["query_string"].decode("latin-1")).items()}
        if scope["method"] != "GET":
            await _answer(send, (405, TEXT, b"only GET is served here\n"))
        elif not of_its_own(scope):
            await _answer(send, (403, TEXT, b"no other page is served here\n"))
        elif path != EVENTS:
            await _answer(send, await self._answers[path](asked))
        else:
            ended = self._admit(of_a_page(scope))
            try:
                await self._stream(scope, asked, receive, send, ended)
            finally:
                self._streams.pop(ended, None)

    def close(self) -> None:
        """End all streams, and the process that makes pages."""
        self._closing = True
        for ended in self._streams:
            ended.set()
        self._pages.close()

    def _admit(self, page: bool) -> asyncio.Event:
        """Make place for a stream, by the oldest of a program, else of a page -> what ends it."""
        while len(self._streams) >= STREAMS:
            oldest = min(self._streams, key=lambda ended: self._streams[ended])
            oldest.set()  # a page comes back by itself
            del self._streams[oldest]
        ended = asyncio.Event()
        self._streams[ended] = page
        if self._closing:
            ended.set()
        return ended

    async def _page(self, asked: Asked) -> Answer:
        which = asked.get("run", "")
        snapshot, version = await asyncio.to_thread(self._look, which)
        try:
            return 200, HTML, (await self._pages.page(snapshot, which, version)).encode()
        except TooSlowError as error:
            return 503, TEXT, f"{error}\n".encode()

    async def _sites(self, asked: Asked) -> Answer:
        snapshot = await asyncio.to_thread(self.watched)
        return 200, JSON, json.dumps(snapshot.to_json()).encode()

    async def _metrics(self, asked: Asked) -> Answer:
        def measured() -> bytes:
            return metrics(self.watched(), *self.newest())

        return 200, CONTENT_TYPE_LATEST.encode(), await asyncio.to_thread(measured)

    def _look(self, which: str) -> tuple[Snapshot, str]:
        snapshot = self.watched()
        return snapshot, version_of(snapshot, which)

    async def _stream(
        self, scope: Scope, asked: Asked, receive: Receive, send: Send, ended: asyncio.Event
    ) -> None:
        """Send an event at each change, until the reader or the server goes, or it has to end."""
        last = dict(scope["headers"]).get(b"last-event-id", b"").decode("latin-1")
        headers = [(b"content-type", STREAM), *HEADERS]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        gone = asyncio.create_task(_gone(receive))
        try:
            seen = last or asked.get("seen", "")
            async for text in self._events(asked.get("run", ""), seen, ended):
                if gone.done():
                    return
                if text:
                    await send({"type": "http.response.body", "body": text, "more_body": True})
            await send({"type": "http.response.body", "body": b""})
        finally:
            gone.cancel()

    async def _events(self, which: str, seen: str, ended: asyncio.Event) -> AsyncIterator[bytes]:
        """Yield an event per change after the version `seen`; at a look without a change b""."""
        yield b"retry: 2000\n\n"
        quiet = 0.0
        while not ended.is_set():
            _, version = await asyncio.to_thread(self._look, which)
            if version != seen:
                seen, quiet = version, 0.0
                yield f"id: {version}\ndata: {version}\n\n".encode()
            elif quiet >= ALIVE_S:
                quiet = 0.0
                yield b": no change\n\n"
            else:
                yield b""
            quiet += LOOK_S
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(ended.wait(), LOOK_S)


def version_of(snapshot: Snapshot, which: str) -> str:
    """A name for what a page shows: it changes with the sites, the run and the run's journal."""
    run, size = snapshot.run(which), 0
    if run is not None:
        with contextlib.suppress(OSError):
            size = (run.path / JOURNAL).stat().st_size
    return hashlib.sha256(repr((snapshot, run, size)).encode()).hexdigest()[:16]


def of_its_own(scope: Scope) -> bool:
    """Whether nobody but a person, a program or this very page asks, as far as a browser says."""
    told = {k: v for k, v in scope["headers"] if k.startswith(b"sec-fetch-")}
    if told.get(b"sec-fetch-site", b"none") in (b"none", b"same-origin"):
        return True
    # A link on another page opens this one, which that page cannot read.
    return told.get(b"sec-fetch-mode") == b"navigate" and told.get(b"sec-fetch-dest") == b"document"


def of_a_page(scope: Scope) -> bool:
    """Whether a page in a browser asks, which says so itself, and no program."""
    return (b"sec-fetch-site", b"same-origin") in scope["headers"]


async def _answer(send: Send, answer: Answer) -> None:
    status, kind, body = answer
    headers = [(b"content-type", kind), (b"content-length", str(len(body)).encode()), *HEADERS]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _gone(receive: Receive) -> None:
    """Wait until the reader hangs up."""
    while (await receive())["type"] != "http.disconnect":
        pass
