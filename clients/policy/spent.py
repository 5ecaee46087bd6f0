"""What a server has used of a site's budgets, in a small database on the site's disk.

It is booked before the work and before anything leaves, and is on the disk when the work begins. So
nothing is given back if the process is ended in between. All runs and all servers count together;
only deleting the file begins anew. Where the policy lists studies, what a study uses is also booked
on its own, in tables of its name: both accounts are changed, or neither.
"""

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from fedda.config import study_name
from fedda.errors import BudgetError, DataError
from fedda.secure.accountant import Steps, epsilon

from .rules import Budget, Privacy

FILE = "budget.db"
TABLES = {
    "used": "(what PRIMARY KEY, n INTEGER)",
    "trainings": "(name PRIMARY KEY)",
    "steps": "(noise REAL, share REAL, n INTEGER, PRIMARY KEY (noise, share))",
}
ALL = ""  # the account of all runs
WAIT = 30.0  # seconds for another process that books


@dataclass(frozen=True)
class UsedBudget:
    """How much was used: requests to train and to test, different trainings, bytes that left."""

    rounds: int = 0
    tests: int = 0
    trainings: int = 0
    bytes: int = 0


class Spent:
    """Books what is used.

    Args:
        state: the client's state folder.
        budget: what may be used in all.
        study: the study that is worked for, if the policy lists studies.
        own: what may be used for it.
    """

    def __init__(
        self, state: Path, budget: Budget, study: str = ALL, own: Budget | None = None
    ) -> None:
        self.path = state / FILE
        self._accounts = {ALL: budget} | ({} if own is None else {study: own})

    def used(self, study: str = ALL) -> UsedBudget:
        """What was used so far, in all or for a study."""
        if not self.path.exists():
            return UsedBudget()
        with self._open(study) as base:
            return _used(base, study)

    def request(self, training: str, rounds: int = 0, tests: int = 0, size: int = 0) -> None:
        """Book a request before it is worked on.

        Args:
            training: what tells this training from others.
            rounds: 1 if it asks for training.
            tests: how many models it asks to test, or to judge in a training.
            size: bytes that will leave before the reply: the sums of gradients.

        Raises:
            BudgetError: it is more than is left; nothing was booked.
        """
        with self._open(*self._accounts) as base:
            for study in self._accounts:
                table = _table("trainings", study)
                base.execute(f"INSERT OR IGNORE INTO {table} VALUES (?)", (training,))
            self._add(base, rounds=rounds, tests=tests, bytes=size)

    def leaving(self, size: int) -> None:
        """Book the bytes of a reply before it leaves.

        Raises:
            BudgetError: it is more than is left; nothing was booked.
        """
        with self._open(*self._accounts) as base:
            self._add(base, bytes=size)

    def steps(self, steps: Steps, privacy: Privacy, own: Privacy | None = None) -> float:
        """Book noisy steps on the site's labelled examples -> epsilon so far, of the study if any.

        Args:
            steps: noise, share of the examples, and how many steps.
            privacy: the delta at which epsilon of all steps is computed, and the most it may be.
            own: the same of the steps for the study.

        Raises:
            BudgetError: it is more than is left; nothing was booked.
        """
        noise, share, n = steps
        with self._open(*self._accounts) as base:
            spent = 0.0
            for study in self._accounts:
                rules, table = (own if study and own else privacy), _table("steps", study)
                base.execute(f"INSERT OR IGNORE INTO {table} VALUES (?, ?, 0)", (noise, share))
                change = f"UPDATE {table} SET n = n + ? WHERE noise = ? AND share = ?"
                base.execute(change, (n, noise, share))
                spent = _epsilon(base, study, rules.delta)
                if rules.epsilon is not None and not spent <= rules.epsilon:  # NaN is more than any
                    raise BudgetError(
                        f"With this round epsilon of the site's examples would be {spent:.3g}, but "
                        f"the policy allows {rules.epsilon:g} over all runs{_of(study)} "
                        "(privacy.epsilon)."
                    )
        return spent

    def epsilon(self, delta: float, study: str = ALL) -> float:
        """Epsilon of all noisy steps so far, in all or for a study."""
        if not self.path.exists():
            return 0.0
        with self._open(study) as base:
            return _epsilon(base, study, delta)

    def _add(self, base: sqlite3.Connection, **counts: int) -> None:
        """Add to every account, and check that none has more than it may."""
        for study, most in self._accounts.items():
            table = _table("used", study)
            for what, n in counts.items():
                base.execute(f"INSERT OR IGNORE INTO {table} VALUES (?, 0)", (what,))
                base.execute(f"UPDATE {table} SET n = n + ? WHERE what = ?", (n, what))
            _check(_used(base, study), most, _of(study))

    @contextmanager
    def _open(self, *accounts: str) -> Iterator[sqlite3.Connection]:
        """Open the database for one change, which holds as a whole or not at all."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with closing(sqlite3.connect(self.path, timeout=WAIT, isolation_level=None)) as base:
                base.execute("PRAGMA synchronous = FULL")  # on the disk before the work begins
                base.execute("BEGIN IMMEDIATE")
                with base:  # commits at the end, or takes everything back if there is an error
                    for study in accounts:
                        for what, columns in TABLES.items():
                            base.execute(
                                f"CREATE TABLE IF NOT EXISTS {_table(what, study)} {columns}"
                            )
                    yield base
        except sqlite3.Error as error:
            raise DataError(
                f"The budgets in {self.path} cannot be read or written ({error}); without them "
                "nothing is answered. Restore the file, or move it away to begin anew."
            ) from None


def _check(used: UsedBudget, most: Budget, of: str) -> None:
    left = "nothing more is done until the site's policy gives more"
    for what, count, limit in (
        ("training requests", used.rounds, most.rounds),
        ("models to test", used.tests, most.tests),
        ("different trainings", used.trainings, most.trainings),
    ):
        if limit is not None and count > limit:
            raise BudgetError(f"The policy's budget of {limit} {what}{of} is spent; {left}.")
    if most.megabytes is not None and used.bytes > most.megabytes * 1e6:
        raise BudgetError(
            f"The policy lets {most.megabytes:g} MB leave this site in all{of}, and this would be "
            f"{used.bytes / 1e6:.3f} MB; {left}."
        )


def _used(base: sqlite3.Connection, study: str) -> UsedBudget:
    counts = dict(base.execute(f"SELECT what, n FROM {_table('used', study)}"))
    (trainings,) = base.execute(f"SELECT COUNT(*) FROM {_table('trainings', study)}").fetchone()
    return UsedBudget(
        counts.get("rounds", 0), counts.get("tests", 0), trainings, counts.get("bytes", 0)
    )


def _epsilon(base: sqlite3.Connection, study: str, delta: float) -> float:
    steps = base.execute(f"SELECT noise, share, n FROM {_table('steps', study)}")
    return epsilon(steps, delta)


def _table(what: str, study: str) -> str:
    """The name of an account's table in SQL; a study's name has no quotation mark."""
    return f'"{study_name(study)} {what}"' if study else what


def _of(study: str) -> str:
    return f" for the study {study}" if study else ""
