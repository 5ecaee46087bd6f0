"""A run's program and the SuperLink beside it: pieces pass through a socket file."""

import asyncio
import os
import stat
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn

from fedda import flower
from fedda.ops.spawn import NEAR_AT
from server.superlink import near
from server.superlink.direct import Direct, RunCalls
from server.superlink.near import Near
from server.superlink.waiting import Waiting
from tests.patience import wait_until

LARGE = os.urandom(3 * 2**20 + 7)


class Beside:
    """A server on the socket file, in a thread, with pieces of one run."""

    def __init__(self) -> None:
        self.pieces = {"large": LARGE, "small": b"ab", "late": b""}
        self.wanted = {"s": {"new"}}
        self._stack = near.listening()
        self._sockets = self._stack.__enter__()
        self.path = os.environ[NEAR_AT]
        self._server: uvicorn.Server | None = None
        self._thread = threading.Thread(target=asyncio.run, args=(self._serve(),))
        self._thread.start()
        wait_until(lambda: self._server is not None and self._server.started, "the server is up")

    def near(self, token: str = "right") -> Near:
        return Near(self.path, "127.0.0.1:1", token, 0)

    def put(self, run: int, session: str, name: str, content: bytes) -> bool:
        if name not in self.wanted.get(session, ()):
            return False
        self.pieces[name] = content
        return True

    def stop(self) -> None:
        assert self._server is not None
        self._server.should_exit = True
        self._thread.join()
        self._stack.__exit__(None, None, None)

    async def _serve(self) -> None:
        state = SimpleNamespace(
            get_task_by_token={"right": SimpleNamespace(run_id=3)}.get,
            get_object=lambda run, name: self.pieces.get(name),
            store_object=lambda *given: self.put(*given),
            store_message_and_object_tree=None,
        )
        calls: Any = RunCalls(self._other, Direct(state, False, Waiting(state)))
        config = uvicorn.Config(
            calls, lifespan="off", ws="none", log_level="error", timeout_keep_alive=1
        )
        self._server = uvicorn.Server(config)
        await self._server.serve(self._sockets)

    async def _other(self, scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 418, "headers": []})
        await send({"type": "http.response.body"})


@pytest.fixture
def beside() -> Iterator[Beside]:
    made = Beside()
    yield made
    made.stop()


def test_pieces_pass_both_ways_on_one_connection(beside: Beside) -> None:
    mine = beside.near()
    for name in ("large", "small", "large"):
        assert mine.piece(name).read() == beside.pieces[name]
    assert (
        mine.put("new", (LARGE[:9], memoryview(LARGE)[9:]), "s") and beside.pieces["new"] == LARGE
    )
    assert not mine.put("new", (LARGE,), "t") and not mine.put("other", (LARGE,), "s")
    assert mine.piece("new").read() == LARGE
    with pytest.raises(flower.ObjectUnavailableError):
        mine.piece("late")
    with pytest.raises(flower.ObjectPullError):
        mine.piece("unknown")
    assert mine.piece("small").read() == b"ab"
    mine.close()


def test_small_pieces_pass_together(beside: Beside) -> None:
    mine = beside.near()
    assert mine.pieces(["small", "late", "unknown"]) == {"small": b"ab"}
    assert mine.pieces(["large", "small"]) == {}  # behind a large one, all are fetched singly
    assert mine.pieces([]) == {} and mine.put_together({}, "s") == {}
    assert mine.put_together({"new": b"x", "other": b"y"}, "s") == {"new": True, "other": False}
    assert mine.pieces(["new"]) == {"new": b"x"}
    mine.close()
    stranger = beside.near("wrong")
    assert stranger.pieces(["small"]) == {}
    assert stranger.put_together({"new": b"z"}, "s") == {"new": False}
    assert beside.pieces["new"] == b"x"
    stranger.close()


def test_only_a_run_that_is_known_gets_and_brings_pieces(beside: Beside) -> None:
    stranger = beside.near("wrong")
    with pytest.raises(flower.ObjectPullError):
        stranger.piece("small")
    assert not stranger.put("new", (b"x",), "s") and "new" not in beside.pieces
    stranger.close()


def test_what_was_left_unread_does_not_come_with_the_next_piece(beside: Beside) -> None:
    mine = beside.near()
    assert mine.piece("large").read(5) == LARGE[:5]
    assert mine.piece("small").read() == b"ab"
    mine.close()


def test_a_connection_that_was_closed_meanwhile_is_opened_again(beside: Beside) -> None:
    mine = beside.near()
    assert mine.piece("small").read() == b"ab"
    was = mine.sock
    wait_until(lambda: was.recv(1) == b"", "an idle connection is closed")
    assert mine.piece("small").read() == b"ab" and mine.sock is not was
    mine.close()


def test_a_server_that_fails_is_asked_again_and_no_site_is_blamed(
    beside: Beside, monkeypatch: pytest.MonkeyPatch
) -> None:
    mine, put, left = beside.near(), beside.put, [1]

    def once_wrong(*given: Any) -> bool:
        if left:
            raise RuntimeError(left.pop())
        return put(*given)

    monkeypatch.setattr(beside, "put", once_wrong)
    with pytest.raises(httpx.ReadError, match="status is 500"):
        mine.put("new", (b"x",), "s")
    assert mine.put("new", (b"x",), "s") and mine.piece("new").read() == b"x"
    mine.close()


def test_a_name_cannot_lead_elsewhere(beside: Beside) -> None:
    mine = beside.near()
    beside.pieces["a b/../\r\nc"] = b"odd"
    assert mine.piece("a b/../\r\nc").read() == b"odd"
    mine.close()


def test_a_superlink_that_is_gone_is_no_fault_of_a_site(tmp_path: Path) -> None:
    with pytest.raises(httpx.ReadError, match="does not answer"):
        Near(str(tmp_path / "none"), "127.0.0.1:1", "t", 0).piece("a")


def test_all_other_calls_pass_through_the_file_as_well(beside: Beside) -> None:
    with httpx.Client(transport=httpx.HTTPTransport(uds=beside.path)) as client:
        assert client.get("http://127.0.0.1:1/health").status_code == 418


def test_only_this_user_can_reach_the_file_and_it_goes_with_the_server() -> None:
    with near.listening() as (listener,):
        path = Path(os.environ[NEAR_AT])
        assert listener.getsockname() == str(path)
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert not path.parent.exists() and NEAR_AT not in os.environ


def test_without_room_for_the_file_programs_come_as_operators_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*args: Any, **named: Any) -> Callable[[], None]:
        raise OSError(28, "no space left")

    monkeypatch.setattr(tempfile, "TemporaryDirectory", full)
    with near.listening() as listeners:
        assert listeners == [] and NEAR_AT not in os.environ
