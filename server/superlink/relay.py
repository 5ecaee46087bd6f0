"""Passes the lanes of runs through the public port: from a site to the socket file of its run.

The first bytes of a TLS connection say in clear which server is called. If that is the name of a
run's lanes, the connection goes on to the run's program as it is: what it says is between the site
and the program. All other connections are the SuperLink's.
"""

import asyncio
import contextlib
import itertools
import json
import logging
import os
import re
import selectors
import socket
import tempfile
import threading
from pathlib import Path

from fedda.lane.invitation import NAME
from fedda.ops.spawn import LANES, WORK

from .filter import Route, Traffic

log = logging.getLogger("fedda.superlink")

ROUTE = "lanes"  # among those that are counted
HANDSHAKE = 0x16  # the first byte of a TLS connection
HELLO = 4096  # bytes in which the name is
PAUSE_S = 0.01  # between two looks at half a hello
BUFFER = 2**18  # bytes that are passed on at once
KERNEL = 2**20  # bytes that the system may hold on the way to a program
CALLED = re.compile(NAME.pattern.encode())


class Relay:
    """Passes connections on, all of them in one thread; used as a `with` block.

    It sets the environment variable by which a run's program finds the folder of socket files.
    """

    def __init__(self, traffic: Traffic | None = None) -> None:
        """Count connections and bytes as a route of their own, once there are any."""
        self._traffic = traffic or Traffic()
        self._selector = selectors.DefaultSelector()
        self._new: list[tuple[socket.socket, socket.socket]] = []
        self._wake, self._woken = socket.socketpair()
        self._woken.setblocking(False)
        self._selector.register(self._woken, selectors.EVENT_READ)
        self._buffer = memoryview(bytearray(BUFFER))
        self._closed = False

    def __enter__(self) -> "Relay":
        self._folder = tempfile.TemporaryDirectory(prefix="fedda-")
        os.environ[LANES] = self._folder.name
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        os.environ.pop(LANES, None)
        self._closed = True
        self._wake.send(b"!")
        self._thread.join()
        for each in (self._wake, self._woken, self._selector):
            each.close()
        self._folder.cleanup()

    async def takes(self, connection: socket.socket, seconds: float) -> bool:
        """Take a new connection if it calls a run; else nothing was read of it.

        Raises:
            TimeoutError: it does not say whom it calls.
            OSError: it broke.
        """
        async with asyncio.timeout(seconds):
            name = _called(await _hello(connection))
        if name is None:
            return False
        with contextlib.ExitStack() as failed:
            failed.enter_context(connection)
            program = failed.enter_context(socket.socket(socket.AF_UNIX))
            program.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, KERNEL)
            program.setblocking(False)
            with contextlib.suppress(OSError):  # the run is over: the site will hear no more
                program.connect(str(Path(self._folder.name) / name))
                failed.pop_all()
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.route.requests += 1
                self._new.append((connection, program))
                self._wake.send(b"!")
        return True

    @property
    def route(self) -> Route:
        return self._traffic.routes[ROUTE]

    def working(self) -> dict[int, tuple[str, int]]:
        """What each site works on, as the runs' programs say: the kind of its request, the run."""
        found: dict[int, tuple[str, int]] = {}
        for file in Path(self._folder.name).glob(f"*{WORK}"):
            with contextlib.suppress(OSError, ValueError):
                run, nodes = json.loads(file.read_text())
                found |= {int(node): (str(kind), int(run)) for node, kind in nodes.items()}
        return found

    def _run(self) -> None:
        while not self._closed:
            for key, _ in self._selector.select():
                if key.data is None:
                    with contextlib.suppress(BlockingIOError):
                        self._woken.recv(BUFFER)
                    while self._new:
                        _Pair(self, *self._new.pop()).begin()
                    continue
                try:
                    key.data.turn(key.fileobj)
                except OSError:
                    key.data.close()
        for key in [*self._selector.get_map().values()]:
            if key.data is not None:
                key.data.close()
        for each in itertools.chain(*self._new):
            each.close()


class _Pair:
    """A site's connection, and the one to its run's program."""

    def __init__(self, relay: Relay, site: socket.socket, program: socket.socket) -> None:
        self._relay, self._other = relay, {site: program, program: site}
        self._site = site
        self._left: dict[socket.socket, bytes] = {}  # what a connection has yet to take
        self._over: set[socket.socket] = set()  # that bring no more

    def begin(self) -> None:
        for each in self._other:
            self._relay._selector.register(each, selectors.EVENT_READ, self)

    def turn(self, each: socket.socket) -> None:
        """Do what is possible with a connection."""
        if each in self._left:
            self._send(each, memoryview(self._left.pop(each)))
        other = self._other[each]
        if other not in self._left and each not in self._over:
            with contextlib.suppress(BlockingIOError):
                size = each.recv_into(self._relay._buffer)
                if each is self._site:
                    self._relay.route.bytes_in += size
                else:
                    self._relay.route.bytes_out += size
                if not size:
                    self._over.add(each)
                self._send(other, self._relay._buffer[:size])
        if len(self._over) == len(self._other):
            self.close()
        else:
            self._watch(each)
            self._watch(other)

    def _send(self, to: socket.socket, data: memoryview) -> None:
        sent = 0
        with contextlib.suppress(BlockingIOError):
            while sent < len(data):
                sent += to.send(data[sent:])
        if sent < len(data):
            self._left[to] = bytes(data[sent:])
        elif self._other[to] in self._over:
            to.shutdown(socket.SHUT_WR)

    def _watch(self, each: socket.socket) -> None:
        """Wait for what a connection can do next."""
        reads = self._other[each] not in self._left and each not in self._over
        events = selectors.EVENT_READ * reads | selectors.EVENT_WRITE * (each in self._left)
        selector = self._relay._selector
        try:
            key = selector.get_key(each)
        except KeyError:
            if events:
                selector.register(each, events, self)
            return
        if not events:
            selector.unregister(each)
        elif key.events != events:
            selector.modify(each, events, self)

    def close(self) -> None:
        for each in self._other:
            with contextlib.suppress(KeyError, ValueError):
                self._relay._selector.unregister(each)
            each.close()


async def _hello(connection: socket.socket) -> bytes:
    """The first bytes of a connection, which stay there."""
    loop = asyncio.get_running_loop()
    while True:
        ready = asyncio.Event()
        loop.add_reader(connection, ready.set)
        try:
            await ready.wait()
        finally:
            loop.remove_reader(connection)
        seen = connection.recv(HELLO, socket.MSG_PEEK)
        whole = 5 + int.from_bytes(seen[3:5])  # of a TLS record
        if seen[:1] != bytes([HANDSHAKE]) or len(seen) >= min(whole, HELLO):
            return seen
        await asyncio.sleep(PAUSE_S)


def _called(hello: bytes) -> str | None:
    """The run's lanes that a connection calls; None: none."""
    found = CALLED.search(hello) if hello[:1] == bytes([HANDSHAKE]) else None
    return None if found is None else found[0].decode()
