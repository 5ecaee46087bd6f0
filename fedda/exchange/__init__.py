"""Sums of gradients between sites, step by step.

- server: `Host.open(groups)` -> `Session`; its invitations go to the sites in Flower messages
- site: `connect(invitation)` -> `Stream`; `swap(group, gradient, examples)` returns the sum
- one process: `LocalHost` and `Turns` do the same without a network

Only gradients of discriminators cross the exchange: no data, no model and no feature.
"""

from fedda.exchange.groups import Group, Invitation
from fedda.exchange.host import Host
from fedda.exchange.in_process import LocalHost, LocalStream
from fedda.exchange.outliers import Outliers
from fedda.exchange.remote import RemoteStream
from fedda.exchange.session import Session
from fedda.exchange.stream import Stream
from fedda.exchange.turn_lock import Turns

__all__ = [
    "Group",
    "Host",
    "Invitation",
    "LocalHost",
    "Outliers",
    "Session",
    "Stream",
    "Turns",
    "connect",
]


def connect(invitation: Invitation, address: str = "") -> Stream:
    """Join a session as one site.

    Args:
        invitation: the one that the server sent to this site.
        address: host:port of the server that this site dials, or unix:FOLDER of its socket file.

    Raises:
        ExchangeError: the exchange cannot be reached, or refuses this site.
    """
    return RemoteStream(invitation, address) if invitation.name else LocalStream(invitation)
