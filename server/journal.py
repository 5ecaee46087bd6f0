"""What happened in a run, line by line, for people who watch it and for those who come later."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Event = dict[str, Any]
Listener = Callable[[Event], None]


class Journal:
    """Appends events to a file of JSON lines and tells whoever listens.

    Args:
        path: the file, or None to keep events in memory only.
        listeners: called with every event, such as a progress display.
    """

    def __init__(self, path: Path | None = None, *listeners: Listener) -> None:
        self.path = path
        self.listeners = listeners
        self.troubles: list[Event] = []
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)

    def write(self, event: str, **facts: Any) -> None:
        """Record one event."""
        entry = {"event": event, "time": round(time.time(), 3), **facts}
        if self.path:
            with self.path.open("a") as file:
                file.write(json.dumps(entry) + "\n")
        for listener in self.listeners:
            listener(entry)

    def trouble(self, what: str, site: str, text: str, **facts: Any) -> None:
        """Record something that went wrong at or with a site; kept for the results."""
        self.troubles.append({"what": what, "site": site, "text": text, **facts})
        self.write("trouble", what=what, site=site, text=text, **facts)
