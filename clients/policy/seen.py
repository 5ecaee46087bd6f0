"""What a site's audit log says so far, for its own page: asked, left and refused; never a value."""

from collections import Counter, deque
from contextlib import suppress
from pathlib import Path

from fedda.errors import Code
from fedda.page.at_site import OwnSite, SiteRequest
from fedda.results.read import Event
from fedda.results.story import added
from fedda.wire import SCALARS

from .compared import AUDIT
from .rules import Policy
from .spent import Spent
from .words import left, words

MOST = 30  # of the last requests, and of the last refusals


class Seen:
    """Follows the newest file of an audit log as it grows.

    Args:
        state: the client's state folder.
        policy: the policy in force.
    """

    def __init__(self, state: Path, policy: Policy) -> None:
        self._state, self._policy = state, policy
        self._spent = Spent(state, policy.budget)
        self._read = 0  # bytes of the file that are in what follows
        self._file = 0  # its number on the disk
        self._begin()

    def look(self, standing: str) -> OwnSite:
        """Read what was added -> what there is to show.

        Args:
            standing: how the site stands with its server, in a sentence.
        """
        path = self._state / AUDIT
        with suppress(OSError):  # not begun yet
            if (file := path.stat().st_ino) != self._file:  # a new one: the old is put aside
                self._begin()
                self._file = file
            events, self._read = added(path, self._read)
            for event in events:
                self._add(event)
        return OwnSite(
            standing=standing,
            since=self._since,
            asked=[*reversed(self._asked)],
            refused=[*reversed(self._refused)],
            left=dict(self._left),
            messages=dict(self._messages),
            budgets=[*left(self._policy, self._spent)],
            policy=[*words(self._policy)],
        )

    def _begin(self) -> None:
        self._read, self._since = 0, 0.0
        self._asked: deque[SiteRequest] = deque(maxlen=MOST)
        self._refused: deque[SiteRequest] = deque(maxlen=MOST)
        self._left: Counter[str] = Counter()
        self._messages: Counter[str] = Counter()

    def _add(self, event: Event) -> None:
        now = float(event.get("time", 0.0))
        self._since = self._since or now
        what = event["event"]
        if what == "received":
            self._asked.append(_asked(event, now))
        elif what == "refused":
            why = Code[code].public if (code := str(event.get("code"))) in Code.__members__ else ""
            self._refused.append(_asked(event, now, why))
        elif what == "answered":
            arrays = event.get("arrays", [])
            for array in arrays:
                self._count(str(array["kind"]), int(array["bytes"]))
            rest = int(event.get("bytes", 0)) - sum(int(array["bytes"]) for array in arrays)
            self._count(SCALARS, rest)
        elif what == "summed":
            self._count("gradient", int(event.get("bytes", 0)))

    def _count(self, kind: str, size: int) -> None:
        self._left[kind] += size
        self._messages[kind] += 1


def _asked(event: Event, now: float, why: str = "") -> SiteRequest:
    """A request in words: where it belongs, and what came with it."""
    named = [event.get("hop") or event.get("kind"), event.get("part")]
    what = " as ".join(str(word) for word in named if word)
    came = [f"{a['name']} ({a['kind']})" for a in event.get("arrays", [])]
    return SiteRequest(
        time=now,
        run=str(event.get("run", event.get("run_id", ""))),
        training=str(event.get("training", "")),
        round=str(event.get("round", "")),
        what=what,
        came=", ".join([*came, *map(str, event.get("numbers", []))]),
        size=int(event.get("bytes", 0)),
        why=why,
    )
