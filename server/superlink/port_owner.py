"""Which account of this machine a connection to the operator's port comes from.

Flower's Control API asks for no password, and whoever starts a run of an app there runs code as the
server's user. So only programs of this user, and of root, may do so, as if the port were a socket
file of mode 600. Linux says in /proc/self/net/tcp whose socket the other end of a connection is;
where there is no such file, nobody is told apart.
"""

import os
import socket
import sys
from pathlib import Path
from typing import Any

TCP = Path("/proc/self/net/tcp")
ESTABLISHED = "01"  # of any other state the account is not said, as of a socket that was closed
ROOT = 0


class Local(socket.socket):
    """A listening socket on 127.0.0.1 that notes which connections are of other accounts.

    Attributes:
        strangers: their ports.
    """

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.strangers: set[int] = set()

    def accept(self) -> tuple[socket.socket, Any]:
        """Take the next connection."""
        taken, address = super().accept()
        own = account(address, taken.getsockname()) in (None, os.geteuid(), ROOT)
        (self.strangers.discard if own else self.strangers.add)(address[1])
        return taken, address


def account(here: tuple[str, int], there: tuple[str, int]) -> int | None:
    """The user id of the socket at one end of an IPv4 connection within this machine.

    Returns:
        -1 if there is no such open connection; None if this system does not say.
    """
    try:
        lines = TCP.read_text().splitlines()[1:]
    except OSError:
        return None
    ends = [_written(here), _written(there), ESTABLISHED]
    for fields in map(str.split, lines):
        if fields[1:4] == ends and fields[9] != "0":  # the inode; a closed socket has none
            return int(fields[7])
    return -1


def _written(address: tuple[str, int]) -> str:
    """An address as the file has it: a number in the machine's own order of bytes, and a port."""
    number = int.from_bytes(socket.inet_aton(address[0]), sys.byteorder)
    return f"{number:08X}:{address[1]:04X}"
