"""The server's end of the gRPC exchange: it listens with TLS and admits sites by their tickets."""

import contextlib
import errno
import ipaddress
import logging
import os
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from fedda.errors import ExchangeError
from fedda.exchange import tls
from fedda.exchange.connections import Connections
from fedda.exchange.groups import Group
from fedda.exchange.meeting import Meeting, Notice
from fedda.exchange.outliers import Outliers
from fedda.exchange.session import Session, ignore, invite
from fedda.exchange.tally import Tally
from fedda.ops import system
from fedda.ops.address import Address
from fedda.ops.spawn import RESERVED

log = logging.getLogger("fedda.exchange")

TICK_S = 0.1
RETRY_S = 0.25  # between two attempts to get a port
GRACE_S = 2.0  # for streams to end by themselves when a session is closed
CONNECTIONS = 1024  # at a time, with those of strangers
HANDSHAKE_MS = 5_000
IDLE_MS = 10_000  # for a connection without a call; a site's call lasts as long as the session
SPARE = 16  # calls beyond one per site, so that strangers are told that they are refused
LOG_LEVELS = {"refused": logging.WARNING, "ended": logging.WARNING, "cut": logging.WARNING}


class Host:
    """Opens sessions that sites join over the network.

    Only one session at a time can be open, unless the system chooses the port.
    """

    def __init__(
        self,
        bind: str = "127.0.0.1",
        port: int = 0,
        notice: Notice = ignore,
        announce: str | None = None,
    ) -> None:
        """Set where sessions listen.

        Args:
            bind: this machine's address to listen on; 0.0.0.0 or :: for all its addresses.
            port: to listen on; 0: the system chooses one.
            notice: called with each event (joined, cut, resumed, left, refused, ended), its site
                and a sentence about it; from several threads, one at a time.
            announce: the host name or address in invitations; None: it is `bind`. If it is empty or
                stands for all addresses, invitations name no host: sites use that of the server.
        """
        self._bind, self._port, self._notice, self._announce = bind, port, notice, announce

    def open(
        self,
        groups: Sequence[Group],
        *,
        join: float,
        wait: float,
        rejoin: float,
        outliers: Outliers | None = None,
    ) -> "RemoteSession":
        """Open a session; the arguments are those of `Meeting`.

        Another run's session may hold the port during a round. This waits for the port as long as
        for the sites.

        Raises:
            ExchangeError: the port stays taken, the address is not this machine's, or the groups
                are not valid.
        """

        def notice(what: str, site: str, text: str) -> None:
            log.log(LOG_LEVELS.get(what, logging.INFO), "%s", text)
            self._notice(what, site, text)

        deadline = time.monotonic() + join
        while True:
            meeting = Meeting(
                groups, join=join, wait=wait, rejoin=rejoin, notice=notice, outliers=outliers
            )
            try:
                return RemoteSession(meeting, self._bind, self._port, self._announce)
            except ExchangeError:
                if time.monotonic() > deadline or not _may_become_free(self._bind, self._port):
                    raise
            time.sleep(RETRY_S)


class RemoteSession(Session):
    """A session that sites join over the network."""

    def __init__(self, meeting: Meeting, bind: str, port: int, announce: str | None = None) -> None:
        super().__init__(meeting)
        certificate, key = tls.fresh()
        self._connections = Connections(meeting, self._bytes_to, self._bytes_from)
        self._pool = ThreadPoolExecutor(len(meeting.sites) + SPARE, "exchange")
        self._server = grpc.server(
            self._pool,
            [_handler(self._join)],
            options=[
                *tls.options(sums.group for sums in meeting.sums.values()),
                ("grpc.so_reuseport", int(RESERVED in os.environ)),  # else a taken port is an error
                ("grpc.http2.min_ping_interval_without_data_ms", tls.PING_MS // 2),
                # Strangers: as many as may be, and not for long. gRPC cannot limit them by address.
                ("grpc.max_allowed_incoming_connections", system.connections(CONNECTIONS)),
                ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
                ("grpc.max_connection_idle_ms", IDLE_MS),
            ],
            maximum_concurrent_rpcs=len(meeting.sites) + SPARE,
        )
        try:
            credentials = grpc.ssl_server_credentials([(key, certificate)])
            port = self._server.add_secure_port(str(Address(bind, port)), credentials)
        except RuntimeError:
            self._server.stop(None).wait()
            self._pool.shutdown()
            raise ExchangeError(
                f"The exchange cannot listen on {Address(bind, port)!s}: wait for the run that "
                "uses this port to end, stop the program that uses it, or give another address or "
                "port (exchange.bind, exchange.port; with port 0 the system chooses)."
            ) from None
        host = bind if announce is None else announce
        host = "" if _is_wildcard(host) else host
        self.invitations = invite(meeting, host, port, certificate.decode())
        self._tickets = {s: tls.hashed(i.ticket) for s, i in self.invitations.items()}
        self._closed = threading.Event()
        self._clock = threading.Thread(target=self._tick, name="exchange-clock", daemon=True)
        self._server.start()
        self._clock.start()

    def tallies(self) -> Mapping[tuple[str, str], Tally]:
        return self._connections.tallies()

    def give_up(self, site: str) -> None:
        self._connections.give_up(site)

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        with self._connections.lock:
            self._end_if_early()
        self._connections.close()
        self._clock.join()
        self._server.stop(GRACE_S).wait()
        self._pool.shutdown()

    def _tick(self) -> None:
        while not self._closed.wait(TICK_S):
            self._connections.tick()

    def _join(self, incoming: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        ticket = dict(context.invocation_metadata()).get(tls.TICKET, "")
        return self._connections.serve(tls.owner(str(ticket), self._tickets), incoming)


def _handler(join: Any) -> grpc.GenericRpcHandler:
    _, service, method = tls.PATH.split("/")
    # gRPC passes plain bytes, so that `frames` reads them and their length can be counted.
    handlers = {method: grpc.stream_stream_rpc_method_handler(join)}
    return grpc.method_handlers_generic_handler(service, handlers)


def _may_become_free(bind: str, port: int) -> bool:
    """Whether another attempt at a port may succeed; none does at another machine's address."""
    family = socket.AF_INET6 if ":" in bind else socket.AF_INET
    try:
        socket.create_server((bind, port), family=family).close()
    except OSError as error:
        return error.errno == errno.EADDRINUSE
    return True


def _is_wildcard(bind: str) -> bool:
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(bind).is_unspecified
    return False
