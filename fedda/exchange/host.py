"""Where the server of the exchange listens: gRPC, TLS, tickets."""

import contextlib
import errno
import ipaddress
import logging
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc

from fedda.errors import ExchangeError
from fedda.exchange import tls
from fedda.exchange.desk import Desk
from fedda.exchange.groups import Group
from fedda.exchange.meeting import Meeting, Notice
from fedda.exchange.session import Session, ignore, invite

log = logging.getLogger("fedda.exchange")

TICK_S = 0.1
AGAIN_S = 0.25  # between two attempts to get a port
GRACE_S = 2.0  # for streams to end by themselves when a session is closed
SPARE = 16  # connections beyond one per participant: they are refused, but heard
LEVEL = {"refused": logging.WARNING, "ended": logging.WARNING, "cut": logging.WARNING}


class Host:
    """Where sessions listen; one at a time, unless the system chooses the port."""

    def __init__(
        self,
        bind: str = "127.0.0.1",
        port: int = 0,
        notice: Notice = ignore,
        announce: str = "",
    ) -> None:
        """Say where.

        Args:
            bind: address of this machine; 0.0.0.0 or :: for all of them, and then invitations
                name none.
            port: 0 for one that the system chooses.
            notice: told what happens (joined, cut, resumed, left, refused, ended), to which site,
                in one sentence. It is called from several threads, one at a time.
            announce: name or address that invitations give, where sites cannot use `bind`.
        """
        self._bind, self._port, self._notice, self._announce = bind, port, notice, announce

    def open(
        self, groups: Sequence[Group], *, join: float, wait: float, rejoin: float
    ) -> "RemoteSession":
        """Open a session; the arguments are those of `Meeting`.

        Another run's session may hold the port while a round of it lasts: it is waited for as long
        as for the sites.

        Raises:
            ExchangeError: the port is and stays taken, or the groups cannot be.
        """

        def notice(what: str, site: str, text: str) -> None:
            log.log(LEVEL.get(what, logging.INFO), "%s", text)
            self._notice(what, site, text)

        ends = time.monotonic() + join
        while True:
            meeting = Meeting(groups, join=join, wait=wait, rejoin=rejoin, notice=notice)
            try:
                return RemoteSession(meeting, self._bind, self._port, self._announce)
            except ExchangeError:
                if time.monotonic() > ends or not _is_free_or_taken(self._bind, self._port):
                    raise
            time.sleep(AGAIN_S)


class RemoteSession(Session):
    """A session that sites join over the network."""

    def __init__(self, meeting: Meeting, bind: str, port: int, announce: str = "") -> None:
        super().__init__(meeting)
        certificate, key = tls.fresh()
        self._desk = Desk(meeting, self._to, self._from)
        self._pool = ThreadPoolExecutor(len(meeting.sites) + SPARE, "exchange")
        self._server = grpc.server(
            self._pool,
            [_handler(self._join)],
            options=[
                *tls.options(sums.group for sums in meeting.sums.values()),
                ("grpc.so_reuseport", 0),  # a port that is taken is an error
                ("grpc.http2.min_ping_interval_without_data_ms", tls.PING_MS // 2),
            ],
            maximum_concurrent_rpcs=len(meeting.sites) + SPARE,
        )
        try:
            credentials = grpc.ssl_server_credentials([(key, certificate)])
            port = self._server.add_secure_port(tls.address(bind, port), credentials)
        except RuntimeError:
            self._server.stop(None).wait()
            self._pool.shutdown()
            raise ExchangeError(
                f"The exchange cannot listen on {tls.address(bind, port)}: wait for the end of the "
                "run, or stop the program, that uses this port, or give another (exchange.port; 0 "
                "lets the system choose)."
            ) from None
        host = announce or ("" if _is_wildcard(bind) else bind)
        self.invitations = invite(meeting, host, port, certificate.decode())
        self._tickets = {s: tls.hashed(i.ticket) for s, i in self.invitations.items()}
        self._closed = threading.Event()
        self._clock = threading.Thread(target=self._tick, name="exchange-clock", daemon=True)
        self._server.start()
        self._clock.start()

    def give_up(self, site: str) -> None:
        self._desk.give_up(site)

    def close(self) -> None:
        if self._closed.is_set():
            return
        self._closed.set()
        with self._desk.lock:
            self._end_if_early()
        self._desk.close()
        self._clock.join()
        self._server.stop(GRACE_S).wait()
        self._pool.shutdown()

    def _tick(self) -> None:
        while not self._closed.wait(TICK_S):
            self._desk.tick()

    def _join(self, incoming: Iterator[bytes], context: grpc.ServicerContext) -> Iterator[bytes]:
        shown = dict(context.invocation_metadata()).get(tls.TICKET, "")
        return self._desk.serve(tls.owner(str(shown), self._tickets), incoming)


def _handler(join: Any) -> grpc.GenericRpcHandler:
    _, service, method = tls.PATH.split("/")
    # Bytes in and out: `frames` reads them, and counts.
    handlers = {method: grpc.stream_stream_rpc_method_handler(join)}
    return grpc.method_handlers_generic_handler(service, handlers)


def _is_free_or_taken(bind: str, port: int) -> bool:
    """Whether a port that could not be had may be had later; an address of others never can."""
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
