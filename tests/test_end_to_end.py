"""A whole federation of processes, over TLS with node keys: what crosses, and what does not."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load

from tests.federation import Federation, final_model, rounds
from tests.processes import leaving_nothing

pytestmark = pytest.mark.slow

# Every Python process that has this file's folder on PYTHONPATH imports it.
WATCH = """
import os, sys
LOG = {log!r}

def note(event, args):
    if event in ("socket.connect", "socket.sendto", "socket.sendmsg"):
        where = args[1]
    elif event == "socket.getaddrinfo":
        where = (args[0], args[1])
    else:
        return
    where = "unix" if isinstance(where, (str, bytes)) or where is None else where[0]
    if isinstance(where, bytes):
        where = where.decode()
    with open(LOG, "a") as file:
        file.write(f"{{os.getpid()}} {{event}} {{where}}\\n")

sys.addaudithook(note)
"""
HERE = {"unix", "127.0.0.1", "::1", "localhost", "None"}

# Appended to the client's program in the bundle that the server ships.
MARK = """
import os, pathlib
pathlib.Path({folder!r}, str(os.getpid())).write_text("imported from " + __file__)
"""

RUN = {
    "method": "kd3a",
    "run.baseline": "fedavg",
    "rounds": 3,
    "model.hidden": "256",  # large, so that the model's bytes dominate the bytes of requests
    "wait.min-sources": 3,
}


class Watched(Federation):
    """A federation whose processes record all addresses to which they connect."""

    def __init__(self, directory: Path, watch: Path) -> None:
        # No forks: those would not be watched.
        super().__init__(directory, env={"FEDDA_COLD": "1"}, server_options=["--any-app"])
        self.connected = directory / "connected.log"
        (watch / "sitecustomize.py").write_text(WATCH.format(log=str(self.connected)))
        self.marks = directory / "marks"
        self.marks.mkdir()
        with (self.app / "clients" / "app.py").open("a") as file:
            file.write(MARK.format(folder=str(self.marks)))

    def wheres(self) -> dict[str, set[int]]:
        """Return the addresses that processes connected to or looked up -> these processes."""
        found: dict[str, set[int]] = {}
        for line in self.connected.read_text().splitlines():
            pid, _, where = line.split(" ", 2)
            found.setdefault(where, set()).add(int(pid))
        return found


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    folder = tmp_path_factory.mktemp("e2e")
    watch = folder / "watch"
    watch.mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(watch))
        with leaving_nothing(Watched(folder / "hub", watch)) as made:
            yield made


@pytest.fixture(scope="module")
def results(hub: Watched) -> dict[str, Any]:
    return hub.begin("live", RUN).finish()


@pytest.fixture(scope="module")
def alone(hub: Watched) -> dict[str, Any]:
    return hub.alone("live", RUN)


def test_the_run_is_complete(hub: Watched, results: dict[str, Any]) -> None:
    assert results["events"] == []
    assert [s["name"] for s in results["sites"]] == ["anna", "bert", "carl", "town"]
    for method in ("fedavg", "kd3a"):
        found = rounds(results, method)
        assert list(found) == [1, 2, 3]
        trained = {"anna", "bert", "carl"} | ({"town"} if method == "kd3a" else set())
        for entry in found.values():
            assert set(entry["weights"]) == trained
            assert sum(entry["weights"].values()) == pytest.approx(1)
            assert 0 <= entry["accuracy"] <= 1
    assert results["final_accuracy"] == found[3]["accuracy"]
    lines = (hub.runs / "live" / "journal.jsonl").read_text().splitlines()
    events = [json.loads(line)["event"] for line in lines]
    assert (events[0], events[-1]) == ("started", "done")
    assert events.count("round") == 6


def test_the_same_seed_gives_the_same_model_without_a_server(
    results: dict[str, Any], alone: dict[str, Any]
) -> None:
    for method in ("fedavg", "kd3a"):
        assert final_model(results, method) == final_model(alone, method)
        for live, here in zip(
            rounds(results, method).values(), rounds(alone, method).values(), strict=True
        ):
            timeless = dict.fromkeys(("seconds", "phases", "site_seconds"))
            assert live | timeless == here | timeless
    assert final_model(results, "kd3a") != final_model(results, "fedavg")


def test_only_models_and_a_few_numbers_cross(
    hub: Watched, results: dict[str, Any], alone: dict[str, Any]
) -> None:
    ledger: dict[str, int] = {}
    for method in ("fedavg", "kd3a"):
        (training,) = results["trainings"][method]
        for what, size in training["bytes"].items():
            assert what.split()[-1] in ("model", "scalars"), what
            ledger[what] = ledger.get(what, 0) + size
    size = sum(a.nbytes for a in load(final_model(results, "kd3a")).values())
    # Three sources train in three rounds of both methods. The target trains with teachers in one
    # of the methods; of the average, it keeps that of a test for the next round.
    assert ledger["from source model"] == pytest.approx(18 * size, rel=0.01)
    assert ledger["from target model"] == pytest.approx(3 * size, rel=0.01)
    assert ledger["to target model"] == pytest.approx((3 * 3 + 1 + 6) * size, rel=0.01)
    into = sum(n for what, n in ledger.items() if what.startswith("from"))
    out = sum(n for what, n in ledger.items() if what.startswith("to"))
    seen = json.loads(hub.traffic.read_text())["routes"]
    # Of a small model, the names of a message's records and the handshakes are a part of the bytes.
    assert into <= seen["lanes"]["bytes-in"] <= 1.1 * into
    assert out <= seen["lanes"]["bytes-out"] <= 1.1 * out


def test_the_program_that_the_server_ships_is_not_run(hub: Watched, results: Any) -> None:
    assert list(hub.marks.iterdir()) == []
    runs_it = [sys.executable, "-c", "import clients.app"]
    subprocess.run(runs_it, cwd=hub.app, env=hub.env, check=True, timeout=60)
    (mark,) = hub.marks.iterdir()  # else the test could not fail
    assert mark.read_text() == f"imported from {hub.app / 'clients' / 'app.py'}"


def test_no_process_connects_to_another_machine(hub: Watched, results: Any) -> None:
    found = hub.wheres()
    assert set(found) <= HERE
    assert {p.popen.pid for p in hub.processes.values()} <= found["127.0.0.1"]
