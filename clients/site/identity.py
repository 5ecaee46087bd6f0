"""Who a site is to the other sites, whatever the server says: its node key, and their keys."""

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fedda.errors import SecureError
from fedda.files import keeping
from fedda.ops import keys
from fedda.secure.agree import Own
from fedda.wire.packing import Kind, Packed, pack


class Identity:
    """A site's own key, and the keys of its federation's sites.

    Args:
        name: the site.
        key: the file of its node key, if it has one.
        peers: the file of the federation's public keys, if it has one.
    """

    def __init__(self, name: str, key: Path | None, peers: Path | None) -> None:
        self.name = name
        self._key, self._peers = key, peers

    @property
    def complete(self) -> bool:
        """Whether this site was given its own key and the others'."""
        return bool(self._key and self._peers)

    def peers(self, role: str = "source") -> Mapping[str, Any]:
        """Return the public keys of the sites that may have a role, by name.

        Raises:
            SecureError: this site was not given its key or the others'.
        """
        if self._key is None or self._peers is None:
            raise SecureError(
                "The run hides models or gradients from the server, but this site was not given "
                "the federation's public keys; start fedda-client with --key and --peers."
            )
        return keys.peers(self._peers, role)

    def everyone(self) -> Mapping[str, Any]:
        """Return the public keys of all sites, by name.

        Raises:
            SecureError: this site was not given its key or the others'.
        """
        return {**self.peers("source"), **self.peers("target")}

    def private(self) -> Any:
        """Return this site's own node key."""
        assert self._key is not None, "peers were asked for before"
        return keys.load_node_key(self._key)

    def offer(self, own: Own) -> Packed:
        """Sign a key for one occasion -> what is sent to the others.

        Raises:
            SecureError: this site was not given its key or the others'.
        """
        self.peers()
        parts = {"public": own.public, "signature": own.sign(self.name, self.private())}
        return pack({n: as_array(b) for n, b in parts.items()}, Kind.KEY)


def as_array(data: bytes) -> np.ndarray:
    """Bytes as an array that can be packed."""
    return np.frombuffer(data, np.uint8)


class Drawer:
    """Where a site has its key pair from the request for it to the one that needs it.

    That is in memory, or in a file of the site's own, which is deleted when the key is taken: under
    Flower's own node a program ends with each request, and on Ray another one may serve the next.
    """

    def __init__(self, file: Path | None) -> None:
        self._file = file
        self._own: Own | None = None

    def put(self, own: Own) -> None:
        """Keep a key pair in place of the last one."""
        if self._file is None:
            self._own = own
        else:
            with keeping(self._file, private=True) as part:
                part.write_text(own.secret)

    def take(self) -> Own | None:
        """Give the key pair away, as it serves once; None if there is none."""
        own, self._own = self._own, None
        if self._file is not None:
            with contextlib.suppress(FileNotFoundError):
                own = Own.read(self._file.read_text())
                self._file.unlink()
        return own
