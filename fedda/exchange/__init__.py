"""Sums of gradients between sites, step by step.

- server: `Host.open(groups)` -> `Session`; its invitations go to the sites in Flower messages
- site: `connect(invitation)` -> `Stream`; `swap(group, gradient, examples)` returns the sum
- one process: `LocalHost` and `Turns` do the same without a network

Only gradients of discriminators cross the exchange: no data, no model and no feature.
"""

from collections.abc import Collection

from fedda.exchange.baton import Turns
from fedda.exchange.groups import Group, Invitation
from fedda.exchange.host import Host
from fedda.exchange.in_process import LocalHost, LocalStream
from fedda.exchange.outliers import Outliers
from fedda.exchange.remote import RemoteStream
from fedda.exchange.session import Session
from fedda.exchange.stream import Stream

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


def connect(
    invitation: Invitation,
    server: str = "",
    hosts: Collection[str] | None = None,
    ports: Collection[int] = (),
) -> Stream:
    """Join a session as one site.

    Args:
        invitation: the one that the server sent to this site.
        server: host of the server that this site dials; used if the invitation names no host.
        hosts: other hosts that this site may dial; None: any, for an invitation that needs no
            distrust.
        ports: the ports that this site may dial; empty: any from 1024 on.

    Raises:
        PolicyError: this site may not dial the address; nothing was dialled.
        ExchangeError: the exchange cannot be reached, or refuses this site.
    """
    if not invitation.certificate:
        return LocalStream(invitation)
    if hosts is not None:
        invitation.check_address(server, hosts, ports)
    return RemoteStream(invitation, server)
