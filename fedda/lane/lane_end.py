"""One end of a lane: what is on its way to and from the other end, over any number of connections.

Both ends keep each message until the other has it whole. When a connection breaks, the next one
begins with what each end has, and every message goes on at the byte where it stopped. The newest
connection counts: only its owner has the ticket, and its old one may seem open for long.
"""

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from flwr.app import Message

from fedda.errors import ExchangeError, WireError

from . import parcels
from .parcels import Frame, Incoming, Outgoing
from .posts import Posts

REMEMBERED = 256  # names of messages that came whole, as the other end may ask after a break


class CutOff(Exception):
    """This connection is over; another may follow."""


class Ended(ExchangeError):
    """The other end says why it ended the connection, for good."""


def _never(*_: Any) -> Any:
    raise WireError("a frame came that is not due")


class LaneEnd:
    """One end of a lane.

    Attributes:
        connected: whether there is a connection, and both ends have said what they have.
        since: when that last changed, on the monotonic clock.
        heard: when the last frame came.
        partial: the message that is coming.
    """

    def __init__(
        self,
        admit: Callable[[Incoming, Callable[[], bool]], bool] = _never,
        came: Callable[[Incoming], None] = _never,
        sent: Callable[[str], None] = lambda _: None,
        anew: Callable[[], None] = lambda: None,
        noted: Callable[[memoryview | bytes], None] = _never,
        most: int = 0,
    ) -> None:
        """Prepare for connections.

        Args:
            admit: says of a message that begins whether its arrays are kept; it may wait, but not
                longer than its second argument says that the connection is open.
            came: takes a message that came whole.
            sent: is told the name of a message that the other end has whole.
            anew: called when another process of the other end takes its place.
            noted: takes a note that came whole.
            most: bytes that such a note may have.
        """
        self.lock = threading.Condition()
        self.connected, self.since, self.heard = False, time.monotonic(), time.monotonic()
        self.partial: Incoming | None = None
        self._admit, self._came, self._sent, self._anew = admit, came, sent, anew
        self._posts, self._noted = Posts(most), noted
        self._last_words: Frame | None = None
        self._out: dict[str, Outgoing] = {}  # in order
        self._control: deque[Frame] = deque()
        self._whole: deque[str] = deque(maxlen=REMEMBERED)
        self._me, self._other = secrets.token_hex(8), ""
        self._open, self._last = 0, 0  # the number of the open connection, of the last one
        self._going = False  # whether `partial` has begun, or gone on, in this connection
        self._said_all = False  # whether the last words of this connection are sent
        self._hang_up: Callable[[], Any] = lambda: None

    def send(self, message: Message, name: str) -> int:
        """Send a message, now or once there is a connection -> bytes of its arrays."""
        outgoing = Outgoing.of(message, name)
        with self.lock:
            self._out[name] = outgoing
            self.lock.notify_all()
        return outgoing.size

    def post(self, note: bytes) -> None:
        """Send a note before all messages, now or once there is a connection."""
        with self.lock:
            self._posts.add(note)
            self.lock.notify_all()

    def is_sent(self, name: str) -> bool:
        """Whether the other end has a message whole."""
        return name not in self._out

    def drop(self, name: str) -> None:
        """Send no more of a message, if nothing of it was sent yet."""
        with self.lock:
            found = self._out.get(name)
            if found is not None and not found.begun:
                del self._out[name]

    def forget(self) -> str:
        """Free the half of a message whose connection broke -> its reply's request, or ""."""
        with self.lock:
            partial = None if self.connected else self.partial
            if partial is None or not partial.keeps:
                return ""
            partial.forget()
            self.partial = None
            return partial.answers

    def end(self, reason: str) -> None:
        """Let this be the last frame of a connection, after the notes on their way."""
        with self.lock:
            self._last_words = parcels.control(parcels.END, {"reason": reason})
            self._out.clear()
            self.lock.notify_all()

    @property
    def met(self) -> bool:
        """Whether both ends have ever heard of each other."""
        return bool(self._other)

    @property
    def is_silent(self) -> bool:
        """Whether no connection has anything left to send."""
        return not self._open or self._said_all

    def cut(self) -> None:
        """Break the open connection."""
        self._hang_up()

    # ---- a connection --------------------------------------------------------------------------

    def open(self, hang_up: Callable[[], Any]) -> tuple[int, bool]:
        """A new connection takes the place of an open one -> its number, and if there was one.

        Args:
            hang_up: ends it.
        """
        with self.lock:
            before, was, old = self._hang_up, bool(self._open), self._open
            self._last += 1
            self._open, self._hang_up = self._last, hang_up
            self._control.clear()
            self._going = self._said_all = False
            self.heard = time.monotonic()
            self._turn(False)
        if was and old:
            before()
        return self._last, was

    def lost(self, number: int) -> None:
        """A connection is over."""
        with self.lock:
            if number == self._open:
                self._open = 0
                self._turn(False)

    def is_open(self, number: int) -> bool:
        """Whether a connection is still the one that counts."""
        return number == self._open

    def _turn(self, connected: bool) -> None:
        self.connected, self.since = connected, time.monotonic()
        self.lock.notify_all()

    def frames(self, number: int) -> Iterator[Frame]:
        """What a connection sends, until it is over."""
        with self.lock:
            partial = self.partial and [self.partial.name, self.partial.got]
            whole, notes = [*self._whole], self._posts.came
            hello = {"me": self._me, "whole": whole, "partial": partial, "notes": notes}
            hello["you"] = self._other  # of whom that is said
        yield parcels.control(parcels.HELLO, hello)
        while (frame := self._next(number)) is not None:
            yield frame
            if frame[0] == parcels.END:
                return

    def _next(self, number: int) -> Frame | None:
        with self.lock:
            while number == self._open:
                if self._control:
                    return self._control.popleft()
                if self.connected and (frame := self._posts.next()) is not None:
                    return frame
                if self._last_words and (self.connected or not self._posts.waiting):
                    self._said_all = True
                    return self._last_words
                for each in self._out.values() if self.connected else ():
                    if (frame := each.next()) is not None:
                        return frame
                self.lock.wait()
        return None

    def take(self, number: int, frame: Frame) -> None:
        """Take what a connection brings.

        Raises:
            CutOff: it is over.
            Ended: the other end ends it.
            WireError: the frame is not due, or cannot be read.
        """
        kind = frame[0] if frame else 0
        with self.lock:
            if number != self._open:
                raise CutOff
            self.heard = time.monotonic()
            due = self.connected or kind in (parcels.HELLO, parcels.END)
            if not due or (self.connected and kind == parcels.HELLO):
                kind = 0
            if kind == parcels.PART:
                self._part(memoryview(frame)[1:])
            note = self._posts.take(frame) if kind == parcels.NOTE else None
            if self._posts.owes:
                self.lock.notify_all()
        match kind:
            case parcels.NOTE:
                if note is not None:
                    self._noted(note)
            case parcels.PART:
                self._finish()
            case parcels.BEGIN:
                self._begin(number, frame)
            case parcels.WHOLE:
                self._arrived(parcels.told(frame))
            case parcels.HELLO:
                self._hello(parcels.told(frame))
            case parcels.END:
                about = parcels.told(frame)
                about = about if isinstance(about, dict) else {}
                raise Ended(str(about.get("reason", ""))[:1000])
            case _:
                raise WireError("a frame came that is not due")

    def _part(self, piece: memoryview) -> None:
        if self.partial is None or not self._going:
            raise WireError("a piece came that belongs to no message")
        self.partial.take(piece)

    def _begin(self, number: int, frame: Frame) -> None:
        start = 1 + parcels.OFFSET
        at, new = int.from_bytes(frame[1:start]), Incoming.parse(frame[start:])
        with self.lock:
            known = self.partial
            if self._going or (known is not None and known.name != new.name):
                raise WireError("a message came before the one before it was whole")
            if at != (known.got if known else 0) or new.name in self._whole:
                raise WireError("a message came that does not go on where it stopped")
            incoming, self._going = known or new, True
            self.partial = incoming
        if incoming.keeps is None:
            keeps = self._admit(incoming, lambda: number == self._open)
            if number != self._open:
                raise CutOff
            incoming.keeps = keeps
        self._finish()

    def _finish(self) -> None:
        """If the message that is coming is whole, hand it on and say so."""
        incoming = self.partial
        if incoming is None or incoming.got < incoming.size:
            return
        with self.lock:
            incoming.whole, self.partial, self._going = True, None, False
            self._whole.append(incoming.name)
            self._control.append(parcels.control(parcels.WHOLE, incoming.name))
            self.lock.notify_all()
        self._came(incoming)

    def _arrived(self, name: Any) -> None:
        with self.lock:
            found = self._out.pop(name, None) if isinstance(name, str) else None
            self.lock.notify_all()
        if found is not None:
            self._sent(found.name)

    def _hello(self, about: Any) -> None:
        """Go on with every message where the other end says that it stopped."""
        try:
            other, whole = str(about["me"]), {str(name) for name in about["whole"]}
            (name, got), notes = about["partial"] or ("", 0), about["notes"]
            if about["you"] != self._me:  # it knows another program of ours
                whole, name, got, notes = set(), "", 0, 0
            if type(got) is not int or not 0 <= got <= self._size(name):
                raise ValueError
        except (KeyError, TypeError, ValueError):
            raise WireError(parcels.UNREADABLE) from None
        with self.lock:
            anew, self._other = self._other not in ("", other), other
            if anew:
                self.partial = None
                self._posts.begin()
            self._posts.go_on(notes)
            arrived = [n for n in self._out if n in whole]
            for each in arrived:
                del self._out[each]
            for each in self._out.values():
                each.go_on(got if each.name == name else 0)
            self._turn(True)
        for each in arrived:
            self._sent(each)
        if anew:
            self._anew()

    def _size(self, name: Any) -> int:
        found = self._out.get(name)
        return 0 if found is None else found.size
