"""Replies come one by one, as they arrive, and none after the deadline."""

import time
import weakref
from collections.abc import Collection, Iterable, Mapping
from copy import copy
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict

from clients.app import expired
from fedda import records
from fedda.errors import Code
from fedda.flower import ErrorCode, make_message
from fedda.wire import packing
from fedda.wire.packing import Kind, Packed
from server import journal
from server.simulation import LocalGrid
from strategies.sites import mail
from strategies.sites.mail import Mail


class SlowGrid(LocalGrid):
    """Sites that answer after a number of looks, or never where the number is None."""

    def __init__(self, looks: Mapping[int, int | None]) -> None:
        super().__init__(lambda message, context: message, [{} for _ in looks])  # type: ignore[arg-type]
        self.looks: dict[int, int | None] = dict(looks)
        self.pulled: list[int] = []
        self.refuse: set[int] = set()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        ids = list(super().push_messages(messages))
        nodes = [m.metadata.dst_node_id for m in messages]
        return ["" if node in self.refuse else i for node, i in zip(nodes, ids, strict=True)]

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        for message_id in message_ids:
            request = self._open[message_id]
            node = request.metadata.dst_node_id
            self.pulled.append(node)
            left = self.looks[node]
            if left == 0:
                del self._open[message_id]
                reply = Message(RecordDict(), reply_to=request)
                del request
                yield reply
                del reply
            elif left is not None:
                self.looks[node] = left - 1


class Restarting(SlowGrid):
    """A server that says of each site that its program was restarted."""

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        for reply in super().pull_messages(message_ids):
            error = Error(int(Code.RESTARTED), Code.RESTARTED.public)
            yield make_message(metadata=reply.metadata, error=error)


def request(node: int) -> Message:
    return Message(RecordDict({"task": ConfigRecord({"x": node})}), node, "train", ttl=9)


def src(reply: Message) -> int:
    return reply.metadata.src_node_id


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mail, "POLL", 0.001)
    monkeypatch.setattr(mail, "POLL_MOST", 0.005)


def test_replies_come_in_the_order_of_arrival() -> None:
    grid = SlowGrid({1: 3, 2: 0, 3: 1})
    assert [src(r) for r in Mail(grid).deliver(map(request, (1, 2, 3)), 5)] == [2, 3, 1]


def with_arrays(node: int, packed: Packed | None) -> Message:
    content = records.write({"model": packed} if packed else {}, task={"x": node})
    return Message(content, node, "train", ttl=9)


def test_requests_with_the_same_arrays_are_sent_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Then their arrays are hashed once, and cross to the server once."""
    monkeypatch.setattr(mail, "TOGETHER", 3)
    one, other = (packing.pack({"w": np.full(3, x, "f")}, Kind.MODEL) for x in (1, 1))
    sent: list[list[int]] = []

    class Counting(SlowGrid):
        def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
            messages = list(messages)
            sent.append([m.metadata.dst_node_id for m in messages])
            return super().push_messages(messages)

    grid = Counting(dict.fromkeys(range(1, 9), 0))
    grid.refuse = {2}
    given = [one, one, one, one, other, None, None, one]
    requests = (with_arrays(n, p) for n, p in enumerate(given, 1))
    replies = [src(r) for r in Mail(grid).deliver(requests, 0.05)]
    assert sent == [[1, 2, 3], [4], [5], [6, 7], [8]]
    assert replies == [1, 3, 4, 5, 6, 7, 8]


def test_what_the_server_says_of_a_restarted_site_is_no_reply_of_that_site() -> None:
    """Its audit log has no such reply, so the server's record of what crossed must have none."""
    received: list[Message] = []
    box = Mail(Restarting({1: 0}), received=received.append)
    assert [r.error.code for r in box.deliver([request(1)], 5)] == [Code.RESTARTED]
    assert received == []


def test_neither_requests_nor_replies_stay_in_memory() -> None:
    sent: list[weakref.ref] = []
    got: list[weakref.ref] = []
    box = Mail(
        grid := SlowGrid({1: 0, 2: 0}),
        lambda m: sent.append(weakref.ref(m.content)),
        lambda m: got.append(weakref.ref(m.content)),
    )
    replies = box.deliver((request(n) for n in (1, 2)), 5)
    reply = next(replies)
    assert src(reply) == 1
    del reply
    reply = next(replies)
    assert src(reply) == 2
    grid._open.clear()
    assert [r() is None for r in got] == [True, False]
    assert all(r() is None for r in sent)


def test_after_the_deadline_nothing_is_fetched() -> None:
    grid = SlowGrid({1: 0, 2: None, 3: None})
    start = time.monotonic()
    senders = [src(r) for r in Mail(grid).deliver(map(request, (1, 2, 3)), 0.05)]
    assert senders == [1]
    assert 0.05 <= time.monotonic() - start < 1
    pulls = len(grid.pulled)
    grid.looks |= {2: 0, 3: 0}  # what comes now comes too late
    assert [src(r) for r in Mail(grid).deliver([request(1)], 0.05)] == [1]
    assert grid.pulled[pulls:] == [1]


def test_a_reply_to_a_refused_request_is_not_waited_for() -> None:
    grid = SlowGrid({1: 0, 2: 0})
    grid.refuse = {1}
    start = time.monotonic()
    assert [src(r) for r in Mail(grid).deliver(map(request, (1, 2)), 5)] == [2]
    assert time.monotonic() - start < 1


def test_two_replies_to_one_request_are_both_delivered() -> None:
    """The strategy decides what to do with the second: it knows which sites it asked."""

    class Twice(SlowGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            for reply in super().pull_messages(message_ids):
                yield from (reply, reply)

    assert [src(r) for r in Mail(Twice({1: 0, 2: 0})).deliver(map(request, (1, 2)), 5)] == [
        *(1, 1, 2, 2)
    ]


def test_in_one_process_a_sites_time_begins_with_its_turn() -> None:
    """Else the sites before it would use up its deadline, the more the slower the machine is."""

    def slow(message: Message, context: Context) -> Message:
        late.append(expired(message))
        time.sleep(0.2)
        return Message(RecordDict(), reply_to=message)

    late: list[bool] = []
    grid = LocalGrid(slow, [{}, {}, {}])  # type: ignore[arg-type]
    asked = [Message(RecordDict(), n, "train", ttl=0.3) for n in (1, 2, 3)]
    assert len(list(grid.send_and_receive(asked))) == 3
    assert late == [False] * 3


def test_a_site_cannot_answer_for_another() -> None:
    class Posing(SlowGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            for reply in super().pull_messages(message_ids):
                if src(reply) == 2:
                    reply.metadata.__dict__["_src_node_id"] = 1
                yield reply

    assert [src(r) for r in Mail(Posing({1: 1, 2: 0})).deliver(map(request, (1, 2)), 5)] == [1]


class Watching(Mail):
    """Mail that notes what it learns while it waits."""

    def __init__(self, grid: SlowGrid, fails: Iterable[bool] = ()) -> None:
        super().__init__(grid)
        self.why: list[tuple[int, str]] = []
        self.owing: list[set[int]] = []
        self.fails = list(fails)

    def lost(self, node_id: int, why: str) -> None:
        self.why.append((node_id, why))

    def owed(self, node_ids: Collection[int]) -> None:
        self.owing.append(set(node_ids))

    def failed(self) -> bool:
        return self.fails.pop(0) if len(self.fails) > 1 else self.fails[0]


@pytest.mark.parametrize("code", sorted(mail.GIVEN_UP))
def test_a_reply_that_will_not_come_is_told_at_once_and_why(code: int) -> None:
    class Gone(SlowGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            for reply in super().pull_messages(message_ids):
                reply.metadata.__dict__["_src_node_id"] = 1  # as in the SuperLink's own messages
                yield make_message(metadata=reply.metadata, error=Error(code))

    box = Watching(Gone({1: None, 2: 0, 3: 5}), [False])
    replies = box.deliver(map(request, (1, 2, 3)), 0.2)
    assert list(replies) == []
    late = "no reply within 0.2 s (wait.train)"
    why = mail.GONE if code == ErrorCode.NODE_UNAVAILABLE else late
    assert box.why == [(2, why), (3, why), (1, late)]


def test_of_a_reply_that_broke_off_it_is_said_that_a_part_came() -> None:
    class Torn(SlowGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            for reply in super().pull_messages(message_ids):  # as a `LeanGrid` says it
                yield make_message(
                    metadata=reply.metadata, error=Error(ErrorCode.MESSAGE_UNAVAILABLE)
                )

    box = Watching(Torn({1: 0}), [False])
    assert list(box.deliver([request(1)], 60)) == []
    assert box.why == [(1, mail.BROKEN)]


class Leaving(SlowGrid):
    """Sites that answer after a number of looks, and are not connected for some of them."""

    def __init__(self, looks: Mapping[int, int | None], away: Mapping[int, range]) -> None:
        super().__init__(looks)
        self.away, self.looked = away, 0

    def get_node_ids(self) -> Iterable[int]:
        self.looked += 1
        return [n for n in super().get_node_ids() if self.looked not in self.away.get(n, ())]


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mail, "LOOK_S", 0.0)


@pytest.mark.usefixtures("often")
def test_a_site_that_was_gone_still_answers_while_others_are_waited_for() -> None:
    box = Watching(Leaving({1: 20, 2: 40}, {1: range(3, 10)}), [False])
    assert [src(r) for r in box.deliver(map(request, (1, 2)), 60)] == [1, 2]
    assert box.why == [(1, mail.GONE)]


@pytest.mark.usefixtures("often")
def test_the_wait_ends_when_no_site_that_owes_a_reply_is_connected() -> None:
    box = Watching(Leaving({1: None, 2: 5, 3: None}, {1: range(999), 3: range(8, 999)}), [False])
    began = time.monotonic()
    assert [src(r) for r in box.deliver(map(request, (1, 2, 3)), 60)] == [2]
    assert box.why == [(1, mail.GONE), (3, mail.GONE)]
    assert time.monotonic() - began < 30


@pytest.mark.usefixtures("often")
def test_a_site_that_is_not_listed_at_one_look_is_not_gone() -> None:
    """Its new session has just replaced the old one."""
    box = Watching(Leaving({1: 20}, {1: range(3, 4)}), [False])
    assert [src(r) for r in box.deliver([request(1)], 60)] == [1]
    assert box.why == []


def test_replies_are_not_waited_for_long_when_the_round_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(mail, "AFTER_FAILURE", 2.0)
    box = Watching(SlowGrid({1: 12, 2: None}), [False, False, True])
    began = time.monotonic()
    assert [src(r) for r in box.deliver(map(request, (1, 2)), 60)] == [1]  # within the grace
    assert box.why == [(2, mail.OVER)]
    assert time.monotonic() - began < 30


def test_a_message_that_answers_no_request_is_passed_over() -> None:
    class Unasked(SlowGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            for reply in super().pull_messages(message_ids):
                stray = make_message(metadata=copy(reply.metadata), content=RecordDict())
                stray.metadata.__dict__["_reply_to_message_id"] = ""
                yield from (stray, reply)

    replies = Mail(Unasked({1: 0})).deliver([request(1)], 5)
    assert [r.metadata.reply_to_message_id != "" for r in replies] == [True]


def test_whom_a_run_waits_for_is_said_at_growing_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(journal, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    reminder, said = journal.Reminder(), []
    for _ in range(1000):
        clock[0] += 0.5
        if seconds := reminder.due():
            said.append(seconds)
    assert said == [5, 15, 35, 75, 155, 315]
    reminder.calm()
    clock[0] += 5
    assert reminder.due() == 505
