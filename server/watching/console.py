"""What the server's console says: sites that come and go, runs that begin and end, troubles."""

import time
from collections.abc import Callable, Iterable
from datetime import datetime

from fedda.results.read import printable
from fedda.results.snapshot import RunNow, Snapshot
from fedda.results.story import Story

MOST = 10  # troubles said at a look; the run's journal has all


class Told:
    """Says what has changed since the last look."""

    def __init__(
        self,
        newest: Callable[[], tuple[Snapshot, Story]],
        say: Callable[[str], None],
        turned: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        """Begin with nothing said.

        Args:
            newest: says which sites and runs there are, and the newest run's story so far.
            say: writes a line.
            turned: says which sites were refused since it was last called, and why.
        """
        self._newest = newest
        self._say = say
        self._turned = turned
        self._online: dict[int, bool] = {}
        self._runs: dict[int, bool] = {}  # whether each has ended
        self._troubles: tuple[int, int] = 0, 0  # run, and how many were said
        self._first = True

    def look(self) -> None:
        """Say what has changed."""
        for line in self._turned():
            self.say(line)
        snapshot, story = self._newest()
        for site in snapshot.sites:
            if site.online != self._online.get(site.node, False):
                self._online[site.node] = site.online
                self.say(f"site {site.called} {'joined' if site.online else 'has left'}")
        for run in reversed(snapshot.runs):  # the oldest first
            self._run(run, story if run is snapshot.run() else None)
        self._first = False

    def _run(self, run: RunNow, story: Story | None) -> None:
        ended = self._runs.get(run.number)
        if ended is None and self._first and run.ended:
            self._runs[run.number] = True  # from before this server started
            return
        if ended is None:
            self._runs[run.number] = False
            self.say(f"run {run.name} ({run.method}) begins, in {run.folder}")
        if ended:
            return
        if story is not None:
            self._trouble(run, story)
        if run.ended:
            self._runs[run.number] = True
            why = (
                f": {story.why}" if run.how == "failed" and story is not None and story.why else ""
            )
            self.say(f"run {run.name} has {run.how}{why}")

    def _trouble(self, run: RunNow, story: Story) -> None:
        number, said = self._troubles
        if number != run.number:  # a resumed run's folder tells of earlier starts, too
            asked = datetime.fromisoformat(run.began).timestamp() if run.began else 0.0
            said = sum(when < asked for when in story.times)
        new = story.troubles[said:]
        self._troubles = run.number, len(story.troubles)
        for trouble in new[:MOST]:
            when = f"round {trouble['round']}" if "round" in trouble else ""
            parts = (f"run {run.name}", when, str(trouble.get("site", "")), str(trouble["text"]))
            self.say(": ".join(filter(None, parts)))
        if len(new) > MOST:
            self.say(f"run {run.name}: {len(new) - MOST} more troubles are in its journal")

    def say(self, text: str) -> None:
        """Write a line with the time of day."""
        self._say(f"{time.strftime('%H:%M:%S')} {printable(text)}")
