"""The target gets each model once: it keeps that of a test, and the next request names it."""

import hashlib
from typing import Any

import numpy as np
import pytest
from flwr.app import Error, Message
from safetensors.numpy import load_file

from clients.site.memory import resident
from clients.site.workspace import ModelCache
from fedda import records
from fedda.errors import Code, ForgottenError, WireError
from fedda.wire import packing
from fedda.wire.packing import Kind
from strategies.base import FedDA
from strategies.sites.post import CachedModels
from tests.local_grid import SOURCES, Node, ScriptedGrid, run, stop_after

ROUNDS = 4


class Forgetful(ScriptedGrid):
    """A grid whose target restarts, and so forgets, before some of its training requests."""

    forgets: tuple[int, ...] = ()

    def push_messages(self, messages: Any) -> Any:
        messages = list(messages)
        for message in messages:
            step = message.content.get("step", {})
            names = message.metadata.message_type == "train" and "kept" in message.content
            if names and step["round"] in self.forgets:
                resident.cache_clear()
        return super().push_messages(messages)


def one_run(nodes: list[Node], folder: Any, *forgets: int, **more: Any) -> tuple[Any, Any, Any]:
    """A run -> its results, its model and its grid."""
    grid = Forgetful(nodes)
    grid.forgets = forgets
    settings = {"method": "kd3a", "rounds": ROUNDS, "run.dir": str(folder)} | more
    results, _ = run(nodes, settings, grid=grid)
    return results, load_file(results["trainings"]["kd3a"][0]["model"]), grid


def to_target(results: Any) -> int:
    return results["trainings"]["kd3a"][0]["bytes"]["to target model"]


def same(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[n], other[n]) for n in one)


@pytest.fixture(scope="module")
def always_sent(domains: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run in which every request brings all of its arrays."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FedDA, "_comes_again", lambda self: False)
        return one_run(domains, tmp_path_factory.mktemp("sent"))


@pytest.mark.parametrize(
    "dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.nightly("fedda/wire"))]
)
def test_every_model_goes_to_the_target_once(domains: Any, tmp_path: Any, dtype: str) -> None:
    results, model, grid = one_run(domains, tmp_path / "held", **{"wire.dtype": dtype})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FedDA, "_comes_again", lambda self: False)
        whole, wanted, _ = one_run(domains, tmp_path / "sent", **{"wire.dtype": dtype})
    assert same(model, wanted)
    first = next(q for q in grid.requests if "arrays" in q.content)
    size = len(records.read(first.content)[0]["model"].buffer)
    # Per round K teachers, and a model before and a model after the training; all but the first
    # model before are that of the last test.
    assert to_target(whole) == ROUNDS * (len(SOURCES) + 2) * size
    assert to_target(results) == to_target(whole) - (ROUNDS - 1) * size
    assert results["events"] == whole["events"] == []


@pytest.mark.parametrize("forgets", [(2,), (2, 4), (2, 3, 4)])
def test_a_target_that_lost_it_gets_it_again(
    domains: Any, tmp_path: Any, always_sent: Any, forgets: tuple[int, ...]
) -> None:
    whole, wanted, _ = always_sent
    results, model, grid = one_run(domains, tmp_path, *forgets)
    assert same(model, wanted) and results["events"] == []
    answered = [reply.error.code for reply in grid.replies if reply.has_error()]
    # A site that loses it twice in a row is not asked to keep any more.
    lost = forgets[:2]
    assert answered == [Code.FORGOTTEN] * len(lost)
    first = next(q for q in grid.requests if "arrays" in q.content)
    model_size = len(records.read(first.content)[0]["model"].buffer)
    teachers = len(SOURCES) * model_size * len(lost)  # came with the request that was not served
    saved = {(2,): 2, (2, 4): 1, (2, 3, 4): 0}[forgets] * model_size
    assert to_target(results) == to_target(whole) - saved + teachers


def test_a_resumed_run_sends_the_model(domains: Any, tmp_path: Any, always_sent: Any) -> None:
    """A new process at the server does not know what its sites keep."""
    settings = {"method": "kd3a", "rounds": ROUNDS, "run.dir": str(tmp_path)}
    with pytest.raises(KeyboardInterrupt):
        run(domains, settings, stop_after(2))
    results, model, _ = one_run(domains, tmp_path, **{"run.resume": True})
    assert same(model, always_sent[1]) and results["events"] == []


def test_a_site_keeps_and_uses_only_what_has_the_named_hash() -> None:
    packed = packing.pack({"w": np.ones(3, np.float32)}, Kind.MODEL)
    other = packing.pack({"w": np.zeros(3, np.float32)}, Kind.MODEL)
    digest = hashlib.sha256(packed.buffer).hexdigest()
    shelf = ModelCache()
    for arrays in ({"model": other}, {}):
        with pytest.raises(WireError, match="'model' to keep is not the one that came"):
            shelf.put(arrays, {"model": digest})
    with pytest.raises(ForgottenError, match="no longer has the 'model'"):
        shelf.take({}, {"model": digest})
    shelf.put({"model": packed}, {"model": digest})
    with pytest.raises(WireError, match="as kept, but brings it"):
        shelf.take({"model": packed}, {"model": digest})
    shelf.put({"model": packed}, {"model": digest})
    with pytest.raises(ForgottenError):
        shelf.take({}, {"model": "0" * 64})
    shelf.put({"model": packed}, {"model": digest})
    assert shelf.take({"teacher/a": other}, {"model": digest}) == {
        "teacher/a": other,
        "model": packed,
    }
    with pytest.raises(ForgottenError):  # given away with its first use
        shelf.take({}, {"model": digest})


def test_the_server_names_only_what_a_site_has_confirmed() -> None:
    packed = packing.pack({"w": np.ones(3, np.float32)}, Kind.MODEL)
    other = packing.pack({"w": np.zeros(3, np.float32)}, Kind.MODEL)
    held = CachedModels()
    asked = held.ask("town", {"model": packed})
    assert asked == {"model": hashlib.sha256(packed.buffer).hexdigest()}
    assert held.name("town", {"model": packed}) == {}  # the test is not answered yet
    held.answered("town", 7, ok=True)
    assert held.name("town", {"model": other}) == {}  # another model is sent
    for ok, named in ((False, {}), (True, asked)):
        held.ask("town", {"model": packed})
        held.answered("town", 7, ok=ok)
        assert held.name("town", {"model": packed}) == named
    assert held.name("town", {"model": packed}) == {}  # used up


def test_only_a_site_whose_request_named_a_model_gets_it_again() -> None:
    request = Message(records.write(step={"round": 1}), 7, "train")
    request.metadata.__dict__["_message_id"] = "1"
    whole = Message(records.write(step={"round": 1}), 7, "train")
    lost, failed = (
        Message(Error(int(code), code.public), reply_to=request)
        for code in (Code.FORGOTTEN, Code.DATA)
    )
    held = CachedModels()
    assert held.again(lost) is None
    held.named("town", 7, lambda: whole)
    assert held.again(failed) is None
    assert held.again(lost) is whole
    assert held.again(lost) is None  # only once per request
