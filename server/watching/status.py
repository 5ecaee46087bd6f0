"""What the SuperLink knows of its sites and runs, for those who watch: reads only, changes nothing.

This is flwr's own state, read in the SuperLink's process: no request to its API is needed.
"""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedda.config import RunSection
from fedda.results.snapshot import FINISHED, RunNow, SiteNow, Snapshot
from fedda.results.story import JournalReader, Story
from fedda.settings import RunConfig

from ..superlink import registered

FRESH_S = 0.5  # for how long an answer serves all who ask
MOST_RUNS = 50
ONLINE, GONE = "online", "unregistered"
# `fedda.settings.defaults` knows all defaults, but loads every method, and so torch.
USUAL = {
    "method": RunConfig.model_fields["method"].default,
    "run.dir": RunSection().dir,
    "run.name": RunSection().name,
}


Working = Callable[[], dict[int, tuple[str, int]]]


class ServerStatus:
    """The sites and runs of a SuperLink, at this moment."""

    def __init__(self, state: Callable[[], Any], working: Working, registered: Path | None) -> None:
        """Watch a SuperLink.

        Args:
            state: returns flwr's LinkState.
            working: says what each site works on: the kind of its request, and the run.
            registered: the file of `registered`, which says the roles of keys; or None.
        """
        self._state = state
        self._working = working
        self._registered = registered
        self._lock = threading.Lock()
        self._taken, self._until = Snapshot(), 0.0
        self._journal: JournalReader | None = None  # of the newest run

    def __call__(self) -> Snapshot:
        """Return the sites and runs; called from any thread."""
        with self._lock:
            if time.monotonic() >= self._until:
                self._taken = self._take()
                self._until = time.monotonic() + FRESH_S
            return self._taken

    def newest(self) -> tuple[Snapshot, Story]:
        """Return them with the story of the newest run so far; called from any thread."""
        snapshot = self()
        run = snapshot.run()
        with self._lock:
            if run is None:
                return snapshot, Story()
            if self._journal is None or self._journal.folder != run.path:
                self._journal = JournalReader(run.path)
            return snapshot, self._journal.look()

    def _take(self) -> Snapshot:
        state, roles, work = self._state(), self._roles(), self._working()
        sites = tuple(
            SiteNow(
                info.node_id,
                info.name,
                roles.get(info.node_id, ""),
                info.status == ONLINE,
                *work.get(info.node_id, ("", 0)),
            )
            for info in state.get_node_info()
            if info.status != GONE
        )
        newest = state.get_run_info(order_by="pending_at", ascending=False, limit=MOST_RUNS)
        return Snapshot(sites, tuple(map(_run, newest)))

    def _roles(self) -> dict[int, str]:
        if self._registered is None:
            return {}
        try:
            return {node: entry.role for node, entry in registered.read(self._registered).items()}
        except (OSError, ValueError):  # not written yet
            return {}


def _run(run: Any) -> RunNow:
    settings = {**USUAL, **run.override_config}
    folder = Path(str(settings["run.dir"])).absolute() / str(settings["run.name"])
    ended = run.status.status == FINISHED
    return RunNow(
        run.run_id,
        folder.name,
        str(folder),
        str(settings["method"]),
        run.status.status,
        run.status.sub_status if ended else "",
        run.pending_at,
    )
