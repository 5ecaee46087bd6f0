"""What a server has used of a site's budgets, in a small database on the site's disk.

It is booked before the work and before anything leaves, and is on the disk when the work begins. So
nothing is given back if the process is ended in between. All runs and all servers count together.
Deleting the file begins anew, but not under a client that goes on.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from fedda.errors import BudgetError, DataError, DiskError
from fedda.secure.accountant import Steps, epsilon

from .rules import Budget, Privacy

FILE = "budget.db"
TABLES = {
    "used": "(what PRIMARY KEY, n INTEGER)",
    "trainings": "(name PRIMARY KEY)",
    "steps": "(noise REAL, share REAL, n INTEGER, PRIMARY KEY (noise, share))",
}
WAIT = 30.0  # seconds for another process that books


@dataclass(frozen=True)
class UsedBudget:
    """How much was used: requests to train and to test, trainings, bytes that left, and looks."""

    rounds: int = 0
    tests: int = 0
    trainings: int = 0
    bytes: int = 0
    looks: int = 0


class Spent:
    """Books what is used."""

    def __init__(self, state: Path, budget: Budget) -> None:
        self.path, self._budget = state / FILE, budget
        self._was_there = self.path.exists()

    def used(self) -> UsedBudget:
        """What was used so far."""
        if not (self._was_there or self.path.exists()):
            return UsedBudget()
        with self._open() as base:
            return _used(base)

    def request(
        self, training: str, rounds: int = 0, tests: int = 0, size: int = 0, looks: int = 0
    ) -> None:
        """Book a request before it is worked on.

        Args:
            training: what tells this training from others.
            rounds: 1 if it asks for training.
            tests: how many models it asks to test, or to judge in a training.
            size: bytes that will leave before the reply: the sums of gradients.
            looks: 1 if it asks what the data look like.

        Raises:
            BudgetError: it is more than is left; nothing was booked.
        """
        with self._open() as base:
            base.execute("INSERT OR IGNORE INTO trainings VALUES (?)", (training,))
            self._add(base, rounds=rounds, tests=tests, bytes=size, looks=looks)

    def leaving(self, size: int) -> None:
        """Book the bytes of a reply before it leaves.

        Raises:
            BudgetError: it is more than is left; nothing was booked.
        """
        with self._open() as base:
            self._add(base, bytes=size)

    def steps(self, steps: Steps, privacy: Privacy) -> float:
        """Book noisy steps on the site's labelled examples -> epsilon so far.

        Args:
            steps: noise, share of the examples, and how many steps.
            privacy: the delta at which epsilon of all steps is computed, and the most it may be.

        Raises:
            BudgetError: it is more than is left; nothing was booked.
        """
        noise, share, n = steps
        with self._open() as base:
            base.execute("INSERT OR IGNORE INTO steps VALUES (?, ?, 0)", (noise, share))
            change = "UPDATE steps SET n = n + ? WHERE noise = ? AND share = ?"
            base.execute(change, (n, noise, share))
            spent = _epsilon(base, privacy.delta)
            if privacy.epsilon is not None and not spent <= privacy.epsilon:  # NaN is more than any
                raise BudgetError(
                    f"With this round epsilon of the site's examples would be {spent:.3g}, but "
                    f"the policy allows {privacy.epsilon:g} over all runs (privacy.epsilon)."
                )
        return spent

    def epsilon(self, delta: float) -> float:
        """Epsilon of all noisy steps so far."""
        if not (self._was_there or self.path.exists()):
            return 0.0
        with self._open() as base:
            return _epsilon(base, delta)

    def _add(self, base: sqlite3.Connection, **counts: int) -> None:
        """Add to the account, and check that it has no more than it may."""
        for what, n in counts.items():
            base.execute("INSERT OR IGNORE INTO used VALUES (?, 0)", (what,))
            base.execute("UPDATE used SET n = n + ? WHERE what = ?", (n, what))
        _check(_used(base), self._budget)

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """Open the database for one change, which holds as a whole or not at all."""
        if self._was_there and not self.path.exists():
            raise DataError(
                f"{self.path}, which says what was spent of the budgets, is gone; without it "
                "nothing is answered. Restore it, or start this client again to begin anew."
            )
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with closing(sqlite3.connect(self.path, timeout=WAIT, isolation_level=None)) as base:
                base.execute("PRAGMA synchronous = FULL")  # on the disk before the work begins
                base.execute("BEGIN IMMEDIATE")
                with base:  # commits at the end, or takes everything back if there is an error
                    for what, columns in TABLES.items():
                        base.execute(f"CREATE TABLE IF NOT EXISTS {what} {columns}")
                    self._was_there = True
                    yield base
        except sqlite3.Error as error:
            if getattr(error, "sqlite_errorcode", 0) == sqlite3.SQLITE_FULL:
                raise DiskError(
                    f"The disk of {self.path} is full, so nothing can be booked and nothing is "
                    "answered; make room there, and leave this file, which says what was spent."
                ) from None
            raise DataError(
                f"The budgets in {self.path} cannot be read or written ({error}); without them "
                "nothing is answered. Restore the file, or move it away to begin anew."
            ) from None


def _check(used: UsedBudget, most: Budget) -> None:
    left = "nothing more is done until the site's policy gives more"
    for what, count, limit in (
        ("training requests", used.rounds, most.rounds),
        ("models to test", used.tests, most.tests),
        ("different trainings", used.trainings, most.trainings),
        ("looks", used.looks, most.looks),
    ):
        if limit is not None and count > limit:
            raise BudgetError(f"The policy's budget of {limit} {what} is spent; {left}.")
    if most.megabytes is not None and used.bytes > most.megabytes * 1e6:
        raise BudgetError(
            f"The policy lets {most.megabytes:g} MB leave this site in all, and this would be "
            f"{used.bytes / 1e6:.3f} MB; {left}."
        )


def _used(base: sqlite3.Connection) -> UsedBudget:
    (trainings,) = base.execute("SELECT COUNT(*) FROM trainings").fetchone()
    return UsedBudget(trainings=trainings, **dict(base.execute("SELECT what, n FROM used")))


def _epsilon(base: sqlite3.Connection, delta: float) -> float:
    return epsilon(base.execute("SELECT noise, share, n FROM steps"), delta)
