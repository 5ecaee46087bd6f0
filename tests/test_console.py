"""The server's console: our own lines stay there, all other output goes to a file."""

import re
import stat
import subprocess
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from fedda.ops.log_redirect import KEPT, Rotating
from fedda.results.snapshot import RunNow, SiteNow, Snapshot
from fedda.results.story import Story, tell
from server.watching.console import MOST, Told
from tests.test_story import SETTINGS, events

PROGRAM = """
import os, subprocess, sys
from pathlib import Path
from fedda.ops.log_redirect import aside

print("before")
with aside(Path(sys.argv[1]), also="also" in sys.argv) as say:
    say("ready: ü")
    print("printed")
    print("complained", file=sys.stderr)
    os.write(1, b"by number\\n")
    subprocess.run(["echo", "by a child"])
    if "fail" in sys.argv:
        raise ValueError("broken")
print("after")
"""


def ran(log: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", PROGRAM, str(log), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


ASIDE = ["printed", "complained", "by number", "by a child"]


def test_other_output_goes_to_the_file_and_ours_to_the_console(tmp_path: Path) -> None:
    log = tmp_path / "superlink.log"
    done = ran(log)
    assert done.stdout.splitlines() == ["before", "ready: ü", "after"]
    assert done.stderr == "" and done.returncode == 0
    assert sorted(log.read_text().splitlines()) == sorted(ASIDE)
    assert stat.S_IMODE(log.stat().st_mode) == 0o600
    done = ran(log, "fail")
    assert len(log.read_text().splitlines()) == 8  # what it held is kept
    assert done.returncode == 1 and "ValueError: broken" in done.stderr
    done = ran(log, "also")
    assert set(ASIDE) <= set((done.stdout + done.stderr).splitlines())


def test_a_large_file_is_put_aside_and_the_oldest_goes(tmp_path: Path) -> None:
    file = Rotating(tmp_path / "log", largest=10)
    for number in range(6):
        file.write(b"line %d\n" % number)  # 7 bytes
    file.close()
    assert (tmp_path / "log").read_text() == "line 5\n"
    kept = [(tmp_path / f"log.{n}").read_text() for n in range(1, KEPT + 1)]
    assert kept == ["line 4\n", "line 3\n", "line 2\n"]
    assert len(list(tmp_path.iterdir())) == KEPT + 1
    assert {stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir()} == {0o600}


def test_a_link_in_the_files_place_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "log").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="log"):
        Rotating(tmp_path / "log")


class Server:
    """What a server has, and what its console says of it."""

    def __init__(self, snapshot: Snapshot, journal: list[dict[str, Any]]) -> None:
        self.snapshot = snapshot
        self.journal = journal
        self.lines: list[str] = []
        self.told = Told(self.newest, self.lines.append)

    def newest(self) -> tuple[Snapshot, Story]:
        return self.snapshot, tell(self.journal, SETTINGS)

    def look(self) -> list[str]:
        """The lines of one look, without the time of day."""
        self.lines.clear()
        self.told.look()
        assert all(re.match(r"\d\d:\d\d:\d\d ", line) for line in self.lines)
        return [line[9:] for line in self.lines]


RUN = RunNow(7, "r", "/runs/r", "kd3a", "running")


def test_sites_that_come_and_go_are_said_once() -> None:
    a, b = SiteNow(1, "a", "", True), SiteNow(2, "", "", False)
    server = Server(Snapshot((a, b)), [])
    assert server.look() == ["site a joined"]
    assert server.look() == []
    server.snapshot = Snapshot((replace(a, online=False), replace(b, online=True)))
    assert server.look() == ["site a has left", "site node 2 joined"]


def test_a_run_is_said_from_its_beginning_to_its_end() -> None:
    old = replace(RUN, number=3, name="old", status="finished", ending="completed")
    server = Server(Snapshot((), (old,)), [])
    assert server.look() == []  # it ended before this server began
    server.snapshot, server.journal = Snapshot((), (RUN, old)), events()[:8]
    assert server.look() == ["run r (kd3a) begins, in /runs/r"]
    server.journal = events()
    assert server.look() == ["run r: round 2: a: x"]
    assert server.look() == []
    failed = {"event": "failed", "error": "QuorumError", "text": "too few sites"}
    server.journal = [*events(), failed]
    ended = replace(RUN, status="finished", ending="failed")
    server.snapshot = Snapshot((), (ended, old))
    assert server.look() == ["run r has failed: too few sites"]
    assert server.look() == []


def test_a_resumed_runs_earlier_troubles_are_not_said_again() -> None:
    asked = datetime.now(UTC)
    before, after = (asked.timestamp() + seconds for seconds in (-60, 1))
    first = [*events()[:8], events()[8] | {"time": before}]
    server = Server(Snapshot((), (replace(RUN, began=asked.isoformat()),)), first)
    assert server.look() == ["run r (kd3a) begins, in /runs/r"]  # its program has not begun yet
    again = [{"event": "started", "time": after}, events()[8] | {"text": "new", "time": after}]
    server.journal = [*first, *again]
    assert server.look() == ["run r: round 2: a: new"]


def test_the_console_says_how_a_run_ended() -> None:
    for ending, said in (("completed", "has finished"), ("stopped", "has been stopped")):
        server = Server(Snapshot((), (RUN,)), events()[:8])
        server.look()
        server.snapshot = Snapshot((), (replace(RUN, status="finished", ending=ending),))
        assert server.look() == [f"run r {said}"]


def test_many_troubles_are_counted_and_cannot_command_the_terminal() -> None:
    trouble = events()[8] | {"text": "a\x1b[2J\nb"}
    server = Server(Snapshot((), (RUN,)), [*events()[:8], *[trouble] * (MOST + 5)])
    lines = server.look()
    assert lines[1:-1] == ["run r: round 2: a: a [2J b"] * MOST
    assert lines[-1] == "run r: 5 more troubles are in its journal"
