"""Sites that wait for work instead of asking again and again."""

import asyncio
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from fedda import flower
from server.superlink import filter as filters
from server.superlink import gateway, waiting
from server.superlink.waiting import Waiting, wanted

FAR = 3600.0  # seconds


def stored(node: int, reply: bool = False) -> Any:
    return SimpleNamespace(
        metadata=SimpleNamespace(
            dst_node_id=node, run_id=3, reply_to_message_id="a" if reply else ""
        )
    )


def test_a_site_waits_until_there_is_work_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is work, it would otherwise wait longer than the test may take."""

    async def play() -> None:
        state = SimpleNamespace(store_message_and_object_tree=lambda message: "done")
        made = Waiting(state)
        began_with = [await made.for_work(node, FAR) for node in (7, 8, 9)]
        assert all(most == 1 for _, most in began_with), "work may be older than this server"
        for node in (7, 8, 9):
            made.handed(node, 0, 1)
        monkeypatch.setattr(waiting, "WHILE", 0.2)
        waited, may = await made.for_work(7, FAR)
        assert waited >= 0.19 and not may
        monkeypatch.setattr(waiting, "WHILE", FAR)
        assert not (await made.for_work(7, 0.0))[1]

        def later() -> None:  # as a thread of the SuperLink does
            assert state.store_message_and_object_tree(stored(9, reply=True)) == "done"
            assert state.store_message_and_object_tree(stored(8)) == "done"

        other, mine, reply = (asyncio.create_task(made.for_work(n, FAR)) for n in (7, 8, 9))
        await asyncio.sleep(0)  # all three wait from here on
        thread = threading.Thread(target=later)
        thread.start()
        assert (await mine)[1]
        thread.join()
        assert not other.done() and not reply.done()
        state.store_message_and_object_tree(stored(7))
        await other
        state.store_message_and_object_tree(stored(7))  # while it does not wait
        await asyncio.sleep(0.01)
        for left in (1, 0):
            assert (await made.for_work(7, FAR))[1]  # again and again, until it was handed both
            made.handed(7, 1, left + 1)
            assert (await made.for_work(7, 0.0))[1] == left
        state.store_message_and_object_tree(stored(7))  # it expires before the site asks
        most = (await made.for_work(7, FAR))[1]
        state.store_message_and_object_tree(stored(7))  # while the server looks, and sees it not
        await asyncio.sleep(0.01)
        made.handed(7, 0, most)
        assert (await made.for_work(7, FAR))[1] == 1, "an invitation would lie there unseen"
        made.handed(7, 1, 1)
        waits = asyncio.create_task(made.for_work(7, FAR))
        await asyncio.sleep(0)
        assert not waits.done() and not reply.done()
        made.close()
        await asyncio.gather(waits, reply)
        await made.for_work(7, FAR)
        assert not made._idle

    asyncio.run(play())


def test_the_more_sites_wait_the_longer_each_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that they all together ask no more often; but one that would not is not kept."""
    state = SimpleNamespace(store_message_and_object_tree=None)
    kept: list[float] = []

    def timeout(seconds: float) -> Any:
        kept.append(seconds)
        return asyncio.timeout(0)

    async def play() -> None:
        made = Waiting(state)
        for before in (0, 99, 499, 10_000):
            made._idle = before
            made.handed(7, 0, 1)
            await made.for_work(7, 60.0)
            await made.for_work(7, 2.0)

    monkeypatch.setattr(waiting, "asyncio", SimpleNamespace(**vars(asyncio) | {"timeout": timeout}))
    asyncio.run(play())
    assert kept == [1.0, 1.0, 2.5, 2.0, 12.5, 2.0, 25.0, 2.0]


@pytest.mark.parametrize(
    ("value", "seconds"),
    [(b"wait=1", 1.0), (b" wait=20 ", 20.0), (b"wait=", 0), (b"wait=-1", 0), (b"respond-async", 0)],
)
def test_only_a_site_that_says_so_waits(value: bytes, seconds: float) -> None:
    assert wanted([(b"host", b"x"), (b"prefer", value)]) == seconds
    assert wanted([(b"host", value)]) == 0


def test_busy_paths_pass_fewer_layers_and_the_operators_paths_all() -> None:
    app = gateway.superlink(gateway.GatewaySettings())
    layers = {m.cls.__name__ for m in app.user_middleware}
    # A layer that flwr renames would silently stay; a new layer must be looked at.
    assert layers | {flower.TRACING_LAYER} == filters.OPERATORS | filters.SWITCHED_OFF | {
        "BaseHTTPMiddleware",
        "ProtobufTranslationMiddleware",
        "NodeAuthMiddleware",
    }
    filters.shortened(app)
    assert {m.cls.__name__ for m in app.user_middleware} == layers
