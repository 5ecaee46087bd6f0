"""All that crosses in real runs, over TLS with node keys: compared with a list, and searched.

A recorder at the server keeps every request of the sites with its answer, and every frame of their
lanes and of the exchange (tests/recorder.py). The allow-list is in this file; the rest is in
tests/listed.py.
"""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, MetricRecord
from google.protobuf.message import Message as Protobuf
from safetensors.numpy import load_file

from fedda.exchange import frames
from fedda.flower import fleet_pb2 as fleet
from fedda.flower import heartbeat_pb2
from fedda.lane.invitation import KIND, LaneInvitation
from fedda.ops import chain
from fedda.wire.packing import Manifest
from tests import canaries, recorder
from tests.command_lines import call
from tests.federation import LOW, Federation
from tests.listed import TABLES, Cell, cells, fits
from tests.local_grid import SMALL_SUMS
from tests.processes import leaving_nothing

pytestmark = pytest.mark.slow

SITES = ("anna", "bert", "carl", "town")
ALL = {"rounds": 2, "wait.min-sources": 3, "wait.settle": 60.0}
DICTIONARY = {"feddadil.encoder-share": 0.5, "feddadil.samples": 32, "feddadil.batch-size": 16}
RUNS: dict[str, dict[str, Any]] = {
    "kd3a": ALL | {"method": "kd3a"},
    "fdann": ALL | {"method": "fdann", "train.batch-size": 16} | SMALL_SUMS,
    "feddadil": ALL | {"method": "feddadil"} | DICTIONARY,
}


class Recorded(Federation):
    """A federation whose server records what crosses; the sites' data hold canaries only."""

    def __init__(self, directory: Path) -> None:
        about: Any = {"database": directory / "state.db", "server_options": ["--any-app"]}
        super().__init__(directory, client_options=LOW, **about)
        self.record = directory / "record"
        self.record.mkdir()
        with (self.app / "server" / "app.py").open("a") as file:
            file.write("\nfrom pathlib import Path as _Path\nfrom tests import recorder\n")
            file.write(f"recorder.record_frames(_Path({str(self.record)!r}))\n")
        self.planted: set[bytes] = set()
        self.known = Random("the name of a class").randbytes(16)  # a source's offer has it
        for name in SITES:
            self._plant(name)

    def places(self) -> Iterator[bytes]:
        """All that crossed, and all that the server keeps."""
        for entry in recorder.requests(self.record):
            yield entry["body"] + entry["answer"]
            yield json.dumps([entry["path"], entry["headers"], entry["answered"]]).encode()
        for _, _, data in (*recorder.frames(self.record), *recorder.lanes(self.record)):
            yield data
        at_the_server = [self.logs / "superlink.log", self.home / "superlink.log", self.traffic]
        at_the_server += [*self.directory.glob("state.db*"), *self.runs.rglob("*")]
        for path in at_the_server:
            if path.is_file():
                yield path.read_bytes()

    def _plant(self, name: str) -> None:
        draw = Random(f"canaries of {name}")
        role, path = self.sites[name]
        with np.load(path) as file:
            arrays = {key: file[key] for key in file.files}

        def planted(count: int) -> list[bytes]:
            made = [draw.randbytes(16) for _ in range(count)]
            self.planted |= {*made}
            return made

        for x in ("x_train", "x_test"):
            pixels = b"".join(planted(arrays[x].size // 16))
            arrays[x] = np.frombuffer(pixels, np.uint8).reshape(arrays[x].shape)
        classes = ["c0", "c1", "c2", self.known.hex()]
        arrays["classes"] = np.array(classes)
        if role == "target":  # what a source says of its labels, a target never does
            labels = b"".join(planted(len(arrays["x_train"])))
            arrays["y_train"] = np.frombuffer(labels, np.int64).reshape(-1, 2)
        arrays["notes"] = np.array([text.hex() for text in planted(20)])
        (secret,) = planted(1)
        moved = path.with_name(f"{secret.hex()}.npz")
        np.savez(moved, **arrays)
        path.unlink()
        self.sites[name] = (role, moved)

    def _program(self, name: str) -> Sequence[Any]:
        if name != "superlink":
            return super()._program(name)
        return [sys.executable, "-m", "tests.recorder", self.record]


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Recorded]:
    folder = tmp_path_factory.mktemp("crossing")
    with leaving_nothing(Recorded(folder / "hub")) as made:
        for name, settings in RUNS.items():
            results = made.begin(name, settings).finish()
            assert results["events"] == []
        yield made


NODE = {"node", "node.node_id"}
TREE = {"message_object_trees", "message_object_trees.object_id", "message_object_trees.children"}
TREE |= {f"message_object_trees{'.children' * depth}.object_id" for depth in range(1, 5)}
TREE |= {f"message_object_trees{'.children' * depth}" for depth in range(1, 5)}
META = ("run_id", "message_id", "src_node_id", "dst_node_id", "reply_to_message_id", "group_id")
META += ("ttl", "message_type", "created_at", "src_task_id", "dst_task_id")
HEAD = {"messages_list", "messages_list.metadata", "messages_list.content"}
HEAD |= {f"messages_list.metadata.{m}" for m in META}
# By path: the name of the types, and the fields that a request and its answer may have.
FLEET: dict[str, tuple[Any, str, set[str], set[str]]] = {
    "activate-node": (fleet, "ActivateNode", {"public_key", "heartbeat_interval"}, {"node_id"}),
    "deactivate-node": (fleet, "DeactivateNode", {"node_id"}, set()),
    "send-node-heartbeat": (
        *(heartbeat_pb2, "SendNodeHeartbeat"),
        *(NODE | {"heartbeat_interval"}, {"success"}),
    ),
    "pull-messages": (fleet, "PullMessages", NODE, HEAD | TREE),
}
HEADERS = {"host", "accept", "accept-encoding", "connection", "user-agent", "content-type"}
HEADERS |= {"content-length", "flwr-public-key", "flwr-signature", "flwr-timestamp"}
HEADERS |= {"flwr-component-name", "flwr-package-name", "flwr-package-version", "prefer"}
HEADERS |= {"x-fedda-site"}  # the site's role, name and version, when a session begins
ANSWERED = {"date", "content-type", "content-length", "connection", "x-fedda-waited"}


def fields(message: Protobuf, prefix: str = "") -> set[str]:
    """The names of all fields that are set, with those of the messages inside."""
    names = set()
    for field, value in message.ListFields():
        name = prefix + field.name
        names.add(name)
        entries = field.message_type is not None and field.message_type.GetOptions().map_entry
        if field.message_type is not None and not entries:
            for each in value if isinstance(value, Sequence) or hasattr(value, "add") else [value]:
                names |= fields(each, f"{name}.")
    return names


def parsed(kind: type[Protobuf], data: bytes) -> Protobuf:
    """Read a message that has no field which its type does not know."""
    message = kind.FromString(data)
    size = message.ByteSize()
    message.DiscardUnknownFields()
    assert message.ByteSize() == size == len(data)
    return message


def test_every_field_of_every_request_and_answer_is_on_the_list(hub: Recorded) -> None:
    seen = set()
    for entry in recorder.requests(hub.record):
        name = entry["path"].removeprefix("/v1/fleet/")
        assert name in FLEET, name
        types, kind, may_ask, may_answer = FLEET[name]
        seen.add(name)
        assert set(entry["headers"]) <= HEADERS, set(entry["headers"]) - HEADERS
        assert set(entry["answered"]) <= ANSWERED, set(entry["answered"]) - ANSWERED
        assert entry["headers"]["user-agent"] == "fedda"
        assert entry["headers"]["prefer"] == "wait=25"
        assert float(entry["answered"].get("x-fedda-waited", 0)) < 60
        more = fields(parsed(getattr(types, f"{kind}Request"), entry["body"])) - may_ask
        assert not more, (name, more)
        if entry["answered"]["content-type"] != "text/plain":  # a sentence why it is refused
            answer = parsed(getattr(types, f"{kind}Response"), entry["answer"])
            more = fields(answer) - may_answer
            assert not more, (name, more)
    assert seen >= set(FLEET) - {"deactivate-node"}


HEADING = {"round", "phase", "hop", "part", "final"}
TASK = {"run", "method", "seed", "rounds", "schedule", "target", "shape", "class-names", "sites"}
TASK |= {"secure", "frozen", "resize", "window", "missing", "refine"}
TASK |= {"shares", "column-names"}
OFFER = {"role": str, "name": str, "version": str, "examples": int, "tested": int}
OFFER |= {"classes": list, "shape": list, "columns": list, "keys": bool}
SUM = {"p", "overlap", "min-examples", "expose-features", "clip", "noise", "masked"}
SUM |= {"name", "certificate", "ticket", "port", "node", "groups", "wait", "rejoin"}
# Of all arrays in these runs: an MLP for images of 8 x 8 and 4 classes, a discriminator with its
# optimizer, and three atoms of 32 points.
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "model": {
        "encoder.1.weight": (64, 64),
        "encoder.1.bias": (64,),
        **{f"encoder.2.{n}": (64,) for n in ("weight", "bias", "running_mean", "running_var")},
        "encoder.2.num_batches_tracked": (),
        "head.weight": (4, 64),
        "head.bias": (4,),
    },
    "discriminator": {
        "layers.0.weight": (100, 64),
        "layers.0.bias": (100,),
        "layers.2.weight": (1, 100),
        "layers.2.bias": (1,),
        **dict.fromkeys(("sync", "exp_avg", "exp_avg_sq"), (6601,)),
        "step": (1,),
    },
    "atoms": {"z": (3, 32, 64), "y": (3, 32, 4)},
}
SCALARS = (int, float, str, bool)


def check_arrays(content: Any, cell: Cell) -> None:
    """Compare the arrays of a message, with their layouts, with the list."""
    arrays, manifests = content.get("arrays", {}), content.get("manifests", {})
    assert set(arrays) == set(manifests)
    for name, array in arrays.items():
        (kind,) = [k for p, k in cell.arrays.items() if fits(name, p)]
        layout = Manifest.parse(str(manifests[name]))
        assert (str(layout.kind), layout.floats) == (kind, "float32")
        assert (array.dtype, array.stype) == ("uint8", "fedda.packed")
        assert array.shape == (len(array.data),) == (layout.nbytes,)
        root = name.split("/")[0].replace("teacher", "model")
        assert {e.name: e.shape for e in layout.entries} == SHAPES[root]
        counts = {e.name for e in layout.entries if e.dtype == "int64"}
        assert {e.dtype for e in layout.entries} <= {"float32", "int64"}
        assert counts <= {"encoder.2.num_batches_tracked"}


def check_task(task: Iterable[str]) -> None:
    """Compare the settings that a request holds with the list."""
    sections = ("model.", "train.", "privacy.", "wire.", "options.")
    assert all(key in TASK or key.startswith(sections) for key in task)


def test_outside_of_lanes_only_invitations_cross(hub: Recorded) -> None:
    invited = 0
    for entry in recorder.requests(hub.record):
        if entry["path"] == "/v1/fleet/pull-messages":
            for message in fleet.PullMessagesResponse.FromString(entry["answer"]).messages_list:
                assert message.metadata.message_type == KIND and not message.content.ByteSize()
                LaneInvitation.parse(message.metadata.group_id)
                invited += 1
    assert invited == len(SITES) * len(RUNS)


def test_every_record_of_every_message_is_on_the_list(hub: Recorded) -> None:
    requests: dict[str, Cell] = {}
    counted = {"query": 0, "train": 0, "evaluate": 0}
    replies = []
    for way, message in recorder.messages(hub.record):
        assert not message.has_error()
        name, kind = message.metadata.message_id, message.metadata.message_type
        counted[kind] += 1
        assert message.metadata.group_id in ("", "roster", "1", "2")
        content = message.content
        for table, record in content.items():
            if isinstance(record, ConfigRecord | MetricRecord) and table != "offer":
                assert all(isinstance(v, SCALARS) or n in TABLES for n, v in record.items())
        if way == "from":
            replies.append(message)
        elif kind == "query":  # with a task, a target says whether its tests fit the run
            assert set(content) <= {"task"}
            check_task(content.get("task", {}))
        else:
            task, step = content["task"], content["step"]
            assert set(content) - {"exchange", "kept"} <= {"arrays", "manifests", "task", "step"}
            assert set(content.get("kept", {})) <= {"model"}
            check_task(task)
            heading = [str(step[k]) for k in ("part", "phase", "hop")]
            enters, leaves = cells(str(task["method"]), *heading)
            numbers = set(step) - HEADING
            assert all(any(fits(n, p) for p in enters.numbers) for n in numbers), numbers
            assert set(content.get("exchange", {})) in (set(), SUM)
            check_arrays(content, enters)
            requests[name] = leaves
    for reply in replies:
        content = reply.content
        if reply.metadata.message_type == "query":
            assert set(content) == {"offer"}
            offer = dict(content["offer"])
            assert {name: type(value) for name, value in offer.items()} == OFFER
            assert all(type(n) is int for n in offer["shape"])
            # What a source says of its labels, a target never does.
            assert len(offer["classes"]) == (0 if offer["role"] == "target" else 4)
            continue
        leaves = requests[reply.metadata.reply_to_message_id]
        assert set(content) <= {"arrays", "manifests", "metrics"}
        numbers = content["metrics"]
        assert all(any(fits(n, p) for p in leaves.numbers) for n in numbers), dict(numbers)
        for name, value in numbers.items():
            its = value if name in TABLES else [value]
            assert all(type(v) in (int, float) for v in its), name
        check_arrays(content, leaves)
    assert min(counted.values()) >= 8, counted


def test_every_frame_of_the_exchange_is_on_the_list(hub: Recorded) -> None:
    seen = {"to": set(), "from": set()}
    size = 0
    for way, site, data in recorder.frames(hub.record):
        assert site in SITES
        head, values = (frames.up if way == "from" else frames.down)(data)
        kind = head.WhichOneof("kind")
        seen[way].add(kind)
        if kind in ("gradient", "sum"):
            about = getattr(head, kind)
            assert about.group == "gradient"
            size = size or values.size
            assert values.size == size
        else:
            assert not values.size
        assert len(data) - values.nbytes < 100
    assert seen["from"] <= {"gradient", "leave"} and seen["to"] <= {"sum"}


def test_no_planted_value_is_in_what_crossed_or_at_the_server(hub: Recorded) -> None:
    assert len(hub.planted) > 1000
    assert canaries.found(hub.planted, hub.places()) == set()


def test_the_search_finds_what_crossed_on_purpose(hub: Recorded) -> None:
    """The name of a source's class is in its offer; otherwise the test before could not fail."""
    assert canaries.found([hub.known], hub.places()) == {hub.known}


def test_the_dictionary_s_coordinates_stay_at_the_sites(hub: Recorded) -> None:
    kept = [*(hub.directory / "state").rglob("feddadil.*.safetensors")]
    tensors = [t for path in kept for t in load_file(path).values() if t.dtype == np.float32]
    coordinates = {t.tobytes() for t in tensors if t.ndim == 1 and t.size == 3}
    assert coordinates
    assert canaries.search(coordinates, b"\n".join(hub.places())) == set()


@pytest.mark.parametrize("which", ["kd3a", "fdann"])
def test_the_logs_of_server_and_sites_hold_the_same_hashes(hub: Recorded, which: str) -> None:
    """Of models, and of sums of gradients."""
    run = hub.runs / which
    server = chain.check(run / "crossed.jsonl")
    assert not server.bad
    for site in SITES:
        state = hub.directory / "state" / site
        log = chain.check(state / "audit.jsonl")
        assert not log.bad
        mine = [entry for entry in log.entries if entry.get("run") == which]
        done = call("policy", "log", "--state-dir", state, "--verify", "--against", run)
        # Questions about what a site offers are in no run's record.
        sent = (e for e in mine if e["event"] != "joins" and e.get("kind") != "query")
        hashes = sorted(e["sha256"] for e in sent)
        assert hashes == sorted(e["sha256"] for e in server.entries if e["site"] == site)
        assert f"{len(hashes)} payloads of {site} are in both" in done.output
        assert sum(e["event"] in ("received", "answered", "refused") for e in mine) >= 2
        summed = [e["frames"] for e in mine if e["event"] == "summed"]
        assert all(summed) and len(summed) == (2 if which == "fdann" else 0)
