"""Counts the bytes that crossed the wire, by round, role, direction and kind."""

from collections import Counter
from typing import Literal

from flwr.app import Message

from fedda import records

Direction = Literal["to", "from"]


class Ledger:
    """Counts the bytes of every message between server and sites in one training, as sent."""

    def __init__(self) -> None:
        self._bytes: Counter[tuple[int, str, str, str]] = Counter()

    def count(self, message: Message, server_round: int, role: str, direction: Direction) -> None:
        """Add one message."""
        if message.has_error():
            return
        for kind, size in records.size(message.content).items():
            self._bytes[server_round, role, direction, kind] += size

    def add(self, server_round: int, role: str, direction: Direction, kind: str, size: int) -> None:
        """Add bytes that crossed in the exchange of gradients, outside Flower's messages."""
        if size:
            self._bytes[server_round, role, direction, kind] += size

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
