"""Progress of reading images at a site: a bar on a terminal, else lines in the log."""

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fedda.data.sets import Progress as Report

logger = logging.getLogger("fedda.site")

EVERY = 10.0  # seconds between two lines in the log


@contextmanager
def shown(what: str) -> Iterator[Report]:
    """A function to call with the number of images read so far and the number of all.

    Args:
        what: the images, for the log: `training images`.
    """
    console = Console(stderr=True)
    columns = (TextColumn(f"reading {what}"), BarColumn(), MofNCompleteColumn())
    columns = (*columns, TimeRemainingColumn())
    # Disabled without a terminal, where it would leave an empty line.
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        task, last = bar.add_task(what, total=None), time.monotonic()

        def report(done: int, total: int) -> None:
            nonlocal last
            if console.is_terminal:
                bar.update(task, completed=done, total=total)
            elif time.monotonic() - last > EVERY:
                last = time.monotonic()
                logger.info("%d of %d %s are read", done, total, what)

        yield report
