"""What crossed in a training: its bytes, and the hash of every payload, per site, but no value.

    sent      a request that was handed to the server's mail: its site, round, bytes and hash
    received  a reply
    summed    the frames with gradients of one site in one group of a session of the exchange

The hashes are a chain in the run's folder (`fedda.ops.chain`). The sites keep the same ones in
their audit logs, so that both can be compared: `fedda policy log --against RUN`.
"""

import logging
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from flwr.app import Message
from flwr.serverapp import Grid

from fedda import records
from fedda.errors import reason
from fedda.exchange import Session
from fedda.ops.chain import Chain
from fedda.results.read import CROSSED
from fedda.wire.packing import Kind

EVENTS = {"to": "sent", "from": "received"}
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
