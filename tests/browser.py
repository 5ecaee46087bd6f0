"""A headless Chromium, told what to do over its debugging pipe; for tests of pages that change."""

import contextlib
import json
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
CHROMIUM = next((found for name in NAMES if (found := shutil.which(name))), None)
PATIENCE = 60.0


class Tab:
    """One page in the browser."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        self._number, self._left = 0, b""
        self.errors: list[Any] = []  # what the page's console complained of
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        given = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = given["sessionId"]
        for domain in ("Runtime", "Log", "Page"):
            self.call(f"{domain}.enable")

    _session = ""

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send one command -> its result."""
        self._number += 1
        command = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            command["sessionId"] = self._session
        os.write(self._write, json.dumps(command).encode() + b"\0")
        while True:
            answer = self._next()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return answer["result"]
            if answer.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded"):
                self.errors.append(answer["params"])

    def open(self, address: str, width: int, height: int = 2400) -> None:
        """Open a page at a width in pixels."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1}
        self.call("Emulation.setDeviceMetricsOverride", **size, mobile=width < 600)
        self.call("Page.navigate", url=address)

    def ask(self, script: str) -> Any:
        """Evaluate an expression in the page."""
        given = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        assert "exceptionDetails" not in given, given
        return given["result"].get("value")

    def wait(self, script: str) -> None:
        """Wait until an expression is true."""
        ends = time.monotonic() + PATIENCE
        while not self.ask(script):
            assert time.monotonic() < ends, (script, self.ask("document.body?.innerText"))
            time.sleep(0.1)

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            added = os.read(self._read, 2**16)
            assert added, "the browser has ended"
            self._left += added
        whole, _, self._left = self._left.partition(b"\0")
        return json.loads(whole)


@contextlib.contextmanager
def browser(folder: Path) -> Iterator[Tab]:
    """Start a browser with nothing of its user's -> a tab."""
    assert CHROMIUM is not None
    theirs, write = os.pipe()
    read, mine = os.pipe()
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    flags += ["--no-first-run", "--disable-dev-shm-usage", f"--user-data-dir={folder}"]
    # The browser reads commands from its file descriptor 3, and answers on 4.
    shell = f'exec "$@" 3<&{theirs} 4>&{mine}'
    command = ["bash", "-c", shell, "bash", CHROMIUM, *flags, "--remote-debugging-pipe"]
    process = subprocess.Popen(command, pass_fds=(theirs, mine), stderr=subprocess.DEVNULL)
    os.close(theirs)
    os.close(mine)
    try:
        yield Tab(write, read)
    finally:
        os.close(write)
        process.terminate()
        process.wait(30)
        os.close(read)
