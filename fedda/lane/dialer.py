"""The end of a lane that dials: it connects, and connects again when the connection breaks."""

import logging
import random
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc

from fedda.errors import ExchangeError, WireError
from fedda.ops import proxies
from fedda.ops.address import Address
from fedda.ops.address import address as parsed

from . import invitation, parcels, tls
from .invitation import LaneInvitation
from .lane_end import CutOff, LaneEnd

log = logging.getLogger("fedda.client")

# Seconds between two attempts to connect: at first, at most if they fail at once, and at most if
# they take long: the server is busy then, perhaps with as many sites as this one.
RETRY_S = (0.05, 1.0, 15.0)
LOCAL = "unix:"  # how the address of a socket file's folder begins
OPTIONS: list[tuple[str, Any]] = [
    ("grpc.max_receive_message_length", parcels.MOST_FRAME),
    ("grpc.max_send_message_length", parcels.MOST_FRAME),
    ("grpc.keepalive_time_ms", tls.PING_MS),
    ("grpc.keepalive_timeout_ms", tls.PING_MS),
    ("grpc.http2.ping_timeout_ms", tls.PING_MS),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),  # shares no other channel's pauses
]


class Dialer:
    """Connects one end of a lane, in a thread of its own."""

    def __init__(
        self,
        line: LaneEnd,
        invited: LaneInvitation,
        address: str,
        gone: Callable[[Exception], None],
        patience: float,
        signature: str = "",
    ) -> None:
        """Begin to connect.

        Args:
            line: the end.
            invited: the run's invitation.
            address: host:port of the server that this site dials, or unix:FOLDER of its file.
            gone: told once why there will be no connection any more; a ConnectionError: none could
                be made.
            patience: seconds without a connection after which that is so.
            signature: of this node's key, for the invitation.
        """
        self._line, self._invited, self._gone = line, invited, gone
        self._patience, self._signature = patience, signature
        local = address.startswith(LOCAL)
        self._options = [*OPTIONS, ("grpc.ssl_target_name_override", invited.name)]
        if local:
            self._address = f"{address}/{invited.name}"
            self._options.append(("grpc.enable_http_proxy", 0))
        else:
            dialled = parsed(address)
            at = Address(dialled.host, invited.port or dialled.port)
            self._address = str(at)
            self._options.append(_way(at))
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=invited.name, daemon=True)
        self._thread.start()

    def close(self, grace: float = 0.0) -> None:
        """Hang up; the other end has some seconds to do so before."""
        self._closing.set()
        if threading.current_thread() is not self._thread:
            self._thread.join(grace)
        self._line.cut()

    def _run(self) -> None:
        why: Exception = ConnectionError("closed")
        try:
            why = ConnectionError(self._connections())
        except (ExchangeError, WireError) as error:
            why = error
        except Exception as error:  # a defect of fedda: nobody should wait for ever
            log.exception("a run's stream failed")
            why = error
        finally:
            self._gone(why)

    def _connections(self) -> str:
        """Connect, again whenever a connection breaks -> why that came to nothing."""
        gone_at, pause, cause = time.monotonic() + self._patience, RETRY_S[0], "closed"
        while not self._closing.is_set():
            began = time.monotonic()
            was, cause = self._connection()
            if was:
                began = time.monotonic()
                gone_at, pause = began + self._patience, RETRY_S[0]
            wait = max(pause, min(2 * (time.monotonic() - began), RETRY_S[2]))
            if time.monotonic() + wait > gone_at:
                break
            self._closing.wait(wait * random.uniform(0.5, 1.0))  # not all sites at once
            pause = min(2 * pause, RETRY_S[1])
        return cause

    def _connection(self) -> tuple[bool, str]:
        """Read what comes until a connection ends -> whether there was one, and what ended it."""
        credentials = grpc.ssl_channel_credentials(self._invited.certificate.encode())
        about = (
            (tls.TICKET, self._invited.ticket),
            (invitation.SIGNATURE, self._signature),
        )
        was, cause = False, "the server ended it"
        with grpc.secure_channel(self._address, credentials, self._options) as channel:
            call: grpc.Call | None = None
            number, _ = self._line.open(lambda: call is not None and call.cancel())
            try:
                call = channel.stream_stream(invitation.PATH)(
                    self._line.frames(number), metadata=about
                )
                for frame in call:
                    self._line.take(number, frame)
                    was = was or self._line.connected
            except CutOff:
                cause = "closed"
            except grpc.RpcError as error:
                cause = str(error.code().name).lower().replace("_", " ")  # type: ignore[attr-defined]
            finally:
                self._line.lost(number)
        return was, cause


def _way(address: Address) -> tuple[str, Any]:
    """The proxy through which Flower's messages go, too; gRPC would know fewer variables."""
    proxy = proxies.proxy_as_named(address, tls=True)
    return ("grpc.http_proxy", proxy) if proxy else ("grpc.enable_http_proxy", 0)
