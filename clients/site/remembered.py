"""To which groups of sites a site has added, over all runs, in a small database on its disk.

From two sums over different groups somebody can compute what the sites in which they differ have
added. Of groups that share no site but this one, every combination still holds all the others of at
least one of them. So a group is a change if this site has, since it last added to it, added to
another one that shares a further site with it, whatever the groups are called, and in whatever run.

Models are compared with models and gradients with gradients, as their difference means nothing; the
changes of both count together. A sum is noted before anything leaves. Nothing is ever forgotten:
where the database is full, the site adds to no more sums.
"""

import hashlib
import json
import sqlite3
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Literal

from fedda.errors import DataError, PolicyError, SecureError
from fedda.secure.agree import Occasion

FILE = "sums.db"
MOST_SUMS = 1_000_000  # noted sums; each takes less than 100 bytes
WAIT = 30.0  # seconds for another process that notes a sum

TABLES = (
    "CREATE TABLE IF NOT EXISTS counts (what PRIMARY KEY, n INTEGER)",
    "CREATE TABLE IF NOT EXISTS groups "
    "(kind TEXT, members TEXT, used INTEGER, PRIMARY KEY (kind, members))",
    "CREATE TABLE IF NOT EXISTS sent (place BLOB PRIMARY KEY, members BLOB) WITHOUT ROWID",
)


class Remembered:
    """Notes the groups of one site's sums, and refuses those that differ too often.

    Args:
        site: its name.
        folder: where the database is; None: in memory only.
        changes: how often a group may differ from an earlier one, over all runs.
    """

    def __init__(self, site: str, folder: Path | None, changes: int) -> None:
        self._site, self._changes = site, changes
        self._path = None if folder is None else folder / FILE
        self._memory: sqlite3.Connection | None = None

    def add(
        self,
        kind: Literal["models", "gradients"],
        groups: Iterable[Sequence[str]],
        occasion: Occasion | None = None,
    ) -> None:
        """Note the groups to which this site is about to add; all of them or none.

        Args:
            kind: of what is summed.
            groups: the names of each group's members, this site's among them.
            occasion: the training, round and try, which then has one group only; None: any.

        Raises:
            PolicyError: a group differs from earlier ones more often than the policy allows, or
                the database is full.
            SecureError: this site has added to another group on this occasion.
        """
        with self._open() as base:
            for group in groups:
                self._check(base, kind, sorted(group))
                if occasion is not None:
                    _note(base, occasion, sorted(group))

    def _check(self, base: sqlite3.Connection, kind: str, group: list[str]) -> None:
        members, number = json.dumps(group), _count(base, "sums", 1)
        if number > MOST_SUMS:
            raise PolicyError(
                f"This site has added to {MOST_SUMS:,} sums, as many as it remembers; to add to "
                f"more, move its file {FILE} away, which begins anew."
            )
        known = dict(base.execute("SELECT members, used FROM groups WHERE kind = ?", (kind,)))
        last, others = known.pop(members, 0), set(group) - {self._site}
        since = [m for m, used in known.items() if used > last and others & set(json.loads(m))]
        if since and (changes := _count(base, "changes", 1)) > self._changes:
            before = ", ".join(json.loads(max(since, key=known.__getitem__)))
            raise PolicyError(
                f"The sum of {kind} is over {', '.join(group)}, and an earlier one was over "
                f"{before}; what these differ by can be computed. This would be change {changes}, "
                f"but the policy allows {self._changes} (secure.changes): wait until the "
                "same sites are back, or allow 2 for each time that a site may drop out and return."
            )
        base.execute("INSERT OR REPLACE INTO groups VALUES (?, ?, ?)", (kind, members, number))

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """Open the database for one change, which holds as a whole or not at all."""
        if self._path is None:
            if self._memory is None:
                self._memory = sqlite3.connect(
                    ":memory:", isolation_level=None, check_same_thread=False
                )
                weakref.finalize(self, self._memory.close)
            with _changing(self._memory) as base:
                yield base
            return
        self._path.parent.mkdir(parents=True, exist_ok=True)
        try:
            base = sqlite3.connect(self._path, timeout=WAIT, isolation_level=None)
            with closing(base), _changing(base):
                yield base
        except sqlite3.Error as error:
            raise DataError(
                f"The sums in {self._path} cannot be read or written ({error}); without them this "
                "site adds to none. Restore the file, or move it away to begin anew."
            ) from None


@contextmanager
def _changing(base: sqlite3.Connection) -> Iterator[sqlite3.Connection]:
    base.execute("PRAGMA synchronous = FULL")  # on the disk before anything leaves
    base.execute("BEGIN IMMEDIATE")
    with base:  # commits at the end, or takes everything back if there is an error
        for table in TABLES:
            base.execute(table)
        yield base


def _count(base: sqlite3.Connection, what: str, more: int) -> int:
    base.execute("INSERT OR IGNORE INTO counts VALUES (?, 0)", (what,))
    base.execute("UPDATE counts SET n = n + ? WHERE what = ?", (more, what))
    (n,) = base.execute("SELECT n FROM counts WHERE what = ?", (what,)).fetchone()
    return int(n)


def _note(base: sqlite3.Connection, occasion: Occasion, group: list[str]) -> None:
    place, members = _digest(vars(occasion)), _digest(group)
    base.execute("INSERT OR IGNORE INTO sent VALUES (?, ?)", (place, members))
    (first,) = base.execute("SELECT members FROM sent WHERE place = ?", (place,)).fetchone()
    if first != members:
        raise SecureError(
            f"This site has added its model of round {occasion.round}, try {occasion.attempt} "
            "to that of another group; only another try or run.name can have this group."
        )


def _digest(thing: object) -> bytes:
    return hashlib.sha256(json.dumps(thing, sort_keys=True).encode()).digest()
