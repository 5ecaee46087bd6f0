"""Where a round's time goes, as far as the server can tell.

    waiting      for sites to be there: looking who answers, and pauses for too few of them
    train        for replies to training requests: the sites' work, and messages on their way
    aggregate    the server's own: packing requests, checking replies, averaging
    test         the target's test of the new model, from request to numbers
    checkpoint   writing the round to disk, once it is over

A reply is checked and added as it arrives while other sites still work, so `aggregate` is only
what nobody but the server was busy with. In a simulation sites work when their reply is fetched.
"""

import time
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from flwr.app import Message, MetricRecord

from .folders import mail

PHASES = ("waiting", "train", "aggregate", "test", "checkpoint")
PLAUSIBLE = 1e7  # seconds, four months


class Phases:
    """A watch that runs for one phase at a time; an inner phase stops the outer one's."""

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
        """Count what happens inside for a phase."""
        self._turn()
        self._open.append(name)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    @contextmanager
    def replies(self) -> Iterator[None]:
        """Waiting for replies is training, unless it is the test that is waited for."""
        with self.phase("test" if self._open[-1:] == ["test"] else "train"):
            yield

    def note(self, site: str, reply: Message) -> None:
        """What a site says of its own time; nobody can check it, so it is shown and never used."""
        metrics = None if reply.has_error() else reply.content.get("metrics")
        said = metrics.get("seconds") if isinstance(metrics, MetricRecord) else None
        if not isinstance(said, int | float) or self._open[-1:] != ["train"]:
            return
        if 0 <= said < PLAUSIBLE:  # and so it is no NaN
            self._sites[site] += said

    def seconds(self) -> dict[str, float]:
        """Seconds of the round so far, by phase."""
        return {p: round(self._seconds[p], 3) for p in PHASES if p in self._seconds}

    def sites(self) -> dict[str, float]:
        """Seconds that sites say they trained for in this round, by name."""
        return {site: round(n, 3) for site, n in sorted(self._sites.items())}

    def _turn(self) -> None:
        now = time.perf_counter()
        if self._open:
            self._seconds[self._open[-1]] += now - self._since
        self._since = now


class TimedMail(mail.Mail):
    """Mail that tells the watch when it waits."""

    phases: Phases

    def deliver(self, requests: Iterable[Message], wait: float) -> Iterator[Message]:
        """As `Mail.deliver`; whoever takes a reply works on their own time."""
        replies = super().deliver(requests, wait)
        while True:
            with self.phases.replies():
                reply = next(replies, None)
            if reply is None:
                return
            yield reply
            del reply  # not held while the next one is fetched
