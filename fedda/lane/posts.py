"""Notes that come in order and each exactly once, over any number of connections.

    N  number, the last number that came from the other end, whether the note ends here; bytes

What is small and often goes this way: gradients and their sums. A note is cut into numbered pieces.
Each frame also says how far the other end's pieces have come, which frees them there. After a break
both ends say so anew, and go on with the next piece.
"""

from collections import deque

from fedda.errors import WireError

from .parcels import NOTE, PIECE, Frame

NUMBER = 8  # bytes of a number
HEAD = 1 + 2 * NUMBER + 1
UNTOLD = 4  # pieces that came, after which the other end is told so without a piece of our own


class Posts:
    """One end's notes, those that it sends and those that come; the caller holds a lock.

    Args:
        most: bytes that a note may have which comes.
    """

    def __init__(self, most: int = 0) -> None:
        self.most = most
        self.begin()

    def begin(self) -> None:
        """Forget all: the other end's program is another one now."""
        self.came = 0  # the number of the last piece that came
        self._told = 0  # the last one of these of which the other end was told
        self._made = 0  # the number of the last piece to send
        self._open: deque[tuple[int, bool, memoryview]] = deque()  # that may not have come there
        self._gone = 0  # how many of these went out in this connection
        self._joined: list[memoryview] = []

    @property
    def waiting(self) -> bool:
        """Whether a piece has not gone out yet."""
        return self._gone < len(self._open)

    @property
    def owes(self) -> bool:
        """Whether it is time to say what has come, also without a piece to send."""
        return self.came >= self._told + UNTOLD

    def add(self, note: bytes) -> None:
        """Send a note; it is not copied."""
        whole = memoryview(note)
        for start in range(0, len(whole), PIECE):
            self._made += 1
            ends = start + PIECE >= len(whole)
            self._open.append((self._made, ends, whole[start : start + PIECE]))

    def next(self) -> Frame | None:
        """The next frame; None if there is nothing to say."""
        number, ends, piece = 0, False, memoryview(b"")
        if self.waiting:
            number, ends, piece = self._open[self._gone]
            self._gone += 1
        elif not self.owes:
            return None
        self._told = self.came
        heads = (bytes([NOTE]), number.to_bytes(NUMBER), self.came.to_bytes(NUMBER))
        return b"".join((*heads, bytes([ends]), piece))

    def take(self, frame: Frame) -> memoryview | bytes | None:
        """Take a frame -> the note that it ends, if it ends one.

        Raises:
            WireError: it is not the next one, or its note is too long.
        """
        if len(frame) < HEAD:
            raise WireError("a frame came that is no piece of a note")
        number = int.from_bytes(frame[1 : 1 + NUMBER])
        self.go_on(int.from_bytes(frame[1 + NUMBER : HEAD - 1]), anew=False)
        if not number:
            return None
        if len(frame) <= HEAD or number != self.came + 1:
            raise WireError("a piece of a note came that is not the next one")
        ends = frame[HEAD - 1] == 1
        if not ends and len(frame) != HEAD + PIECE:  # else a long note could be of very many
            raise WireError("a piece of a note came that is not as long as it has to be")
        self._joined.append(memoryview(frame)[HEAD:])
        if sum(map(len, self._joined)) > self.most:
            raise WireError(f"a note came with more than the {self.most:,} bytes that it may have")
        self.came = number
        if not ends:
            return None
        parts, self._joined = self._joined, []
        return parts[0] if len(parts) == 1 else b"".join(parts)

    def go_on(self, has: object, anew: bool = True) -> None:
        """Free what has come at the other end; with `anew`, send all else in this connection.

        Raises:
            WireError: nobody can have so many.
        """
        first = self._open[0][0] if self._open else self._made + 1
        if type(has) is not int or not first - 1 <= has <= self._made:
            raise WireError("the other end of the lane counts notes that cannot be")
        for _ in range(has + 1 - first):
            self._open.popleft()
            self._gone = max(0, self._gone - 1)
        if anew:
            self._gone = 0
