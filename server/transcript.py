"""The server's record of what crossed in a run: the hash of every payload, per site, but no value.

    sent      a request that was handed to the server's mail: its site, round, bytes and hash
    received  a reply
    summed    the frames with gradients of one site in one group of a session of the exchange

It is a hash chain in the run's folder (`fedda.ops.chain`). The sites keep the same hashes in their
audit logs, so that both can be compared: `fedda policy log --against RUN`.
"""

import logging
from pathlib import Path
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from fedda import records
from fedda.errors import reason
from fedda.exchange import Session
from fedda.ops.chain import Chain
from fedda.results.read import CROSSED

logger = logging.getLogger("fedda.server")


class Transcript:
    """Writes the record of one training of a run.

    Args:
        folder: the run's folder.
        grid: the way to the sites; nothing is written for a simulation in this process.
        training: the name of the training within the run.
    """

    def __init__(self, folder: Path, grid: Grid, training: str) -> None:
        alone = getattr(grid, "in_process", False)
        self._chain = None if alone else Chain(folder / CROSSED, durable=False)
        self._grid, self._training = grid, training

    def message(self, event: str, site: str, server_round: int, message: Message) -> None:
        """Note a request that is sent or a reply that was received."""
        if self._chain is None:
            return
        size = sum(records.size(message.content).values()) if message.has_content() else 0
        kind = message.metadata.message_type
        about = {"kind": kind, "bytes": size, "sha256": records.digest(message)}
        self._add(event, site, server_round, **about)

    def session(self, server_round: int, session: Session) -> None:
        """Note what came in a session of the exchange that has ended."""
        for (site, group), tally in session.tallies().items():
            self._add("summed", site, server_round, group=group, **tally.about())

    def _add(self, event: str, site: str, server_round: int, **about: Any) -> None:
        if self._chain is None:
            return
        place = {"run_id": self._run_id(), "training": self._training, "round": server_round}
        try:
            self._chain.add(event=event, site=site, **place, **about)
        except OSError as error:  # a full disk: the run's other files say so, too
            logger.error("%s cannot be written (%s)", self._chain.path, reason(error))

    def _run_id(self) -> int:
        """Flower's number of the run, by which sites know it; 0 if the grid has none."""
        try:
            return self._grid.run.run_id
        except (NotImplementedError, AttributeError):
            return 0
