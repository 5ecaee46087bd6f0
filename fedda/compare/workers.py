"""Training the cells of a comparison: one after the other, or in several processes."""

import logging
import multiprocessing
import os
import shutil
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedda.errors import FeddaError, RunError
from fedda.folders import load
from fedda.results import begun

if TYPE_CHECKING:
    from .cells import Cell, Plan

# What happens, to which cell: "begin" and the rounds it has from an earlier try, "round" and its
# number, "done" and an error or None.
Notify = Callable[[str, "Cell", Any], None]

ERROR, LOG = "error.txt", "log.txt"  # in a cell's folder: of its last try
READY = "ready"
PATIENCE = 10.0  # seconds that a process has to end
KILLED = "its process was killed (exit code {}); if memory is short, give fewer --jobs"


def train(plan: "Plan", cell: "Cell", notify: Notify) -> None:
    """One cell, resumed if it was begun before."""
    folder, error = plan.folder(cell), None
    try:
        if plan.results(cell) is None:  # else somebody else finished it meanwhile
            with _logged(folder / LOG):
                _simulate(plan, cell, notify)
        (folder / ERROR).unlink(missing_ok=True)
    except load("server", "run").GoingOnError:
        error = f"another process trains it in {folder}; wait for its end"
    except Exception as trouble:  # one cell's trouble must not end the others
        known = isinstance(trouble, FeddaError)
        error = str(trouble) if known else f"{type(trouble).__name__}: {trouble}"
        try:
            (folder / ERROR).write_text(traceback.format_exc())
        except OSError as full:
            error += f" (and {folder / ERROR} cannot be written: {full})"
    finally:
        load("clients", "site").resident.cache_clear()  # else every cell's data stays in memory
    notify("done", cell, error)


def _simulate(plan: "Plan", cell: "Cell", notify: Notify) -> None:
    folder, config, sites = plan.folder(cell), plan.config(cell), plan.sites(cell)

    def listen(event: dict[str, Any]) -> None:
        if event["event"] in ("training", "round"):
            kind = "begin" if event["event"] == "training" else "round"
            notify(kind, cell, event["round"])

    run = config.run.model_copy(update={"resume": begun(folder)})
    config = config.model_copy(update={"run": run})
    journal = load("server", "journal").Journal(folder / "journal.jsonl", listen)
    plan.note(cell, sites)
    load("server", "local").simulate(config, sites, journal, plan.engine)
    # Checkpoints and the sites' optimizers: there is nothing left to go on with.
    for left in (*folder.glob("*-*/"), folder / "sites"):
        shutil.rmtree(left, ignore_errors=True)


@contextmanager
def _logged(path: Path) -> Iterator[None]:
    """Keep what sites log beside the training's results, and out of the progress shown."""
    path.parent.mkdir(parents=True, exist_ok=True)
    logging.getLogger("flwr").setLevel(logging.WARNING)
    ours, handler = logging.getLogger("fedda"), logging.FileHandler(path, "w", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    before = ours.propagate
    ours.propagate = False
    ours.addHandler(handler)
    try:
        yield
    finally:
        ours.removeHandler(handler)
        ours.propagate = before
        handler.close()


@dataclass
class _Worker:
    """A process, the end of its pipe that is here, and what it trains; None before it is ready."""

    process: BaseProcess
    link: Connection
    cell: "Cell | None" = None


def in_parallel(plan: "Plan", cells: Sequence["Cell"], jobs: int, notify: Notify) -> None:
    """Train in several processes; a killed one costs its cell and is replaced.

    Raises:
        RunError: no process can be started.
    """
    todo = deque(cells)
    crew: list[_Worker] = []
    # A tracker started later would end the hold on Ctrl-C in `_hire`.
    resource_tracker.ensure_running()
    try:
        while todo or crew:
            while len(crew) < jobs and len(todo) > sum(w.cell is None for w in crew):
                crew.append(_hire(plan))
            ready = wait([w.link for w in crew])
            for worker in [w for w in crew if w.link in ready]:
                if not _hear(worker, todo, notify, once=plan.engine == "ray"):
                    crew.remove(worker)
    finally:
        for worker in crew:
            worker.process.terminate()
        for worker in crew:
            _bury(worker)


def _hear(worker: _Worker, todo: deque["Cell"], notify: Notify, once: bool) -> bool:
    """Take one message of a worker, give it a cell if it has none -> whether it stays."""
    try:
        told = worker.link.recv()
    except (EOFError, OSError):  # it is dead
        _bury(worker)
        if worker.cell is None:
            raise RunError(
                "A training's process could not start; a script that trains with jobs above 1 "
                "must be a file, and do so below `if __name__ == '__main__':`."
            ) from None
        notify("done", worker.cell, KILLED.format(worker.process.exitcode))
        return False
    if told != READY:
        notify(*told)
        if told[0] != "done":
            return True
    over = once and worker.cell is not None
    worker.cell = todo.popleft() if todo and not over else None
    try:
        worker.link.send(worker.cell)
    except OSError:  # it died between two cells: the next look at it finds out
        return True
    if worker.cell is None:
        _bury(worker)
    return worker.cell is not None


def _hire(plan: "Plan") -> _Worker:
    # Spawned: a forked copy of a process that has used torch's threads may hang.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(plan, theirs), daemon=True)
    # Ctrl-C reaches every process of a terminal; this one alone decides what it means.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        process.start()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
    theirs.close()  # so that its death is the end of the pipe
    return _Worker(process, ours)


def _bury(worker: _Worker) -> None:
    """Wait for a process to end, and end it if it does not."""
    worker.process.join(PATIENCE)
    if worker.process.is_alive():
        worker.process.kill()
        worker.process.join()
    worker.link.close()


def _work(plan: "Plan", link: Connection) -> None:
    """A worker's life: cells until there are none."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    link.send(READY)
    while (cell := link.recv()) is not None:
        train(plan, cell, lambda *told: link.send(told))


def _leave_with_parent() -> None:
    """End when the first process is gone, even if it was killed and could end nobody."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
