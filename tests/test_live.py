"""The live page: what it says of a run so far, its events, and who is served."""

import asyncio
import base64
import contextlib
import hashlib
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from starlette.datastructures import Headers

from fedda.contrib.report.page.live_page import SCRIPT, page
from fedda.results.snapshot import RunNow, SiteNow, Snapshot
from fedda.results.story import JournalReader, Story
from fedda.settings import RunConfig
from server.run import claim
from server.superlink.filter import LocalOnly
from server.watching.live import EVENTS, METRICS, PAGE, Live, of_its_own, version_of
from tests.browser import CHROMIUM, browser
from tests.contrib.report.test_page import EVIL, Read
from tests.patience import PATIENCE
from tests.test_story import SETTINGS, events


@pytest.fixture
def run(tmp_path: Path) -> RunNow:
    """A run's folder in the middle of a run, as a server leaves it."""
    changed = {"train.lr": 0.05, "run.dir": str(tmp_path.parent), "run.name": tmp_path.name}
    claim(tmp_path, RunConfig.parse(SETTINGS | changed))
    lines = [json.dumps(event) + "\n" for event in events()]
    (tmp_path / "journal.jsonl").write_text("".join(lines))
    return RunNow(7, "r", str(tmp_path), "kd3a", "running")


def sites(run: RunNow) -> Snapshot:
    a, t = SiteNow(1, "a", "source", True, "train", 7), SiteNow(2, "t", "", False)
    return Snapshot((a, t), (run, replace(run, number=3, name="old", status="finished")))


def test_the_page_says_who_is_there_and_who_trains(run: RunNow) -> None:
    read = Read(page(sites(run), "", "v1"))
    assert read.tables["Sites now"][1:] == [
        ["a", "source", "yes", "yes", "trains", "1"],
        ["t", "target", "no", "yes", "–", "0"],
    ]
    assert "Training fedavg, seed 0, training 1 of 4: round 2 of 4." in read.words
    assert "0:56" in read.words and "3.8 kB" in read.words
    assert read.paths("m k1")  # the curve so far
    assert ("a", {"href": "/live?run=3"}) in read.elements


def test_each_other_run_has_one_link(run: RunNow) -> None:
    others = tuple(replace(run, number=number, name=f"n{number}") for number in (3, 4))
    read = Read(page(Snapshot((), (run, *others)), "", "v1"))
    links = [about["href"] for name, about in read.elements if name == "a" and "href" in about]
    assert [link for link in links if link.startswith("/live")] == ["/live?run=3", "/live?run=4"]


def test_only_the_pages_own_script_may_run(run: RunNow) -> None:
    text = page(sites(run), "", "v1")
    assert re.findall(r"<script>(.*?)</script>", text, re.DOTALL) == [SCRIPT]
    digest = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
    policy = next(a["content"] for t, a in Read(text).elements if "http-equiv" in a)
    assert f"script-src 'sha256-{digest}'" in policy and "default-src 'none'" in policy
    assert not re.findall(r"(?:src|href)=\"(?!#|/live|\?)", text)


def test_what_sites_say_is_escaped(run: RunNow) -> None:
    spoilt = json.dumps(events()[8] | {"text": EVIL, "site": EVIL, "what": EVIL})
    joined = json.dumps(events()[1] | {"site": EVIL, "role": EVIL})
    with (run.path / "journal.jsonl").open("a") as file:
        file.write(f"{spoilt}\n{joined}\n")
    snapshot = Snapshot((SiteNow(1, EVIL, EVIL, True, EVIL, 7),), (replace(run, name=EVIL),))
    text = page(snapshot, EVIL, "v1")
    assert "alert" in Read(text).words
    assert text.count("<script") == 1


def test_without_a_run_the_page_shows_the_sites() -> None:
    snapshot = Snapshot((SiteNow(1, "", "", True),), ())
    read = Read(page(snapshot, "", "v1"))
    assert "No run has begun" in read.words
    assert read.tables["Sites now"][1][0] == "node 1"
    assert "knows no run x" in Read(page(snapshot, "x", "v1")).words


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


def newest(watched: Callable[[], Snapshot]) -> tuple[Snapshot, Story]:
    run = watched().run()
    return watched(), JournalReader(run.path).look() if run else Story()


@contextlib.contextmanager
def serving(watched: Callable[[], Snapshot]) -> Iterator[str]:
    """Serve the live page on loopback, as the operator's port does -> its address."""

    async def other(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 404, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    stop = threading.Event()

    async def serve() -> None:
        live = Live(other, watched, lambda: newest(watched))
        app = LocalOnly(live, port)
        config = uvicorn.Config(app, lifespan="off", log_level="error", ws="none")
        server = uvicorn.Server(config)
        task = asyncio.create_task(server._serve([listener]))
        await asyncio.to_thread(stop.wait)
        live.close()
        server.should_exit = True
        await task

    thread = threading.Thread(target=asyncio.run, args=(serve(),))
    thread.start()
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        stop.set()
        thread.join(PATIENCE)
        listener.close()
        assert not thread.is_alive()


def client_of(address: str) -> httpx.Client:
    return httpx.Client(base_url=address, timeout=PATIENCE, trust_env=False)


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
        for path in (PAGE, EVENTS, METRICS):
            assert client.get(path, headers={"host": "evil.example"}).status_code == 421
            assert client.get(path, headers={"origin": "https://evil.example"}).status_code == 421
            assert client.get(path, headers={"sec-fetch-site": "cross-site"}).status_code == 403
            assert client.request("POST", path).status_code == 405
        kept = client.get(PAGE).headers
        assert kept["x-content-type-options"] == "nosniff" and kept["cache-control"] == "no-store"


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


@pytest.mark.skipif(CHROMIUM is None, reason="no Chromium is installed")
@pytest.mark.parametrize("width", [1400, 400])
def test_a_browser_follows_a_run(run: RunNow, tmp_path: Path, width: int) -> None:
    journal = run.path / "journal.jsonl"
    with serving(lambda: sites(run)) as address, browser(tmp_path / "browser") as tab:
        tab.open(f"{address}{PAGE}", width)
        tab.wait("document.body?.innerText.includes('round 2 of 4')")
        tab.wait("document.getElementById('lost').hidden")
        tab.ask("document.querySelector('#accuracy details').open = true")
        tab.ask("document.querySelector('#accuracy .tools button').click()")
        with journal.open("a") as file:
            file.write(json.dumps(events()[-1] | {"round": 3, "accuracy": 0.75}) + "\n")
        tab.wait("document.body.innerText.includes('round 3 of 4')")
        assert tab.ask("document.body.innerText").count("75.0") >= 2  # the card and the results
        assert tab.ask("document.querySelector('#accuracy details').open")
        assert tab.ask("document.querySelectorAll('#accuracy .big').length") == 1
        assert tab.ask("document.querySelector('#accuracy .tools').innerText").startswith("reduce")
        assert tab.ask("document.documentElement.scrollWidth") <= width
        assert tab.errors == []
