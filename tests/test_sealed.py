"""Sealed models in whole rounds: KD3A's result to the bit, and a server that reads no model."""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message

from clients import fedavg as clients_fedavg
from clients.site.memory import resident
from clients.site.origin import Origin
from fedda import records
from fedda.errors import Code, ConfigError, QuorumError, SecureError
from fedda.ops import keys
from fedda.results.card import CARD
from fedda.secure.agree import Occasion, Own
from fedda.secure.seal import LONGER, Envelope, seal, unseal
from fedda.settings import RunConfig
from fedda.wire.packing import Arrays, Kind, Packed, pack
from tests import local_grid
from tests.federation import Federation, Run, final_model
from tests.local_grid import (
    SOURCES,
    Bench,
    Node,
    assert_close,
    changed,
    failures,
    ruled,
    sent_by,
    settings_of,
)
from tests.patience import wait_until
from tests.processes import alive, below, is_alive, program_of

pytestmark = pytest.mark.usefixtures("fresh_sites")

IMAGES = {"model__name": "digit-cnn", "model__hidden": "", "train__lr": 0.01}  # with BatchNorm
OFFICIAL = {
    "kd3a__vote": "hard",
    "kd3a__focus": "shapley",
    "kd3a__target_weight": "kept",
    "kd3a__smoothing": 0.9,
    "kd3a__batchnorm": "linear",
    "kd3a__teacher_batchnorm": "updated",
}


@pytest.fixture
def keyed(domains: list[Node], tmp_path: Path) -> list[Node]:
    return local_grid.keyed(domains, tmp_path)


def bench(nodes: Sequence[Node], script: Any = None, **settings: Any) -> Bench:
    resident.cache_clear()
    return Bench(nodes, "kd3a", script or {}, kd3a__relay="sealed", **settings)


def address(public: bytes, **changes: Any) -> Envelope:
    return Envelope(
        **{"training": "t", "round": 1, "source": "anna", "target": "town", "begun": "b"} | changes,
        public=public,
    )


# ---- one model -----------------------------------------------------------------------------------


def test_only_the_right_key_opens_a_model_and_only_for_its_address() -> None:
    occasion = Occasion("t", 1, 1, "target")
    own, other = Own(occasion), Own(occasion)
    sealed = seal(b"model" * 100, address(own.public))
    assert len(sealed) == 500 + LONGER and b"model" not in sealed
    assert unseal(sealed, address(own.public), own) == b"model" * 100
    assert seal(b"model" * 100, address(own.public)) != sealed  # a new secret each time
    wrongs = ({"training": "u"}, {"round": 2}, {"source": "bert"}, {"target": "city"})
    for wrong in (*wrongs, {"begun": "c"}):
        with pytest.raises(SecureError, match="not for this site's key"):
            unseal(sealed, address(own.public, **wrong), own)
    with pytest.raises(SecureError, match="not for this site's key"):
        unseal(sealed, address(own.public), other)
    with pytest.raises(SecureError, match="not for this site's key"):
        unseal(sealed[:-1] + bytes([sealed[-1] ^ 1]), address(own.public), own)
    with pytest.raises(SecureError, match="key of town is no X25519 key"):
        seal(b"model", address(bytes(31)))


# ---- rounds --------------------------------------------------------------------------------------


RUNS: list[dict[str, Any]] = [
    {},
    IMAGES,
    {"kd3a__weighting": "examples", "guard__max_examples": 1.05},
    {"kd3a__weighting": "h-divergence", "kd3a__smoothing": 0.5},
    {"wire__dtype": "float16"},
    {"wire__dtype": "bfloat16", **IMAGES},
    {"kd3a__batchnorm": "loss", **IMAGES, "train__lr": 1e-4},
    {"kd3a__batchnorm": "loss", "wire__dtype": "float16", **IMAGES, "train__lr": 1e-4},
    {"train__carry_momentum": True, **OFFICIAL, **IMAGES},
]


MORE = pytest.mark.nightly("clients", "fedda/secure", "fedda/wire", "strategies")


@pytest.mark.parametrize(
    "settings",
    # Convolutions take their time: the official settings alone are in the gate.
    [pytest.param(s, marks=[MORE] * ("model__name" in s and s is not RUNS[-1])) for s in RUNS],
    ids=lambda s: ",".join(f"{k}={v}" for k, v in s.items()) or "default",
)
def test_the_result_is_the_open_ones_to_the_bit(
    keyed: list[Node], settings: dict[str, Any]
) -> None:
    plain = Bench(keyed, "kd3a", rounds=3, **settings)
    wanted = [plain.round(t) for t in (1, 2, 3)]
    weights = plain.strategy.weights
    made = bench(keyed, rounds=3, **settings)
    found = [made.round(t) for t in (1, 2, 3)]
    for (model, numbers), (model_2, numbers_2) in zip(wanted, found, strict=True):
        assert model.keys() == model_2.keys() and numbers == numbers_2 | {"loss": numbers["loss"]}
        assert all(np.array_equal(model[n], model_2[n]) for n in model)
        assert {n: a.dtype for n, a in model.items()} == {n: a.dtype for n, a in model_2.items()}
    assert made.strategy.weights == pytest.approx(weights, abs=6e-4)  # told in steps of .001
    assert set(weights) == {"town", *SOURCES}
    assert made.notices == plain.notices == []


@pytest.mark.parametrize("settings", [{}, {"kd3a__batchnorm": "loss"}], ids=str)
def test_changes_of_a_model_are_sealed_as_well(keyed: list[Node], settings: dict[str, Any]) -> None:
    """With int8 the target reads changes, where the open run's server sends it rounded models."""
    results = []
    for relay in ("open", "sealed"):
        resident.cache_clear()
        made = Bench(keyed, "kd3a", rounds=3, kd3a__relay=relay, wire__dtype="int8", **settings)
        results.append([made.round(t) for t in (1, 2, 3)][-1][0])
        assert made.notices == []
    assert_close(results[1], results[0], 0.01)


def test_a_source_that_is_away_keeps_its_last_weight(keyed: list[Node]) -> None:
    weights = []
    for relay in ("open", "sealed"):
        resident.cache_clear()
        made = Bench(keyed, "kd3a", rounds=3, kd3a__relay=relay, kd3a__smoothing=0.75,
                     wait__min_sources=2)  # fmt: skip
        made.round(1)
        made.grid.offline = {"carl"}
        made.round(2)
        made.grid.offline = set()
        made.round(3)
        weights.append(made.strategy.weights)
    assert weights[0] == pytest.approx(weights[1], abs=6e-4)


def test_the_server_gets_no_model_of_a_source(keyed: list[Node]) -> None:
    made = bench(keyed)
    made.round()
    leaving = {
        (c.role, c.hop): (c.arrays, c.numbers)
        for c in made.grid.crossed
        if c.way == "from" and c.kind == "train"
    }
    alphas = {f"alpha/{name}" for name in ("town", *SOURCES)}
    assert leaving == {
        ("target", "keys"): ({"key": "key"}, {"seconds"}),
        ("source", "train"): ({"sealed": "sealed"}, {"steps", "seconds"}),
        ("target", "distil"): ({"model": "model"}, {"loss", "steps", "seconds", "kept"} | alphas),
    }


# ---- a server that lies --------------------------------------------------------------------------


def test_a_key_of_the_servers_own_is_refused(keyed: list[Node], tmp_path: Path) -> None:
    """Neither a key that nobody signed, nor one that a site signed which may be no target."""
    signer = {"anna": tmp_path / "nodes" / "anna", "town": None}

    for name, file in signer.items():

        def swapped(
            request: Message, reply: Message, name: str = name, file: Path | None = file
        ) -> list[Message]:
            if request.content["step"]["hop"] != "keys":
                return [reply]
            training = RunConfig.parse(settings_of("kd3a")).run.name + ".kd3a-0"
            own = Own(Occasion(training, 1, 1, "target"))
            signed = own.sign(name, keys.load_node_key(file)) if file else bytes(132)
            parts = {"public": own.public, "signature": signed}
            forged = pack({n: np.frombuffer(b, np.uint8) for n, b in parts.items()}, Kind.KEY)
            return [changed(request, reply, arrays={"key": forged})]

        made = bench(keyed, {"town": swapped})
        with pytest.raises(QuorumError):
            made.round()
        assert failures(made) == {(s, int(Code.SECURE)) for s in SOURCES}


@pytest.mark.parametrize("what", ["settings", "model"])
def test_a_server_that_tells_sources_other_things_than_the_target_gets_no_mean(
    keyed: list[Node],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    what: str,
) -> None:
    """It would know what the sources send, as nothing is learnt at a rate of almost 0."""
    made = bench(keyed)
    push = made.grid.push_messages
    monkeypatch.setattr(Origin, "check", lambda *_: None)  # as of a later round's model

    def lying(messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        for message in messages:
            if message.content.get("step", {}).get("hop") == "train":
                arrays, tables = records.read(message.content)
                if what == "settings":
                    tables["task"] = {**tables["task"], "train.lr": 1e-6}
                else:
                    sent = arrays["model"].unpack()
                    moved = {n: local_grid.times(a, 1.01) for n, a in sent.items()}
                    arrays = {**arrays, "model": pack(moved, Kind.MODEL)}
                message.content = records.write(arrays, **tables)
        return push(messages)

    monkeypatch.setattr(made.grid, "push_messages", lying)
    with pytest.raises(QuorumError):
        made.round()
    assert failures(made) == {("town", int(Code.SECURE))}
    assert "other settings or another model" in caplog.text


def tampered(
    nodes: list[Node],
    change: Callable[[dict[str, Packed], dict[str, Any]], None],
    monkeypatch: pytest.MonkeyPatch,
    **settings: Any,
) -> Bench:
    """Run a round whose request to distil is changed on its way."""
    made = bench(nodes, **settings)
    push = made.grid.push_messages

    def changing(messages: Any) -> Any:
        sent = []
        for message in messages:
            if message.content.get("step", {}).get("hop") == "distil":  # type: ignore[union-attr]
                arrays, tables = records.read(message.content)
                change(arrays, tables["step"])
                about = message.metadata
                content = records.write(arrays, **tables)
                message = Message(content, about.dst_node_id, "train", ttl=60.0, group_id="1")
            sent.append(message)
        return push(sent)

    monkeypatch.setattr(made.grid, "push_messages", changing)
    return made


def swap(arrays: dict[str, Packed], step: dict[str, Any]) -> None:
    arrays["sealed/anna"], arrays["sealed/bert"] = arrays["sealed/bert"], arrays["sealed/anna"]


def claim(arrays: dict[str, Packed], step: dict[str, Any]) -> None:
    raw = {n: a.copy() for n, a in arrays["sealed/anna"].raw().items()}
    raw["examples"][:] = 10**6
    arrays["sealed/anna"] = pack(raw, Kind.SEALED)


def flip(arrays: dict[str, Packed], step: dict[str, Any]) -> None:
    raw = {n: a.copy() for n, a in arrays["sealed/anna"].raw().items()}
    raw["sealed"][100] ^= 1
    arrays["sealed/anna"] = pack(raw, Kind.SEALED)


@pytest.mark.parametrize(
    ("change", "refused"), [(swap, {"anna", "bert"}), (claim, {"anna"}), (flip, {"anna"})]
)
def test_what_a_source_did_not_seal_is_left_out(
    keyed: list[Node],
    change: Callable[..., None],
    refused: set[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    made = tampered(keyed, change, monkeypatch, wait__min_sources=2)
    if len(refused) > 1:  # two of four sites are fewer than secure.least
        with pytest.raises(QuorumError):
            made.round()
        assert failures(made) == {("town", int(Code.SECURE))}
        return
    made.round()
    assert {site for what, site, _ in made.notices if what == "refused"} == refused
    assert set(made.strategy.weights) == {"town", *SOURCES} - refused
    assert sum(made.strategy.weights.values()) == pytest.approx(1)


def test_a_server_that_leaves_sources_out_gets_no_mean(
    keyed: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    def leave(arrays: dict[str, Packed], step: dict[str, Any]) -> None:
        del arrays["sealed/bert"], arrays["sealed/carl"]

    made = tampered(keyed, leave, monkeypatch)
    with pytest.raises(QuorumError):
        made.round()
    assert failures(made) == {("town", int(Code.SECURE))}


def test_the_server_weighs_no_source(keyed: list[Node], monkeypatch: pytest.MonkeyPatch) -> None:
    """Its largest weight can only make all sites equal."""

    def level(arrays: dict[str, Packed], step: dict[str, Any]) -> None:
        step["most"] = 1

    made = tampered(keyed, level, monkeypatch, kd3a__weighting="examples")
    made.round()
    assert list(made.strategy.weights.values()) == pytest.approx([0.25] * 4)


def test_a_key_opens_one_request(keyed: list[Node]) -> None:
    made = bench(keyed)
    made.round()
    asked = [r for r in made.grid.requests if "step" in r.content]
    (distil,) = [r for r in asked if r.content["step"]["hop"] == "distil"]
    reply = made.grid.call(distil)
    assert reply.has_error() and reply.error.code == Code.SECURE


def test_a_model_beyond_the_guards_bounds_is_left_out(
    keyed: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    outgoing = clients_fedavg.Source.outgoing

    def wild(self: Any) -> dict[str, Packed]:
        if self.site.name != "bert":
            return outgoing(self)
        model: Arrays = {n: a * 1000 for n, a in outgoing(self)["model"].unpack().items()}
        return {"model": pack(model, Kind.MODEL)}

    monkeypatch.setattr(clients_fedavg.Source, "outgoing", wild)
    made = bench(keyed, wait__min_sources=2)
    made.round()
    assert [(what, site) for what, site, _ in made.notices] == [("refused", "bert")]
    made = bench(keyed, wait__min_sources=3)
    with pytest.raises(QuorumError, match="2 sources"):
        made.round()


def test_an_update_much_longer_than_the_others_is_scaled_down(
    keyed: list[Node], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the target, as the server cannot read it; so however long it is, the mean is the same."""
    outgoing, by = clients_fedavg.Source.outgoing, [0.0]

    def reverse(self: Any) -> dict[str, Packed]:
        if self.site.name != "bert":
            return outgoing(self)
        sent = self.request.arrays["model"].unpack()
        model = outgoing(self)["model"].unpack()
        lie = {n: sent[n] - by[0] * (a - sent[n]) for n, a in model.items()}
        return {"model": pack(lie, Kind.MODEL)}

    monkeypatch.setattr(clients_fedavg.Source, "outgoing", reverse)
    models = []
    for by[0], times in ((20.0, 2.0), (100.0, 2.0), (100.0, 0.0)):
        caplog.clear()
        made = bench(keyed, guard__max_update=times, guard__max_change=0.0)
        models.append(made.round()[0])
        assert not made.notices and made.strategy.weights["bert"] > 0
        assert ("the update of bert is" in caplog.text) == (times > 0)
    for name, values in models[0].items():
        np.testing.assert_allclose(models[1][name], values, rtol=0.02, atol=0.01)
    assert any(np.abs(models[2][n] - values).max() > 0.1 for n, values in models[0].items())


# ---- the sites' side -----------------------------------------------------------------------------


def test_a_site_can_demand_it(keyed: list[Node], tmp_path: Path) -> None:
    nodes = ruled(keyed, "[secure]\ndemand = true", tmp_path)
    assert bench(nodes).round()[0]
    resident.cache_clear()
    made = Bench(nodes, "kd3a")
    with pytest.raises(QuorumError):
        made.round()
    assert {(s, int(Code.POLICY)) for s in SOURCES} <= failures(made)


def test_the_target_sets_the_smallest_group(keyed: list[Node], tmp_path: Path) -> None:
    made = bench(ruled(keyed, "[secure]\nleast = 5", tmp_path))
    with pytest.raises(QuorumError):
        made.round()
    assert failures(made) == {("town", int(Code.SECURE))}


@pytest.mark.parametrize("who", ["town", "anna"])
def test_a_site_without_peers_refuses(keyed: list[Node], who: str) -> None:
    nodes = [n | ({"peers": ""} if n["name"] == who else {}) for n in keyed]
    made = bench(nodes, wait__min_sources=3)
    with pytest.raises(QuorumError):
        made.round()
    assert failures(made) == {(who, int(Code.SECURE))}


def test_the_heads_cannot_stay_at_their_sites() -> None:
    with pytest.raises(ConfigError, match="relay is sealed, but heads is local"):
        RunConfig.parse({"method": "kd3a", "kd3a.relay": "sealed", "kd3a.heads": "local"})


def test_the_targets_state_survives_a_restart(keyed: list[Node], tmp_path: Path) -> None:
    """The weights of the last round stay at the target, on its disk."""
    weights = []
    for restart in (False, True):
        folder = str(tmp_path / f"state-{restart}")
        made = bench([n | {"state-dir": folder} for n in keyed], kd3a__smoothing=0.9)
        made.round(1)
        if restart:
            resident.cache_clear()
        made.round(2)
        weights.append(made.strategy.weights)
    assert weights[0] == pytest.approx(weights[1], abs=6e-4)
    assert sent_by(made, "town")


# ---- the server's memory and disk ----------------------------------------------------------------


def memory_of(pid: int) -> Iterator[bytes]:
    """Yield what a process can write to, region by region."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, rights, *_ = line.split()
            start, end = (int(n, 16) for n in span.split("-"))
            with contextlib.suppress(OSError, ValueError, OverflowError):
                if rights.startswith("rw"):
                    memory.seek(start)
                    yield memory.read(end - start)


HELD = "acting: hold in round 2 distil"  # the server has all models of a round then


def on_server(hub: Federation, run: Run, marks: Mapping[bytes, str]) -> set[str]:
    """Name the marks that the server's processes, a run's program or their files hold now."""
    found: set[str] = set()

    def look(data: bytes) -> None:
        found.update(name for mark, name in marks.items() if mark in data)

    for process in alive(below(hub.processes["superlink"].popen.pid, program_of(run.folder))):
        for data in memory_of(process.pid):
            look(data)
    for folder in (hub.home, hub.runs):
        for file in folder.rglob("*"):
            if file.is_file():
                look(file.read_bytes())
    return found


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/mem").exists(), reason="reads memory through /proc")
def test_no_process_or_file_of_the_server_ever_holds_a_sources_model(
    hub: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody asked for it; the same search finds every source's model where the relay is open."""
    marks: dict[bytes, str] = {}
    outgoing = clients_fedavg.Source.outgoing

    def spied(self: Any) -> dict[str, Packed]:
        arrays = outgoing(self)
        if self.request.round == 2:
            weight = arrays["model"].unpack()["encoder.1.weight"]
            marks[weight.tobytes()[64:128]] = self.site.name
        return arrays

    settings = {"method": "kd3a", "rounds": 2, "run.seeds": "7"}  # no other run's models
    with monkeypatch.context() as patch:
        patch.setattr(clients_fedavg.Source, "outgoing", spied)
        alone = hub.alone("relay", settings)
    assert sorted(marks.values()) == SOURCES
    models = []
    town = hub.processes["town"]
    hidden = {"secure": "auto", "kd3a.relay": "auto", "run.baseline": "fedavg"}
    for relay, more in (("sealed", hidden), ("open", {})):
        before = town.text().count(HELD)
        hub.act("town", {"2 distil": ["hold", 0]})
        run = hub.begin(f"relay-{relay}", settings | more)
        wait_until(lambda n=before: town.text().count(HELD) > n, HELD)
        assert is_alive(program_of(run.folder))
        found = on_server(hub, run, marks)
        hub.act("town", {})
        results = run.finish()
        models.append(final_model(results, "kd3a"))
        if not more:
            assert found == set(SOURCES)
            continue
        assert not found | on_server(hub, run, marks)
        (kd3a,), (fedavg,) = (results["trainings"][m] for m in ("kd3a", "fedavg"))
        assert (kd3a["hidden"], fedavg["hidden"]) == ("sealed", "sum")
        kinds = {key for each in (kd3a, fedavg) for key in each["bytes"]}
        assert "from source model" not in kinds
        assert {"from source sealed", "from source masked"} <= kinds
        card = (run.folder / CARD).read_text()
        assert "Secure sums" in card and "Sealed models" in card
    assert models[0] == models[1] == final_model(alone, "kd3a")
