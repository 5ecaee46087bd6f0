"""Notes on a lane: each comes once and in order, whatever breaks, and nothing else is taken."""

from random import Random

import pytest

from fedda.errors import WireError
from fedda.lane import posts
from fedda.lane.parcels import NOTE
from fedda.lane.posts import HEAD, Posts

MOST = 1000


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(posts, "PIECE", 7)


@pytest.mark.parametrize("seed", range(20))
def test_notes_come_once_and_in_order_over_connections_that_break(seed: int) -> None:
    draw = Random(seed)
    ends = [Posts(MOST), Posts(MOST)]
    made: list[list[bytes]] = [[], []]
    came: list[list[bytes]] = [[], []]
    on_the_way: list[list[bytes]] = [[], []]

    def step(k: int) -> None:
        if (frame := ends[k].next()) is not None:
            on_the_way[k].append(frame)
        if on_the_way[k]:
            note = ends[1 - k].take(on_the_way[k].pop(0))
            came[1 - k] += [] if note is None else [bytes(note)]

    for _ in range(400):
        k = draw.randrange(2)
        if draw.random() < 0.2:
            note = draw.randbytes(draw.randrange(1, 40))
            ends[k].add(note)
            made[k].append(note)
        if draw.random() < 0.05:  # what is on its way is lost
            on_the_way = [[], []]
            counts = [each.came for each in ends]
            for each, count in zip(ends, reversed(counts), strict=True):
                each.go_on(count)
        step(k)
    for k in [0, 1] * 400:
        step(k)
    assert came == [made[1], made[0]]
    assert all(len(each._open) <= posts.UNTOLD for each in ends)


def frame(number: int, has: int = 0, ends: bool = True, piece: bytes = b"1") -> bytes:
    heads = number.to_bytes(posts.NUMBER) + has.to_bytes(posts.NUMBER)
    return bytes([NOTE]) + heads + bytes([ends]) + piece


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ([frame(2)], "not the next one"),
        ([frame(1), frame(1)], "not the next one"),
        ([frame(1, piece=b"")], "not the next one"),
        ([frame(1)[: HEAD - 3]], "no piece of a note"),
        ([frame(1, has=1)], "cannot be"),
        ([frame(0, has=2**60)], "cannot be"),
        ([frame(n, ends=False, piece=b"1" * 7) for n in range(1, 144)], "more than the 1,0"),
        ([frame(1, piece=b"1" * 1001)], "more than the 1,0"),
        ([frame(1, ends=False, piece=b"1" * 6)], "not as long"),
        ([frame(1, ends=False, piece=b"1" * 8)], "not as long"),
    ],
)
def test_what_is_not_due_is_refused(given: list[bytes], said: str) -> None:
    end = Posts(MOST)
    with pytest.raises(WireError, match=said):
        for each in given:
            end.take(each)


@pytest.mark.parametrize("has", [-1, 2, "1", None, True, 1.0])
def test_a_count_that_cannot_be_is_refused(has: object) -> None:
    end = Posts(MOST)
    end.add(b"1")
    with pytest.raises(WireError, match="cannot be"):
        end.go_on(has)
