"""What a server shows of a run so far: its events, and who is served."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from starlette.datastructures import Headers

from fedda.results.snapshot import RunNow
from server.watching.live import EVENTS, METRICS, PAGE, Live, of_its_own, version_of
from tests.patience import PATIENCE
from tests.plugged import HERE
from tests.watched import client_of, run, serving, sites

__all__ = ["run"]  # a fixture


@pytest.mark.parametrize(
    ("told", "served"),
    [
        ({}, True),
        ({"site": "none", "mode": "navigate", "dest": "document"}, True),
        ({"site": "same-origin", "mode": "cors", "dest": "empty"}, True),
        ({"site": "cross-site", "mode": "navigate", "dest": "document"}, True),
        ({"site": "cross-site", "mode": "navigate", "dest": "iframe"}, False),
        ({"site": "cross-site", "mode": "no-cors", "dest": "image"}, False),
        ({"site": "same-site", "mode": "cors", "dest": "empty"}, False),
    ],
)
def test_another_page_gets_nothing(told: dict[str, str], served: bool) -> None:
    headers = [(f"sec-fetch-{name}".encode(), value.encode()) for name, value in told.items()]
    assert of_its_own(Headers(raw=headers)) == served


def test_an_event_comes_when_the_journal_grows(run: RunNow) -> None:
    snapshot = sites(run)
    with serving(lambda: snapshot) as address, client_of(address) as client:
        seen = version_of(snapshot, "")
        with client.stream("GET", f"{EVENTS}?seen={seen}") as stream:
            assert stream.headers["content-type"] == "text/event-stream"
            lines = stream.iter_lines()
            assert next(lines) == "retry: 2000"
            with (run.path / "journal.jsonl").open("a") as file:
                file.write(json.dumps({"event": "done", "time": 30.0}) + "\n")
            data = next(line for line in lines if line.startswith("data: "))
            assert data == f"data: {version_of(snapshot, '')}" != f"data: {seen}"
        assert client.get("/other").status_code == 404


def test_only_this_machines_own_pages_and_programs_are_served(run: RunNow) -> None:
    with serving(lambda: sites(run)) as address, client_of(address) as client:
        for path in (*[PAGE] * HERE, EVENTS, METRICS):
            assert client.get(path, headers={"host": "evil.example"}).status_code == 421
            assert client.get(path, headers={"origin": "https://evil.example"}).status_code == 421
            assert client.get(path, headers={"sec-fetch-site": "cross-site"}).status_code == 403
            assert client.request("POST", path).status_code == 405
        for path in (*[PAGE] * HERE, METRICS):
            kept = client.get(path).headers
            assert kept["x-content-type-options"] == "nosniff"
            assert kept["cache-control"] == "no-store"


def asked(live: Live, *addresses: str) -> list[httpx.Response]:
    """Ask for several addresses at once."""

    async def ask() -> list[httpx.Response]:
        transport = httpx.ASGITransport(live)
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            return await asyncio.gather(*map(client.get, addresses))

    return asyncio.run(ask())


def test_a_stream_ends_with_its_reader(run: RunNow) -> None:
    """As uvicorn says it; it raises no error where somebody who has gone is written to."""
    live = Live(nothing, lambda: sites(run), nothing)
    scope = {"type": "http", "asgi": {"spec_version": "2.3"}, "method": "GET", "path": EVENTS}
    sent: list[Any] = []
    gone = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def send(event: Any) -> None:
        sent.append(event)
        if b"data: " in event.get("body", b""):
            gone.set()

    async def follow() -> None:
        asked = scope | {"headers": [], "query_string": b""}
        await asyncio.wait_for(live(asked, receive, send), PATIENCE)

    asyncio.run(follow())
    assert sent[1]["body"] == b"retry: 2000\n\n" and not live._streams


def nothing(*_: Any) -> Any:
    raise AssertionError("the page is not passed on")


@pytest.mark.slow
@pytest.mark.parametrize("page", [False, True], ids=["program", "page"])
def test_idle_streams_keep_nobody_out(
    run: RunNow, monkeypatch: pytest.MonkeyPatch, page: bool
) -> None:
    """The oldest of a program ends, and a page's only if there is no other."""
    monkeypatch.setattr("server.watching.live.STREAMS", 2)
    own = {"sec-fetch-site": "same-origin"}
    with (
        serving(lambda: sites(run)) as address,
        client_of(address) as client,
        client.stream("GET", EVENTS, headers=own) as first,
        client.stream("GET", EVENTS, headers=own if page else {}) as idle,
    ):
        lines, others = first.iter_lines(), idle.iter_lines()
        assert next(lines) == next(others) == "retry: 2000"
        with client.stream("GET", EVENTS, headers=own) as more:
            assert more.status_code == 200 and next(more.iter_lines()) == "retry: 2000"
            for _ in lines if page else others:
                pass  # it ends
            with (run.path / "journal.jsonl").open("a") as file:
                file.write(json.dumps({"event": "done", "time": 30.0}) + "\n")
            assert any(line.startswith("data: ") for line in (others if page else lines))
