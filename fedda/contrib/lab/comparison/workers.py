"""Training the cells of a comparison: one after the other, or in several processes."""

import logging
import multiprocessing
import os
import shutil
import signal
import threading
import traceback
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, Literal, Protocol

from fedda.errors import FeddaError, RunError
from fedda.halves import load
from fedda.ops.lock import GoingOnError
from fedda.results.progress import PROGRESS
from fedda.results.read import begun
from fedda.settings import RunConfig

from .cells import Cell, Notify, of_journal

ERROR, LOG = "error.txt", "log.txt"  # in a cell's folder, about its last try
KEPT = (".model.safetensors", ".refined.safetensors")  # endings of a site's finished models
READY = "ready"
PATIENCE = 10.0  # seconds to wait for a process to end
KILLED = "its process was killed (exit code {}); if memory is short, give fewer --jobs"


class WorkerTrainings(Protocol):
    """What training needs to know of a comparison; `Plan` is one."""

    @property
    def engine(self) -> Literal["process", "ray"]: ...

    def config(self, cell: Cell) -> RunConfig:
        """The settings of one cell's run."""
        ...

    def sites(self, cell: Cell) -> list[dict[str, Any]]:
        """The sites of one cell."""
        ...

    def folder(self, cell: Cell) -> Path:
        """Where a cell's run is kept."""
        ...

    def results(self, cell: Cell) -> dict[str, Any] | None:
        """A cell's results, or None if it has not finished."""
        ...

    def note(self, cell: Cell, sites: Sequence[Mapping[str, Any]]) -> None:
        """Save what a cell is trained with beyond its settings."""
        ...


def train(plan: WorkerTrainings, cell: Cell, notify: Notify) -> None:
    """Train one cell; if it was begun before, resume it."""
    folder, error = plan.folder(cell), None
    try:
        if plan.results(cell) is None:  # else another process has finished it meanwhile
            with _logged(folder / LOG):
                _simulate(plan, cell, notify)
        (folder / ERROR).unlink(missing_ok=True)
    except GoingOnError:
        error = f"another process trains it in {folder}; wait for its end"
    except Exception as trouble:  # one cell's trouble must not end the others
        known = isinstance(trouble, FeddaError)
        error = str(trouble) if known else f"{type(trouble).__name__}: {trouble}"
        try:
            (folder / ERROR).write_text(traceback.format_exc())
        except OSError as full:
            error += f" (and {folder / ERROR} cannot be written: {full})"
    finally:
        load("clients", "site.memory").resident.cache_clear()  # else all cells' data stay in memory
    notify("done", cell, error)


def _simulate(plan: WorkerTrainings, cell: Cell, notify: Notify) -> None:
    folder, config, sites = plan.folder(cell), plan.config(cell), plan.sites(cell)
    run = config.run.model_copy(update={"resume": begun(folder)})
    config = config.model_copy(update={"run": run})
    journal = load("server", "journal").Journal(folder / "journal.jsonl", of_journal(cell, notify))
    plan.note(cell, sites)
    load("server", "simulation").simulate(config, sites, journal, plan.engine)
    # A finished training needs no checkpoints, and of its sites only the models that stay there.
    for checkpoints in folder.glob("*-*/"):
        shutil.rmtree(checkpoints, ignore_errors=True)
    for path in sorted((folder / "sites").rglob("*"), reverse=True):  # a folder after its files
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
        elif path.is_file() and not path.name.endswith(KEPT):
            path.unlink()


@contextmanager
def _logged(path: Path) -> Iterator[None]:
    """Write the sites' log to a file beside the results, not into the progress display."""
    path.parent.mkdir(parents=True, exist_ok=True)
    logging.getLogger("flwr").setLevel(logging.WARNING)
    logger, handler = logging.getLogger("fedda"), logging.FileHandler(path, "w", delay=True)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    before = logger.propagate
    logger.propagate = False
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.propagate = before
        handler.close()


@dataclass
class _Worker:
    """A process, our end of its pipe, and the cell that it trains, None before it is ready."""

    process: BaseProcess
    link: Connection
    cell: Cell | None = None


def in_parallel(plan: WorkerTrainings, cells: Sequence[Cell], jobs: int, notify: Notify) -> None:
    """Train in several processes; if one is killed, its cell fails and a new process replaces it.

    Raises:
        RunError: no process can be started.
    """
    todo = deque(cells)
    workers: list[_Worker] = []
    # Started now, as its start would unblock the Ctrl-C that `_start` blocks.
    resource_tracker.ensure_running()
    try:
        while todo or workers:
            while len(workers) < jobs and len(todo) > sum(w.cell is None for w in workers):
                workers.append(_start(plan))
            ready = wait([w.link for w in workers])
            for worker in [w for w in workers if w.link in ready]:
                if not _serve(worker, todo, notify, once=plan.engine == "ray"):
                    workers.remove(worker)
    finally:
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            _end(worker)


def _serve(worker: _Worker, todo: deque[Cell], notify: Notify, once: bool) -> bool:
    """Handle one message of a worker; when idle, give it a cell or end it -> whether it stays."""
    try:
        message = worker.link.recv()
    except (EOFError, OSError):  # the worker is dead
        _end(worker)
        if worker.cell is None:
            raise RunError(
                "A training's process could not start; a script that trains with jobs above 1 "
                "must be a file, and do so below `if __name__ == '__main__':`."
            ) from None
        notify("done", worker.cell, KILLED.format(worker.process.exitcode))
        return False
    if message != READY:
        notify(*message)
        if message[0] != "done":
            return True
    used_up = once and worker.cell is not None
    worker.cell = todo.popleft() if todo and not used_up else None
    try:
        worker.link.send(worker.cell)
    except OSError:  # the worker died between two cells: its next message says so
        return True
    if worker.cell is None:
        _end(worker)
    return worker.cell is not None


def _start(plan: WorkerTrainings) -> _Worker:
    """Start a worker's process."""
    # Spawned: a forked copy of a process that has used torch's threads may hang.
    context = multiprocessing.get_context("spawn")
    our_end, worker_end = context.Pipe()
    process = context.Process(target=_work, args=(plan, worker_end), daemon=True)
    # Ctrl-C reaches every process of a terminal; only this process may react to it.
    with _without_ctrl_c():
        process.start()
    worker_end.close()  # so that the pipe ends when the worker dies
    return _Worker(process, our_end)


@contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Hold Ctrl-C back; on Windows a worker ignores it from its own first line on instead."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(worker: _Worker) -> None:
    """Wait for a worker's process to end, and kill it if it does not."""
    worker.process.join(PATIENCE)
    if worker.process.is_alive():
        worker.process.kill()
        worker.process.join()
    worker.link.close()


def _work(plan: WorkerTrainings, link: Connection) -> None:
    """What a worker's process does: train the cells that it receives until it receives None."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    link.send(READY)
    while (cell := link.recv()) is not None:
        with _passing_on(cell, link):
            train(plan, cell, lambda *message: link.send(message))


class _Sending(logging.Handler):
    """Sends each line of a log to the first process."""

    def __init__(self, cell: Cell, link: Connection) -> None:
        super().__init__()
        self._cell, self._link = cell, link

    def emit(self, record: logging.LogRecord) -> None:
        self._link.send(("line", self._cell, record.getMessage()))


@contextmanager
def _passing_on(cell: Cell, link: Connection) -> Iterator[None]:
    """Send what a training's sites say of long work before they can train."""
    handler = _Sending(cell, link)
    logger = logging.getLogger(PROGRESS)
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def _leave_with_parent() -> None:
    """End this worker when the first process ends, even if that was killed without cleaning up."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
