"""What a training takes: the bytes that cross, per site, and where the time of its rounds goes.

Of what crosses, the hash of every payload is kept, but no value:

    sent      a request that was handed to the server's mail: its site, round, bytes and hash
    received  a reply
    summed    the frames with gradients of one site in one group of a session of the exchange

The hashes are a chain in the run's folder (`fedda.ops.chain`). The sites keep the same ones in
their audit logs, so that both can be compared: `fedda policy log --against RUN`.

The time goes into phases, as far as the server can tell:

    waiting      for enough sites: asking which ones answer, and pausing while too few do
    train        waiting for replies to training requests: the sites' work and the transport
    aggregate    the server's own work: packing requests, checking replies, averaging
    test         the target's test of the new model, from the request until its numbers arrive
    checkpoint   writing the round to disk, once it is over

A reply is checked and added as it arrives, while other sites still work, so `aggregate` counts only
the time in which the server alone was busy. In a simulation a site works when its reply is fetched.
"""

import logging
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from flwr.app import Message, MetricRecord
from flwr.serverapp import Grid

from fedda import records
from fedda.errors import reason
from fedda.exchange import Session
from fedda.ops.chain import Chain
from fedda.results.read import CROSSED
from fedda.wire.packing import Kind

from .journal import Reminder
from .strategy_modules import mail

EVENTS = {"to": "sent", "from": "received"}
PHASES = ("waiting", "train", "aggregate", "test", "checkpoint")
PLAUSIBLE = 1e7  # seconds, four months; a site that reports more is not believed
logger = logging.getLogger("fedda.server")


class Ledger:
    """Counts every message between server and sites in one training, as sent, and writes it down.

    Args:
        folder: the run's folder.
        grid: the way to the sites; nothing is written for a simulation in this process.
        training: the name of the training within the run.
    """

    def __init__(self, folder: Path, grid: Grid, training: str) -> None:
        alone = getattr(grid, "in_process", False)
        self._chain = None if alone else Chain(folder / CROSSED, durable=False)
        self._grid, self._training = grid, training
        self._bytes: Counter[tuple[int, str, str, str]] = Counter()

    def message(
        self, way: Literal["to", "from"], site: str, role: str, server_round: int, message: Message
    ) -> None:
        """Count and note a request that is sent or a reply that was received."""
        sizes = records.size(message.content) if message.has_content() else {}
        for kind, size in sizes.items():
            self._bytes[server_round, role, way, kind] += size
        if self._chain is not None:
            about = {"kind": message.metadata.message_type, "bytes": sum(sizes.values())}
            about["sha256"] = records.digest(message)
            self._add(EVENTS[way], site, server_round, **about)

    def session(self, server_round: int, session: Session, roles: Mapping[str, str]) -> None:
        """Count and note what crossed in a session of the exchange that has ended."""
        for name, (to, back) in session.traffic().items():
            for way, size in (("to", to), ("from", back)):
                if size:
                    self._bytes[server_round, roles[name], way, Kind.GRADIENT] += size
        for (site, group), tally in session.tallies().items():
            self._add("summed", site, server_round, group=group, **tally.about())

    def round(self, server_round: int) -> dict[str, int]:
        """Bytes of one round, as `direction role kind` -> bytes."""
        counts = {k[1:]: n for k, n in self._bytes.items() if k[0] == server_round}
        return {f"{way} {role} {kind}": n for (role, way, kind), n in sorted(counts.items())}

    def total(self) -> dict[str, int]:
        """Bytes of all rounds, as `direction role kind` -> bytes."""
        total: Counter[str] = Counter()
        for (_, role, way, kind), n in self._bytes.items():
            total[f"{way} {role} {kind}"] += n
        return dict(sorted(total.items()))

    def state(self) -> list[list]:
        """All counts, for a checkpoint."""
        return [[*key, n] for key, n in self._bytes.items()]

    def restore(self, state: list[list]) -> None:
        """Take over the counts of a checkpoint."""
        self._bytes = Counter({(int(r), a, b, c): n for r, a, b, c, n in state})

    def _add(self, event: str, site: str, server_round: int, **about: Any) -> None:
        if self._chain is None:
            return
        try:
            run_id = self._grid.run.run_id  # Flower's number of the run, by which sites know it
        except (NotImplementedError, AttributeError):
            run_id = 0
        place = {"run_id": run_id, "training": self._training, "round": server_round}
        try:
            self._chain.add(event=event, site=site, **place, **about)
        except OSError as error:  # a full disk: the run's other files say so, too
            logger.error("%s cannot be written (%s)", self._chain.path, reason(error))


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
