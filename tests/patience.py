"""How long the live tests wait for what must happen: one limit, which scales with the machine.

A limit only ends a test that hangs. What a test asserts never depends on it: a site that is to be
late is held until the test releases it, and the order of events shows what ended a round.
"""

import os
import time
from collections.abc import Callable

QUIET = 180.0  # seconds; on a quiet machine only what hangs takes as long
MOST = 540.0  # the suite's own limit for a test is 600 s, and ends it without saying what it awaits
PIECE = 0.012  # seconds that `_piece` takes on a quiet core that is not new
LARGEST = 8.0


def _piece() -> float:
    """Seconds of wall clock for a small, fixed piece of work."""
    began = time.perf_counter()
    sum(i * i % 7 for i in range(200_000))
    return time.perf_counter() - began


def measured() -> float:
    """How many times slower than a quiet machine this one is now, 1 at least.

    Programs that wait for a processor count as well: they will want it in a moment.
    """
    slower = sum(_piece() for _ in range(10)) / (10 * PIECE)
    crowded = os.getloadavg()[0] / (os.cpu_count() or 1)
    return min(max(1.0, slower, crowded), LARGEST)


FACTOR = measured()
PATIENCE = min(QUIET * FACTOR, MOST)  # seconds


def wait_until(condition: Callable[[], object], what: str, seconds: float = PATIENCE) -> None:
    """Look ten times a second until the condition holds; else fail and say what did not happen."""
    ends = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < ends, f"{what}, not even after {seconds:.0f} s"
        time.sleep(0.1)
