"""Sums of gradients between sites, step by step.

- server: `Host.open(groups)` -> `Session`, whose invitations go out in Flower messages
- site: `connect(invitation)` -> `Stream`, whose `swap(group, gradient, examples)` gives the sum
- one process: `LocalHost` and `Turns`, without a network

Only discriminator gradients cross: no data, no model and no feature.
"""

from fedda.exchange.groups import Group, Invitation
from fedda.exchange.host import Host
from fedda.exchange.local import LocalHost, LocalStream
from fedda.exchange.remote import RemoteStream
from fedda.exchange.session import Session
from fedda.exchange.stream import Stream
from fedda.exchange.turns import Turns

__all__ = ["Group", "Host", "Invitation", "LocalHost", "Session", "Stream", "Turns", "connect"]


def connect(invitation: Invitation, host: str = "") -> Stream:
    """Join a session.

    Args:
        invitation: what came from the server.
        host: the server that the site dials anyway, for an invitation that names none.

    Raises:
        ExchangeError: the exchange cannot be reached, or refuses this site.
    """
    if not invitation.certificate:
        return LocalStream(invitation)
    return RemoteStream(invitation, host)
