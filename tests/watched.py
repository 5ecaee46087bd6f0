"""A run's folder in the middle of a run, and what a server shows of it, on loopback."""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn

from fedda.results.snapshot import RunNow, SiteNow, Snapshot
from fedda.results.story import JournalReader, Story
from fedda.settings import RunConfig
from server.run import claim
from server.superlink.filter import LocalOnly
from server.watching.live import Live
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
