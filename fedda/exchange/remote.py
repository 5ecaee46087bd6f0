"""A site's end of the exchange, on a lane of its own to the run's program."""

from fedda.errors import ExchangeError
from fedda.exchange import frames
from fedda.exchange.groups import Invitation
from fedda.exchange.stream import Stream
from fedda.exchange.sums import Vector
from fedda.exchange.tally import Tally
from fedda.lane.dialer import Dialer
from fedda.lane.lane_end import LaneEnd

LEAVE_S = 2.0  # seconds for the server to take note that a site leaves
MAX_REASON = 1000  # characters of a server's reason that an error repeats


class RemoteStream(Stream):
    """One site's connection to a session, over the network."""

    def __init__(self, invitation: Invitation, address: str) -> None:
        super().__init__(invitation)
        self.tallies = {name: Tally() for name in self._groups}
        self._patience, self._rejoin = invitation.wait, invitation.rejoin
        self._address = address
        self._asked: dict[str, int] = {}  # by group: the sync whose sum has not come
        self._sums: dict[str, Vector] = {}  # that have come, and `receive` has not returned yet
        self._failed, self._closing = "", False
        self._line = LaneEnd(noted=self._take, most=frames.most(invitation.groups))
        self._dialer = Dialer(self._line, invitation.lane, address, self._gone, self._rejoin)
        with self._line.lock:
            self._line.lock.wait_for(lambda: self._line.met or self._failed, self._patience)
        if not self._line.met:
            self.close()
            raise ExchangeError(self._failed or self._silence())

    def close(self) -> None:
        with self._line.lock:
            self._closing = True
            leaves = self._line.connected and not self._failed
        if leaves:
            self._line.post(frames.LEAVE)
        self._dialer.close(LEAVE_S if leaves else 0.0)

    def _push(self, group: str, index: int, gradient: Vector, examples: int) -> None:
        data = frames.gradient(group, index, examples, gradient)
        self._check_open()
        self._asked[group] = index
        self._line.post(data)
        self.tallies[group].add(data)  # while the frame travels

    def _pull(self, group: str, index: int) -> Vector:
        with self._line.lock:
            self._line.lock.wait_for(
                lambda: group in self._sums or self._failed or self._closing, self._patience
            )
            if group in self._sums:
                return self._sums.pop(group)
        self._check_open()
        raise ExchangeError(self._silence())

    def _check_open(self) -> None:
        if self._failed or self._closing:
            raise ExchangeError(self._failed or "This stream of the exchange is closed.")

    def _silence(self) -> str:
        return f"The exchange gave no answer within {self._patience:g} s: see the server's log."

    # ---- called by the thread that connects ----------------------------------------------------

    def _take(self, data: frames.Note) -> None:
        down, values = frames.down(data)
        if down.WhichOneof("kind") != "sum":
            raise ExchangeError("The exchange sent a frame that is not due.")
        head = down.sum
        with self._line.lock:
            if self._asked.pop(head.group, None) != head.index:
                raise ExchangeError("The exchange sent a sum that is not due.")
            self._sums[head.group] = values
            self._line.lock.notify_all()

    def _gone(self, why: Exception) -> None:
        said, at = str(why), f"the exchange at {self._address}"
        if isinstance(why, ConnectionError) and self._line.met:
            said = (
                f"The connection to {at} broke, and could not be made again within "
                f"{self._rejoin:g} s ({why})."
            )
        elif isinstance(why, ConnectionError):
            said = f"This site cannot connect to {at} ({why}), which is its server's address."
        said = "".join(c if c.isprintable() else " " for c in said[:MAX_REASON])
        with self._line.lock:
            self._failed = said or "The exchange ended."
            self._line.lock.notify_all()
