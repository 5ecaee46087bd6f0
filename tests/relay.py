"""A TCP relay on loopback that a test can cut, or let fall silent."""

import contextlib
import socket
import struct
import threading
from typing import Self


class Relay:
    """Passes bytes between whoever connects to `port` and a server on this machine."""

    def __init__(self, server: int) -> None:
        self._server = server
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._threads: list[threading.Thread] = []
        self._silent = threading.Event()
        self._forgotten: list[socket.socket] = []
        self._closed = False
        self.connections = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._start(self._accept)

    def cut(self) -> None:
        """Reset every connection, as when a router forgets it."""
        for pair in self._pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                    end.shutdown(socket.SHUT_RDWR)
        self._pairs.clear()

    def forget(self) -> None:
        """Close the site's end of every connection, but not the server's, which notices nothing."""
        self._forgotten += [far for _, far in self._pairs]
        for near, _ in self._pairs:
            with contextlib.suppress(OSError):
                near.shutdown(socket.SHUT_RDWR)
        self._pairs.clear()

    def remember(self) -> None:
        """Close the server's ends that `forget` left open."""
        for far in self._forgotten:
            with contextlib.suppress(OSError):
                far.shutdown(socket.SHUT_RDWR)

    def fall_silent(self) -> None:
        """Drop all data from now on, but close no connection."""
        self._silent.set()

    def close(self) -> None:
        """Cut all connections and accept no more."""
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()
        self.remember()
        for thread in self._threads:
            thread.join(5)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, work: object, *args: socket.socket) -> None:
        thread = threading.Thread(target=work, args=args, daemon=True)  # pyright: ignore
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while not self._closed:
                near, _ = self._listener.accept()
                self.connections += 1
                try:
                    far = socket.create_connection(("127.0.0.1", self._server))
                except OSError:
                    near.close()
                    continue
                self._pairs.append((near, far))
                self._start(self._pass_on, near, far)
                self._start(self._pass_on, far, near)

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                if self._silent.is_set():
                    continue
                try:
                    other.sendall(data)
                except OSError:
                    if one not in self._forgotten:  # else its server must notice nothing
                        break
        for end in (one, other):  # the first thread to end wakes the other
            with contextlib.suppress(OSError):
                if end not in self._forgotten:
                    end.shutdown(socket.SHUT_RDWR)
        one.close()
