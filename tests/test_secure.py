"""Secure sums in whole rounds: who signs what, what a server in the middle gets, who drops out."""

import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Error, Message
from safetensors.numpy import load_file

from clients.site.identity import Drawer
from clients.site.memory import resident
from fedda import records
from fedda.errors import Code, ConfigError, KeyFileError, QuorumError, SecureError
from fedda.ops import keys
from fedda.secure.agree import Occasion, Own, verify
from fedda.settings import RunConfig, Task
from fedda.wire.packing import Kind, pack
from server.journal import Journal
from server.simulation import simulate
from tests import local_grid
from tests.local_grid import (
    SOURCES,
    Bench,
    Node,
    ScriptedGrid,
    assert_close,
    failures,
    ruled,
    run,
    settings_of,
)

pytestmark = pytest.mark.usefixtures("fresh_sites")

IMAGES = {"model.name": "digit-cnn", "model.hidden": "", "train.lr": 0.01}  # with BatchNorm
SEALED = {"method": "kd3a", "kd3a.relay": "sealed"}


@pytest.fixture
def keyed(domains: list[Node], tmp_path: Path) -> list[Node]:
    return local_grid.keyed(domains, tmp_path)


Change = Callable[[dict[str, Any]], None]


def staying(nodes: list[Node], folder: Path) -> list[Node]:
    return [n | {"state-dir": str(folder / "state" / n["name"])} for n in nodes]


def with_dora(keyed: list[Node]) -> list[Node]:
    """The same sites, and a fourth source."""
    folder = Path(str(keyed[0]["key"])).parents[1]
    keys.add(folder, "dora")
    return [*keyed, keyed[0] | {"name": "dora", "key": str(folder / "nodes" / "dora")}]


def bench(nodes: list[Node], method: str = "fedavg", **settings: Any) -> Bench:
    return Bench(nodes, method, secure="sum", **settings)


# ---- keys ----------------------------------------------------------------------------------------


def test_a_signature_holds_for_one_site_round_try_and_role(tmp_path: Path) -> None:
    for name in ("anna", "bert"):
        keys.add(tmp_path, name)
    known = keys.peers(tmp_path / "peers")
    occasion = Occasion("run.fedavg-0", 3, 1)
    own = Own(occasion)
    signature = own.sign("anna", keys.load_node_key(tmp_path / "nodes" / "anna"))
    verify(occasion, "anna", own.public, signature, known)
    others = [Occasion("run.fedavg-1", 3, 1), Occasion("run.fedavg-0", 4, 1)]
    others += [Occasion("run.fedavg-0", 3, 2), Occasion("run.fedavg-0", 3, 1, "target")]
    for other in others:
        with pytest.raises(SecureError, match="somebody stands between"):
            verify(other, "anna", own.public, signature, known)
    with pytest.raises(SecureError, match="'bert' is not signed"):
        verify(occasion, "bert", own.public, signature, known)
    with pytest.raises(SecureError, match="not signed"):
        verify(occasion, "anna", Own(occasion).public, signature, known)
    with pytest.raises(SecureError, match=r"'eve'.*not in this site's peers"):
        verify(occasion, "eve", own.public, signature, known)


@pytest.mark.parametrize("bits", [256, 521])
def test_every_curve_of_ssh_signs(bits: int) -> None:
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key({256: ec.SECP256R1(), 521: ec.SECP521R1()}[bits])
    occasion = Occasion("run", 1, 1)
    own = Own(occasion)
    signature = own.sign("anna", key)
    assert len(signature) == 132
    verify(occasion, "anna", own.public, signature, {"anna": key.public_key()})


def test_a_pair_has_one_seed_and_any_difference_another() -> None:
    occasion = Occasion("run", 1, 1)
    a, b, c = Own(occasion), Own(occasion), Own(occasion)
    group = {"a": a.public, "b": b.public, "c": c.public}
    of_a, of_b = a.seeds("a", group, b"same"), b.seeds("b", group, b"same")
    (shared,) = set(of_a) & set(of_b)
    assert of_a[shared] and not of_b[shared]
    assert not set(of_a) & set(b.seeds("b", group, b"other model"))
    smaller = {"a": a.public, "b": b.public}
    assert not set(of_a) & set(b.seeds("b", smaller, b"same"))
    with pytest.raises(SecureError, match="key of c is no X25519 key"):
        a.seeds("a", group | {"c": bytes(32)}, b"same")


def test_the_peers_file_follows_the_keys(tmp_path: Path) -> None:
    for name, role in (("anna", "source"), ("bert", ""), ("town", "target")):
        keys.add(tmp_path, name, role)
    assert set(keys.peers(tmp_path / "peers")) == {"anna", "bert"}
    keys.revoke(tmp_path, "bert")
    keys.add(tmp_path / "elsewhere", "carl")
    keys.admit(tmp_path, "carl", tmp_path / "elsewhere" / "nodes" / "carl.pub", "source")
    assert set(keys.peers(tmp_path / "peers")) == {"anna", "carl"}
    twice = tmp_path / "twice"
    twice.write_bytes((tmp_path / "peers").read_bytes() * 2)
    with pytest.raises(KeyFileError, match="another line has"):
        keys.peers(twice)


# ---- rounds --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("method", "more"),
    [
        *((m, {}) for m in ("fedavg", "fedprox", "adabn", "fedbn", "autodial")),
        ("fedavg", {"fedavg__weighting": "uniform"}),
    ],
)
def test_a_round_gives_the_plain_result_and_shows_no_model(
    keyed: list[Node], method: str, more: dict[str, Any]
) -> None:
    settings = {k.replace(".", "__"): v for k, v in IMAGES.items()} | more
    open_ = Bench(keyed, method, **settings)
    wanted, plain = open_.round()
    resident.cache_clear()
    made = bench(keyed, method, **settings)
    found, numbers = made.round()
    assert_close(found, wanted, 1e-6)
    assert made.strategy.weights == pytest.approx(open_.strategy.weights)
    counters = [n for n in wanted if n.endswith("num_batches_tracked")]
    assert counters and all(found[n] == wanted[n] for n in counters)
    assert numbers["loss"] == pytest.approx(plain["loss"], rel=1e-6)
    back = [c for c in made.grid.crossed if c.way == "from" and c.role == "source" and c.hop]
    assert [(c.arrays, c.numbers) for c in back] == 3 * [({"key": "key"}, {"seconds"})] + 3 * [
        ({"masked": "masked"}, {"steps", "seconds"})
    ]


@pytest.mark.parametrize("floats", ["bfloat16", "int8"])
@pytest.mark.parametrize("method", ["fedavg", "autodial"])
def test_with_fewer_bytes_the_sum_is_still_the_plain_result(
    keyed: list[Node], method: str, floats: str
) -> None:
    """Under masks nothing is rounded to the type that leaves a site, so the two differ a little."""
    settings: dict[str, Any] = {"model__hidden": "32", "wire__dtype": floats}
    plain = Bench(keyed, method, **settings)
    wanted, _ = plain.round()
    resident.cache_clear()
    made = bench(keyed, method, **settings)
    found, _ = made.round()
    assert_close(found, wanted, 1e-3 if floats == "int8" else 4e-3)
    assert made.notices == []
    (reply, *_) = (
        records.read(m.content)[0]["masked"]
        for m in made.grid.replies
        if m.has_content() and "masked" in m.content.get("arrays", {})
    )
    sizes = {e.name: e.dtype for e in reply.manifest.entries if len(e.shape) > 1}
    assert sizes and set(sizes.values()) == {"int32"}


@pytest.mark.contrib
def test_sources_are_sent_the_same_along_with_the_model(keyed: list[Node]) -> None:
    """Centring's sources need the target's means, which come in the clear, under masks as well."""
    at_once: dict[str, Any] = {"centring__plain_share": 0.0}
    wanted, plain = Bench(keyed, "centring", **at_once).round()
    resident.cache_clear()
    made = bench(keyed, "centring", **at_once)
    found, numbers = made.round()
    assert_close(found, wanted, 1e-6)
    assert numbers["loss"] == pytest.approx(plain["loss"], rel=1e-6)
    sent = [
        c.arrays for c in made.grid.crossed if (c.way, c.role, c.hop) == ("to", "source", "train")
    ]
    assert [arrays.get("means") for arrays in sent] == 3 * ["statistics"]


def test_a_site_that_drops_out_costs_a_round_not_the_run(
    keyed: list[Node], runs: dict[str, str], tmp_path: Path
) -> None:
    """Of four sources one fails in the second round, after it has signed its key."""
    requests: list[Message] = []

    def dies(request: Message, reply: Message) -> list[Message]:
        requests.append(request)
        gone = Message(Error(int(Code.RESTARTED), "gone"), reply_to=request)
        return [reply if len(requests) < 4 else gone]

    settings = {"method": "fedavg", "secure": "sum", "run.expect": 5}
    nodes = ruled(with_dora(keyed), "[secure]\nchanges = 1", tmp_path)
    results, events = run(nodes, settings | runs, script={"dora": dies})
    first, second = results["trainings"]["fedavg"][0]["rounds"]
    assert set(first["weights"]) == {*SOURCES, "dora"}
    assert set(second["weights"]) == {*SOURCES}
    assert any("3 of the 4 sites of a secure sum" in str(e.get("text")) for e in events)


def test_sites_without_peers_refuse(domains: list[Node]) -> None:
    made = bench(domains)
    with pytest.raises(QuorumError, match=r"0 sources are left .* a secure sum needs 3"):
        made.round()
    assert failures(made) == {(s, int(Code.SECURE)) for s in SOURCES}


def test_a_server_in_the_middle_is_refused(keyed: list[Node]) -> None:
    """The server replaces bert's key by one of its own, for which it has no signature of bert's."""

    def replaced(request: Message, reply: Message) -> list[Message]:
        if request.content["step"]["hop"] != "keys":
            return [reply]
        arrays, tables = records.read(reply.content)
        signature = arrays["key"].raw()["signature"]
        public = np.frombuffer(Own(Occasion("x", 1, 1)).public, np.uint8)
        key = pack({"public": public, "signature": signature}, Kind.KEY)
        return [Message(records.write({"key": key}, metrics=tables["metrics"]), reply_to=request)]

    made = Bench(keyed, "fedavg", {"bert": replaced}, secure="sum")
    with pytest.raises(QuorumError, match="0 of the 3 sites of a secure sum"):
        made.round()
    assert failures(made) == {(s, int(Code.SECURE)) for s in SOURCES}


def masked_requests(made: Bench) -> list[Message]:
    """Let the sites sign keys, and return the requests for masked models that follow."""
    replies = [made.grid.call(request) for request in made.begin()]
    found: list[Message] = []

    def keep(requests: Any, *_: Any) -> list[Message]:
        found.extend(requests)
        return []

    made.strategy.mail.deliver = keep  # type: ignore[method-assign]
    with pytest.raises(QuorumError):
        made.strategy.aggregate_train(1, replies)
    return found


def step(**numbers: Any) -> Change:
    def change(content: dict[str, Any]) -> None:
        content["step"] |= numbers

    return change


def other_model(content: dict[str, Any]) -> None:
    model = {n: a * 0 for n, a in content["arrays"]["model"].unpack().items()}
    content["arrays"]["model"] = pack(model, Kind.MODEL)


def other_task(content: dict[str, Any]) -> None:
    content["task"]["train.lr"] = 1e-6


@pytest.mark.parametrize("change", [step(most=10**6), other_model, other_task])
def test_a_server_that_tells_one_site_something_else_gets_noise(
    keyed: list[Node], change: Change
) -> None:
    """It could else know the others' models beforehand, or drown them by one site's weight."""
    made = bench(keyed)
    requests = masked_requests(made)
    sums: list[int] = []
    own: dict[str, Own | None] = {}
    for altered in (False, True):
        total = np.zeros(1, np.uint64)
        for request in requests:
            arrays, tables = records.read(request.content)
            content = {"arrays": arrays, **tables}
            if altered and request.metadata.dst_node_id == made.grid.id_of("carl"):
                change(content)
            sent = records.write(content.pop("arrays"), **content)
            again = Message(sent, request.metadata.dst_node_id, "train", ttl=60.0)
            site = resident(tuple(sorted(made.grid.nodes[request.metadata.dst_node_id].items())))
            if not altered:
                own[site.name] = site.summed._drawer._own
            site.summed._drawer._own = own[site.name]  # the test alone can use a key twice
            masked = records.read(made.grid.call(again).content)[0]["masked"].raw()
            total += masked["sum:weight"].view(np.uint64)
        sums.append(int(total[0]))
    assert sums[0] == 150
    assert sums[1] > 10**9


def test_a_key_serves_for_one_request(keyed: list[Node]) -> None:
    made = bench(keyed)
    first = masked_requests(made)[0]
    assert not made.grid.call(first).has_error()
    assert made.grid.call(first).error.code == Code.SECURE


@pytest.mark.parametrize("settings", [{"method": "fedavg", "secure": "sum"}, SEALED])
def test_a_site_whose_program_ends_with_each_request_takes_part(
    keyed: list[Node], tmp_path: Path, settings: dict[str, Any]
) -> None:
    """As under Flower's own node and on Ray: a key waits in the site's file until it has served."""
    plain = {"rounds": 2, "run.baseline": "none", **settings}
    whole, _ = run(staying(keyed, tmp_path / "one"), plain | {"run.dir": str(tmp_path / "a")})
    nodes = [node | {"forgetful": True} for node in staying(keyed, tmp_path / "other")]
    results, _ = run(nodes, plain | {"run.dir": str(tmp_path / "b")}, grid=Ending(nodes))
    assert results["events"] == whole["events"] == []
    assert sum(len(trained) for trained in results["trainings"].values()) == 1
    assert list((tmp_path / "one" / "state").rglob("*.key")) == []
    assert list((tmp_path / "other" / "state").rglob("*.key")) == []


class Ending(ScriptedGrid):
    """Sites whose memory is lost after each request."""

    def _call(self, message: Message) -> Message:
        resident.cache_clear()
        return super()._call(message)


def test_only_the_owner_can_read_a_key_that_is_kept(tmp_path: Path) -> None:
    file, own = tmp_path / "anna" / "summed.key", Own(Occasion("t", 3, 1, "target"))
    Drawer(file).put(own)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    taken = Drawer(file).take()
    assert taken is not None and (taken.public, taken.occasion) == (own.public, own.occasion)
    assert not file.exists() and Drawer(file).take() is None
    in_memory = Drawer(None)
    in_memory.put(own)
    assert in_memory.take() is own and in_memory.take() is None


@pytest.mark.parametrize("between", [False, True], ids=["at once", "after another training"])
def test_a_round_is_sent_to_one_group_only(
    keyed: list[Node], tmp_path: Path, between: bool
) -> None:
    """A server that restarts, and asks for the same try with a smaller group, gets nothing."""
    nodes = ruled(staying(with_dora(keyed), tmp_path), "[secure]\nchanges = 9", tmp_path)
    bench(nodes, run__expect=5).round()
    if between:
        bench(nodes, run__expect=5, run__name="between").round()
    resident.cache_clear()  # the sites restart, too
    made = bench(nodes, run__expect=5)
    made.grid.offline.add("dora")
    with pytest.raises(QuorumError, match="0 of the 3"):
        made.round()
    assert failures(made) == {(s, int(Code.SECURE)) for s in SOURCES}
    found, _ = made.round()  # the second try has draws of its own
    assert found


def test_a_try_again_has_draws_of_its_own(keyed: list[Node]) -> None:
    first = bench(keyed)
    wanted, _ = first.round()
    resident.cache_clear()
    second = bench(keyed)
    second.strategy.channel._try = (1, 1)  # type: ignore[attr-defined]
    found, _ = second.round()
    assert any((found[n] != wanted[n]).any() for n in wanted)


# ---- the site's policy ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "rule", ["[secure]\nleast = 4", "[leaving]\nmodels = false"], ids=["least", "models"]
)
def test_the_policy_can_refuse_a_sum(keyed: list[Node], rule: str, tmp_path: Path) -> None:
    made = bench(ruled(keyed, rule, tmp_path))
    with pytest.raises(QuorumError):
        made.round()
    assert failures(made) == {(s, int(Code.POLICY)) for s in SOURCES}


def test_the_policy_can_demand_sums(keyed: list[Node], tmp_path: Path) -> None:
    nodes = ruled(keyed, "[secure]\ndemand = true", tmp_path)
    made = Bench(nodes, "fedavg")
    with pytest.raises(QuorumError):
        made.round()
    assert failures(made) == {(s, int(Code.POLICY)) for s in SOURCES}
    bench(nodes).round()


@pytest.mark.parametrize("rule", ["", "[secure]\nchanges = 0"], ids=["no policy", "0"])
def test_the_group_does_not_change_unless_the_policy_allows_it(
    keyed: list[Node], rule: str, tmp_path: Path
) -> None:
    nodes = with_dora(keyed)
    made = bench(ruled(nodes, rule, tmp_path) if rule else nodes, run__expect=5, rounds=3)
    made.round(1)
    made.round(2)
    made.grid.offline.add("dora")
    with pytest.raises(QuorumError):
        made.round(3)
    assert failures(made) == {(s, int(Code.POLICY)) for s in SOURCES}
    made.grid.offline.clear()
    made.round(3)


def test_a_site_may_drop_out_and_return_as_often_as_the_policy_says(
    keyed: list[Node], tmp_path: Path
) -> None:
    nodes = ruled(with_dora(keyed), "[secure]\nchanges = 2", tmp_path)
    made = bench(nodes, run__expect=5, rounds=4)
    made.round(1)
    made.grid.offline.add("dora")
    made.round(2)
    made.grid.offline.clear()
    made.round(3)
    made.grid.offline.add("dora")
    with pytest.raises(QuorumError):
        made.round(4)
    assert failures(made) == {(s, int(Code.POLICY)) for s in SOURCES}


def test_the_same_training_under_another_name_has_the_same_group(keyed: list[Node]) -> None:
    """With the same seed and model the difference of both sums would be one site's model."""
    nodes = with_dora(keyed)
    bench(nodes, run__expect=5).round()
    made = bench(nodes, run__expect=5, run__name="again")
    made.grid.offline.add("dora")
    with pytest.raises(QuorumError, match="0 of the 3"):
        made.round()
    assert failures(made) == {(s, int(Code.POLICY)) for s in SOURCES}


# ---- what is refused -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings, says",
    [
        ({"method": "kd3a"}, "kd3a needs single models"),
        ({"method": "fdann"}, "fdann needs single models"),
        ({"method": "fedavg", "run.baseline": "kd3a"}, "kd3a needs single models"),
        ({"method": "fedavg", "guard.mean": "median"}, "guard.mean is median"),
        ({"method": "fedavg", "sources-per-round": 3}, "sources-per-round is 3"),
        ({"method": "fedavg", "secure": "max"}, "secure"),
    ],
)
def test_settings_that_contradict_sums_are_refused(settings: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        RunConfig.parse({"secure": "sum", **settings})


def test_a_site_refuses_a_task_without_such_sums() -> None:
    flat = RunConfig.parse({}).task("kd3a", 0, (1, 8, 8), ["a", "b"], 4).flat()
    with pytest.raises(ConfigError, match="kd3a needs single models"):
        Task.parse(flat | {"secure": "sum"})


def test_two_sources_are_too_few(keyed: list[Node]) -> None:
    made = bench([n for n in keyed if n["name"] != "carl"], run__expect=3)
    with pytest.raises(QuorumError, match="2 sources"):
        made.round()


def test_the_servers_bound_holds_for_the_mean(keyed: list[Node]) -> None:
    made = bench(keyed, guard__max_change=1e-9)
    with pytest.raises(QuorumError, match=r"the secure sum.*guard.max-change"):
        made.round()


def test_a_plain_model_is_no_answer(keyed: list[Node]) -> None:
    """Neither side takes a model where the contract has a masked one."""

    def plain(request: Message, reply: Message) -> list[Message]:
        if request.content["step"]["hop"] != "train":
            return [reply]
        model = records.read(request.content)[0]["model"]
        tables = records.read(reply.content)[1]
        return [Message(records.write({"model": model}, **tables), reply_to=request)]

    made = Bench(keyed, "fedavg", {"anna": plain}, secure="sum")
    with pytest.raises(QuorumError, match="2 of the 3"):
        made.round()
    assert any(what == "refused" and site == "anna" for what, site, _ in made.notices)


def test_a_simulation_makes_its_own_keys(domains: list[Node], runs: dict[str, str]) -> None:
    results = {}
    for secure in ("none", "sum"):
        settings = settings_of("fedavg") | runs | {"secure": secure, "run.name": secure}
        config = RunConfig.parse(settings)
        results[secure] = simulate(config, domains, Journal(), "process")
    models = [load_file(results[s]["trainings"]["fedavg"][0]["model"]) for s in results]
    assert_close(models[1], models[0], 1e-5)


def test_a_site_with_a_smaller_bound_takes_the_same_models(
    keyed: list[Node], tmp_path: Path
) -> None:
    """The masked model is not built, so it does not count as values of the network."""
    made = bench(keyed)
    values = sum(a.size for a in made.model.values())
    nodes = ruled(keyed, f"[limits]\nparameters = {values + 200}", tmp_path)
    assert bench(nodes).round()[0]
