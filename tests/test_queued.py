"""Requests that are kept in a queue for each site are handed out as flwr does itself."""

import itertools
import random
from collections.abc import Iterator
from typing import Any

import pytest
from flwr.app import Message, RecordDict

from fedda.flower import NOOP_FEDERATION_ID, SUPERLINK_NODE_ID, TaskIdentity, TaskType
from server.simulation import identity
from server.superlink import gateway
from server.superlink.queued import queued

SITES, RUNS, WAIT = 3, 2, 600.0


class Post:
    """A SuperLink's state in memory, with sites and runs, all known by number."""

    def __init__(self) -> None:
        self.state = gateway.superlink(gateway.GatewaySettings()).state.linkstate_factory.state()
        self.nodes = [self.state.create_node("o", f"n{i}", b"%d" % i, 30) for i in range(SITES)]
        for node in self.nodes:
            self.state.activate_node(node, 30)
        of = None, None, None, {}, NOOP_FEDERATION_ID, None, "", TaskType.SERVER_APP
        self.runs = [self.state.create_run(*of) for _ in range(RUNS)]
        self.names: dict[str, int] = {}

    def ask(self, node: int, run: int, expires: bool = False) -> None:
        message = Message(RecordDict(), self.nodes[node], "train", ttl=WAIT)
        about = {"_run_id": self.runs[run], "_message_id": str(len(self.names))}
        message.metadata.__dict__.update(about | {"_src_node_id": SUPERLINK_NODE_ID})
        assert self.state.store_message_ins(message) == str(len(self.names))
        self.names[str(len(self.names))] = len(self.names)
        if expires:
            message.metadata.__dict__["_ttl"] = -1.0

    def take(self, node: int, limit: int | None, run: int | None) -> list[int]:
        run_id = None if run is None else self.runs[run]
        found = self.state.get_message_ins(self.nodes[node], limit, run_id=run_id)
        assert all(message.metadata.delivered_at for message in found)
        return [self.names[message.metadata.message_id] for message in found]


@pytest.fixture(autouse=True)
def task() -> Iterator[None]:
    with identity():
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
        yield


def test_requests_are_handed_out_as_flwr_does() -> None:
    rng, flwrs, ours = random.Random(0), Post(), Post()
    queued(ours.state)
    handed = 0
    for _ in range(400):
        node, run = rng.randrange(SITES), rng.randrange(RUNS)
        match rng.choice(["ask", "ask", "take", "take all", "expired", "delete", "again"]):
            case "ask":
                calls: tuple[Any, ...] = ("ask", node, run)
            case "take":
                calls = ("take", node, 1, rng.choice([None, run]))
            case "take all":
                calls = ("take", node, None, rng.choice([None, run]))
            case "expired":
                calls = ("ask", node, run, True)
            case "delete" if flwrs.names:
                name = rng.choice([*flwrs.names])
                for post in (flwrs, ours):
                    post.state.delete_messages({name})
                continue
            case "again" if stored := [*flwrs.state.message_ins_store]:
                for post in (flwrs, ours):
                    post.state.store_message_ins(post.state.message_ins_store[stored[0]])
                continue
            case _:
                continue
        theirs, mine = (getattr(post, calls[0])(*calls[1:]) for post in (flwrs, ours))
        assert theirs == mine
        handed += len(mine or ())
    assert handed > 50


def test_a_site_that_asks_costs_no_look_at_the_requests_for_others() -> None:
    post, looked = Post(), itertools.count()
    queued(post.state)
    check = post.state._check_stored_messages
    for number in range(30):
        post.ask(number % SITES, 0)
    post.state._check_stored_messages = lambda names: [next(looked), check(names)]
    assert post.take(0, 1, None) == [0] and post.take(1, None, None) == [*range(1, 30, 3)]
    assert next(looked) <= 20


def test_requests_that_a_site_never_fetched_do_not_pile_up() -> None:
    post = Post()
    queued(post.state)
    (queues,) = (
        cell.cell_contents
        for cell in post.state.store_message_ins.__closure__
        if isinstance(cell.cell_contents, dict)
    )
    for _ in range(5):
        post.ask(0, 0)
        assert [len(queue) for queue in queues.values()] == [1]
        post.state.delete_messages({*post.names})
