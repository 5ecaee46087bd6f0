"""The demo as a newcomer starts it: a whole federation of processes that leaves no process."""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from fedda.cli.launch import INTERRUPTED
from fedda.data import digits
from tests import forked
from tests.command_lines import call
from tests.patience import PATIENCE, wait_until
from tests.processes import Member, alive, below, kill, marked

pytestmark = pytest.mark.slow


def command(folder: Path, rounds: int) -> list[str]:
    words = ["demo", "--dir", str(folder), "--seeds", "1", "--rounds", str(rounds)]
    return [sys.executable, "-m", "fedda", *words]


def environment(folder: Path) -> dict[str, str]:
    """An environment with the test's own mark."""
    return os.environ | {"FEDDA_MARK": str(folder)}


def test_the_demo_in_one_round(
    tmp_path: Path, signal_handlers: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, so that what it starts are forks; over fewer images."""
    monkeypatch.setattr(digits, "build", partial(digits.build, train=300, test=100))
    nothing = forked.CONTEXT.Process(target=print)
    nothing.start()
    nothing.join()
    before = below(os.getpid())
    done = call(*command(tmp_path, 1)[3:])
    for word in ("FedAvg", "KD3A", "fonts", "traffic.json", "report.html"):
        assert word in done.stdout, done.stdout
    folder = tmp_path / "demo"
    results = json.loads((folder / "results.json").read_text())
    assert len(results["trainings"]["kd3a"][0]["rounds"]) == 1
    assert (folder / "report.png").read_bytes().startswith(b"\x89PNG")
    page = (folder / "report.html").read_text()
    # The four sites' notes are on this machine, so the page shows them.
    assert "KD3A: test at fonts, last round" in page and "KD3A, last round, by domain" in page
    assert "No notes of" not in page
    routes = json.loads((folder / "traffic.json").read_text())["routes"]
    assert routes["lanes"]["bytes-in"] > 0
    wait_until(lambda: below(os.getpid()) <= before, "processes are left")


@pytest.mark.nightly("fedda/cli/demo.py", "fedda/ops/federation.py", "fedda/ops/spawn.py")
def test_an_interrupted_demo_leaves_no_process(tmp_path: Path) -> None:
    mark, journal = f"FEDDA_MARK={tmp_path}", tmp_path / "demo" / "journal.jsonl"
    log = tmp_path / "log"
    with log.open("wb") as out:
        words, env = command(tmp_path, 100), environment(tmp_path)
        demo = subprocess.Popen(words, stdout=out, stderr=out, env=env)
    started: set[Member] = set()
    try:
        wait_until(lambda: journal.exists() and '"training"' in journal.read_text(), "no training")
        started = below(demo.pid) | marked(mark)
        assert len(below(demo.pid)) >= 6  # the command, the server and four sites
        assert below(demo.pid) <= marked(mark), "the mark would not find what is left"
        demo.send_signal(signal.SIGINT)
        assert demo.wait(PATIENCE) == INTERRUPTED, log.read_text()
        assert "stopped, with everything that was started" in log.read_text()
        wait_until(lambda: not alive(started) and not marked(mark), "processes are left")
    finally:
        demo.kill()
        demo.wait()
        kill(started | marked(mark))
