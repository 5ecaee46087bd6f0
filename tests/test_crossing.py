"""All that crosses in real runs, over TLS with node keys, is searched for values of the data.

A recorder at the server keeps every request of the sites with its answer, and every frame of their
lanes and of the exchange (tests/recorder.py). Which names may cross is compared in
test_contract.py, over runs in one process.
"""

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from flwr.app import Message
from safetensors.numpy import load_file

from fedda.flower import fleet_pb2 as fleet
from fedda.flower import inflate_object_from_contents, iterate_object_tree
from fedda.flower import message_pb2 as proto
from fedda.lane.invitation import FIELDS, KIND, TABLE
from tests import canaries, recorder
from tests.federation import LOW, Federation
from tests.local_grid import SMALL_SUMS
from tests.processes import leaving_nothing

pytestmark = pytest.mark.slow

SITES = ("anna", "bert", "carl", "town")
ALL = {"rounds": 2, "wait.min-sources": 3, "wait.settle": 60.0}
DICTIONARY = {"feddadil.encoder-share": 0.5, "feddadil.samples": 32, "feddadil.batch-size": 16}
RUNS: dict[str, dict[str, Any]] = {
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


# ---- what crosses, field by field ----------------------------------------------------------------

TREE = {"message_object_trees", "message_object_trees.object_id", "message_object_trees.children"}
TREE |= {f"message_object_trees{'.children' * depth}.object_id" for depth in range(1, 5)}
TREE |= {f"message_object_trees{'.children' * depth}" for depth in range(1, 5)}
META = ("run_id", "message_id", "src_node_id", "dst_node_id", "reply_to_message_id", "group_id")
META += ("ttl", "message_type", "created_at", "src_task_id", "dst_task_id")
HEADERS = {"host", "accept", "accept-encoding", "connection", "user-agent", "content-type"}
HEADERS |= {"content-length", "flwr-public-key", "flwr-signature", "flwr-timestamp"}
HEADERS |= {"flwr-component-name", "flwr-package-name", "flwr-package-version", "prefer"}
HEADERS |= {"x-fedda-site"}  # the site's role, name and version, when a session begins


# ---- what the messages hold ----------------------------------------------------------------------

TASK = {"run", "method", "seed", "rounds", "schedule", "target", "shape", "class-names", "sites"}
TASK |= {"secure", "frozen", "resize", "window", "missing", "refine"}
TASK |= {"shares", "column-names"}
OFFER = {"role": str, "name": str, "version": str, "examples": int, "tested": int}
OFFER |= {"classes": list, "shape": list, "columns": list, "keys": bool}
SUM = {"p", "overlap", "min-examples", "expose-features", "clip", "noise", "masked"}
SUM |= {"name", "certificate", "ticket", "node", "groups", "wait", "rejoin"}


def invitations(hub: Recorded) -> Iterator[tuple[str, Message]]:
    """All messages outside of lanes, made again from their pieces -> to or from a site, it."""
    heads: dict[str, tuple[str, proto.ObjectTree]] = {}
    pieces: dict[str, bytes] = {}
    for entry in recorder.requests(hub.record):
        match entry["path"].removeprefix("/v1/fleet/"):
            case "push-messages":
                request = fleet.PushMessagesRequest.FromString(entry["body"])
                heads |= {t.object_id: ("from", t) for t in request.message_object_trees}
            case "pull-messages":
                answer = fleet.PullMessagesResponse.FromString(entry["answer"])
                heads |= {t.object_id: ("to", t) for t in answer.message_object_trees}
            case "push-object":
                piece = proto.PushObjectRequest.FromString(entry["body"])
                pieces[piece.object_id] = piece.object_content
            case "pull-object":
                asked = proto.PullObjectRequest.FromString(entry["body"])
                found = proto.PullObjectResponse.FromString(entry["answer"])
                if found.object_available:
                    pieces[asked.object_id] = found.object_content
    used = set()
    for name, (way, tree) in heads.items():
        used |= {piece.object_id for piece in iterate_object_tree(tree)}
        message = inflate_object_from_contents(name, dict(pieces))
        assert isinstance(message, Message)
        yield way, message
    assert set(pieces) <= used, "pieces crossed that belong to no message"


def test_outside_of_lanes_only_invitations_cross(hub: Recorded) -> None:
    asked = answered = 0
    for way, message in invitations(hub):
        assert message.metadata.message_type == KIND and not message.has_error()
        tables = {name: {*table} for name, table in message.content.items()}
        assert tables == ({TABLE: FIELDS} if way == "to" else {})
        asked, answered = asked + (way == "to"), answered + (way == "from")
    assert asked == answered == len(SITES) * len(RUNS)


# ---- what was planted ----------------------------------------------------------------------------


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
