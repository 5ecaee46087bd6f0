"""The live page, its events and the metrics, at the operator's port only: nothing is changed."""

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial

from prometheus_client import CONTENT_TYPE_LATEST
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from fedda import plugins
from fedda.errors import typed
from fedda.results.read import JOURNAL, human
from fedda.results.snapshot import RunNow, Snapshot
from fedda.results.story import Story

from .metrics import metrics

PAGE, EVENTS, METRICS = "/live", "/live/events", "/metrics"
LOOK_S = 1.0  # between two looks for a change
ALIVE_S = 15.0  # between two comments that keep a quiet stream open
STREAMS = 32  # at a time; one more ends the oldest
LARGEST = 16 * 10**6  # bytes of a journal of which a page is made; it takes about 10 s
HEADERS = {
    "cache-control": "no-store",
    "content-security-policy": "frame-ancestors 'none'",
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
}
STREAM = {"content-type": "text/event-stream"}


class Live:
    """Answers the addresses of those who watch, and passes all others on."""

    def __init__(
        self,
        app: ASGIApp,
        watched: Callable[[], Snapshot],
        newest: Callable[[], tuple[Snapshot, Story]],
    ) -> None:
        """Wrap an application.

        Args:
            app: what serves all other addresses.
            watched: says which sites and runs there are; called in threads.
            newest: says also the newest run's story so far; called in threads.
        """
        self.app = app
        self.watched = watched
        self.newest = newest
        self._answers: dict[str, Callable[[Request], Awaitable[Response]]] = {
            EVENTS: self._stream,
            METRICS: self._metrics,
        }
        page = plugins.installed("pages").get("live")
        if page is not None:
            self._answers[PAGE] = partial(self._page, page.value)
        self._one = asyncio.Lock()  # one page is made at a time
        self._last: tuple[tuple[str, str], str] = ("", ""), ""  # of what, and the page
        self._free = 0.0  # until when none is made, as the last took as long
        self._streams: dict[asyncio.Event, bool] = {}  # what ends each, and whether a page asked
        self._closing = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        answer = self._answers.get(scope.get("path", "")) if scope["type"] == "http" else None
        if answer is None:
            await self.app(scope, receive, send)
            return
        request = Request(scope)
        if request.method != "GET":
            response = _plain(405, "only GET is served here")
        elif not of_its_own(request.headers):
            response = _plain(403, "no other page is served here")
        else:
            response = await answer(request)
        await response(scope, receive, send)

    def close(self) -> None:
        """End all streams."""
        self._closing = True
        for ended in self._streams:
            ended.set()

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

    async def _page(self, page: Callable[..., str], asked: Request) -> Response:
        """Make the page, in a thread; the last one again if nothing has changed.

        While a page is made, every step of the sites' requests waits some milliseconds for its
        turn. So one is made at a time, in half of the time at most, and none of a large journal.
        """
        which = asked.query_params.get("run", "")
        async with self._one:
            snapshot, version = await asyncio.to_thread(self._look, which)
            run = snapshot.run(which)
            if run is not None and (size := _size(run)) > LARGEST:
                return _plain(503, _too_large(run, size))
            if self._last[0] != (which, version):
                await asyncio.sleep(self._free - time.monotonic())
                began = time.monotonic()
                made = await asyncio.to_thread(page, snapshot, which, version)
                self._last = (which, version), made
                self._free = 2 * time.monotonic() - began
            return Response(self._last[1], headers=HEADERS, media_type="text/html")

    async def _metrics(self, _: Request) -> Response:
        text = await asyncio.to_thread(lambda: metrics(*self.newest()))
        return Response(text, headers=HEADERS, media_type=CONTENT_TYPE_LATEST)

    async def _stream(self, asked: Request) -> Response:
        """Send an event at each change, until the reader or the server goes, or it has to end."""
        query = asked.query_params
        seen = asked.headers.get("last-event-id") or query.get("seen", "")
        # A page in a browser says so itself, a program does not.
        ended = self._admit(asked.headers.get("sec-fetch-site") == "same-origin")
        events = self._events(query.get("run", ""), seen, ended)
        return StreamingResponse(events, headers=STREAM | HEADERS)

    async def _events(self, which: str, seen: str, ended: asyncio.Event) -> AsyncIterator[str]:
        """Yield an event per change after the version `seen`, and comments in between."""
        try:
            yield "retry: 2000\n\n"
            quiet = 0.0
            while not ended.is_set():
                _, version = await asyncio.to_thread(self._look, which)
                if version != seen:
                    seen, quiet = version, 0.0
                    yield f"id: {version}\ndata: {version}\n\n"
                elif quiet >= ALIVE_S:
                    quiet = 0.0
                    yield ": no change\n\n"
                quiet += LOOK_S
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(ended.wait(), LOOK_S)
        finally:
            self._streams.pop(ended, None)

    def _look(self, which: str) -> tuple[Snapshot, str]:
        snapshot = self.watched()
        return snapshot, version_of(snapshot, which)


def version_of(snapshot: Snapshot, which: str) -> str:
    """A name for what a page shows: it changes with the sites, the run and the run's journal."""
    run = snapshot.run(which)
    size = 0 if run is None else _size(run)
    return hashlib.sha256(repr((snapshot, run, size)).encode()).hexdigest()[:16]


def of_its_own(told: Headers) -> bool:
    """Whether nobody but a person, a program or this very page asks, as far as a browser says."""
    if told.get("sec-fetch-site", "none") in ("none", "same-origin"):
        return True
    # A link on another page opens this one, which that page cannot read.
    return told.get("sec-fetch-mode") == "navigate" and told.get("sec-fetch-dest") == "document"


def _size(run: RunNow) -> int:
    """Bytes of a run's journal; 0 if there is none."""
    with contextlib.suppress(OSError):
        return (run.path / JOURNAL).stat().st_size
    return 0


def _plain(status: int, text: str) -> Response:
    return Response(f"{text}\n", status, HEADERS, "text/plain")


def _too_large(run: RunNow, size: int) -> str:
    return (
        f"The journal of this run has {human(size)}, and pages are made of {human(LARGEST)} at "
        f"most. `{typed('fedda', 'attach', run.folder)}` shows the run in a terminal, and its "
        "report when it has ended."
    )
