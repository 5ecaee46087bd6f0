"""Processes that end when the process that they serve has ended."""

import os
import subprocess
import sys
import time

import pytest

WATCHES = """
import signal, sys, time
from fedda.ops.spawn import watch_parent
signal.signal(signal.SIGTERM, lambda *_: print("asked", flush=True))
watch_parent(int(sys.argv[1]), grace=0.5, ask=sys.argv[2] == "ask")
print("watching", flush=True)
time.sleep(60)
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["ask", "force"])
def test_a_process_that_ignores_signals_still_ends_with_the_one_it_watches(how: str) -> None:
    watched = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    command = [sys.executable, "-c", WATCHES, str(watched.pid), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ}) as served:
        assert served.stdout is not None
        assert served.stdout.readline() == "watching\n"
        time.sleep(0.2)
        assert served.poll() is None
        watched.kill()
        watched.wait()
        assert served.wait(10) == 1
        assert served.stdout.read() == ("asked\n" if how == "ask" else "")
