"""Progress of a site's long work before it can train: a bar on a terminal, else lines in the log.

A simulation's display has the terminal: it takes the lines of this log (`fedda.results.progress`).
"""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fedda.data.sets import Progress as Report

logger = logging.getLogger("fedda.progress")

EVERY = 10.0  # seconds between two lines in the log


@contextmanager
def shown(what: str, done_: str = "read", bar: bool = True) -> Iterator[Report]:
    """A function to call with the number of images done so far and the number of all.

    Args:
        what: the images, for the log: `training images`.
        done_: what is done with them.
        bar: whether a bar may be shown, as before a site has joined.
    """
    console = Console(stderr=True)
    own = bar and console.is_terminal
    columns = (TextColumn(f"reading {what}"), BarColumn(), MofNCompleteColumn())
    columns = (*columns, TimeRemainingColumn())
    # Disabled without a terminal, where it would leave an empty line.
    with Progress(*columns, console=console, transient=True, disable=not own) as drawn:
        task, last = drawn.add_task(what, total=None), time.monotonic()

        def report(done: int, total: int) -> None:
            nonlocal last
            if own:
                drawn.update(task, completed=done, total=total)
            elif time.monotonic() - last > EVERY:
                last = time.monotonic()
                logger.info("%d of %d %s are %s", done, total, what, done_)

        yield report
