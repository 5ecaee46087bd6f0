"""The server's end of a run's lanes: gRPC on a socket file, to which the gateway passes sites on.

Where no gateway of fedda's is, as with Flower's own SuperLink, it is a port of the run's own. A
site has one lane for its requests, and another one while it sums gradients.
"""

import json
import logging
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc

from fedda.errors import RunError, WireError
from fedda.files import put
from fedda.ops import system
from fedda.ops.address import Address
from fedda.ops.spawn import WORK

from . import invitation, parcels, tls
from .invitation import LaneInvitation
from .lane_end import CutOff, Ended, LaneEnd

log = logging.getLogger("fedda.server")

CONNECTIONS = 4096  # at a time; the gateway limits those of one address
HANDSHAKE_MS, IDLE_MS = 20_000, 10_000  # for a handshake, and for a connection without a call
GRACE_S = 2.0  # for streams to end by themselves
MOST_SAID = 10  # strangers that the log names; with more, anyone could fill disks
OPTIONS = [
    ("grpc.max_receive_message_length", parcels.MOST_FRAME),
    ("grpc.max_send_message_length", parcels.MOST_FRAME),
    ("grpc.so_reuseport", 0),  # else two runs could share a port
    # Of each stream so much may have come that nobody has taken; else it grows with the line.
    ("grpc.http2.bdp_probe", 0),
    ("grpc.http2.lookahead_bytes", parcels.PIECE),
]


class LaneHost:
    """Serves the lanes of one run; `invite` says who may come.

    Attributes:
        name: that sites call.
        certificate: the only one that they accept, in PEM.
        port: of the run's own; 0: sites come through the gateway.
    """

    def __init__(self, place: Path | Address) -> None:
        """Listen in the gateway's folder, or at an address; port 0 there is any free one.

        Raises:
            RunError: another program listens there.
        """
        self.name = invitation.new_name()
        certificate, key = tls.fresh(self.name)
        self.certificate = certificate.decode()
        self._path = place / self.name if isinstance(place, Path) else None
        # What those read who watch the gateway.
        self._work = place / f"{self.name}{WORK}" if isinstance(place, Path) else None
        self._said = ""
        # By the ticket's hash: the lane, whether a signature is the site's, and its name.
        self._known: dict[bytes, tuple[LaneEnd, Callable[[str], bool], str]] = {}
        self._strangers = 0
        most = system.connections(CONNECTIONS)
        self._pool = ThreadPoolExecutor(most, "lane")
        _, service, method = invitation.PATH.split("/")
        handlers = {method: grpc.stream_stream_rpc_method_handler(self._serve)}
        self._server = grpc.server(
            self._pool,
            [grpc.method_handlers_generic_handler(service, handlers)],
            options=[
                *OPTIONS,
                ("grpc.max_allowed_incoming_connections", most),
                ("grpc.server_handshake_timeout_ms", HANDSHAKE_MS),
                ("grpc.max_connection_idle_ms", IDLE_MS),
                # Sites ask whether the server is there. Whether they are, the gateway's system asks
                # theirs: a stopped process is late and not gone.
                ("grpc.http2.min_ping_interval_without_data_ms", tls.PING_MS // 2),
            ],
            maximum_concurrent_rpcs=most,
        )
        credentials = grpc.ssl_server_credentials([(key, certificate)])
        where = f"unix:{self._path}" if self._path else str(place)
        try:
            port = self._server.add_secure_port(where, credentials)
        except RuntimeError as error:
            raise RunError(
                f"cannot listen on {place}: stop the program that uses it, or name another address "
                "with -c run.listen=HOST:PORT"
            ) from error
        self.port = 0 if self._path else port
        self._server.start()

    def invite(
        self,
        ticket: str,
        line: LaneEnd,
        who: str,
        is_signed: Callable[[LaneInvitation, str], bool] = lambda made, said: True,
    ) -> LaneInvitation:
        """Let a site come -> its invitation.

        Args:
            ticket: the site's.
            line: takes its connections.
            who: the site, for the log.
            is_signed: whether a signature is the site's; by default the ticket is enough.
        """
        made = LaneInvitation(self.name, self.certificate, ticket, self.port)
        self._known[tls.hashed(ticket)] = line, lambda said: is_signed(made, said), who
        return made

    def invite_node(self, ticket: str, line: LaneEnd, node: Any) -> LaneInvitation:
        """Let one of Flower's nodes come, which signs with its key if the server knows that.

        Args:
            ticket: the site's.
            line: takes its connections.
            node: what Flower's server knows of it.
        """
        public = bytes(node.public_key)

        def is_own(made: LaneInvitation, said: str) -> bool:
            return not public or invitation.is_signed(public, made.claim(node.node_id), said)

        return self.invite(ticket, line, node.name or f"node {node.node_id}", is_own)

    def forget(self, ticket: str) -> None:
        """Let nobody come with this ticket any more."""
        self._known.pop(tls.hashed(ticket), None)

    def say(self, run: int, nodes: Mapping[int, str]) -> None:
        """Write down what sites work on, for those who watch the server.

        Args:
            run: Flower's number of the run.
            nodes: what each of them does, by its number.
        """
        if self._work and (text := json.dumps([run, nodes])) != self._said:
            put(self._work, text)
            self._said = text

    def close(self) -> None:
        """End all lanes: the run is over."""
        for line, *_ in self._known.values():
            line.end("The run is over.")
        self._known = {}
        self._server.stop(GRACE_S).wait()
        self._pool.shutdown(wait=False, cancel_futures=True)
        for path in filter(None, (self._path, self._work)):
            path.unlink(missing_ok=True)

    def _serve(self, incoming: Iterator[bytes], context: Any) -> Iterator[bytes]:
        about = dict(context.invocation_metadata())
        known = self._known.get(tls.hashed(str(about.get(tls.TICKET, ""))))
        if known is None or not known[1](str(about.get(invitation.SIGNATURE, ""))):
            yield self._refused(known[2] if known else "")
            return
        line, _, who = known
        number, twice = line.open(context.cancel)
        if twice:
            log.warning("%s opened a second stream; the first is closed", who)
        context.add_callback(lambda: line.lost(number))
        reader = threading.Thread(
            target=self._read, args=(line, number, incoming, context, who), daemon=True
        )
        reader.start()
        yield from line.frames(number)

    def _refused(self, who: str) -> bytes:
        what = f"{who} without its key" if who else "a stranger without a ticket of this run"
        self._strangers += 1
        if self._strangers <= MOST_SAID:
            last = self._strangers == MOST_SAID
            log.warning("%s is refused%s", what, "; further ones are not named" if last else "")
        reason = "This run knows no such ticket and key: the run may be over."
        return parcels.control(parcels.END, {"reason": reason})

    def _read(
        self, line: LaneEnd, number: int, incoming: Iterator[bytes], context: Any, who: str
    ) -> None:
        """Take all that a connection brings, until it breaks."""
        try:
            for frame in incoming:
                line.take(number, frame)
        except (CutOff, grpc.RpcError):
            pass
        except (WireError, Ended) as error:
            log.warning("the stream of %s is closed: %s", who, error)
        except Exception as error:  # a defect of fedda: no site should wait for ever
            if line.is_open(number):
                log.exception("the stream of %s failed (%s)", who, type(error).__name__)
        finally:
            line.lost(number)
            context.cancel()
