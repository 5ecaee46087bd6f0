"""What is agreed before the first gradient: the groups, and each site's invitation.

    Group        which sites sum gradients together, and how often
    Invitation   which groups a site is in, and how it and the run's program recognise each other

An invitation travels inside a Flower message, so it is as secret and as trusted as that connection.
`Invitation.parse` still checks all of it, as it checks whatever comes from outside.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedda.errors import ExchangeError, WireError
from fedda.lane.invitation import LaneInvitation
from fedda.lane.tls import TICKETS

MAX_SIZE = 2**28  # values of one gradient, 1 GiB
MAX_SYNCS = 2**40
MAX_MEMBERS = 10_000
MAX_GROUPS = 10_000
MAX_TEXT = 255  # characters of a name
KEYS = "keys"  # the group in which members of masked groups agree on keys; no layout has this name
MAX_WAIT = 7 * 24 * 3600.0


@dataclass(frozen=True)
class Group:
    """Sites that sum their gradients."""

    name: str  # unique in its session
    size: int  # float32 values of one flat gradient
    syncs: int  # how many sums the group makes
    members: tuple[str, ...]  # names of the sites; their gradients are added in this order
    # whether the values are whole numbers modulo 2^32, under masks that cancel in the sum
    # (`fedda.exchange.masked`)
    masked: bool = False

    def __post_init__(self) -> None:
        members = [_is_name(member) for member in self.members]
        if not _is_name(self.name) or not members or not all(members):
            raise ExchangeError(
                f"A group of the exchange and its members need names of 1 to {MAX_TEXT} characters."
            )
        if type(self.masked) is not bool:
            raise ExchangeError(f"Group '{self.name}' does not say whether its sums are masked.")
        if len(set(self.members)) != len(members) or len(members) > MAX_MEMBERS:
            raise ExchangeError(
                f"Group '{self.name}' has {len(members)} members, of which "
                f"{len(set(self.members))} differ: name each of at most {MAX_MEMBERS} sites once."
            )
        for what, number, most in (("size", self.size, MAX_SIZE), ("syncs", self.syncs, MAX_SYNCS)):
            if type(number) is not int or not 1 <= number <= most:
                raise ExchangeError(
                    f"Group '{self.name}' has {what}={number!r}: "
                    f"it must be a whole number from 1 to {most}."
                )


def check_groups(groups: Sequence[Group]) -> tuple[Group, ...]:
    """Refuse a session without groups, with too many, or with two of one name.

    Raises:
        ExchangeError: with the names.
    """
    names = [group.name for group in groups]
    if not names or len(names) > MAX_GROUPS or len(set(names)) != len(names):
        raise ExchangeError(
            f"A session has the groups {', '.join(names[:8]) or '(none)'}: "
            f"it needs 1 to {MAX_GROUPS}, each with a name of its own."
        )
    return tuple(groups)


@dataclass(frozen=True)
class Invitation:
    """What one site needs to take part in one session."""

    name: str  # of the run's lanes; empty: the session is inside this process
    # the only one that the site accepts, in PEM; empty inside this process
    certificate: str = field(repr=False)
    # 64 hexadecimal digits that only this site and the run's program know
    ticket: str = field(repr=False)
    node: str  # the site's name
    groups: tuple[Group, ...]  # those that it is a member of
    wait: float  # seconds after which a site that hears nothing gives up
    rejoin: float = 0.0  # seconds within which it may connect again after a break
    port: int = 0  # of the run's own, at the server's host; 0: the one that the site dials anyway

    @property
    def lane(self) -> LaneInvitation:
        """The lane on which gradients and sums travel."""
        return LaneInvitation(self.name, self.certificate, self.ticket, self.port)

    def flat(self) -> dict[str, str | int | float]:
        """The invitation as the record of a Flower message."""
        groups = [[g.name, g.size, g.syncs, list(g.members), g.masked] for g in self.groups]
        return {
            "name": self.name,
            "certificate": self.certificate,
            "ticket": self.ticket,
            "port": self.port,
            "node": self.node,
            "groups": json.dumps(groups, separators=(",", ":")),
            "wait": self.wait,
            "rejoin": self.rejoin,
        }

    @classmethod
    def parse(cls, flat: Mapping[str, Any]) -> "Invitation":
        """Read what `flat` wrote, trusting nothing.

        Raises:
            WireError: it is no invitation; the error repeats nothing of its content.
        """
        try:
            fields: dict[str, Any] = dict(flat)
            groups = tuple(_group(*entry) for entry in json.loads(fields["groups"]))
            fields["groups"] = check_groups(groups)
            invitation = cls(**fields)
            invitation._check()
        except (KeyError, ValueError, TypeError, RecursionError, ExchangeError):
            raise WireError(
                "The invitation to the exchange cannot be read: server and site need the same "
                "version of fedda."
            ) from None
        return invitation

    def _check(self) -> None:
        if self.name or self.certificate or self.port != 0:
            self.lane.check()
        seconds = (self.wait, self.rejoin)
        valid = (
            type(self.ticket) is str
            and TICKETS.fullmatch(self.ticket) is not None
            and all(self.node in group.members for group in self.groups)
            and all(type(s) in (int, float) and math.isfinite(s) for s in seconds)
            and 0 < self.wait <= MAX_WAIT
            and 0 <= self.rejoin <= MAX_WAIT
        )
        if not valid:
            raise ValueError


def _group(name: Any, size: Any, syncs: Any, members: Any, masked: Any) -> Group:
    if type(members) is not list:
        raise ValueError
    return Group(name, size, syncs, tuple(members), masked)


def _is_name(name: object) -> bool:
    return type(name) is str and 0 < len(name) <= MAX_TEXT and name.isprintable()
