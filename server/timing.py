"""Where a round's time goes, as far as the server can tell.

    waiting      for enough sites: asking which ones answer, and pausing while too few do
    train        waiting for replies to training requests: the sites' work and the transport
    aggregate    the server's own work: packing requests, checking replies, averaging
    test         the target's test of the new model, from the request until its numbers arrive
    checkpoint   writing the round to disk, once it is over

A reply is checked and added as it arrives, while other sites still work, so `aggregate` counts only
the time in which the server alone was busy. In a simulation a site works when its reply is fetched.
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from flwr.app import Message, MetricRecord

from .strategy_modules import mail

PHASES = ("waiting", "train", "aggregate", "test", "checkpoint")
SAY = (5.0, 600.0)  # seconds until it is said whom a run waits for: at first, and at most
PLAUSIBLE = 1e7  # seconds, four months; a site that reports more is not believed


class Phases:
    """A stopwatch for one phase at a time: while an inner phase runs, the outer one pauses."""

    def __init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        """Begin a new round."""
        self._seconds: defaultdict[str, float] = defaultdict(float)
        self._sites: defaultdict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Count the time inside the `with` block as time of a phase."""
        self._count()
        self._open.append(name)
        try:
            yield
        finally:
            self._count()
            self._open.pop()

    @contextmanager
    def replies(self) -> Iterator[None]:
        """Count waiting for replies as training, or as test inside the phase `test`."""
        with self.phase("test" if self._open[-1:] == ["test"] else "train"):
            yield

    def note(self, site: str, reply: Message) -> None:
        """Note how long a site says it trained. It cannot be checked, so it is only ever shown."""
        metrics = None if reply.has_error() else reply.content.get("metrics")
        seconds = metrics.get("seconds") if isinstance(metrics, MetricRecord) else None
        if not isinstance(seconds, int | float) or self._open[-1:] != ["train"]:
            return
        if 0 <= seconds < PLAUSIBLE:  # false for NaN as well
            self._sites[site] += seconds

    def seconds(self) -> dict[str, float]:
        """Seconds of the round so far, by phase."""
        return {p: round(self._seconds[p], 3) for p in PHASES if p in self._seconds}

    def sites(self) -> dict[str, float]:
        """Seconds that sites say they trained in this round, by the site's name."""
        return {site: round(n, 3) for site, n in sorted(self._sites.items())}

    def _count(self) -> None:
        """Add the time since the last call to the innermost open phase."""
        now = time.perf_counter()
        if self._open:
            self._seconds[self._open[-1]] += now - self._since
        self._since = now


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


class TimedMail(mail.Mail):
    """Mail that counts the time spent waiting for replies, and knows when to say for whom."""

    phases: Phases  # of the training

    def deliver(self, requests: Iterable[Message], wait: float) -> Iterator[Message]:
        """Do as `Mail.deliver`; the time in which the caller works on a reply is not counted."""
        self.reminder = Reminder()
        replies = super().deliver(requests, wait)
        while True:
            with self.phases.replies():
                reply = next(replies, None)
            if reply is None:
                return
            self.reminder.calm()
            yield reply
            del reply  # so that it is freed before the next one is fetched
