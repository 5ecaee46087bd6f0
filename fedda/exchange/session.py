"""What the server does with one session of the exchange, with or without a network."""

import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Self

from fedda.exchange.groups import MAX_WAIT, Invitation
from fedda.exchange.meeting import Meeting
from fedda.exchange.outliers import Excess
from fedda.exchange.tally import Tally


def ignore(_what: str, _site: str, _text: str) -> None:
    """The notice of a host that was given no function to call."""


class Session(ABC):
    """One session; a `with` block closes it at its end."""

    # by site, what the site must get over a link that it trusts
    invitations: Mapping[str, Invitation]

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._bytes_to = dict.fromkeys(meeting.sites, 0)
        self._bytes_from = dict.fromkeys(meeting.sites, 0)

    @property
    def ended(self) -> str:
        """Why the session ended early; empty if it did not."""
        return self._meeting.ended

    @property
    def blamed(self) -> tuple[str, ...]:
        """The sites because of which it ended early."""
        return self._meeting.blamed

    def traffic(self) -> dict[str, tuple[int, int]]:
        """Bytes of frames by site: sent to it, received from it."""
        sites = self._meeting.sites
        return {site: (self._bytes_to[site], self._bytes_from[site]) for site in sites}

    def fewest(self) -> dict[str, int]:
        """The smallest number of examples that a gradient summed over, by site."""
        return dict(self._meeting.fewest)

    def outliers(self) -> Mapping[str, Excess]:
        """What was found in the gradients of a site that did not count as they were, by site."""
        return self._meeting.outliers.found if self._meeting.outliers else {}

    def tallies(self) -> Mapping[tuple[str, str], Tally]:
        """The gradients that came over a network, by site and group; inside a process none."""
        return {}

    @abstractmethod
    def give_up(self, site: str) -> None:
        """Stop waiting for a site that failed, as the server learned outside the exchange."""

    @abstractmethod
    def close(self) -> None:
        """End the session; sites that still wait for a sum get an error."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end_if_early(self) -> None:
        if not all(sums.over for sums in self._meeting.sums.values()):
            self._meeting.end("The server closed the exchange before its last sync.")


def invite(
    meeting: Meeting, name: str = "", certificate: str = "", port: int = 0
) -> dict[str, Invitation]:
    """An invitation for every site of a meeting, each with its own ticket."""
    # The longest that a sum can take within the rules, and 10 s for the frames' way.
    longest = math.fsum([meeting.join, meeting.wait, 2 * meeting.rejoin, 10.0])
    patience = min(longest, MAX_WAIT)  # a site refuses an invitation with more
    return {
        site: Invitation(
            name=name,
            certificate=certificate,
            ticket=secrets.token_hex(32),
            node=site,
            groups=tuple(sums.group for sums in meeting.sums_of(site)),
            wait=patience,
            rejoin=min(meeting.rejoin, MAX_WAIT),
            port=port,
        )
        for site in meeting.sites
    }
