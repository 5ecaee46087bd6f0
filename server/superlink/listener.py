"""Limits on the connections of the public listener, so that strangers cannot use them up.

Everything here happens before a caller is known: how many connections there are, from one address
and in all, how long a TLS handshake, the head and the body of a request may take, and how large a
head may be.
"""

import asyncio
import ipaddress
import logging
import socket
import time
import weakref
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

PER_ADDRESS, IN_ALL = 256, 4096
HANDSHAKE_S = 10.0
GOODBYE_S = 5.0  # for the other side to answer that a TLS connection ends
HEAD_S = 10.0
HEAD_BYTES = 2**14
STALL_S, STALL_BYTES = 20.0, 2**14  # a body brings this many bytes, or its end, in each such time
# Seconds idle until it asks, seconds between two questions, and how many stay without an answer.
KEEP_ALIVE = {"TCP_KEEPIDLE": 15, "TCP_KEEPINTVL": 5, "TCP_KEEPCNT": 4}
SAY_S = 60.0  # between two lines of the console about connections that were closed
LOOK_S = 2.0  # between two looks at a connection's time

CONNECTION = "fedda.connection"  # in a request's scope: the connection that it came on

# What strangers send is not worth a line each; only exceptions of our own are.
log = logging.getLogger("fedda.superlink.public")
log.setLevel(logging.ERROR)


@dataclass(frozen=True)
class ListenerLimits:
    """How many connections the public listener keeps at a time, in all and from one address."""

    in_all: int = IN_ALL
    per_address: int | None = None  # None: a quarter of all, and no more than `PER_ADDRESS`

    def within(self, most: int) -> "ListenerLimits":
        """The limits where the system allows so many connections; both are given."""
        from_one = self.per_address or max(1, min(PER_ADDRESS, most // 4))
        return ListenerLimits(most, min(from_one, most))


class Listener(socket.socket):
    """A listening socket that closes the connections beyond its limits at once."""

    limits = ListenerLimits().within(IN_ALL)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.open: Counter[str] = Counter()
        self.refused = 0
        self._last = ("", False)  # the address that was refused last, and if not for itself
        self._said, self._next = 0, 0.0  # how many refusals the console knows, when it hears again

    def accept(self) -> tuple[socket.socket, Any]:
        """Take the next connection.

        Raises:
            BlockingIOError: there is none, or it was one too many.
        """
        taken, address = super().accept()
        group = neighbours(address[0])
        full = self.open.total() >= self.limits.in_all
        if full or self.open[group] >= (self.limits.per_address or self.limits.in_all):
            taken.close()
            self.refused += 1
            self._last = group, full
            # To asyncio it looks as if nobody had called, so it turns to other work first.
            raise BlockingIOError
        self.open[group] += 1
        _ask_if_there(taken)
        kind = (taken.family, taken.type, taken.proto)
        return _Counted(*kind, taken.detach(), self._leave, group), address

    def news(self) -> list[str]:
        """What the console is to say of connections that were closed: once a minute."""
        new, now = self.refused - self._said, time.monotonic()
        if not new or now < self._next:
            return []
        self._said, self._next = self.refused, now + SAY_S
        address, full = self._last
        why = f"one address may have {self.limits.per_address} at a time; --address-connections"
        if full:
            why = f"there may be {self.limits.in_all} in all; --connections, or the system's limit "
            why += "of open files,"
        return [
            f"{new} connection{'s were' if new > 1 else ' was'} closed at once, the last from "
            f"{address}: {why} allows more"
        ]

    def _leave(self, group: str) -> None:
        self.open[group] -= 1
        if not self.open[group]:
            del self.open[group]


class _Counted(socket.socket):
    """A connection that is counted until it is closed."""

    def __init__(
        self, family: int, kind: int, proto: int, fileno: int, leave: Any, group: str
    ) -> None:
        super().__init__(family, kind, proto, fileno)
        self._gone = weakref.finalize(self, leave, group)

    def close(self) -> None:
        super().close()
        self._gone()  # acts only once


def _ask_if_there(connection: socket.socket) -> None:
    """Let the system ask an idle other side whether it is there, and break the connection if not.

    A stopped process's system answers for it; a machine without power does not.
    """
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in KEEP_ALIVE.items():
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


def neighbours(address: str) -> str:
    """The addresses that one caller commands: one of IPv4, or the last 64 bits of IPv6."""
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        if ip.ipv4_mapped is None:
            return str(ipaddress.ip_network((int(ip) >> 64 << 64, 64)))
        ip = ip.ipv4_mapped
    return str(ip)


Takes = Callable[[socket.socket, float], Awaitable[bool]]


class Loop(asyncio.SelectorEventLoop):
    """asyncio's event loop, which waits only `HANDSHAKE_S` for a TLS handshake.

    Attributes:
        takes: takes a new connection of the public listener, or leaves it as it is.
    """

    takes: Takes | None = None

    async def _accept_connection2(self, factory: Any, connection: Any, *args: Any) -> None:
        if self.takes is not None and isinstance(connection, _Counted):
            try:
                if await self.takes(connection, HANDSHAKE_S):
                    return
            except (OSError, TimeoutError):
                connection.close()
                return
        await super()._accept_connection2(factory, connection, *args)  # type: ignore[misc]

    async def create_server(self, *args: Any, **options: Any) -> Any:
        if options.get("ssl") is not None:
            options.setdefault("ssl_handshake_timeout", HANDSHAKE_S)
            options.setdefault("ssl_shutdown_timeout", GOODBYE_S)
        return await super().create_server(*args, **options)


class Protocol(HttpToolsProtocol):
    """uvicorn's protocol, with limits on the time of each request and on the size of its head."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.logger = log
        self._phase = "head"  # what is awaited: a head, a body or an answer
        self._since = self.loop.time()
        self._arrived = 0  # bytes since then
        self._head = 0  # bytes of the head as far as it was parsed
        self._left = 0  # bytes of an answer that the caller had not taken at the last look
        self._timer: asyncio.TimerHandle | None = None

    @property
    def is_open(self) -> bool:
        """Whether the other side can still be reached, as far as the system knows."""
        return self.transport is not None and not self.transport.is_closing()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._look()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._phase == "answer" and self.cycle.response_complete:
            self._enter("head")
        self._arrived += len(data)
        super().data_received(data)
        # The parser keeps a line that does not end, so bytes that are not parsed yet count as well.
        if self._phase == "head" and self._arrived > HEAD_BYTES:
            self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[CONNECTION] = self  # type: ignore[typeddict-unknown-key]
        self._head = 0
        if self._phase != "head":
            self._enter("head")

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._enter("body")

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._enter("answer")

    def _unsupported_upgrade_warning(self) -> None:
        pass  # one more of the messages that strangers could cause

    def _enter(self, phase: str) -> None:
        self._phase, self._since, self._arrived, self._left = phase, self.loop.time(), 0, 0

    def _count(self, size: int) -> None:
        self._head += size
        if self._head > HEAD_BYTES:
            raise ValueError("the head of a request is too long")  # the parser answers 400

    def _look(self) -> None:
        """Look again and again whether the other side takes too long."""
        now, left = self.loop.time(), self.transport.get_write_buffer_size()
        waited = now - self._since
        if self._phase == "head":
            if waited > HEAD_S:
                self.transport.abort()
        elif waited > STALL_S:
            stalls = self._phase == "body" and not self.flow.read_paused
            if (stalls and self._arrived < STALL_BYTES) or 0 < self._left <= left:
                self.transport.abort()
            self._since, self._arrived, self._left = now, 0, left
        self._timer = self.loop.call_later(LOOK_S, self._look)
