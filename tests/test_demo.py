"""The demo as a newcomer starts it: a whole federation of processes that leaves no process."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fedda.cli.launch import INTERRUPTED
from tests.federation import PATIENCE, processes_with, wait_until

pytestmark = pytest.mark.slow


def command(folder: Path, rounds: int) -> list[str]:
    words = ["demo", "--dir", str(folder), "--seeds", "1", "--rounds", str(rounds)]
    return [sys.executable, "-m", "fedda.cli", *words]


def test_the_demo_in_one_round(tmp_path: Path) -> None:
    done = subprocess.run(
        command(tmp_path, 1), capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
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
    assert routes["/v1/fleet/push-object"]["bytes-in"] > 0
    assert processes_with(str(tmp_path)) == []


def test_an_interrupted_demo_leaves_no_process(tmp_path: Path) -> None:
    mark, journal = str(tmp_path), tmp_path / "demo" / "journal.jsonl"
    log = tmp_path / "log"
    with log.open("wb") as out:
        demo = subprocess.Popen(command(tmp_path, 100), stdout=out, stderr=out)
    try:
        wait_until(
            lambda: journal.exists() and '"training"' in journal.read_text(),
            PATIENCE,
            "no training",
        )
        assert len(processes_with(mark)) >= 6  # the command, the server and four sites
        demo.send_signal(signal.SIGINT)
        assert demo.wait(PATIENCE) == INTERRUPTED, log.read_text()
        assert "stopped, with everything that was started" in log.read_text()
        wait_until(lambda: processes_with(mark) == [], 60, f"left: {processes_with(mark)}")
    finally:
        demo.kill()
        demo.wait()
        for left in processes_with(mark):
            os.kill(left, signal.SIGKILL)
