"""A run's journal: writes each event as a line of JSON to a file and passes it to listeners."""

import json
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedda.errors import Code, FeddaError, code_of, reason
from fedda.ops.lock import GoingOnError
from fedda.results.read import Event
from fedda.results.story import added, facts

LONGEST = 600  # characters of a trouble's text; longer ones are cut, as they may quote a site
SAY = (5.0, 600.0)  # seconds until it is said whom a run waits for: at first, and at most

logger = logging.getLogger("fedda.server")
Listener = Callable[[Event], None]


class Journal:
    """Appends events to a file of JSON lines and calls the listeners.

    Args:
        path: the file, or None to keep events in memory only.
        listeners: functions, such as a progress display, that are called with every event. A
            listener that raises an error is not called again.
    """

    def __init__(self, path: Path | None = None, *listeners: Listener) -> None:
        self.path = path
        self.listeners = list(listeners)
        self.troubles: list[Event] = []
        if path:
            path.parent.mkdir(parents=True, exist_ok=True)
            self.troubles = [facts(e) for e in self.past("trouble")]  # from before a resume

    def write(self, event: str, **facts: Any) -> None:
        """Record one event."""
        entry = {"event": event, "time": round(time.time(), 3), **facts}
        try:
            if self.path:
                with self.path.open("a") as file:
                    file.write(json.dumps(entry) + "\n")
        except OSError as error:  # a full disk must not hide events from the listeners
            logger.error("%s cannot be written (%s): %s", self.path, reason(error), entry)
        for listener in list(self.listeners):
            try:
                listener(entry)
            except Exception:  # a display whose terminal is gone must not end the run
                logger.exception("a listener of the run's journal failed and is not called again")
                self.listeners.remove(listener)

    def trouble(self, what: str, site: str, text: str, **facts: Any) -> None:
        """Record something that went wrong at or with a site, and keep it for the results."""
        text = text if len(text) <= LONGEST else f"{text[:LONGEST]}..."
        self.troubles.append({"what": what, "site": site, "text": text, **facts})
        self.write("trouble", what=what, site=site, text=text, **facts)

    def knows(self, about: Event) -> bool:
        """Whether a trouble with these facts is recorded already."""
        return any(about.items() <= trouble.items() for trouble in self.troubles)

    @contextmanager
    def ending(self) -> Iterator[None]:
        """Record why the run in the `with` block failed, if it does."""
        try:
            yield
        except GoingOnError:
            raise  # the journal belongs to the process that executes this run
        except FeddaError as error:
            self.write("failed", error=type(error).__name__, text=str(error))
            raise
        except (KeyboardInterrupt, SystemExit) as error:
            text = "the run was stopped, by a person or with its server; --resume goes on with it"
            self.write("failed", error=type(error).__name__, text=text)
            raise
        except BaseException as error:
            kind = type(error).__name__
            text = f"the run's program failed ({kind}); the server's superlink.log says where"
            if code_of(error) is Code.DISK:
                text = (
                    f"the disk of {self.path.parent if self.path else 'the run'} is full; make "
                    "room there, and --resume goes on with the run, of which nothing is lost"
                )
            self.write("failed", error=kind, text=text)
            raise

    def past(self, event: str) -> Iterator[Event]:
        """Yield the events of one kind in the file; skip a line that a crash cut short."""
        if self.path is not None and self.path.is_file():
            yield from (entry for entry in added(self.path)[0] if entry["event"] == event)


class Reminder:
    """Tells when to say again whom a run waits for: after seconds, then less and less often."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self.calm()

    def calm(self) -> None:
        """Begin anew with short pauses, as something has come."""
        self._pause = SAY[0]
        self._next = time.monotonic() + self._pause

    def due(self) -> float:
        """Seconds since the wait began if it is time to say so, else 0."""
        now = time.monotonic()
        if now < self._next:
            return 0.0
        self._pause = min(2 * self._pause, SAY[1])
        self._next = now + self._pause
        return round(now - self._began, 1)


def by_reason(said: Mapping[str, str]) -> str:
    """Why sites gave no usable answer, each reason once, after those whose it is."""
    sites: dict[str, list[str]] = {}
    for site, text in said.items():
        sites.setdefault(text.rstrip("."), []).append(site)
    return "".join(f" {', '.join(names)}: {text}." for text, names in sites.items())
