"""The way of a run's program to the SuperLink beside it: a socket file, without encryption.

Both run on one machine, as one user, and every model passes between them. TLS, an HTTP client that
reads 16 kB at a time and messages within messages took a third of the server's processor time in
rounds with large models. The file lies in a folder that only this user can enter; a request needs
the program's token here, too. Pieces of messages pass as they are, so that they need no copies.
"""

import contextlib
import http.client
import os
import socket
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from urllib.parse import quote

import httpx

from fedda import flower
from fedda.flower.batches import joined, parted
from fedda.ops.spawn import NEAR_AT

PIECE = "/near/piece/"  # then a piece's name: GET fetches it, PUT brings it
# The same for several small pieces at once: POST has their names, PUT each name and its piece. An
# answer has as many parts: pieces, empty where one is not there or not small, or whether one was
# wanted.
PIECES = "/near/pieces"
SESSION = "x-fedda-session"  # in which the SuperLink awaits a piece
PATIENCE_S = 30.0  # without an answer, as Flower's own client waits
GONE, NOT_YET = 404, 202  # the status of a piece that will not come, and of one on its way


@contextlib.contextmanager
def listening() -> Iterator[list[socket.socket]]:
    """Listen on such a file, and tell the programs that are started here where it is.

    Yields no socket where there is no room for the file: programs then come as operators do.
    """
    with contextlib.ExitStack() as stack:
        listeners = []
        os.environ.pop(NEAR_AT, None)
        with contextlib.suppress(OSError, AttributeError):
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="fedda-"))
            listener = stack.enter_context(socket.socket(socket.AF_UNIX))
            listener.bind(at := str(Path(folder) / "superlink"))
            os.environ[NEAR_AT] = at
            listeners.append(listener)
        try:
            yield listeners
        finally:
            os.environ.pop(NEAR_AT, None)


class Near(http.client.HTTPConnection):
    """Fetches and brings pieces, one after the other."""

    def __init__(self, path: str, host: str, token: str, wait: float) -> None:
        """Take the socket file; it is opened at the first request, and again if it was closed.

        Args:
            path: the file.
            host: what the SuperLink is called as a server of this machine.
            token: by which the SuperLink knows the program.
            wait: seconds for which the SuperLink may wait for a piece.
        """
        super().__init__(host, timeout=PATIENCE_S)
        self._path = path
        self._last: http.client.HTTPResponse | None = None
        self._headers = {flower.TASK_TOKEN_HEADER: token, "prefer": f"wait={wait:.0f}"}

    def connect(self) -> None:
        with contextlib.ExitStack() as stack:
            made = stack.enter_context(socket.socket(socket.AF_UNIX))
            made.settimeout(self.timeout)
            made.connect(self._path)
            stack.pop_all()
        self.sock = made

    def piece(self, name: str) -> http.client.HTTPResponse:
        """Ask for a piece -> its content, to be read until its end.

        Raises:
            ObjectUnavailableError: it is not there yet.
            ObjectPullError: it will not come.
            httpx.ReadError: the SuperLink does not answer.
        """
        got = self._ask("GET", PIECE + quote(name, safe=""))
        if got.status == http.client.OK:
            return got
        got.read()
        if got.status == NOT_YET:
            raise flower.ObjectUnavailableError(name)
        raise flower.ObjectPullError(name, "the SuperLink has none")

    def pieces(self, names: Sequence[str]) -> dict[str, bytes]:
        """Ask for several pieces -> those that are there, and small.

        Raises:
            httpx.ReadError: the SuperLink does not answer.
        """
        if not names:
            return {}
        found = parted(self._ask("POST", PIECES, [joined(map(str.encode, names))]).read())
        return {name: piece for name, piece in zip(names, found, strict=True) if piece}

    def put_together(self, pieces: Mapping[str, bytes], session: str) -> dict[str, bool]:
        """Bring several small pieces -> whether the SuperLink wanted each.

        Raises:
            httpx.ReadError: the SuperLink does not answer.
        """
        if not pieces:
            return {}
        body = joined(part for name, piece in pieces.items() for part in (name.encode(), piece))
        about = {SESSION: session, "content-length": str(len(body))}
        wanted = parted(self._ask("PUT", PIECES, [body], about).read())
        return {name: bool(each) for name, each in zip(pieces, wanted, strict=True)}

    def put(self, name: str, parts: Sequence[bytes | memoryview], session: str) -> bool:
        """Bring a piece, which is made of these parts -> whether the SuperLink wanted it.

        Raises:
            httpx.ReadError: the SuperLink does not answer.
        """
        about = {SESSION: session, "content-length": str(sum(map(len, parts)))}
        got = self._ask("PUT", PIECE + quote(name, safe=""), parts, about)
        got.read()
        return got.status == http.client.OK

    def _ask(
        self,
        method: str,
        path: str,
        body: Sequence[bytes | memoryview] | None = None,
        more: Mapping[str, str] = {},
    ) -> http.client.HTTPResponse:
        """Send a request -> the answer. Made twice, it does no harm."""
        given = (method, path, body, {**self._headers, **more})
        if self._last is not None and self._last.length:  # the rest of it would come first
            self.close()
        with as_httpx(), contextlib.ExitStack() as failed:
            failed.callback(self.close)
            try:
                self.request(*given)
                self._last = self.getresponse()
            except (http.client.RemoteDisconnected, BrokenPipeError):  # it was idle for too long
                self.close()
                self.request(*given)
                self._last = self.getresponse()
            if self._last.status not in (http.client.OK, NOT_YET, GONE):
                raise http.client.HTTPException(f"its status is {self._last.status}")
            failed.pop_all()
            return self._last


@contextlib.contextmanager
def as_httpx() -> Iterator[None]:
    """Let what goes wrong on the way look as it does on Flower's: the server failed, not a site."""
    try:
        yield
    except (OSError, http.client.HTTPException) as error:
        raise httpx.ReadError(f"the SuperLink does not answer: {error!r}") from error
