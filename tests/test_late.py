"""An answer that came in time reaches its run, whatever the site's heartbeats said."""

import asyncio
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from flwr.app import Message, RecordDict

from fedda import flower
from fedda.flower import (
    NOOP_FEDERATION_ID,
    ErrorCode,
    TaskIdentity,
    TaskType,
    get_object_tree,
    message_from_proto,
    message_to_proto,
    remove_content_from_message,
)
from fedda.flower import runtime_pb2 as runtime
from server.simulation import identity
from server.superlink import direct, gateway, late, waiting
from server.superlink.direct import Direct
from server.superlink.waiting import Waiting

pytestmark = pytest.mark.filterwarnings("ignore:No path_separator:DeprecationWarning")  # alembic

WAIT = 600.0  # seconds; as long as a run waits for an answer


class Hub:
    """A SuperLink's state with one site, which a run has asked something."""

    def __init__(self, database: Path | None) -> None:
        app = gateway.superlink(gateway.GatewaySettings(database=database))
        self.state = app.state.linkstate_factory.state()
        self.node = self.state.create_node("owner", "anna", b"key", 30)
        self.state.activate_node(self.node, 30)
        serverapp = TaskType.SERVER_APP
        self.run = self.state.create_run(
            None, None, None, {}, NOOP_FEDERATION_ID, None, "", serverapp
        )
        self.direct = Direct(self.state, False)
        self.direct._task = lambda token: self.state.get_tasks(run_ids=[self.run])[0]  # type: ignore[method-assign]
        self.asked = self._store(Message(RecordDict(), self.node, "train", ttl=WAIT))

    def answer(self) -> str:
        """Let the site answer, without any piece of its answer -> the answer's name."""
        request = self.state.get_message_ins(self.node, 1)[0]
        return self._store(Message(RecordDict(), reply_to=request))

    def gone(self, seconds: float) -> None:
        """Let the site's last heartbeat be as old as if it had gone so many seconds ago."""
        self.state.acknowledge_node_heartbeat(self.node, -seconds / 2)
        assert self.state.get_nodes(self.run) == set()

    def replies(self) -> list[Message]:
        """What the run hears."""
        return asyncio.run(self.heard(0.0))

    async def heard(self, wait: float) -> list[Message]:
        """What the run hears that would wait for so many seconds."""
        body = runtime.PullAppMessagesRequest(message_ids=[self.asked]).SerializeToString()
        answer = await self.direct.of_run("pull-messages", "token", body, wait)
        assert answer is not None
        found = runtime.PullAppMessagesResponse.FromString(answer)
        assert len(found.messages_list) == len(found.message_object_trees)
        return [message_from_proto(head) for head in found.messages_list]

    def _store(self, message: Message) -> str:
        message.metadata.__dict__["_run_id"] = self.run
        message.metadata.__dict__["_message_id"] = message.object_id
        if message.metadata.reply_to_message_id:
            message.metadata.__dict__["_src_node_id"] = self.node
        tree, session = get_object_tree(message), self.state.start_session(self.run)
        head = message_from_proto(message_to_proto(remove_content_from_message(message)))
        stored, _ = self.state.store_message_and_object_tree(head, tree, session)
        assert stored
        return str(message.metadata.message_id)


@pytest.fixture(params=["memory", "database"])
def hub(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Hub]:
    with identity():
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
        yield Hub(None if request.param == "memory" else tmp_path / "state.db")


def test_an_answer_is_handed_on_though_its_sites_heartbeats_are_late(hub: Hub) -> None:
    name = hub.answer()
    hub.gone(1000)
    assert [reply.metadata.message_id for reply in hub.replies()] == [name]


def test_a_site_that_looked_dead_may_still_answer(hub: Hub) -> None:
    hub.gone(1000)
    assert hub.replies() == []
    name = hub.answer()
    assert [reply.metadata.message_id for reply in hub.replies()] == [name]


def test_programs_that_only_ask_for_replies_hear_of_a_site_that_stays_away(hub: Hub) -> None:
    hub.gone(late.GONE_S + 1)
    (reply,) = hub.replies()
    assert reply.error.code == ErrorCode.NODE_UNAVAILABLE


def test_a_program_hears_of_a_reply_as_soon_as_it_is_there(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waiting, "WHILE", 3600.0)

    async def play() -> None:
        made = hub.direct._waiting = Waiting(hub.state)
        program = asyncio.create_task(hub.heard(3600.0))
        await asyncio.sleep(0.05)
        assert not program.done()
        name = await asyncio.to_thread(hub.answer)  # as a thread of the SuperLink does
        assert [reply.metadata.message_id for reply in await program] == [name]
        assert not made._waits

    asyncio.run(play())


def test_a_reply_is_given_again_to_a_program_that_did_not_get_it(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its request timed out on a busy machine, and was answered all the same."""
    name = hub.answer()
    for _ in range(3):
        assert [reply.metadata.message_id for reply in hub.replies()] == [name]
    monkeypatch.setattr(direct, "GIVEN_KEPT", 0)
    assert len(hub.replies()) == 1
    (forgotten,) = hub.replies()
    assert forgotten.error.code == ErrorCode.MESSAGE_UNAVAILABLE


def test_an_answer_waits_for_its_next_piece_for_as_long_as_its_site_is_stopped(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = hub.answer()
    later = datetime.now(UTC) + timedelta(seconds=1000)
    for kind in ("in_memory", "sql"):
        monkeypatch.setattr(getattr(flower, f"{kind}_corestate"), "now", lambda: later)
    assert hub.state.get_object(hub.run, name) == b""  # announced, and not there yet
    assert [reply.metadata.message_id for reply in hub.replies()] == [name]


def test_an_answer_that_nobody_will_complete_is_deleted(hub: Hub) -> None:
    name = hub.answer()
    asyncio.run(hub.direct.drop(name))
    assert hub.state.get_object(hub.run, name) is None
