"""A site's end of the gRPC exchange.

One thread of this module owns the connection: it connects, reads what comes, and connects again
when the connection breaks, also while the site computes. A gradient is kept until its sum has come,
so that it can be sent again if the server does not have it.
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
from fedda.exchange.tally import Tally
from fedda.ops.address import Address

RETRY_S = (0.05, 1.0)  # seconds between two attempts: at first, and at most
LEAVE_S = 2.0  # seconds for the server to take note that a site leaves
MAX_REASON = 1000  # characters of a server's reason that an error repeats


class _RefusedForNow(Exception):
    """The server refuses a new connection, as it still takes the broken one for open."""


class RemoteStream(Stream):
    """One site's connection to a session, over the network."""

    def __init__(self, invitation: Invitation, host: str) -> None:
        super().__init__(invitation)
        self.tallies = {name: Tally() for name in self._groups}
        self._address = str(Address(invitation.host or host, invitation.port))
        self._certificate = invitation.certificate.encode()
        self._ticket, self._patience = invitation.ticket, invitation.wait
        self._changed = threading.Condition()
        self._received = dict.fromkeys(self._groups, 0)
        # By group: the sync and frame of the gradient whose sum has not come; and the sum that has
        # come but that `receive` has not returned yet.
        self._unanswered: dict[str, tuple[int, bytes]] = {}
        self._sums: dict[str, Vector] = {}
        self._out: queue.SimpleQueue[bytes | None] | None = None  # None: no connection
        self._call: grpc.Call | None = None
        self._rejoin: float | None = None  # seconds, as the server's first Welcome says
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
        while self._thread.is_alive():  # the server does not answer: stop waiting for it
            if self._call is not None:
                self._call.cancel()
            self._thread.join(0.1)

    def _settled(self) -> bool:
        return self._rejoin is not None or bool(self._failed)

    def _push(self, group: str, index: int, gradient: Vector, examples: int) -> None:
        data = frames.gradient(group, index, examples, gradient)
        with self._changed:
            self._check_open()
            self._unanswered[group] = (index, data)
            if self._out is not None:
                self._out.put(data)
        self.tallies[group].add(data)  # while the frame travels

    def _pull(self, group: str, index: int) -> Vector:
        with self._changed:
            done = self._changed.wait_for(
                lambda: group in self._sums or self._failed or self._closing, self._patience
            )
            if group in self._sums:
                return self._sums.pop(group)
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
        except Exception as error:  # a defect of fedda: the site must not wait for ever
            trouble = f"The exchange failed at this site ({type(error).__name__}: {error})."
        with self._changed:
            self._failed, self._out = trouble or self._failed, None
            self._changed.notify_all()

    def _connections(self) -> str:
        """Connect, again whenever a connection breaks -> why that failed; empty if all is done."""
        deadline, pause = math.inf, RETRY_S[0]
        while True:
            cause = self._connection()
            with self._changed:
                connected, self._out, self._call = self._out is not None, None, None
                done = all(self._received[n] == g.syncs for n, g in self._groups.items())
                if self._closing or done:
                    return ""
                if self._rejoin is None:
                    return (
                        f"The exchange at {self._address} cannot be reached ({cause}): this site "
                        "must be able to connect to that address (exchange.host and exchange.port)."
                    )
                if connected:
                    deadline, pause = time.monotonic() + self._rejoin, RETRY_S[0]
                if time.monotonic() + pause > deadline:
                    return (
                        f"The connection to the exchange at {self._address} broke, and could not "
                        f"be made again within {self._rejoin:g} s ({cause})."
                    )
                self._changed.wait_for(lambda: self._closing, pause)
                pause = min(2 * pause, RETRY_S[1])

    def _connection(self) -> str:
        """Connect, and read what comes until the connection ends -> what ended it."""
        out: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        credentials = grpc.ssl_channel_credentials(self._certificate)
        options = [
            *tls.options(self._groups.values()),
            ("grpc.ssl_target_name_override", tls.NAME),
            ("grpc.use_local_subchannel_pool", 1),  # shares no other channel's pauses
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
            self._take_sum(down.sum, values)
        elif kind == "welcome" and self._out is None:
            self._begin(down.welcome, out)
        elif kind == "ended":
            self._end(down.ended)
        else:
            raise ExchangeError("The exchange sent a frame that is not due.")

    def _take_sum(self, head: Sum, values: Vector) -> None:
        index, _ = self._unanswered.get(head.group, (None, b""))
        if index is None or head.index != index:
            raise ExchangeError("The exchange sent a sum that is not due.")
        self._sums[head.group] = values
        self._received[head.group] = index + 1
        del self._unanswered[head.group]

    def _begin(self, welcome: Welcome, out: queue.SimpleQueue[bytes | None]) -> None:
        """Go on from the gradients that the server has, and send again the one that it lacks."""
        taken = {position.group: position.count for position in welcome.taken}
        for name, group in self._groups.items():
            count = taken.get(name, 0)
            if not 0 <= count <= group.syncs:
                raise ExchangeError(
                    f"The exchange counts {count} gradients of this site in group '{name}', "
                    f"which cannot be: the group has {group.syncs} syncs."
                )
            if self._rejoin is None:
                self._resume(name, count)
            elif name in self._unanswered and count == self._unanswered[name][0]:
                out.put(self._unanswered[name][1])
            elif count != self._sent_so_far(name):
                raise ExchangeError(
                    f"The exchange has {count} gradients of this site in group '{name}', "
                    f"but {self._sent_so_far(name)} were sent."
                )
        rejoin = welcome.rejoin if math.isfinite(welcome.rejoin) else 0.0
        self._rejoin, self._out = min(max(rejoin, 0.0), MAX_WAIT), out

    def _resume(self, name: str, count: int) -> None:
        """Count gradients from before a restart of this site's program; their last sum is due."""
        self._sent[name] = count
        if count:
            self._due.add(name)
            self._received[name] = count - 1
            self._unanswered[name] = (count - 1, b"")

    def _sent_so_far(self, name: str) -> int:
        return self._received[name] + (name in self._unanswered)

    def _end(self, ended: Ended) -> NoReturn:
        reason = "".join(c if c.isprintable() else " " for c in ended.reason[:MAX_REASON])
        if ended.again and self._rejoin is not None:
            raise _RefusedForNow(reason)
        raise ExchangeError(reason or "The exchange ended.")
