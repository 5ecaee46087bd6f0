"""An open run: targets that join after it began, and whether they can take part."""

import time

from fedda import models
from fedda.errors import RosterError
from fedda.settings import RunConfig

from .journal import Journal
from .presence import LOOK, Sites
from .strategy_modules import roster


class Newcomers:
    """Waits for targets that the run has not adapted to yet."""

    def __init__(self, sites: Sites, config: RunConfig, journal: Journal) -> None:
        self._sites = sites
        self._shape = models.inputs(config.input, config.model)
        self._journal = journal
        self._turned_away: set[str] = set()  # they are not tried again before they have left

    def wait(self, members: roster.Roster) -> tuple[roster.Roster, list[str]]:
        """Wait, without end, for targets that are not in the roster -> it with them, their names.

        Sources that join are not waited for: a source takes part from the run's beginning.
        """
        self._journal.write("open", targets=[node.name for node in members.targets])
        while True:
            self._sites.look()
            known = {node.name for node in members.nodes}
            there = list(self._sites.offers.values())
            self._turned_away &= {node.name for node in there}
            joined = []
            for node in there:
                if node.role != "target" or node.name in known | self._turned_away:
                    continue
                try:
                    members = members.joined(node, self._shape)
                except RosterError as error:
                    self.turn_away(node.name, str(error))
                else:
                    joined.append(node.name)
            if joined:
                return members, joined
            time.sleep(LOOK)

    def turn_away(self, target: str, why: str) -> None:
        """Leave a target out until it has disconnected and joined again."""
        self._turned_away.add(target)
        text = f"{why} The run goes on without it; it is tried again when it joins again."
        self._journal.trouble("left out", target, text)
