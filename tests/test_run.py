"""Whole runs: repeatable, resumable after any round, and honest about the sites that failed."""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Error, Message
from safetensors.numpy import load_file

from clients.app import make_app
from clients.site.memory import Site
from fedda.errors import Code, QuorumError, RosterError, RunError
from fedda.flower import ErrorCode, make_message
from fedda.ops import lock
from fedda.results import terminal
from fedda.results.read import summary
from fedda.results.remarks import missing_tests, small_sites
from fedda.wire import packing
from fedda.wire.packing import Kind
from server import checkpoint, journal, presence
from server.journal import Event, Journal
from server.presence import Sites
from server.simulation import folders, simulate
from strategies.base import FedDA
from strategies.sites import mail
from tests.local_grid import (
    EXAMPLES,
    FAST,
    Node,
    ScriptedGrid,
    changed,
    never,
    reshaped,
    run,
    settings_of,
    stop_after,
)
from tests.local_grid import RunConfig as Config


def model(results: dict[str, Any]) -> dict[str, bytes]:
    path = results["trainings"][results["method"]][0]["model"]
    return {name: array.tobytes() for name, array in load_file(path).items()}


def timeless(value: Any) -> Any:
    """Return results without what always differs between runs: seconds, paths and settings."""
    if isinstance(value, dict):
        changing = ("seconds", "phases", "site_seconds", "model", "config", "name")
        return {k: timeless(v) for k, v in value.items() if k not in changing}
    return [timeless(v) for v in value] if isinstance(value, list) else value


def without_kept(results: Any) -> tuple[Any, int]:
    """Results without the bytes to the target, and the sum of these.

    A target keeps the model of a round's test; a server that resumes sends it once more.
    """
    found = json.loads(json.dumps(timeless(results)))
    total = 0
    for runs in found["trainings"].values():
        for training in runs:
            for counted in (training["bytes"], *(entry["bytes"] for entry in training["rounds"])):
                sent = [counted.pop(f"to target {what}", 0) for what in ("model", "scalars")]
                total += sum(sent) if counted is training["bytes"] else 0
    return found, total


ROUNDED = pytest.mark.nightly("fedda/wire", "fedda/maths/coarse.py", "strategies", "clients/site")


@pytest.mark.parametrize(
    "settings",
    [{}, {"secure": "sum"}, pytest.param({"method": "kd3a"}, marks=ROUNDED)],
    ids=str,
)
def test_int8_on_the_wire_takes_a_quarter_and_ends_nearer_to_float32_than_bfloat16(
    domains: list[Node], tmp_path: Path, settings: dict[str, Any]
) -> None:
    last, models = {}, {}
    for dtype in ("float32", "bfloat16", "int8"):
        own = {"method": "fedavg", "wire.dtype": dtype, "model.hidden": "64,32", "rounds": 4}
        own |= {"train.lr": 1e-4, "train.lr-end": 1e-4}  # steps below those of bfloat16
        config = Config.parse(
            settings_of("fedavg") | own | settings | {"run.dir": str(tmp_path / dtype)}
        )
        results = simulate(config, domains, Journal(), "process")
        ((training,),) = results["trainings"].values()
        last[dtype] = training["rounds"][-1]
        models[dtype] = load_file(training["model"])
        assert not results["events"]
    sent = [sum(n for k, n in e["bytes"].items() if k.endswith("model")) for e in last.values()]
    assert 0.5 <= sent[1] / sent[0] < 0.52  # entries are filled up to eight bytes
    assert 0.25 < sent[2] / sent[0] < 0.34  # biases stay whole, and each short row has its scale
    far = {d: apart(models[d], models["float32"]) for d in ("bfloat16", "int8")}
    assert far["int8"] < far["bfloat16"] / 3
    for each in last.values():
        assert each["loss"] == pytest.approx(last["float32"]["loss"], rel=0.05)


def apart(one: Mapping[str, np.ndarray], other: Mapping[str, np.ndarray]) -> float:
    """How far two models' weights are apart."""
    names = [n for n in one if n.endswith("weight")]
    return math.sqrt(sum(float(((one[n] - other[n]) ** 2).sum()) for n in names))


RESUMED: list[dict[str, Any]] = [
    {"method": "fedavg"},
    {"method": "fedavg", "model.name": "digit-cnn", "model.hidden": "", "rounds": 2},
    {"method": "fedprox", "train.rounds-per-epoch": 3},
    {"method": "kd3a"},
    {"method": "kd3a", "kd3a.heads": "local", "kd3a.smoothing": 0.7},
    {"method": "kd3a", "kd3a.batchnorm": "loss", "wire.dtype": "float16"},
    {"method": "kd3a", "kd3a.heads": "local", "wire.dtype": "bfloat16"},
    {"method": "kd3a", "kd3a.heads": "local", "wire.dtype": "int8"},
    {"method": "kd3a", "train.carry-momentum": True},
    {"method": "kd3a", "train.carry-momentum": True, "kd3a.batchnorm": "loss"},
    {"method": "fedavg", "train.carry-momentum": True, "train.optimizer": "adam"},
    # With overlap a sum is pending when a round ends; then dropout and shuffles of eq. 8.
    {"method": "dils", "exchange.p": 2, "exchange.overlap": True},
    {"method": "fada", "fada.layers.dropout": 0.5},
    {"method": "mdan", "mdan.max": "soft"},
    {"method": "mdan", "mdan.max": "hard"},
]


LOCAL = {"method": "kd3a", "kd3a.heads": "local", "kd3a.smoothing": 0.7}  # a strategy remembers
QUICK = ({"method": "kd3a"}, {"method": "fedavg"}, LOCAL)
ABOUT = (
    *("server/checkpoint.py", "server/training.py", "clients/base.py", "clients/site/trainer.py"),
    *("strategies/base.py", "strategies/sites/correspondence.py"),
)


def nightly(method: str) -> pytest.MarkDecorator:
    return pytest.mark.nightly(*ABOUT, f"clients/{method}.py", f"strategies/{method}.py")


@pytest.mark.parametrize(
    "settings",
    [s if s in QUICK else pytest.param(s, marks=nightly(s["method"])) for s in RESUMED],
    ids=lambda s: ",".join(str(v) for v in s.values()),
)
def test_a_stopped_run_goes_on_bit_for_bit(
    domains: list[Node], tmp_path: Path, settings: dict[str, Any]
) -> None:
    def sites(folder: str) -> list[Node]:
        return [node | {"state-dir": str(tmp_path / folder)} for node in domains]

    def place(name: str) -> dict[str, Any]:
        return {"rounds": 3, "run.dir": str(tmp_path / name), **settings}

    whole, _ = run(sites("a"), place("whole"))
    stopped = 1 if settings.get("rounds") == 2 else 2
    with pytest.raises(KeyboardInterrupt):
        run(sites("b"), place("parts"), stop_after(stopped))
    resumed, events = run(sites("b"), place("parts") | {"run.resume": True})
    rounds = [e["round"] for e in events if e["event"] == "round"]
    assert rounds == list(range(stopped + 1, settings.get("rounds", 3) + 1))
    assert model(resumed) == model(whole)
    (found, sent), (wanted, before) = without_kept(resumed), without_kept(whole)
    once = sum(len(array) for array in model(whole).values())
    assert found == wanted and 0 <= sent - before <= 1.1 * once + 500


@pytest.mark.slow
@pytest.mark.parametrize("storage", ["in memory", "on disk"])
def test_a_round_that_is_asked_for_again_gives_the_same_bits(
    domains: list[Node], tmp_path: Path, storage: str
) -> None:
    """With carried momentum a site must go back to its state before the round."""

    def sites(folder: str) -> list[Node]:
        place = {"state-dir": str(tmp_path / folder)} if storage == "on disk" else {}
        return [node | place for node in domains]

    settings = {"method": "kd3a", "rounds": 3, "train.carry-momentum": True}
    whole, _ = run(sites("a"), settings | {"run.dir": str(tmp_path / "whole")})
    calls = 0

    def fail_once(request: Message, reply: Message) -> list[Message]:
        nonlocal calls
        calls += 1
        return failing(request, reply) if calls == 2 else [reply]

    settings |= {"run.dir": str(tmp_path / "again")}
    again, _ = run(sites("b"), settings, script={"town": fail_once})
    assert [e["what"] for e in again["events"]] == ["failed", "paused", "resumed"]
    assert model(again) == model(whole)


def test_the_baseline_and_the_method_are_trained_with_every_seed(
    domains: list[Node], runs: dict[str, str]
) -> None:
    settings = {"run.seeds": "0,1", "run.baseline": "fedavg", "rounds": 1}
    results, events = run(domains, runs | settings)
    begun = [(e["seed"], e["method"]) for e in events if e["event"] == "training"]
    assert begun == [(0, "fedavg"), (0, "kd3a"), (1, "fedavg"), (1, "kd3a")]
    trained = {m: [t["seed"] for t in ts] for m, ts in results["trainings"].items()}
    assert trained == {"fedavg": [0, 1], "kd3a": [0, 1]}
    for method, key in (("kd3a", "final"), ("fedavg", "fedavg")):
        accuracies = [t["final_accuracy"] for t in results["trainings"][method]]
        assert results[f"{key}_accuracy"] == pytest.approx(np.mean(accuracies))
        assert results[f"{key}_accuracy_std"] == pytest.approx(np.std(accuracies, ddof=1))


def test_a_folder_holds_one_run(domains: list[Node], runs: dict[str, str]) -> None:
    with pytest.raises(RunError, match="holds no run to go on with"):
        run(domains, runs | {"run.resume": True})
    run(domains, runs | {"rounds": 1})
    with pytest.raises(RunError, match="holds a run already"):
        run(domains, runs | {"rounds": 1})
    with pytest.raises(RunError, match=r"began with rounds 1, not 2"):
        run(domains, runs | {"rounds": 2, "run.resume": True})
    with pytest.raises(RunError, match=r"began with kd3a\.mixup 0\.2, not 0\.5"):
        run(domains, runs | {"rounds": 1, "kd3a.mixup": 0.5, "run.resume": True})
    run(domains, runs | {"rounds": 1, "wait.sites": 0.4, "run.resume": True})


def test_a_folder_that_cannot_be_written_says_what_to_do(
    domains: list[Node], runs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(checkpoint, "replace", full)
    with pytest.raises(RunError, match=r"written \(No space left on device\): make room, let"):
        run(domains, runs)


def test_a_folder_serves_one_run_at_a_time(
    domains: list[Node], runs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "LEAVE", 0.0)
    refused: list[str] = []

    def again(event: Event) -> None:
        if event["event"] == "round" and event["round"] == 1:
            with pytest.raises(RunError, match="is still going on") as error:
                run(domains, runs | {"run.resume": True})
            refused.append(str(error.value))

    run(domains, runs, again)
    assert len(refused) == 1
    run(domains, runs | {"run.resume": True})  # free again


def test_a_damaged_folder_is_an_error_that_names_it(
    domains: list[Node], runs: dict[str, str]
) -> None:
    run(domains, runs | {"rounds": 1})
    config = Path(runs["run.dir"]) / "run" / "config.json"
    config.write_text(config.read_text()[:-9])
    with pytest.raises(RunError, match=r"config\.json is damaged"):
        run(domains, runs | {"rounds": 1, "run.resume": True})


def a_state(server_round: int = 1) -> checkpoint.State:
    rng = np.random.default_rng(server_round)
    arrays = {
        "w": rng.normal(size=(3, 2)).astype(np.float32).T,  # not contiguous
        "a": rng.normal(size=2).astype(np.float32),
        "n": np.array(7),
        "none": np.zeros((0, 2), np.float32),
        "bits": np.array([7], np.uint16),
    }
    history = [{"round": server_round, "loss": 0.5}]
    return checkpoint.State(
        server_round,
        arrays,
        {"Real World": packing.pack({"head.w": arrays["a"]}, Kind.MODEL)},
        {"alpha": {"anna": 0.25}},
        history,
        [[1, "source", "to", "model", 80]],
        {"round": 1, "infomax": 0.5},
    )


def assert_same(found: checkpoint.State | None, wanted: checkpoint.State) -> None:
    assert found is not None
    assert list(found.model) == list(wanted.model)
    for name, array in wanted.model.items():
        assert found.model[name].dtype == array.dtype and found.model[name].shape == array.shape
        np.testing.assert_array_equal(found.model[name], array)
    rest = ("round", "numbers", "history", "ledger", "best")
    assert [getattr(found, k) for k in rest] == [getattr(wanted, k) for k in rest]
    assert list(found.arrays.items()) == list(wanted.arrays.items())  # manifests and bytes


def test_a_checkpoint_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert checkpoint.read(tmp_path) is None
    checkpoint.write(tmp_path, a_state(1))
    checkpoint.write(tmp_path, a_state(2))
    assert_same(checkpoint.read(tmp_path), a_state(2))
    assert_same(checkpoint.read(tmp_path, checkpoint.BEST), a_state(1))  # it was the best round
    checkpoint.write(tmp_path, replace(a_state(3), best={"round": 3}))
    left = sorted(p.name for p in tmp_path.iterdir())
    assert left == ["3.checkpoint.safetensors", "best.checkpoint.json", "checkpoint.json"]


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("floats", ["float16", "float32", "float64"])
def test_a_checkpoint_gives_back_remembered_arrays_to_the_bit(
    tmp_path: Path, kind: Kind, floats: str
) -> None:
    odd = np.array([[1 / 3, -0.0, 1e-7], [np.nan, np.inf, 65504]])
    arrays = {"w": odd.astype(np.float32).T, "a": odd.astype(np.float64), "n": np.array(7)}
    arrays |= {"some": np.array([True, False, True]), "none": np.zeros((0, 2), np.float16)}
    packed = packing.pack(arrays, kind, floats)
    others = {str(other): packing.pack({"w": np.ones(1)}, other) for other in Kind}
    others["a"] = packing.pack({"b/c": np.zeros(2)}, Kind.MODEL)
    others["a/b"] = packing.pack({"c": np.ones(2)}, Kind.MODEL)
    state = replace(a_state(), arrays={"z": packed, **others})
    checkpoint.write(tmp_path, state)
    found = checkpoint.read(tmp_path)
    assert_same(found, state)
    raw = found.arrays["z"].raw()  # type: ignore[union-attr]
    assert {str(a.dtype) for n, a in raw.items() if n in ("w", "a", "none")} == {floats}


@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_a_full_disk_leaves_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    """At whichever of the two files and two steps of writing the disk fails."""
    checkpoint.write(tmp_path, a_state(1))
    calls = 0

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == call:
                raise OSError(28, "No space left on device")
            return real(*args)

        return wrapped

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.os, "fsync", failing(checkpoint.os.fsync))
        patch.setattr(Path, "replace", failing(Path.replace))
        with pytest.raises(RunError, match=r"round 2 cannot be written .*is intact"):
            checkpoint.write(tmp_path, a_state(2))
        calls = 0
        with pytest.raises(RunError, match=r"\(No space left on device\); it is the first\. Make"):
            checkpoint.write(tmp_path / "other", a_state(1))
    assert_same(checkpoint.read(tmp_path), a_state(1))
    assert not list(tmp_path.glob("*.part")) + list(tmp_path.glob(".*.part"))
    checkpoint.write(tmp_path, a_state(2))
    assert_same(checkpoint.read(tmp_path), a_state(2))


Damage = Callable[[Path, Path], object]  # to the files of a checkpoint's arrays and facts


def lacking(key: str) -> Damage:
    def damage(arrays: Path, facts: Path) -> None:
        kept = {k: v for k, v in json.loads(facts.read_text()).items() if k != key}
        facts.write_text(json.dumps(kept))

    return damage


DAMAGED: dict[str, Damage] = {
    "bit": lambda arrays, _: arrays.write_bytes(bytes([*arrays.read_bytes()[:-1], 77])),
    "cut": lambda arrays, _: arrays.write_bytes(arrays.read_bytes()[:-8]),
    "gone": lambda arrays, _: arrays.unlink(),
    "half a text": lambda _, facts: facts.write_text(facts.read_text()[:40]),
    "no text": lambda _, facts: facts.write_bytes(b"\xff\xfe\x00"),
    "a list": lambda _, facts: facts.write_text("[]"),
    "a word": lambda _, facts: facts.write_text('"checkpoint"'),
    **{key: lacking(key) for key in ("digest", "round", "arrays", "order", "layouts")},
    **{key: lacking(key) for key in ("numbers", "history", "ledger", "best")},
}


@pytest.mark.parametrize("how", DAMAGED)
def test_a_damaged_checkpoint_is_an_error_that_names_its_folder(tmp_path: Path, how: str) -> None:
    checkpoint.write(tmp_path, a_state(1))
    DAMAGED[how](tmp_path / "1.checkpoint.safetensors", tmp_path / "checkpoint.json")
    with pytest.raises(RunError, match=str(tmp_path)):
        checkpoint.read(tmp_path)


def failing(request: Message, reply: Message) -> list[Message]:
    return [Message(Error(1000, "the site's program failed"), reply_to=request)]


def nan(request: Message, reply: Message) -> Sequence[Message]:
    def spoil(model: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        return {n: a * np.float32("nan") if a.dtype.kind == "f" else a for n, a in model.items()}

    return reshaped(spoil)(request, reply)


def twice(request: Message, reply: Message) -> list[Message]:
    return [reply, reply]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "kd3a"])
@pytest.mark.parametrize(
    ("script", "what", "rounds"),
    [(failing, "failed", 2), (nan, "refused", 2), (never, "silent", 1)],
)
def test_a_run_goes_on_without_a_site_and_says_so(
    domains: list[Node],
    runs: dict[str, str],
    method: str,
    script: Any,
    what: str,
    rounds: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # The time for which a round waits passes at once, whatever time the other sites take.
    clock = [1000.0]
    waits = lambda seconds: clock.__setitem__(0, clock[0] + seconds)  # noqa: E731
    fake = SimpleNamespace(monotonic=lambda: clock[0], sleep=waits)
    monkeypatch.setattr("strategies.sites.mail.time", fake)
    settings = {"method": method, "rounds": rounds, "wait.min-sources": 2, "wait.train": 60.0}
    results, events = run(domains, runs | settings, script={"carl": script})
    troubles = [(e["what"], e["site"], e["round"]) for e in results["events"]]
    assert troubles == [(what, "carl", t) for t in range(1, rounds + 1)]
    assert [e for e in events if e["event"] == "trouble"]
    last = results["trainings"][method][0]["rounds"][-1]["weights"]
    assert set(last) == {"anna", "bert"} | ({"town"} if method == "kd3a" else set())
    assert sum(last.values()) == pytest.approx(1)
    if method == "fedavg":
        assert last == pytest.approx({"anna": 4 / 9, "bert": 5 / 9})


@pytest.mark.parametrize("tries", [1, 3])
def test_without_a_quorum_a_run_fails(
    domains: list[Node], runs: dict[str, str], tries: int
) -> None:
    asked = 0

    def fail(request: Message, reply: Message) -> list[Message]:
        nonlocal asked
        asked += 1
        return failing(request, reply)

    settings = {"method": "fedavg", "wait.min-sources": 3, "wait.tries": tries}
    events: list[Event] = []
    why = r"2 sources are left .*wait\.min-sources is 3\. carl: the site's program failed; [^.]*\.$"
    with pytest.raises(QuorumError, match=why):
        run(domains, runs | settings, events.append, script={"carl": fail})
    assert asked == tries
    assert sum(e.get("what") == "paused" for e in events) == tries - 1
    assert not [e for e in events if e["event"] in ("round", "done")]
    assert not (Path(runs["run.dir"]) / "run" / "results.json").exists()


def silent_about_kept(request: Message, reply: Message) -> list[Message]:
    return [changed(request, reply, without=["kept"])]


@pytest.mark.parametrize(
    ("script", "told"), [(failing, ""), (silent_about_kept, r" .* town: town sent no kept\.$")]
)
def test_without_its_target_a_run_tries_again_and_fails_for_a_reason(
    domains: list[Node], runs: dict[str, str], script: Any, told: str
) -> None:
    with pytest.raises(QuorumError, match=rf"town \(target\) gave no usable reply{told}"):
        run(domains, runs, script={"town": script})


def test_a_reply_that_comes_twice_counts_once(domains: list[Node], runs: dict[str, str]) -> None:
    fine, _ = run(domains, {"method": "fedavg", "run.dir": runs["run.dir"] + "-fine"})
    results, _ = run(domains, runs | {"method": "fedavg"}, script={"anna": twice})
    assert {(e["what"], e["site"]) for e in results["events"]} == {("stale", "anna")}
    assert model(results) == model(fine)


def test_a_source_that_leaves_is_left_out_and_taken_back(
    domains: list[Node], runs: dict[str, str]
) -> None:
    grid = ScriptedGrid(domains)

    def come_and_go(event: Event) -> None:
        if event["event"] == "round":
            grid.offline = {"carl"} if event["round"] == 1 else set()

    settings = {"method": "fedavg", "rounds": 3, "wait.min-sources": 2}
    results, _ = run(domains, runs | settings, come_and_go, grid=grid)
    averaged = [sorted(r["weights"]) for r in results["trainings"]["fedavg"][0]["rounds"]]
    assert averaged == [["anna", "bert", "carl"], ["anna", "bert"], ["anna", "bert", "carl"]]
    assert [(e["what"], e["site"]) for e in results["events"]] == [("absent", "carl")]


def test_a_run_waits_for_sites_that_left_but_not_for_ever(
    domains: list[Node], runs: dict[str, str]
) -> None:
    grid = ScriptedGrid(domains)

    def leave(event: Event) -> None:
        if event["event"] == "round":
            grid.offline = {"bert", "carl"}

    def back(event: Event) -> None:
        leave(event)
        if event.get("what") == "paused":
            grid.offline = set()

    settings = {"method": "fedavg", "wait.min-sources": 2}
    with pytest.raises(QuorumError, match="only 1 source came back"):
        run(domains, runs | settings, leave, grid=grid)
    grid.offline = set()
    resumed = run(domains, runs | settings | {"run.resume": True}, back, grid=grid)[0]
    assert len(resumed["trainings"]["fedavg"][0]["rounds"]) == 2


@pytest.mark.parametrize("offline", [{"town"}, {"anna", "bert", "carl"}, {"anna"}])
def test_a_run_without_enough_sites_does_not_begin(
    domains: list[Node], runs: dict[str, str], offline: set[str]
) -> None:
    grid = ScriptedGrid(domains)
    grid.offline = offline
    with pytest.raises(QuorumError, match="joined"):
        run(domains, runs, grid=grid)


def claiming(monkeypatch: pytest.MonkeyPatch, examples: object) -> None:
    """Let anna offer this in place of the number of its examples."""
    real = Site.offer

    def offer(self: Site) -> dict[str, Any]:
        return real(self) | ({"examples": examples} if self.name == "anna" else {})

    monkeypatch.setattr(Site, "offer", offer)


def test_a_claim_of_many_examples_is_bounded_and_reported(
    domains: list[Node], runs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    claiming(monkeypatch, 10**6)
    results, _ = run(domains, runs | {"method": "fedavg", "rounds": 1})
    counts = {"anna": 120, "bert": 50, "carl": 60}  # twice the larger one of the others
    weights = results["trainings"]["fedavg"][0]["rounds"][0]["weights"]
    assert weights == pytest.approx({s: n / 230 for s, n in counts.items()})
    assert [(e["what"], e["site"]) for e in results["events"]] == [("bounded", "anna")]


def test_a_site_with_an_invalid_offer_does_not_stop_the_others(
    domains: list[Node], runs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    claiming(monkeypatch, "secret")
    results, _ = run(domains, runs | {"method": "fedavg", "rounds": 1, "run.expect": 3})
    assert [e["what"] for e in results["events"]] == ["no offer"]
    assert [s["name"] for s in results["sites"]] == ["bert", "carl", "town"]


def test_results_have_what_readers_rely_on(domains: list[Node], runs: dict[str, str]) -> None:
    results, _ = run(domains, runs | {"run.baseline": "fedavg"})
    path = Path(runs["run.dir"]) / "run" / "results.json"
    assert json.loads(path.read_text()) == json.loads(json.dumps(results))
    assert set(results) >= {
        *("name", "method", "config", "seeds", "versions", "sites", "shape", "classes"),
        *("final_accuracy", "final_accuracy_std", "selected_accuracy", "selected_by"),
        *("fedavg_accuracy", "fedavg_accuracy_std", "seconds", "trainings", "events"),
    }
    assert set(results["versions"]) == {"fedda", "flwr", "torch", "python"}
    assert results["sites"][0] == {"name": "anna", "role": "source", "examples": 40, "tested": 24}
    training = results["trainings"]["kd3a"][0]
    assert set(training) >= {
        *("seed", "final_accuracy", "selected_accuracy", "selected_round"),
        *("seconds", "bytes", "model", "rounds"),
    }
    first = training["rounds"][0]
    assert set(first) >= {
        *("round", "loss", "distillation", "kept", "accuracy", "test_loss", "tested", "infomax"),
        *("weights", "bytes", "seconds"),
    }
    size = first["bytes"]["to source model"] / 3
    assert first["bytes"]["from source model"] == 3 * size
    assert first["bytes"]["to target model"] == 5 * size  # three teachers, and two models
    assert first["bytes"]["from target model"] == size
    assert training["bytes"]["from target model"] == 2 * size
    best = max(reversed(training["rounds"]), key=lambda r: r["infomax"])
    assert training["selected_round"] == best["round"]
    assert training["selected_accuracy"] == best["accuracy"]


def test_a_run_without_tests_has_no_accuracy_and_no_infomax(
    domains: list[Node], runs: dict[str, str]
) -> None:
    results, _ = run(domains, runs | {"rounds": 1, "run.evaluate": False})
    assert results["final_accuracy"] is None and results["selected_accuracy"] is None
    assert "infomax" not in results["trainings"]["kd3a"][0]["rounds"][0]


def test_an_unreadable_reply_is_counted_and_refused(
    domains: list[Node], runs: dict[str, str]
) -> None:
    def strip(request: Message, reply: Message) -> list[Message]:
        sent = changed(request, reply)
        del sent.content["manifests"]
        return [sent]

    settings = {"method": "fedavg", "rounds": 1, "wait.min-sources": 2}
    results, _ = run(domains, runs | settings, script={"carl": strip})
    assert [(e["what"], e["site"]) for e in results["events"]] == [("refused", "carl")]
    bytes_ = results["trainings"]["fedavg"][0]["rounds"][0]["bytes"]
    assert bytes_["from source unreadable"] == bytes_["from source model"] / 2


def test_folders_become_sites_and_simulate_runs_them(
    domains: list[Node], runs: dict[str, str]
) -> None:
    root = Path(domains[0]["data"]).parent
    sites = folders(root, "town", {"anna": 20})
    assert [(s["name"], s["poison"]) for s in sites] == [*zip(EXAMPLES, (20, 0, 0, 0), strict=True)]
    assert [s["role"] for s in sites] == ["source"] * 3 + ["target"]
    config = Config.parse(FAST | runs | {"rounds": 1})
    results = simulate(config, sites, Journal(), "process")
    assert len(results["trainings"]["kd3a"][0]["rounds"]) == 1
    with pytest.raises(RunError, match="no domain 'nowhere'"):
        folders(root, "nowhere", {})
    with pytest.raises(RunError, match="'town' is not a source"):
        folders(root, "town", {"town": 5})
    with pytest.raises(RunError, match="is not a folder"):
        folders(root / "none", "town", {})


def test_a_listener_that_fails_ends_no_run(
    domains: list[Node], runs: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[str] = []

    def fail(event: dict[str, Any]) -> None:
        heard.append(event["event"])
        raise BrokenPipeError("the terminal is gone")

    results, events = run(domains, runs, fail)
    assert len(results["trainings"]["kd3a"][0]["rounds"]) == 2
    assert len(heard) == 1 and events[-1]["event"] == "done"
    assert "the terminal is gone" in caplog.text


def test_a_journal_is_lines_of_json(tmp_path: Path) -> None:
    heard: list[Event] = []
    path = tmp_path / "sub" / "journal.jsonl"
    journal = Journal(path, heard.append)
    journal.write("started", engine="process")
    journal.trouble("failed", "anna", "no reason", round=3)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == heard
    assert [e["event"] for e in lines] == ["started", "trouble"]
    assert journal.troubles == [{"what": "failed", "site": "anna", "text": "no reason", "round": 3}]
    journal.trouble("failed", "anna", "x" * 10**6)  # a site cannot fill it
    assert len(journal.troubles[1]["text"]) < 1000 and path.stat().st_size < 2000


def test_test_labels_are_numbered_by_the_sources_class_names(
    domains: list[Node], runs: dict[str, str], tmp_path: Path
) -> None:
    """A target whose test set lacks the first class must not be scored against shifted labels."""
    with np.load(next(n for n in domains if n["role"] == "target")["data"]) as file:
        content = dict(file)
    later = content["y_test"] > 0
    x, y = content["x_test"][later], content["y_test"][later]
    plain = {"x_train": content["x_train"], "x_test": x, "y_test": y, "classes": list("0123")}
    # 0 now means the second class, as its names say.
    changed = plain | {"y_test": y - 1, "classes": list("123")}
    accuracies = []
    for name, arrays in (("changed", changed), ("plain", plain)):
        path = tmp_path / f"{name}.npz"
        np.savez(path, **arrays)
        nodes = [n | {"data": str(path)} if n["role"] == "target" else n for n in domains]
        results, _ = run(nodes, runs | {"run.name": name, "method": "fedavg", "rounds": "4"})
        accuracies.append(results["final_accuracy"])
    assert accuracies[0] == accuracies[1] > 0.5


def test_a_resumed_run_counts_the_sites_it_began_with(
    domains: list[Node], runs: dict[str, str]
) -> None:
    """One source does not come back: the others go on with the example counts of the start."""
    settings = runs | {"method": "fedavg"}
    with pytest.raises(KeyboardInterrupt):
        run(domains, settings, stop_after(1))
    grid = ScriptedGrid(domains)
    grid.offline.add("anna")
    results, _ = run(domains, settings | {"run.resume": True}, grid=grid)
    first, second = results["trainings"]["fedavg"][0]["rounds"]
    assert set(first["weights"]) == {"anna", "bert", "carl"}
    assert second["weights"] == pytest.approx({"bert": 50 / 110, "carl": 60 / 110})
    assert ("absent", "anna") in {(e["what"], e["site"]) for e in results["events"]}
    assert [s["name"] for s in results["sites"]] == ["anna", "bert", "carl", "town"]


def test_a_resumed_run_refuses_a_site_that_changed_its_offer(
    domains: list[Node], runs: dict[str, str], tmp_path: Path
) -> None:
    with pytest.raises(KeyboardInterrupt):
        run(domains, runs, stop_after(1))
    nodes = [with_fewer(domains[0], tmp_path), *domains[1:]]
    with pytest.raises(RosterError, match=r"another offer: .* begin a new run"):
        run(nodes, runs | {"run.resume": True})


def with_fewer(node: Node, folder: Path) -> Node:
    """A site that has five examples less."""
    with np.load(node["data"]) as file:
        np.savez(folder / "fewer.npz", **{name: array[:-5] for name, array in file.items()})
    return node | {"data": str(folder / "fewer.npz")}


def test_a_full_disk_does_not_hide_what_happened(caplog: pytest.LogCaptureFixture) -> None:
    heard: list[Event] = []
    journal = Journal(None, heard.append)
    journal.path = Path("/dev/full")
    journal.trouble("refused", "anna", "a reply too far away")
    assert heard[0]["site"] == "anna" and journal.troubles
    assert "/dev/full cannot be written (No space left on device): {" in caplog.text
    assert "too far away" in caplog.text


class Spoilt(ScriptedGrid):
    """A grid on which something else comes in place of anna's next answers."""

    def __init__(self, domains: list[Node], *spoil: Callable[[Message], Message]) -> None:
        super().__init__(domains)
        self.anna = self.id_of("anna")
        self.spoil = list(spoil)
        self.asked = 0

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        self.asked += sum(m.metadata.dst_node_id == self.anna for m in messages)
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        for reply in super().pull_messages(message_ids):
            if reply.metadata.src_node_id == self.anna and self.spoil:
                reply = self.spoil.pop(0)(reply)
            yield reply


def error(code: int) -> Callable[[Message], Message]:
    """An error in place of an answer."""

    def spoil(answer: Message) -> Message:
        return make_message(metadata=answer.metadata, error=Error(code))

    return spoil


@pytest.mark.parametrize("code", [ErrorCode.NODE_UNAVAILABLE, Code.RESTARTED])
def test_a_site_that_was_restarted_before_it_answered_is_asked_again_at_once(
    domains: list[Node], runs: dict[str, str], code: int
) -> None:
    grid = Spoilt(domains, error(code))
    journal = Journal()
    sites = Sites(grid, Config.parse(FAST | runs), journal)
    sites.look()
    assert grid.anna not in sites.there()
    sites.look()
    assert grid.anna in sites.there()
    assert journal.troubles == []


def test_a_site_that_answers_several_questions_at_once_joins_once(
    domains: list[Node], runs: dict[str, str]
) -> None:
    """As after it was stopped and went on."""
    grid, events = ScriptedGrid(domains), list[Event]()
    sites = Sites(grid, Config.parse(FAST | runs), Journal(None, events.append))
    for _ in range(2):
        sites._ask([grid.id_of("anna")])
    sites.look()
    assert [e["site"] for e in events if e["event"] == "joined"].count("anna") == 1


def test_a_site_that_gives_up_every_question_is_asked_less_and_less_often(
    domains: list[Node], runs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = [1000.0]
    fake = SimpleNamespace(monotonic=lambda: clock[0], sleep=lambda seconds: None)
    monkeypatch.setattr(presence, "time", fake)
    grid = Spoilt(domains, *[error(ErrorCode.NODE_UNAVAILABLE)] * 12)
    sites = Sites(grid, Config.parse(FAST | runs), Journal())
    for _ in range(600):  # a minute, as `gather` looks
        sites.look()
        clock[0] += presence.LOOK
    assert 4 <= grid.asked <= 8  # at 0, 0.1, 1.1, 3.1, 7.1, 15.1, 31.1 and 51.1 s
    for _ in range(1200):
        sites.look()
        clock[0] += presence.LOOK
    assert grid.anna in sites.there(), "once it answers, it counts as present"


def test_a_site_that_joins_after_the_start_is_told_to_take_no_part(
    domains: list[Node], runs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(presence, "PAUSE", 0.0)
    grid = Spoilt(domains, *[error(ErrorCode.NODE_UNAVAILABLE)] * 9)
    journal = Journal()
    sites = Sites(grid, Config.parse(FAST | runs | {"run.expect": 3}), journal)
    assert "anna" not in {node.name for node in sites.gather().nodes}
    while grid.anna not in sites.there():
        sites.look()
    assert [(t["site"], t["text"]) for t in journal.troubles] == [("anna", presence.LATE)]


def test_too_few_sites_are_told_with_what_those_that_refuse_say(
    domains: list[Node], runs: dict[str, str]
) -> None:
    grid = Spoilt(domains, error(Code.DATA))
    settings = FAST | runs | {"run.expect": 4, "wait.sites": 0.2}
    with pytest.raises(QuorumError, match=f"node {grid.anna}: the site could not use its data"):
        Sites(grid, Config.parse(settings), Journal()).gather()


def test_an_answer_counts_for_the_site_that_was_asked_alone(
    domains: list[Node], runs: dict[str, str]
) -> None:
    def posing(answer: Message) -> Message:
        answer.metadata.__dict__["_src_node_id"] = 2
        return answer

    def unasked(answer: Message) -> Message:
        answer.metadata.__dict__["_reply_to_message_id"] = ""
        return answer

    for spoil in (posing, unasked):
        grid = Spoilt(domains, spoil)
        sites = Sites(grid, Config.parse(FAST | runs), Journal())
        sites.look()
        assert sites.there() == set(grid.get_node_ids()) - {grid.anna}


@pytest.fixture
def talkative(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a run say at once and often for whom it waits."""
    monkeypatch.setattr(journal, "SAY", (0.01, 0.01))


@pytest.mark.usefixtures("talkative")
def test_a_run_says_who_owes_it_a_reply(domains: list[Node], runs: dict[str, str]) -> None:
    class Slow(ScriptedGrid):
        """A grid on which carl's reply takes some looks."""

        looks = 8

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            ids, self.looks = list(message_ids), self.looks - 1
            late = self.id_of("carl")
            asked = {i: self._open[i].metadata for i in ids if i in self._open}
            slow = [
                i for i, m in asked.items() if (m.dst_node_id, m.message_type) == (late, "train")
            ]
            return super().pull_messages([i for i in ids if i not in slow or self.looks < 0])

    settings = {"method": "fedavg", "rounds": 1, "wait.train": 60.0}
    _, events = run(domains, runs | settings, grid=Slow(domains))
    said = [e for e in events if e["event"] == "waiting-for"]
    assert said[-1]["sites"] == ["carl"]
    assert said[-1]["seconds"] > 0
    assert (said[-1]["round"], said[-1]["method"], said[-1]["seed"]) == (1, "fedavg", 0)


@pytest.mark.usefixtures("talkative")
def test_a_run_that_pauses_says_who_is_missing(domains: list[Node], runs: dict[str, str]) -> None:
    grid = ScriptedGrid(domains)

    def leave(event: Event) -> None:
        if event["event"] == "training":
            grid.offline = {"carl", "bert"}
        if event["event"] == "waiting-for":
            grid.offline = set()

    settings = {"method": "fedavg", "rounds": 1, "wait.min-sources": 3, "wait.sites": 60.0}
    _, events = run(domains, runs | settings, leave, grid=grid)
    said = next(e for e in events if e["event"] == "waiting-for")
    assert said["sites"] == ["bert", "carl"]


def test_the_exchange_hears_of_a_site_that_the_server_counts_as_gone(
    domains: list[Node], runs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Gone(ScriptedGrid):
        """A grid that lists carl, but whose server says that carl is gone once it is to train."""

        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            for reply in super().pull_messages(message_ids):
                trains = reply.metadata.message_type == "train"
                gone = trains and reply.metadata.src_node_id == self.id_of("carl")
                yield error(ErrorCode.NODE_UNAVAILABLE)(reply) if gone else reply

    told: list[tuple[str, str]] = []
    monkeypatch.setattr(FedDA, "give_up", lambda self, name, why: told.append((name, why)))
    settings = {"method": "fedavg", "rounds": 1, "wait.train": 60.0}
    run(domains, runs | settings, grid=Gone(domains))
    assert told == [("carl", mail.GONE)]


def test_a_round_whose_exchange_ended_waits_for_no_reply(
    domains: list[Node], runs: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A site that computes on, or hangs, is left behind; the round is asked for again."""
    monkeypatch.setattr(mail, "AFTER_FAILURE", 0.05)
    ended: list[Any] = []

    class Hanging(ScriptedGrid):
        def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
            invited = [i for i, m in self._open.items() if "exchange" in m.content]
            if invited and not ended:
                sessions[-1]._meeting.end("for the test")
                ended.append(sessions[-1])
                for message_id in invited:  # these are never answered
                    del self._open[message_id]
            return super().pull_messages(message_ids)

    sessions: list[Any] = []
    convene = FedDA.convene

    def noted(self: FedDA, *args: Any) -> None:
        convene(self, *args)
        sessions.append(self.session)

    monkeypatch.setattr(FedDA, "convene", noted)
    far = {"wait.train": 600.0, "wait.settle": 5.0, "wait.sites": 60.0}
    results, _ = run(domains, runs | far | {"method": "fdann", "rounds": 1}, grid=Hanging(domains))
    assert [session.ended for session in ended] == ["for the test"]
    assert {e["what"] for e in results["events"]} >= {"exchange ended", "silent", "paused"}
    assert results["final_accuracy"] is not None


class Untestable(ScriptedGrid):
    """A grid whose target answers none of its next requests to test, and then is away."""

    def __init__(self, domains: list[Node], lost: int, away: bool) -> None:
        super().__init__(domains)
        self.lost, self.away = lost, away

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        for reply in super().pull_messages(message_ids):
            target = reply.metadata.src_node_id == self.id_of("town")
            if reply.metadata.message_type == "evaluate" and target and self.lost:
                self.lost -= 1
                if self.away:
                    self.offline.add("town")
                reply = error(Code.RESTARTED)(reply)
            yield reply


def test_a_target_that_was_restarted_in_a_test_is_asked_again(
    domains: list[Node], runs: dict[str, str]
) -> None:
    settings = runs | {"method": "fedavg"}
    results, _ = run(domains, settings, grid=Untestable(domains, 2, away=False))
    whole, _ = run(domains, settings | {"run.name": "whole"})
    first, second = (r["trainings"]["fedavg"][0]["rounds"][1] for r in (results, whole))
    assert first["accuracy"] == second["accuracy"]
    assert results["final_accuracy"] == whole["final_accuracy"]
    assert results["untested"] == []


def test_a_last_test_that_was_lost_is_said_and_made_up_for_when_the_run_is_resumed(
    domains: list[Node], runs: dict[str, str]
) -> None:
    settings = runs | {"method": "fedavg", "rounds": 1, "run.seeds": "0,1"}
    results, _ = run(domains, settings, grid=Untestable(domains, 1, away=True))
    assert results["final_accuracy"] is None
    assert results["final_accuracy_seeds"] == 0
    assert [(t["seed"], t["target"]) for t in results["untested"]] == [(0, "town"), (1, "town")]
    assert {e["what"] for e in results["events"]} >= {"untested"}
    (said,) = missing_tests(results)
    assert "seed 0, at town; FedAvg (source-only), seed 1, at town: the means" in said
    assert said in "".join(map(str, terminal._notes(summary(results), results)))

    made_up, _ = run(domains, settings | {"run.resume": True})
    whole, _ = run(domains, settings | {"run.name": "whole"})
    assert made_up["untested"] == missing_tests(made_up) == []
    assert made_up["final_accuracy"] == whole["final_accuracy"]
    assert made_up["final_accuracy_seeds"] == 2
    assert made_up["selected_accuracy"] == whole["selected_accuracy"]
    assert model(made_up) == model(whole)


def test_a_target_whose_policy_allows_no_test_is_asked_once_a_round(
    domains: list[Node], runs: dict[str, str]
) -> None:
    policy = json.dumps({"leaving": {"tests": False}})
    nodes = [n | {"policy": policy} if n["name"] == "town" else n for n in domains]
    grid = ScriptedGrid(nodes)
    results, _ = run(nodes, runs | {"method": "fedavg", "rounds": 2}, grid=grid)
    tests = [c for c in grid.crossed if (c.way, c.kind, c.site) == ("to", "evaluate", "town")]
    assert len(tests) == 2
    assert results["final_accuracy"] is None and len(results["untested"]) == 1
    assert Code.POLICY.public in {e["text"] for e in results["events"]}


def test_a_site_that_comes_back_changed_is_left_out_and_the_run_goes_on(
    domains: list[Node], runs: dict[str, str], tmp_path: Path
) -> None:
    grid, fewer = ScriptedGrid(domains), with_fewer(domains[0], tmp_path)

    def change(event: Event) -> None:
        if event["event"] == "round" and event["round"] == 1:
            anna = grid.id_of("anna")
            grid.nodes[anna] = fewer
            grid.app = make_app(list(grid.nodes.values()))
            sites[0].doubt(anna)

    sites: list[Sites] = []
    real = Sites.gather

    def gather(self: Sites, *args: Any) -> Any:
        sites.append(self)
        return real(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Sites, "gather", gather)
        results, _ = run(domains, runs | {"method": "fedavg"}, change, grid=grid)
    assert set(results["trainings"]["fedavg"][0]["rounds"][1]["weights"]) == {"bert", "carl"}
    assert ("refused", "anna") in {(e["what"], e["site"]) for e in results["events"]}


def test_tests_of_other_classes_are_found_before_the_training(
    domains: list[Node], runs: dict[str, str], tmp_path: Path
) -> None:
    """A target tells nobody its classes, so the server asks it, and learns that they do not fit."""
    path = tmp_path / "town.npz"
    with np.load(domains[3]["data"]) as town:
        arrays = dict(town)
    np.savez(path, **arrays, classes=np.array(["0", "1", "two", "3"]))
    nodes = [*domains[:3], {**domains[3], "data": str(path)}]
    events: list[Event] = []
    with pytest.raises(RosterError, match=r"^town cannot use its data.*classes \(0, 1, 2, 3\)"):
        run(nodes, FAST | runs | {"method": "fedavg"}, events.append)
    assert "training" not in [e["event"] for e in events]
    # Names that no test has, and a run that tests nothing, are no reason to refuse it.
    names = np.array(["0", "1", "2", "3", "four"])
    np.savez(path, **arrays, classes=names)
    results, _ = run(nodes, FAST | runs | {"method": "fedavg", "run.name": "names"})
    assert "accuracy" in results["trainings"]["fedavg"][0]["rounds"][-1]
    np.savez(path, **arrays, classes=np.array(["0", "1", "two", "3"]))
    untested = {"method": "fedavg", "run.evaluate": False, "run.name": "untested"}
    results, _ = run(nodes, FAST | runs | untested)
    assert "accuracy" not in results["trainings"]["fedavg"][0]["rounds"][-1]


@pytest.mark.parametrize(("shape", "what"), [([4], "example"), ([1, 8, 8], "image")])
def test_patients_of_a_table_are_no_images(shape: list[int], what: str) -> None:
    sites = [{"name": "east", "role": "source", "examples": 90}]
    found: Any = {"sites": sites, "shape": shape, "trainings": {"kd3a": [{"rounds": [{}]}]}}
    (said,) = small_sites(found)
    assert f"east (90 {what}s): with fewer than 200 {what}s (200, or 20 a class)" in said
