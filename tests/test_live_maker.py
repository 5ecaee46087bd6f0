"""The process that makes live pages: small, ended when nobody needs it, and never busy for long."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from fedda.page.live_page import made
from fedda.results.read import ABOUT
from fedda.results.snapshot import Run, Snapshot
from fedda.settings import RunConfig
from server.run import claim
from server.superlink import pages
from server.superlink.pages import Pages, TooSlowError
from tests.test_story import SETTINGS, events

ROOT = Path(__file__).parents[1]


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """A run's folder as a server leaves it in the middle of a run."""
    changed = {"train.lr": 0.05, "run.dir": str(tmp_path), "run.name": "r"}
    (tmp_path / "r").mkdir()
    claim(tmp_path / "r", RunConfig.parse(SETTINGS | changed))
    lines = [json.dumps(event) + "\n" for event in events()]
    (tmp_path / "r" / "journal.jsonl").write_text("".join(lines))
    return Run(7, "r", str(tmp_path / "r"), "kd3a", "running")


def makers() -> list[int]:
    """The processes that make pages for this one."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int(folder.joinpath("stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"fedda.live.maker" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:  # it has ended
            continue
    return found


def gone() -> bool:
    for _ in range(100):
        if not makers():
            return True
        time.sleep(0.05)
    return False


MAKE = """
import json, sys
from fedda.page.live_page import made
print(made(json.loads(sys.argv[1]), "", "v"))
assert not {"torch", "sklearn", "matplotlib", "flwr"} & set(sys.modules), "they take much memory"
"""


def test_a_page_is_made_without_torch_and_is_the_same(run: Run) -> None:
    snapshot = Snapshot((), (run,)).to_json()
    command = [sys.executable, "-c", MAKE, json.dumps(snapshot)]
    shown = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert shown.returncode == 0, shown.stderr
    page = shown.stdout.removesuffix("\n")
    assert "FedAvg (source-only)" in page and "train.lr" in page
    (run.path / ABOUT).unlink()  # as in the folder of an older version: torch is loaded
    assert made(snapshot, "", "v") == page


def test_a_page_that_takes_too_long_is_given_up(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = Snapshot((), (run, replace(run, name="other", folder=str(run.path / "other"))))

    async def ask() -> None:
        making = Pages()
        monkeypatch.setattr(pages, "MAKE_S", 0.01)
        with pytest.raises(TooSlowError, match=r"given up.*fedda attach .*r` shows"):
            await making.page(snapshot, "", "v1")
        assert await asyncio.to_thread(gone)
        monkeypatch.setattr(pages, "MAKE_S", 60.0)
        with pytest.raises(TooSlowError):  # not tried again so soon, as each try takes a processor
            await making.page(snapshot, "", "v2")
        assert not makers()
        assert "other" in await making.page(snapshot, "other", "v1")  # others are not kept waiting
        assert len(makers()) == 1
        monkeypatch.setattr(pages.time, "monotonic", lambda: time.perf_counter() + 1e9)
        assert "round 2 of 4" in await making.page(snapshot, "", "v2")
        making.close()
        assert await asyncio.to_thread(gone)

    asyncio.run(ask())


def test_a_process_that_was_ended_is_replaced_and_an_idle_one_ends(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = Snapshot((), (run,))

    async def ask() -> None:
        making = Pages()
        first = await making.page(snapshot, "", "v1")
        os.kill(makers()[0], signal.SIGKILL)
        assert await making.page(snapshot, "", "v1") == first
        monkeypatch.setattr(pages, "IDLE_S", 0.1)
        assert "v2" in await making.page(snapshot, "", "v2")
        assert await asyncio.to_thread(gone)

    asyncio.run(ask())
