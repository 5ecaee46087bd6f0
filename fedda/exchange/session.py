"""What a server holds while its sites exchange gradients, whatever carries them."""

import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Self

from fedda.exchange.groups import MAX_WAIT, Invitation
from fedda.exchange.meeting import Meeting


def ignore(_what: str, _site: str, _text: str) -> None:
    """The notice of a host that was given none."""


class Session(ABC):
    """One session, from its invitations to its end; as a context manager, closed at the end.

    Attributes:
        invitations: what each site must get, over a link it trusts.
    """

    invitations: Mapping[str, Invitation]

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._to = dict.fromkeys(meeting.sites, 0)
        self._from = dict.fromkeys(meeting.sites, 0)

    @property
    def ended(self) -> str:
        """Why the session ended early; empty if it did not."""
        return self._meeting.ended

    def traffic(self) -> dict[str, tuple[int, int]]:
        """Bytes of frames by site: to it, from it."""
        return {site: (self._to[site], self._from[site]) for site in self._meeting.sites}

    def fewest(self) -> dict[str, int]:
        """By site, the fewest examples that one of its gradients summed over."""
        return dict(self._meeting.fewest)

    @abstractmethod
    def give_up(self, site: str) -> None:
        """Wait no longer for a site, of which the server heard by another way that it failed."""

    @abstractmethod
    def close(self) -> None:
        """End it; participants who still wait are told."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _end_if_early(self) -> None:
        if not all(sums.over for sums in self._meeting.sums.values()):
            self._meeting.end("The server closed the exchange before its last sync.")


def invite(
    meeting: Meeting, host: str = "", port: int = 0, certificate: str = ""
) -> dict[str, Invitation]:
    """An invitation with a ticket of its own for every site of a meeting."""
    # The longest a sum can take while the rules are kept, and a little for the way.
    longest = math.fsum([meeting.join, meeting.wait, 2 * meeting.rejoin, 10.0])
    patience = min(longest, MAX_WAIT)  # what a site accepts
    return {
        site: Invitation(
            host=host,
            port=port,
            certificate=certificate,
            ticket=secrets.token_hex(32),
            node=site,
            groups=tuple(sums.group for sums in meeting.of(site)),
            wait=patience,
        )
        for site in meeting.sites
    }
