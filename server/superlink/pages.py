"""Makes live pages in a process of its own, begun at the first request for one.

Charts take memory and time that the SuperLink's process needs for the sites.
"""

import asyncio
import contextlib
import json
import subprocess
import sys
import time
from typing import Any

from fedda.errors import FeddaError
from fedda.live.maker import LENGTH
from fedda.results.snapshot import Snapshot

COMMAND = (sys.executable, "-m", "fedda.live.maker")
MAKE_S = 60.0  # to make a page; the first takes a second more
REST_S = 300.0  # without another try for a run, after one that took too long
IDLE_S = 300.0  # without a request for a page, after which the process ends

Process = subprocess.Popen[bytes]


class TooSlowError(FeddaError):
    """A page took too long to make."""


class Pages:
    """Makes pages, one at a time."""

    def __init__(self) -> None:
        self._process: Process | None = None
        self._one = asyncio.Lock()
        self._idle: asyncio.TimerHandle | None = None
        self._last: tuple[tuple[str, str], str] = ("", ""), ""  # of what, and the page
        self._rests: dict[str, float] = {}  # until when no page of a run is tried

    async def page(self, snapshot: Snapshot, which: str, version: str) -> str:
        """Return the page; the last one again if nothing has changed.

        Raises:
            TooSlowError: it takes too long, or did so a short while ago.
        """
        async with self._one:
            if self._idle is not None:
                self._idle.cancel()
            try:
                if self._last[0] != (which, version):
                    run = snapshot.run(which)
                    folder = run.folder if run else ""
                    made = await self._made(folder, snapshot.to_json(), which, version)
                    self._last = (which, version), made
                return self._last[1]
            finally:
                self._idle = asyncio.get_running_loop().call_later(IDLE_S, self.close)

    async def _made(self, folder: str, *about: Any) -> str:
        """Make a page; if the process has ended meanwhile, once more in a new one."""
        if time.monotonic() < self._rests.get(folder, 0.0):
            raise _too_slow(folder)
        for again in (True, False):
            if self._process is None:
                self._process = _begun()
            making = asyncio.to_thread(_make, self._process, about)
            try:
                return await asyncio.wait_for(making, MAKE_S)
            except TimeoutError:
                self.close()  # it would be busy for nobody, and keep others waiting
                self._rests = {folder: time.monotonic() + REST_S}
                raise _too_slow(folder) from None
            except (EOFError, OSError):
                self.close()
                if not again:
                    raise
            except BaseException:  # an answer that nobody awaits must not be the next one's
                self.close()
                raise
        raise AssertionError

    def close(self) -> None:
        """End the process."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with contextlib.suppress(OSError), process:
                pass  # closes its pipes and waits for its end


def _begun() -> Process:
    return subprocess.Popen(COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE)


def _make(process: Process, about: tuple[Any, ...]) -> str:
    """Have a page made; called in a thread.

    Raises:
        EOFError, OSError: the process has ended.
    """
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(json.dumps(about).encode() + b"\n")
    process.stdin.flush()
    length = int.from_bytes(process.stdout.read(LENGTH), "big")
    page = process.stdout.read(length)
    if not length or len(page) < length:
        raise EOFError("the process that makes pages has ended")
    return page.decode()


def _too_slow(folder: str) -> TooSlowError:
    return TooSlowError(
        f"The page takes more than {MAKE_S:.0f} s to make and was given up; the next try is in "
        f"{REST_S / 60:.0f} minutes at the earliest. `fedda attach {folder}` shows the run in a "
        "terminal, and its report when it has ended."
    )
