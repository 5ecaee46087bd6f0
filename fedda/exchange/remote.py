"""A site's end of the gRPC exchange.

One thread of this module owns the connection: it dials, reads what comes, and dials again when the
connection breaks, also while the site computes. A gradient is kept until its sum has come, so that
it can be sent again where the server does not have it.
"""

import math
import queue
import threading
import time
from typing import NoReturn

import grpc

from fedda.errors import ExchangeError
from fedda.exchange import frames, tls
from fedda.exchange.exchange_pb2 import Ended, Hello, Position, Sum, Up, Welcome
from fedda.exchange.groups import MAX_WAIT, Invitation
from fedda.exchange.stream import Stream
from fedda.exchange.sums import Vector

AGAIN_S = (0.05, 1.0)  # seconds between two attempts: at first, and at most
LEAVE_S = 2.0  # for the server to take note that a site leaves
MAX_REASON = 1000  # characters of what a server says


class _RefusedForNow(Exception):
    """The server still takes the broken connection for open."""


class RemoteStream(Stream):
    """A site's way into a session, over the network."""

    def __init__(self, invitation: Invitation, host: str) -> None:
        super().__init__(invitation)
        self._address = tls.address(invitation.host or host, invitation.port)
        self._certificate = invitation.certificate.encode()
        self._ticket, self._patience = invitation.ticket, invitation.wait
        self._changed = threading.Condition()
        self._received = dict.fromkeys(self._groups, 0)
        self._kept: dict[str, tuple[int, bytes]] = {}  # by group, the frame whose sum is due
        self._arrived: dict[str, Vector] = {}
        self._out: queue.SimpleQueue[bytes | None] | None = None  # None: no connection
        self._call: grpc.Call | None = None
        self._rejoin: float | None = None  # seconds, from the server's first welcome
        self._failed = ""
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="exchange", daemon=True)
        self._thread.start()
        with self._changed:
            in_time = self._changed.wait_for(self._settled, self._patience)
        if self._failed or not in_time:
            self.close()
            raise ExchangeError(self._failed or self._silence())

    def close(self) -> None:
        with self._changed:
            self._closing = True
            if self._out is not None:
                self._out.put(frames.LEAVE)
                self._out.put(None)
            elif self._call is not None:
                self._call.cancel()
            self._changed.notify_all()
        self._thread.join(LEAVE_S)
        while self._thread.is_alive():  # the server does not answer: do not wait for it
            if self._call is not None:
                self._call.cancel()
            self._thread.join(0.1)

    def _settled(self) -> bool:
        return self._rejoin is not None or bool(self._failed)

    def _push(self, group: str, index: int, gradient: Vector, examples: int) -> None:
        data = frames.gradient(group, index, examples, gradient)
        with self._changed:
            self._check_open()
            self._kept[group] = (index, data)
            if self._out is not None:
                self._out.put(data)

    def _pull(self, group: str, index: int) -> Vector:
        with self._changed:
            done = self._changed.wait_for(
                lambda: group in self._arrived or self._failed or self._closing, self._patience
            )
            if group in self._arrived:
                return self._arrived.pop(group)
            self._check_open()
            assert not done
            raise ExchangeError(self._silence())

    def _check_open(self) -> None:
        if self._failed or self._closing:
            raise ExchangeError(self._failed or "This stream of the exchange is closed.")

    def _silence(self) -> str:
        return (
            f"The exchange at {self._address} gave no answer within {self._patience:g} s: "
            "see the server's log."
        )

    # ---- the thread that owns the connection ---------------------------------------------------

    def _run(self) -> None:
        trouble = ""
        try:
            trouble = self._connections()
        except ExchangeError as error:
            trouble = str(error)
        except Exception as error:  # a defect of ours: the site must not wait for ever
            trouble = f"The exchange failed at this site ({type(error).__name__}: {error})."
        with self._changed:
            self._failed, self._out = trouble or self._failed, None
            self._changed.notify_all()

    def _connections(self) -> str:
        """One connection after the other -> why there is none any more; empty if all is well."""
        give_up, pause = math.inf, AGAIN_S[0]
        while True:
            why = self._connection()
            with self._changed:
                was_up, self._out, self._call = self._out is not None, None, None
                done = all(self._received[n] == g.syncs for n, g in self._groups.items())
                if self._closing or done:
                    return ""
                if self._rejoin is None:
                    return (
                        f"The exchange at {self._address} cannot be reached ({why}): this site "
                        "must be able to dial that address (exchange.host and exchange.port)."
                    )
                if was_up:
                    give_up, pause = time.monotonic() + self._rejoin, AGAIN_S[0]
                if time.monotonic() + pause > give_up:
                    return (
                        f"The connection to the exchange at {self._address} broke, and could not "
                        f"be made again within {self._rejoin:g} s ({why})."
                    )
                self._changed.wait_for(lambda: self._closing, pause)
                pause = min(2 * pause, AGAIN_S[1])

    def _connection(self) -> str:
        """Dial, and read what comes until the connection ends -> what ended it."""
        out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        credentials = grpc.ssl_channel_credentials(self._certificate)
        options = [
            *tls.options(self._groups.values()),
            ("grpc.ssl_target_name_override", tls.NAME),
            ("grpc.use_local_subchannel_pool", 1),  # no other channel's waiting times
        ]
        with grpc.secure_channel(self._address, credentials, options) as channel:
            with self._changed:
                if self._closing:
                    return "closed"
                counts = self._received.items() if self._rejoin is not None else ()
                received = [Position(group=name, count=count) for name, count in counts]
                out.put(Up(hello=Hello(received=received)).SerializeToString())
                call = channel.stream_stream(tls.PATH)(
                    iter(out.get, None), metadata=((tls.TICKET, self._ticket),)
                )
                self._call = call
            try:
                for data in call:
                    with self._changed:
                        self._take(data, out)
                        self._changed.notify_all()
                return "the server ended it"
            except _RefusedForNow as error:
                return str(error)
            except grpc.RpcError:
                return str(call.code().name).lower().replace("_", " ")
            finally:
                out.put(None)

    def _take(self, data: bytes, out: queue.SimpleQueue[bytes | None]) -> None:
        down, values = frames.down(data)
        kind = down.WhichOneof("kind")
        if kind == "sum" and self._out is not None:
            self._arrive(down.sum, values)
        elif kind == "welcome" and self._out is None:
            self._begin(down.welcome, out)
        elif kind == "ended":
            self._end(down.ended)
        else:
            raise ExchangeError("The exchange sent a frame that is not due.")

    def _arrive(self, found: Sum, values: Vector) -> None:
        index, _ = self._kept.get(found.group, (None, b""))
        if index is None or found.index != index:
            raise ExchangeError("The exchange sent a sum that is not due.")
        self._arrived[found.group] = values
        self._received[found.group] = index + 1
        del self._kept[found.group]

    def _begin(self, welcome: Welcome, out: queue.SimpleQueue[bytes | None]) -> None:
        """Go on where server and site agree that they were."""
        taken = {position.group: position.count for position in welcome.taken}
        for name, group in self._groups.items():
            there = taken.get(name, 0)
            if not 0 <= there <= group.syncs:
                raise ExchangeError("The exchange counts gradients that cannot be.")
            if self._rejoin is None:
                self._adopt(name, there)
            elif name in self._kept and there == self._kept[name][0]:
                out.put(self._kept[name][1])
            elif there != self._sent_so_far(name):
                raise ExchangeError(
                    f"The exchange has {there} gradients of this site in group '{name}', "
                    f"but {self._sent_so_far(name)} were sent."
                )
        rejoin = welcome.rejoin if math.isfinite(welcome.rejoin) else 0.0
        self._rejoin, self._out = min(max(rejoin, 0.0), MAX_WAIT), out

    def _adopt(self, name: str, there: int) -> None:
        """Where this site's program began anew: the last sum is still to be received."""
        self._sent[name] = there
        if there:
            self._due.add(name)
            self._received[name] = there - 1
            self._kept[name] = (there - 1, b"")

    def _sent_so_far(self, name: str) -> int:
        return self._received[name] + (name in self._kept)

    def _end(self, ended: Ended) -> NoReturn:
        said = "".join(c if c.isprintable() else " " for c in ended.reason[:MAX_REASON])
        if ended.again and self._rejoin is not None:
            raise _RefusedForNow(said)
        raise ExchangeError(said or "The exchange ended.")
