"""What is agreed before the first gradient: the groups, and each site's invitation.

    Group        which sites sum gradients together, and how often
    Invitation   where a site finds the exchange, and how the two recognise each other

An invitation travels inside a Flower message, so it is as secret and as trusted as that connection.
`Invitation.parse` still checks all of it, as it checks whatever comes from outside.
"""

import json
import math
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedda.errors import ExchangeError, PolicyError, WireError

MAX_SIZE = 2**28  # values of one gradient, 1 GiB; gRPC's frames end at 2 GiB
MAX_SYNCS = 2**40
MAX_MEMBERS = 10_000
MAX_GROUPS = 10_000
MAX_TEXT = 255  # characters of a name
KEYS = "keys"  # the group in which members of masked groups agree on keys; no layout has this name
MAX_WAIT = 7 * 24 * 3600.0
FIRST_PORT = 1024  # below it are the ports of a machine's own services
TICKET = re.compile(r"[0-9a-f]{64}")
CERTIFICATE = re.compile(
    r"-----BEGIN CERTIFICATE-----[A-Za-z0-9+/=\s]{1,8192}-----END CERTIFICATE-----\s*"
)
FIELDS = {"host", "port", "certificate", "ticket", "node", "groups", "wait"}


@dataclass(frozen=True)
class Group:
    """Sites that sum their gradients.

    Attributes:
        name: unique in its session.
        size: float32 values of one flat gradient.
        syncs: how many sums the group makes.
        members: names of the sites; their gradients are added in this order.
        masked: whether the values are whole numbers modulo 2^32, under masks that cancel in the
            sum (`fedda.exchange.masked`).
    """

    name: str
    size: int
    syncs: int
    members: tuple[str, ...]
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
    """What one site needs to take part in one session.

    Attributes:
        host: of the exchange; empty: that of the server that the site is connected to.
        port: of the exchange; 0: the session is inside this process.
        certificate: the only one that the site accepts, in PEM; empty inside this process.
        ticket: 64 hexadecimal digits that only this site and the exchange know.
        node: the site's name.
        groups: those that the site is a member of.
        wait: seconds without an answer after which the site gives up by itself.
    """

    host: str
    port: int
    certificate: str = field(repr=False)
    ticket: str = field(repr=False)
    node: str
    groups: tuple[Group, ...]
    wait: float

    def flat(self) -> dict[str, str | int | float]:
        """The invitation as the record of a Flower message."""
        groups = [[g.name, g.size, g.syncs, list(g.members), g.masked] for g in self.groups]
        return {
            "host": self.host,
            "port": self.port,
            "certificate": self.certificate,
            "ticket": self.ticket,
            "node": self.node,
            "groups": json.dumps(groups, separators=(",", ":")),
            "wait": self.wait,
        }

    @classmethod
    def parse(cls, flat: Mapping[str, Any]) -> "Invitation":
        """Read what `flat` wrote, trusting nothing.

        Raises:
            WireError: it is no invitation; the error repeats nothing of its content.
        """
        try:
            fields: dict[str, Any] = dict(flat)
            if set(fields) != FIELDS:
                raise ValueError
            groups = tuple(_group(*entry) for entry in json.loads(fields["groups"]))
            fields["groups"] = check_groups(groups)
            invitation = cls(**fields)
            invitation._check()
        except (ValueError, TypeError, RecursionError, ExchangeError):
            raise WireError(
                "The invitation to the exchange cannot be read: server and site need the same "
                "version of fedda."
            ) from None
        return invitation

    def check_address(
        self, server: str, hosts: Collection[str] = (), ports: Collection[int] = ()
    ) -> None:
        """Check that a site may dial this address: a server could name any machine near the site.

        Args:
            server: the host that the site dials as its server.
            hosts: other hosts that the site allows.
            ports: the ports that the site allows; empty: any from 1024 on.

        Raises:
            PolicyError: it may not; nothing was dialled.
        """
        if not self.certificate:
            return  # inside this process
        host = self.host or server
        if not host or _plain(host) not in {_plain(known) for known in (server, *hosts)}:
            raise PolicyError(
                f"The server asks this site to sum gradients at the host {host!r}, but the site "
                f"dials only {' or '.join(filter(None, (server, *hosts))) or 'no host'}; if that "
                "host belongs to the server, allow it with --exchange-host or in the policy."
            )
        if self.port not in ports if ports else self.port < FIRST_PORT:
            known = ", ".join(map(str, ports)) or f"from {FIRST_PORT} on"
            raise PolicyError(
                f"The server asks this site to sum gradients at port {self.port}, but the site "
                f"dials only ports {known} (exchange.ports of the policy)."
            )

    def _check(self) -> None:
        local = self.port == 0 and self.certificate == ""
        valid = (
            type(self.host) is str
            and len(self.host) <= MAX_TEXT
            and type(self.port) is int
            and 0 <= self.port < 2**16
            and (local or (self.port > 0 and CERTIFICATE.fullmatch(self.certificate) is not None))
            and TICKET.fullmatch(self.ticket) is not None
            and all(self.node in group.members for group in self.groups)
            and type(self.wait) in (int, float)
            and math.isfinite(self.wait)
            and 0 < self.wait <= MAX_WAIT
        )
        if not valid:
            raise ValueError


def _group(name: Any, size: Any, syncs: Any, members: Any, masked: Any) -> Group:
    if type(members) is not list:
        raise ValueError
    return Group(name, size, syncs, tuple(members), masked)


def _plain(host: str) -> str:
    """A host's name as it is compared: in lower case, without brackets and a last dot."""
    return host.strip("[]").rstrip(".").lower()


def _is_name(name: object) -> bool:
    return type(name) is str and 0 < len(name) <= MAX_TEXT and name.isprintable()
