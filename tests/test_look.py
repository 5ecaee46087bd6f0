"""`fedda look`: what sites tell before any training, what never leaves, and what follows."""

import json
import math
import re
import shlex
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from PIL import Image

from clients.policy import describe
from clients.policy.rules import Policy
from clients.site import site_statistics
from clients.site.memory import Site, resident
from fedda import records
from fedda.config.inputs import scales_of
from fedda.errors import Code, FeddaError, QuorumError, WireError
from fedda.look.account import Account
from fedda.look.advice import compared, settings
from fedda.maths import summaries
from fedda.ops import chain
from fedda.settings import RunConfig
from fedda.wire import LOOK_TABLE, packing
from fedda.wire.packing import Kind
from server import looking
from server.journal import Journal
from tests.command_lines import call, parse
from tests.federation import Federation
from tests.local_grid import Node, ScriptedGrid
from tests.processes import leaving_nothing
from tests.reference import summaries as twin

pytestmark = pytest.mark.usefixtures("fresh_sites", "signal_handlers")

YES = '{"leaving": {"look": true}, "budget": {"looks": 9}}'  # else one answer is all


def rows(n: int, d: int = 3, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(50, 10, (n, d)).astype(np.float32)


def photos(n: int, seed: int = 0, channels: int = 1, bright: int = 100) -> np.ndarray:
    rng = np.random.default_rng(seed)
    side = (n, 32, 32, channels) if channels == 3 else (n, 32, 32)
    return rng.integers(bright - 60, bright + 60, side).astype(np.uint8)


def labels(n: int, rare: int = 0) -> np.ndarray:
    """Labels of two classes, and of a third with a few examples."""
    return np.where(np.arange(n) < n - rare, np.arange(n) % 2, 2)


def site(folder: Path, name: str, x: np.ndarray, y: np.ndarray | None = None, **more: Any) -> Node:
    arrays: dict[str, Any] = {"x": x}
    if y is not None:
        arrays |= {"y": y, "classes": np.array(["common", "other", "zebra"])[: y.max() + 1]}
    folder.mkdir(exist_ok=True)
    np.savez(folder / f"{name}.npz", allow_pickle=False, **arrays)
    role = "target" if y is None else "source"
    node = {"role": role, "name": name, "data": str(folder / f"{name}.npz"), "policy": YES}
    state = {"state-dir": str(folder / "state" / name), "audited": True, "notes": False}
    return node | state | more


def two(folder: Path, **more: Any) -> list[Node]:
    """A source and a target with the same columns."""
    return [
        site(folder, "anna", rows(200), labels(200), **more),
        site(folder, "town", rows(200, seed=1), **more),
    ]


class Looked:
    """A look at sites of this process, with all that crossed."""

    def __init__(self, nodes: list[Node], folder: Path, name: str = "look") -> None:
        resident.cache_clear()
        self.grid = ScriptedGrid(nodes)
        waits = {"wait.sites": 1.0, "wait.settle": 0.0, "run.expect": len(nodes)}
        flat = {"run.look": True, "run.dir": str(folder / "runs"), "run.name": name} | waits
        self.names = {i: str(node["name"]) for i, node in enumerate(nodes, start=1)}
        self.folder = folder / "runs" / name
        journal = Journal(self.folder / "journal.jsonl")
        self.seen = looking.execute(RunConfig.parse(flat), self.grid, journal, self.names)

    def replies(self) -> dict[str, Message]:
        return {self.names[m.metadata.src_node_id]: m for m in self.grid.replies}

    def bytes_of(self, name: str) -> bytes:
        """All bytes that a site sent."""
        content = self.replies()[name].content
        arrays, tables = records.read(content)
        return b"".join(bytes(p.buffer) for p in arrays.values()) + json.dumps(tables).encode()

    def told(self, name: str) -> dict[str, Any]:
        return next(s for s in self.seen["sites"] if s["name"] == name)


@pytest.mark.parametrize("n", [64, 300])
def test_a_column_is_its_naive_twin_s_rounded(n: int) -> None:
    values = np.random.default_rng(n).gamma(2, 3, n)
    values[5] = np.nan
    made = summaries.column(torch.tensor(np.append(values, 1.0))[:, None], None)
    wanted = twin.column([*values, 1.0])
    step = (wanted["high"] - wanted["low"]) / 64
    for name, value in wanted.items():
        assert getattr(made, name) == pytest.approx(value, abs=step, rel=5e-3), name
    seen = [float(v) for v in [*values, 1.0] if not math.isnan(v)]
    within = [min(max(v, wanted["low"]), wanted["high"]) for v in seen]
    np.testing.assert_allclose(made.share, twin.share(within, wanted["low"], wanted["high"]))


def test_a_column_by_hand() -> None:
    made = summaries.column(torch.arange(100.0)[:, None], None)
    assert (made.low, made.high, made.missing) == (14.5, 84.5, 0)
    assert made.mean == pytest.approx(49.5, abs=0.4)
    # 15 values lie below 14.5, and 8.75 in each bin: only the ends have ten.
    assert made.share.tolist() == pytest.approx([0.2, 0, 0, 0, 0, 0, 0, 0.2])
    few = summaries.column(torch.arange(63.0)[:, None], None)
    assert few[:4] == (0, 0, 0, 0) and not few.share.any()


@pytest.mark.parametrize("n", [73, 109, 203])
def test_no_number_tells_how_many_examples_there_are(n: int) -> None:
    """A share in units of one over their exact number would."""
    made = summaries.column(torch.from_numpy(rows(n, 1)), None)
    told = (made.share * (n // 10)).tolist()
    assert any(told) and told == pytest.approx([round(x) for x in told], abs=1e-4)


def test_ten_values_far_out_decide_nothing_and_eleven_do() -> None:
    values = torch.from_numpy(rows(200, 1))
    made = []
    for odd in (1e3, 1e6):
        for many in (10, 11):
            some = values.clone()
            some[:many] = odd
            made.append(summaries.column(some, None))
    assert made[0][:5] == made[2][:5] and torch.equal(made[0].share, made[2].share)
    assert made[1].high != made[3].high


def test_drift_is_its_naive_twin_s() -> None:
    draws = np.random.default_rng(0)
    m, m2 = draws.normal(0, 1, (2, 6))
    s, s2 = draws.gamma(1, 1, (2, 6))
    s[:2] = s2[:2] = 0
    m[0] = m2[0]
    found = summaries.drift(
        [torch.tensor(m), torch.tensor(m2)], [torch.tensor(s), torch.tensor(s2)]
    )
    assert found == pytest.approx(twin.drift(m, s, m2, s2))
    one, two, unit = torch.zeros(4), torch.full((4,), 2.0), torch.ones(4)
    assert summaries.drift([one, two], [unit, unit]) == 2  # by hand: two deviations everywhere
    assert summaries.drift([two, two], [unit, one]) == 0


FRESH = Policy.model_validate(tomllib.loads(describe.FRESH)).model_dump_json(by_alias=True)
MORE = '{"leaving": {"statistics": true}}'


@pytest.mark.parametrize("policy", [{}, *({"policy": text} for text in ("", "{}", MORE, FRESH))])
def test_no_site_tells_unless_its_policy_says_so(tmp_path: Path, policy: dict[str, str]) -> None:
    silent = site(tmp_path, "carl", rows(200), labels(200))
    del silent["policy"]
    made = Looked([*two(tmp_path), silent | policy], tmp_path)
    assert made.replies()["carl"].error.code == Code.POLICY
    assert made.seen["refused"] == {"carl": Code.POLICY.public}
    assert [s["name"] for s in made.seen["sites"]] == ["anna", "town"]
    (trouble,) = [e for e in Journal(made.folder / "journal.jsonl").troubles]
    assert (trouble["site"], trouble["text"]) == ("carl", Code.POLICY.public)


def test_a_source_under_differential_privacy_tells_nothing(tmp_path: Path) -> None:
    policy = '{"leaving": {"look": true}, "privacy": {"noise": 1.0}}'
    nodes = [*two(tmp_path, policy=policy), site(tmp_path, "vill", rows(100))]
    made = Looked(nodes, tmp_path)
    assert set(made.seen["refused"]) == {"anna"}  # a target's examples have no labels


def test_a_rare_class_and_small_counts_never_leave(tmp_path: Path) -> None:
    nodes = two(tmp_path)
    nodes[0] = site(tmp_path, "anna", rows(203), labels(203, rare=3))
    made = Looked(nodes, tmp_path)
    assert made.told("anna")["classes"] == {"common": 100, "other": 100}
    assert made.told("anna")["examples"] == 200 and made.told("town")["classes"] == {}
    everything = made.bytes_of("anna") + b"".join(p.read_bytes() for p in made.folder.iterdir())
    assert b"common" in everything and b"zebra" not in everything


def test_a_value_of_one_example_changes_no_byte(tmp_path: Path) -> None:
    sent = []
    for value in (1e5, 7e8):
        folder = tmp_path / str(value)
        folder.mkdir()
        x = rows(200)
        x[17, 1] = value
        nodes = [site(folder, "anna", x, labels(200)), *two(folder)[1:]]
        sent.append(Looked(nodes, folder).bytes_of("anna"))
    assert sent[0] == sent[1]
    assert np.float32(7e8).tobytes() not in sent[1]


@pytest.mark.parametrize("channels", [1, 3])
def test_one_odd_pixel_changes_no_byte(tmp_path: Path, channels: int) -> None:
    sent = []
    for value in (0, 251):
        folder = tmp_path / str(value)
        folder.mkdir()
        x = photos(200, channels=channels)
        if value:
            x[17, 5, 5] = value
        nodes = [site(folder, "anna", x, labels(200)), site(folder, "town", photos(200, 1))]
        made = Looked(nodes, folder)
        sent.append(made.bytes_of("anna"))
        assert not any(share[-1] for share in made.told("anna")["arrays"]["share"])
    assert sent[0] == sent[1]


def test_exactly_the_listed_content_crosses(tmp_path: Path) -> None:
    made = Looked(two(tmp_path), tmp_path)
    assert {m.metadata.message_type for m in made.grid.requests} == {"query.look"}
    asked = [records.read(m.content) for m in made.grid.requests]
    assert asked == [({}, {"look": {"run": "look"}})] * 2
    for message in made.replies().values():
        arrays, tables = records.read(message.content)
        assert {n: p.manifest.kind for n, p in arrays.items()} == {"look": Kind.STATISTICS}
        assert {n: set(t) for n, t in tables.items()} == {"look": {*LOOK_TABLE}}


def test_few_examples_tell_no_statistics(tmp_path: Path) -> None:
    nodes = [*two(tmp_path), site(tmp_path, "vill", rows(63)), site(tmp_path, "tiny", rows(9))]
    nodes[0]["min-images"] = 201  # the site's own minimum
    made = Looked(nodes, tmp_path)
    assert made.told("anna")["arrays"] == {} and made.told("town")["arrays"]
    assert made.told("vill")["arrays"] == {} and made.told("vill")["examples"] == 60
    assert made.told("tiny")["examples"] == 0
    assert "fewer than 10 examples" in made.seen["text"]


def test_a_site_tells_once_unless_its_policy_gives_more(tmp_path: Path) -> None:
    """From two answers somebody could compute the example by which they differ."""
    once = '{"leaving": {"look": true}}'
    assert Looked(two(tmp_path, policy=once), tmp_path, "first").seen["refused"] == {}
    with pytest.raises(QuorumError, match=r"0 of 2 sites told .* anna, town: a budget"):
        Looked(two(tmp_path, policy=once), tmp_path, "second")
    more = '{"leaving": {"look": true}, "budget": {"looks": 2}}'
    assert Looked(two(tmp_path, policy=more), tmp_path, "third").seen["refused"] == {}
    with pytest.raises(QuorumError, match="0 of 2 sites told"):
        Looked(two(tmp_path, policy=more), tmp_path, "fourth")


def test_a_source_that_becomes_a_target_tells_its_classes_no_more(tmp_path: Path) -> None:
    nodes = two(tmp_path)
    assert b"common" in Looked(nodes, tmp_path, "first").bytes_of("anna")
    nodes[0]["role"] = "target"
    assert b"common" not in Looked(nodes, tmp_path, "second").bytes_of("anna")


def test_noise_of_the_policy_hides(tmp_path: Path) -> None:
    loud = '{"leaving": {"look": true}, "protect": {"noise": 5}}'
    plain = Looked(two(tmp_path / "plain"), tmp_path, "plain").told("town")
    first = Looked(two(tmp_path / "loud", policy=loud), tmp_path, "loud")
    assert first.told("town")["arrays"]["low"] != plain["arrays"]["low"]
    other = Looked(two(tmp_path / "other", policy=loud), tmp_path, "other")
    assert other.bytes_of("town") != first.bytes_of("town")


def test_no_more_than_32_bits_of_a_seed_would_let_noise_be_guessed() -> None:
    """As many are tried in hours, and what noise does to all shares says which it is."""
    x = torch.from_numpy(rows(200))
    few, many = (
        site_statistics.statistics(x, 5, np.random.default_rng(seed)).buffer
        for seed in (1, 2**32 + 1)
    )
    assert bytes(few) != bytes(many)


def test_a_target_s_column_of_labels_in_other_letters_tells_nothing(tmp_path: Path) -> None:
    nodes = two(tmp_path)
    for node, head in zip(nodes, ("label", " Label"), strict=True):
        table = np.column_stack([rows(200, 2), labels(200)])
        file = tmp_path / f"{node['name']}.csv"
        np.savetxt(file, table, "%g", ",", header=f"age,chol,{head}", comments="")
        node["data"] = str(file)
    with pytest.raises(QuorumError, match="1 of 2 sites told"):
        Looked(nodes, tmp_path)
    nodes[1]["columns"] = "label=Label"
    made = Looked(nodes, tmp_path, "named")
    assert made.told("town")["columns"] == ["age", "chol"]


@pytest.mark.parametrize("case", ["disk", "many names", "odd name"])
def test_texts_of_a_column_tell_nothing_wherever_they_lie(tmp_path: Path, case: str) -> None:
    """Their statistics would say how many have the first text of the alphabet."""
    (tmp_path / "sites").mkdir()
    long = "x" * 200 if case == "many names" else "x"
    name = "sex=kind" if case == "odd name" else "sex"
    told = []
    for frequent in ("ant", "zebra"):
        other = {"ant": "zebra", "zebra": "ant"}[frequent]
        path = tmp_path / "sites" / "east.csv"
        columns = {name: [frequent] * 150 + [other] * 50}
        columns |= {f"{long}{i}": range(200) for i in range(90)}
        columns |= {"label": ["a", "b"] * 100}
        heading, rows_of = ",".join(columns), zip(*columns.values(), strict=True)
        path.write_text("\n".join([heading, *(",".join(map(str, row)) for row in rows_of)]))
        node = {"role": "source", "name": "east", "data": str(path), "policy": YES}
        node |= {"state-dir": str(tmp_path / frequent), "cache": "disk" if case == "disk" else ""}
        arrays, _ = site_statistics.tell(Site({k: v for k, v in node.items() if v}))
        told.append(bytes(arrays["look"].buffer))
    assert told[0] == told[1]


@pytest.mark.parametrize("run", ["x" * 10**6, "../../etc", "\x1b[2J\n", b"\xff", [1] * 1000, 7, ""])
def test_any_name_of_a_run_is_answered_alike_and_noted_shortly(tmp_path: Path, run: Any) -> None:
    grid = ScriptedGrid(two(tmp_path))
    reply = grid.call(Message(records.write(look={"run": run}), 1, "query.look", ttl=60))
    assert reply.has_content()
    log = tmp_path / "state" / "anna" / "audit.jsonl"
    assert len(chain.check(log).entries) == 2 and log.stat().st_size < 4000
    assert {p.name for p in tmp_path.iterdir()} == {"anna.npz", "town.npz", "state"}


def test_looks_are_booked_and_audited(tmp_path: Path) -> None:
    policy = '{"leaving": {"look": true}, "budget": {"rounds": 1, "looks": 9}}'
    nodes = [*two(tmp_path), site(tmp_path, "carl", rows(99), labels(99), policy=policy)]
    first = Looked(nodes, tmp_path, "first")
    assert first.seen["refused"] == {}
    second = Looked(nodes, tmp_path, "second")
    assert second.seen["refused"] == {"carl": Code.BUDGET.public}
    log = chain.check(tmp_path / "state" / "carl" / "audit.jsonl").entries
    events = [(e["event"], e.get("run"), e.get("code")) for e in log]
    assert events[:2] == [("received", "first", None), ("answered", "first", None)]
    assert events[2:] == [("received", "second", None), ("refused", "second", "BUDGET")]
    assert log[1]["arrays"][0]["kind"] == "statistics" and "classes" in log[1]["numbers"]
    assert log[1]["sha256"] == records.digest(first.replies()["carl"])
    counted = {"from site scalars", "to site scalars", "from site statistics"}
    assert set(first.seen["bytes"]) == counted


@pytest.mark.parametrize(
    "tables",
    [
        {"look": {}},
        {"look": {"run": "x", "columns": "3"}},
        {"task": {"run": "x"}},
        {"look": {"run": "x"}, "task": {}},
    ],
)
def test_a_request_can_choose_nothing(tmp_path: Path, tables: Mapping[str, Any]) -> None:
    grid = ScriptedGrid(two(tmp_path))
    request = Message(records.write(**tables), 1, "query.look", ttl=60)
    assert grid.call(request).error.code == Code.WIRE


@pytest.fixture
def honest(tmp_path: Path) -> tuple[dict[str, Any], dict[str, packing.Packed]]:
    content = Looked(two(tmp_path), tmp_path).replies()["town"].content
    arrays, tables = records.read(content)
    return tables["look"], arrays


@pytest.mark.parametrize(
    "change",
    [
        *({"role": "master"}, {"name": "a/b"}, {"kind": "audio"}, {"more": 1}),
        *({"shape": shape} for shape in ([3, 3, 3], [4], [0], [2**20 + 1], ["3"])),
        {"kind": "image", "shape": [10**9, 1, 1]},
        *({"columns": [*names, "c"]} for names in (["a", "a"], ["a\nb", "b"], ["a" * 20_000, "b"])),
        *({"examples": examples} for examples in (203, -10, True)),
        {"classes": ["a"], "counts": [10]},
        *({"role": "source", "classes": ["a"], "counts": counts} for counts in ([13], [0], [])),
        {"role": "source", "classes": ["a", "a"], "counts": [10, 10]},
        {"role": "source", "classes": ["\x1b[2J"], "counts": [10]},
    ],
)
def test_the_server_refuses_what_no_site_may_tell(
    honest: tuple[dict[str, Any], dict[str, packing.Packed]], change: dict[str, Any]
) -> None:
    table, arrays = honest
    assert Account.read(table, arrays).name == "town"
    with pytest.raises(WireError):
        Account.read({**table, **change}, arrays)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("mean", value) for value in (np.nan, np.inf)),
        *((name, value) for name in ("missing", "share") for value in (-0.1, 1.1, 3e38)),
    ],
)
def test_the_server_refuses_other_arrays(
    honest: tuple[dict[str, Any], dict[str, packing.Packed]], name: str, value: float
) -> None:
    table, arrays = honest
    entries = {n: a.copy() for n, a in arrays["look"].unpack().items()}
    for kind in (Kind.MODEL, Kind.ATOMS):
        with pytest.raises(WireError):
            Account.read(table, {"look": packing.pack(entries, kind)})
    with pytest.raises(WireError):
        Account.read(table, {"others": arrays["look"]})
    entries[name].flat[0] = value
    with pytest.raises(FeddaError, match="not finite" if name == "mean" else None):
        Account.read(table, {"look": packing.pack(entries, Kind.STATISTICS)})


def test_a_claim_without_statistics_costs_the_server_nothing(
    honest: tuple[dict[str, Any], dict[str, packing.Packed]],
) -> None:
    claimed = Account.read({**honest[0], "shape": [2**20]}, {})
    assert len(json.dumps(claimed.to_json())) < 1000


def test_the_classes_of_a_site_are_added_once_and_not_for_each_class() -> None:
    """It may name ten thousand."""

    class Counted(dict[str, int]):
        times = 0

        def values(self) -> Any:
            Counted.times += 1
            return super().values()

    classes = Counted({f"class {n}": 10 for n in range(100)})
    assert "equally" not in text(*(tells(n, rows(64, 1), classes=classes) for n in "abcd"))
    assert Counted.times == 4


def test_two_sites_of_one_name_are_named(tmp_path: Path) -> None:
    nodes = [*two(tmp_path), site(tmp_path, "carl", rows(99), labels(99)) | {"name": "anna"}]
    assert len(Looked(nodes, tmp_path).seen["sites"]) == 2


def tells(name: str, x: np.ndarray, **more: Any) -> Account:
    """What a site of these examples tells."""
    kind = "vector" if x.ndim == 2 else "image"
    if kind == "image":
        x = x[:, None] if x.ndim == 3 else x.transpose(0, 3, 1, 2)
    packed = site_statistics.statistics(torch.from_numpy(x.copy()), 0, np.random.default_rng(0))
    shape = tuple(map(int, x.shape[1:]))
    told = Account("source", name, kind, shape, len(x) // 10 * 10, {"common": 50, "other": 50})
    return replace(Account.read(told.table(), {"look": packed}), **more)


def text(*told: Account) -> str:
    return compared(told)["text"]


def test_columns_are_called_by_their_names_and_compared_by_them() -> None:
    names, unit = ("age", "chol", "salt"), rows(300, seed=3)
    unit[:, 2] *= 1000
    a, b = (replace(tells(n, rows(300, seed=i)), columns=names) for i, n in enumerate("ab"))
    odd = replace(tells("u", unit), columns=names)
    assert "u has another value range in salt:" in text(a, b, odd)
    assert settings([a, b]) and not settings([a, replace(b, columns=names[::-1])])
    (scale,) = re.findall(r"-c 'input.window=(.*?)'", text(a, b))
    assert [*scales_of(scale)] == [*names]
    mean, deviation = scales_of(scale)["chol"]
    assert mean == pytest.approx(50, abs=2) and deviation == pytest.approx(10, abs=2)
    unnamed = (replace(each, columns=()) for each in (a, b))
    assert "'input.window=" not in text(*unnamed)
    other = replace(b, columns=("age", "chol", "zinc"))
    assert "Beside a, b has the columns 'zinc', and lacks 'salt': no run" in text(a, other)


@pytest.mark.parametrize(
    ("x", "changed", "wanted"),
    [
        ((rows(99), rows(99)), {}, "--preset table"),
        ((rows(99, 200), rows(99, 200)), {}, "--preset vectors"),
        ((photos(99), photos(99)), {}, "-c input.size=32 -c input.channels=1"),
        ((photos(99), photos(99)), {"shape": (3, 0, 0)}, "--preset photos"),
        ((rows(99), photos(99)), {}, ""),
    ],
)
def test_the_settings_to_begin_with(x: Any, changed: dict[str, Any], wanted: str) -> None:
    told = [tells("a", x[0]), replace(tells("b", x[1]), **changed)]
    assert " ".join(compared(told)["settings"]) == wanted


@pytest.mark.contrib
def test_it_looks_at_folders_and_says_what_to_type(tmp_path: Path) -> None:
    root, out = tmp_path / "clinics", tmp_path / "out"
    site(root, "anna", rows(200), labels(200))
    site(root, "bert<b>", rows(200, seed=2), labels(200))
    site(root, "town", rows(200, seed=1))
    done = call("look", "--data", root, "--target", "town", "--out", out)
    seen = json.loads((out / "look.json").read_text())
    assert len(seen["sites"]) == 3 and seen["refused"] == {} and seen["target"] == "town"
    assert seen["text"] in done.output.replace("\n", " ") or seen["text"] in done.output
    typed = next_line(done.output)
    assert typed[:3] == ["fedda", "run", "fedavg"] and typed[-2:] == ["--preset", "table"]
    assert parse(typed)["target"] == "town"
    assert [e["event"] for e in Journal(out / "journal.jsonl").past("done")] == ["done"]


def next_line(output: str) -> list[str]:
    """The words of the command that is to be typed next."""
    (line,) = [x for x in output.splitlines() if x.startswith("next: ")]
    return shlex.split(line.removeprefix("next: "))


def patients(folder: Path, name: str, sex: str = "male female", label: bool = True) -> None:
    """A table with numbers, gaps and texts."""
    x = rows(99, seed=len(name)).round(1)
    cells = [[f"{a}", f"{b}" if i % 9 else "", sex.split()[i % 2]] for i, (a, b, _) in enumerate(x)]
    heads = ["age", "chol", "sex", *(["label"] if label else [])]
    lines = [[*row, *([f"class-{i % 2}"] if label else [])] for i, row in enumerate(cells)]
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.csv").write_text("\n".join(map(",".join, [heads, *lines])))


@pytest.mark.contrib
def test_what_it_says_to_type_runs_as_it_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the texts of all sites, gaps filled, and a folder whose name a shell would part."""
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "my sites"
    patients(root, "anna")
    patients(root, "bert", "Male other")
    patients(root, "town", label=False)
    table = root / "bert.csv"
    table.write_text(table.read_text().replace("label", "outcome", 1))
    (root / "notes.txt").write_text("nothing")
    words = ("--target", "town", "--columns", "bert:label=outcome")
    done = call("look", "--data", "my sites", *words)
    assert "notes.txt" in done.output and "has a number in sex at anna" in done.output
    typed = next_line(done.output)
    assert "input.categories=sex=female|male|other" in typed
    call(*typed[1:], "--rounds", 1)


@pytest.mark.contrib
def test_values_that_sites_write_in_other_ways_are_to_be_decided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table leaves out a column of texts, which has neither a range nor gaps."""
    monkeypatch.chdir(tmp_path)
    for name, sex in {"anna": "F M", "bert": "F M", "carl": "male female"}.items():
        patients(tmp_path / "sites", name, sex)
    patients(tmp_path / "sites", "town", "F M", label=False)
    output = call("look", "--data", "sites", "--target", "town", columns=200).output
    assert "sex has F, M at anna, bert, town, and female, male at carl, none in common" in output
    assert next_line(output)[-1] == "input.categories=sex=..."
    (row,) = (line for line in output.splitlines() if line.split()[:1] == ["carl"])
    assert " 100 % " not in row and " 11 % " in row, row
    assert float(row.split("columns")[1].split()[0]) > 20, row


def test_floored_gaps_are_not_told_as_all() -> None:
    x = rows(99)
    x[:20, 0] = x[:9, 1] = np.nan
    assert "a in 1 or more of 3 columns (up to about 22 %)" in text(tells("a", x), tells("b", x))


def test_a_number_that_may_stand_for_a_gap_is_named_at_its_site(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    x = rows(99)
    x[:20, 1] = -999
    Looked([site(tmp_path, "anna", x, labels(99)), site(tmp_path, "town", rows(99))], tmp_path)
    said = [m for m in caplog.messages if "stands for a gap" in m]
    assert len(said) == 1 and said[0].startswith("anna: column 1 (counted from 0)"), said


def test_scans_that_use_few_gray_values_are_told_how_to_be_read() -> None:
    dark = tells("dim", photos(99, bright=60) // 20)
    said = text(dark, tells("b", photos(99)))
    assert "At dim nearly all values are 0" in said and "--gray-bits 12" in said
    assert "gray-bits" not in text(*(tells(n, photos(99)) for n in "ab"))


def test_what_it_says_to_type_leaves_out_what_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "scans"
    for number, name in enumerate(("anna", "bert", "odd", "town")):
        for i, x in enumerate(photos(24, number)):
            folder = root / name / ("a", "b")[i % 2 if name != "town" else 0]
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(x).save(folder / f"{i}.png")
    whole = (root / "odd" / "a" / "0.png").read_bytes()
    (root / "odd" / "a" / "0.png").write_bytes(whole[:200])
    typed = next_line(call("look", "--data", root, "--target", "town").output)
    assert "run.sources=anna,bert" in typed
    assert "odd" not in call(*typed[1:], "--rounds", 1).output


def test_it_says_what_a_run_would_end_with_and_nothing_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    patients(tmp_path / "sites", "anna", "1 2")
    patients(tmp_path / "sites", "bert", "x x")
    patients(tmp_path / "sites", "town", "1 2", label=False)
    words = ("look", "--data", "sites", "--target", "town")
    assert json.loads(call(*words, "--json").stdout)["settings"] == []
    done = call(*words, "--out", "again")
    assert "A run would fail: " in done.output and "next: " not in done.output


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "Give --data DIR, or --server DIR."),
        (["--data", "one"], "one has 1 sites (anna), and 2 are needed to compare"),
        (["--data", "two", "--target", "nowhere"], "no site 'nowhere'"),
        (["--server", "hub", "--target", "town"], "--target is for simulated sites"),
        (["--server", "hub"], "No server runs from"),
        (None, "fedda look"),
    ],
)
def test_errors_are_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str] | None, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    site(tmp_path / "one", "anna", rows(99), labels(99))
    two(tmp_path / "two")
    if words is None:  # a setting cannot make a training of it
        data = ("--simulate", "two", "--target", "town")
        done = call("run", "kd3a", *data, "-c", "run.look=true", code=1)
    else:
        done = call("look", *words, "--out", "out", code=1)
    assert said in done.output.replace("\n", " "), done.output


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Federation]:
    (tmp_path / "policy.toml").write_text("[leaving]\nlook = true\n")
    options = ["--policy", str(tmp_path / "policy.toml")]
    told = dict.fromkeys(("anna", "carl", "town"), options)
    with leaving_nothing(Federation(tmp_path / "hub", client_options=told)) as made:
        yield made


@pytest.mark.nightly("fedda/look", "fedda/cli/look.py")
def test_sites_that_joined_a_server_are_looked_at(hub: Federation, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = call("look", "--server", hub.home, "--expect", 4, "--out", out)
    seen = json.loads((out / "look.json").read_text())
    assert [s["name"] for s in seen["sites"]] == ["anna", "carl", "town"]
    assert seen["refused"] == {"bert": Code.POLICY.public}
    assert "bert told nothing" in done.output
    state = hub.directory / "state" / "anna"
    log = call("policy", "log", "--state-dir", state, "--verify", "--against", out)
    assert "2 payloads of anna are in both" in log.output, log.output
