"""Failures in a live federation, and what the operator and the sites learn about them.

Every site is its own process, ended by its id; `tests.actor` defines how a site misbehaves.

No assertion depends on seconds. A site that is to miss a deadline is held until the journal says
that the server gave it up; if the server waited for it, the test would wait for ever. Only in those
tests is the deadline near. On a busy machine another site may miss it, too, and is then named.
"""

import contextlib
import json
import math
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from clients.node import resident
from fedda.cli.client import app as client_command
from fedda.errors import KeyFileError
from fedda.ops import certificate, keys
from fedda.ops.refusal import Refusal
from fedda.ops.spawn import LOOPBACK
from fedda.results import read
from server.presence import AGAIN
from tests.federation import LIVE, Federation, Operator, Run, final_model, rounds
from tests.patience import FACTOR, PATIENCE, wait_until
from tests.processes import is_alive, program_of, wait_for_act

pytestmark = pytest.mark.slow

SITES = {"anna", "bert", "carl", "town"}
# No deadline of a run is met by chance, and a site that failed is asked anew before a round begins.
FAR = {"wait.train": 3600.0, "wait.evaluate": 3600.0, "wait.settle": PATIENCE}
KD3A = FAR | {"method": "kd3a", "wait.min-sources": 1}
FEDAVG = FAR | {"method": "fedavg", "wait.min-sources": 1}
# A round takes a third of a second on a quiet machine. Tests are held, or answered, at any time.
DEADLINE = 4.0 * FACTOR
NEAR = {"wait.train": DEADLINE, "wait.settle": 1.0}


@pytest.fixture(scope="module", autouse=True)
def warm(federation: Federation) -> None:
    federation.begin("first", FEDAVG | {"rounds": 1}).finish()  # a first training takes longer


def troubles(found: dict[str, Any]) -> list[tuple[str, str, int]]:
    """Return the troubles in the results: what happened, at which site, in which round."""
    return [(e["what"], e["site"], e.get("round", 0)) for e in found["events"]]


def assert_named(run: Run, found: dict[int, dict[str, Any]], everyone: set[str]) -> None:
    """Whoever did not take part in a round is named in the journal, with the round."""
    for number, entry in found.items():
        missing = {e["site"] for e in run.find("trouble", round=number)} - {""}
        assert everyone - missing <= set(entry["weights"]), (number, entry, missing)


def test_a_run_waits_for_sources_and_for_its_target_and_loses_nothing(hub: Federation) -> None:
    settings = KD3A | NEAR | {"wait.min-sources": 3, "wait.tries": 20, "wait.settle": 10.0}
    hub.act("carl", {"2": ["hold", 0]})
    hub.act("town", {"3": ["hold", 0]})
    run = hub.begin("paused", settings)
    wait_for_act(hub, run.folder, "carl", "hold in round 2")
    hub.kill("carl")
    hub.act("carl", {})
    run.wait_for("trouble", what="silent", site="carl", round=2)
    run.wait_for("trouble", what="paused", round=2)
    first = run.find("trouble", what="paused", round=2)[0]
    # On a busy machine another source may be late, too; then it is named, and one source is left.
    late = {e["site"] for e in run.find("trouble", round=2) if e["time"] <= first["time"]}
    count = read.counted(len(SITES - {"town"} - late), "source")
    assert first["text"].startswith((f"{count} are left", f"{count} is left"))
    assert "The run waits." in first["text"]
    hub.revive("carl")
    run.wait_for("trouble", what="resumed", round=2)

    wait_for_act(hub, run.folder, "town", "hold in round 3")
    hub.kill("town")
    hub.act("town", {})
    hub.revive("town")
    text = run.wait_for("trouble", what="paused", round=3)["text"]
    assert text.startswith("town (target) gave no usable reply")
    results = run.finish()

    named = {(what, number) for what, site, number in troubles(results) if site == "town"}
    # Its new process says that it was restarted, if it is back before the deadline.
    assert named & {("silent", 3), ("failed", 3)}
    pauses = [(what, number) for what, _, number in troubles(results) if what[-3:] == "sed"]
    assert {("paused", 2), ("paused", 3)} <= set(pauses), pauses
    assert {what for what, _, _ in troubles(results)} <= {"silent", "failed", "paused", "resumed"}
    assert [e["round"] for e in run.find("round")] == [1, 2, 3]
    assert final_model(results, "kd3a") == final_model(hub.alone("paused", settings), "kd3a")


@pytest.mark.nightly("server/training.py", "strategies/sites/mail.py", "clients/node/resident.py")
def test_a_target_that_is_killed_between_test_and_training_gets_the_model_again(
    hub: Federation,
) -> None:
    settings = KD3A | {"wait.min-sources": 3}
    hub.act("carl", {"2": ["hold", 0]})
    run = hub.begin("forgotten", settings)
    wait_for_act(hub, run.folder, "carl", "hold in round 2")
    hub.kill("town")  # it has tested round 1's model, and is asked to train once carl is done
    hub.revive("town")
    hub.processes["town"].wait_for("connected", PATIENCE)
    hub.act("carl", {})
    results = run.finish()
    assert results["events"] == []
    assert [e["round"] for e in run.find("round")] == [1, 2, 3]
    hub.processes["town"].wait_for("no longer has the 'model'", PATIENCE)
    alone = hub.alone("forgotten", settings)
    assert final_model(results, "kd3a") == final_model(alone, "kd3a")
    sent, wanted = (
        [entry["bytes"]["to target model"] for entry in r["trainings"]["kd3a"][0]["rounds"]]
        for r in (results, alone)
    )
    # In round 2 the request with K teachers came twice, the second time with the model.
    size = wanted[0] // (len(SITES) - 1 + 2)
    assert wanted == [5 * size, 4 * size, 4 * size]
    assert sent == [5 * size, 8 * size, 4 * size]


def test_a_run_goes_on_after_its_server_was_killed(hub: Federation) -> None:
    settings = KD3A | {
        "kd3a.smoothing": 0.5,  # its state is at the server
        "kd3a.heads": "local",  # its state is at the server, for each source
        "train.carry-momentum": True,  # its state is at the sites
    }
    changes = [f"{key}={value}" for key, value in (LIVE | settings).items() if key != "method"]
    begin = ["run", "kd3a", "--server", hub.home, "--dir", hub.runs, "--name", "cut"]
    begin += ["--baseline", "none", *(part for text in changes for part in ("-c", text))]
    hub.act("bert", {"2": ["hold", 0]})
    operator = Operator(hub, begin)
    wait_for_act(hub, hub.runs / "cut", "bert", "hold in round 2")
    program = program_of(hub.runs / "cut")
    hub.kill("superlink")
    assert operator.popen.wait(PATIENCE) == 1
    assert "error: " in operator.text()
    assert "--resume" in operator.text()
    hub.act("bert", {})
    for name in SITES:
        hub.processes[name].wait_for("the server does not answer", PATIENCE)
    # Flower asks it to end, but it may then wait for ever for the server that is dead.
    wait_until(lambda: not is_alive(program), "the run's program outlives its server")
    hub.start_server()

    operator = Operator(hub, ["run", "--resume", hub.runs / "cut"])
    assert operator.popen.wait(PATIENCE) == 0, operator.text()
    assert "going on after round 1 of 3" in operator.text()
    results = json.loads((hub.runs / "cut" / "results.json").read_text())
    assert list(rounds(results, "kd3a")) == [1, 2, 3]
    alone = hub.alone("cut", settings)
    assert final_model(results, "kd3a") == final_model(alone, "kd3a")
    for now, then in zip(
        rounds(results, "kd3a").values(), rounds(alone, "kd3a").values(), strict=True
    ):
        assert now["weights"] == then["weights"]


def test_a_hostile_site_neither_ends_a_run_nor_holds_it(hub: Federation) -> None:
    """Its reply comes piece by piece, it confirms what it does not have, and it plays dead.

    The pieces come often enough to be waited for, and would all be there after two deadlines.
    """
    hub.act("carl", {"2": ["drip", DEADLINE / 3], "gone": False})
    hub.act("bert", {"early": True})
    run = hub.begin("hostile", FEDAVG | NEAR | {"rounds": 4, "wait.settle": PATIENCE})
    wait_for_act(hub, run.folder, "carl", "drip in round 2")
    hub.act("carl", {"2": ["drip", DEADLINE / 3], "gone": True})
    hub.act("bert", {})
    run.wait_for("trouble", what="silent", site="carl", round=2)
    hub.act("carl", {"gone": True})
    results = run.finish()
    found = rounds(results, "fedavg")
    assert "acting: confirm early" in hub.processes["bert"].text()
    assert list(found) == [1, 2, 3, 4]
    assert all("carl" not in found[i]["weights"] for i in (2, 3, 4)), "his reply was waited for"
    assert_named(run, found, SITES - {"town"})
    seconds = run.find("round", round=4)[-1]["time"] - run.find("round", round=1)[-1]["time"]
    questions = hub.processes["carl"].text().count("acting: gone")
    # At once, at once again, then after pauses of 1, 2, 4, ... up to AGAIN seconds.
    most = 3 + math.log2(1 + seconds) + seconds / AGAIN
    assert 2 <= questions <= most, "the site's false answers make the server ask all the time"


def test_rounds_end_by_their_deadline_with_slow_late_and_lossy_sites(hub: Federation) -> None:
    """One source never answers; another joins late and loses 30 % of its requests."""
    hub.processes["carl"].stop()
    hub.act("carl", {"join": "hold"})
    hub.processes["carl"].start()
    hub.act("bert", {"1": ["hold", 0]})
    try:
        run = hub.begin("stragglers", FEDAVG | NEAR | {"rounds": 2, "run.expect": 3})
        wait_for_act(hub, run.folder, "bert", "hold in round 1")
        hub.act("carl", {"loss": 0.3})
        hub.processes["carl"].wait_for("acting: loss", PATIENCE)
        results = run.finish()  # bert is still held
    finally:
        hub.kill("bert")
        hub.act("bert", {})
        hub.revive("bert")
    found = rounds(results, "fedavg")
    assert list(found) == [1, 2]
    assert all("bert" not in entry["weights"] for entry in found.values())
    assert_named(run, found, {"anna", "bert"})
    assert ("silent", "bert", 1) in troubles(results)


@pytest.mark.nightly("server/superlink", "clients/node")
def test_a_site_that_the_system_stops_for_long_loses_nothing(hub: Federation) -> None:
    """A source in the middle of its work, which then goes on."""
    settings = KD3A | {"wait.min-sources": 3}
    carl = hub.processes["carl"].popen.pid
    hub.act("carl", {"2": ["hold", 0]})
    run = hub.begin("stopped", settings)
    wait_for_act(hub, run.folder, "carl", "hold in round 2")
    os.kill(carl, signal.SIGSTOP)
    try:
        hub.act("carl", {})
        time.sleep(75.0)  # Flower counts a site as gone after 60 s
        assert not run.find("round", round=2), "carl was not stopped"
    finally:
        os.kill(carl, signal.SIGCONT)
    results = run.finish()
    assert results["events"] == []
    assert final_model(results, "kd3a") == final_model(hub.alone("stopped", settings), "kd3a")


@pytest.mark.nightly("server/superlink", "clients/node")
def test_a_crowded_machine_makes_no_trouble(hub: Federation) -> None:
    """Other programs want every processor, twice over, while rounds are tiny."""
    settings = KD3A | {"wait.min-sources": 3, "rounds": 20}
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(4)]
    try:
        results = hub.begin("crowded", settings).finish()
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert results["events"] == []
    assert final_model(results, "kd3a") == final_model(hub.alone("crowded", settings), "kd3a")


@pytest.mark.nightly("server/training.py", "strategies/sites/mail.py", "clients/node/resident.py")
def test_two_simultaneous_runs_do_not_affect_each_other(hub: Federation) -> None:
    """This holds even if the sites keep each run's optimizer between rounds."""
    left = KD3A | {"rounds": 12, "train.carry-momentum": True}
    both = {"left": left, "right": left | {"train.lr": 0.02}}
    hub.act("anna", {"1": ["hold", 0]})  # the first run waits until the second has started
    running = {name: hub.begin(name, settings) for name, settings in both.items()}
    for event in ("started", "training"):
        wait_until(
            lambda event=event: all(run.find(event) for run in running.values()),
            f"not both runs got as far as {event}",
        )
        hub.act("anna", {})
    assert not any(run.find("done") for run in running.values()), "they ran one after the other"
    for name, settings in both.items():
        results = running[name].finish()
        assert results["events"] == []
        assert final_model(results, "kd3a") == final_model(hub.alone(name, settings), "kd3a")


def test_a_refused_site_gets_the_reason(
    hub: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    certificate.init(tmp_path, [LOOPBACK])
    stranger = keys.add(tmp_path, "stranger")
    ca, known = hub.home / "ca.crt", hub.home / "nodes" / "anna"

    def join(ca: Path, key: Path, port: int, *more: str) -> tuple[int, str]:
        options = [*more, "--role", "source", "--data", hub.sites["anna"][1]]
        options += ["--ca", ca, "--key", key, "--superlink", f"{LOOPBACK}:{port}", "--patience", 1]
        options += ["--state-dir", tmp_path / "state", "--min-images", 16]
        done = CliRunner().invoke(client_command, list(map(str, options)))
        errors = [x for x in done.output.splitlines() if x.startswith("error: ")]
        assert len(errors) == 1, done.output
        return done.exit_code, errors[0]

    console = hub.processes["superlink"]
    for key, name, code, who in (
        (known, "anna", "in-use", "site anna"),
        (known, "berta", "name", "site anna"),
        (stranger, "stranger", "unknown", f"a site at {LOOPBACK}"),
    ):
        why = Refusal(code)
        refused, text = join(ca, key, hub.port, "--name", name)
        assert refused == 3
        assert f"does not accept this site's key: {why.at_site()}" in text
        console.wait_for(f"{who} is refused: {why.at_server()}", PATIENCE)
    code, text = join(tmp_path / "ca.crt", known, hub.port)
    assert (code, "not signed by the authority in --ca" in text) == (3, True)
    with pytest.raises(KeyFileError, match="wants a registered key from every site"):
        resident.serve(
            lambda message, context: message,
            superlink=f"{LOOPBACK}:{hub.port}",
            node_config={},
            root_certificates=ca,
            on_event=lambda kind, text: None,
        )
    assert hub.processes["anna"].alive, "the site that has the key lost it"

    monkeypatch.setattr(certificate, "SERVER_DAYS", -1 / 48)  # half an hour ago
    certificate.init(tmp_path / "old", [LOOPBACK])
    with expired_server(tmp_path / "old") as port:
        code, text = join(tmp_path / "old" / "ca.crt", stranger, port)
        assert (code, "has expired: its operator renews it" in text) == (3, True), text
    process = Operator(hub, ["superlink", "--dir", tmp_path / "old", "--port", "1"])
    assert process.popen.wait(PATIENCE) == 3
    assert "expired" in process.text()


@contextlib.contextmanager
def expired_server(folder: Path) -> Iterator[int]:
    """Start a server that greets with the folder's certificate and hangs up -> its port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "server.pem", folder / "server.key")
    listener = socket.create_server((LOOPBACK, 0))

    def greet() -> None:
        while True:
            try:
                plain, _ = listener.accept()
            except OSError:
                return
            with plain, contextlib.suppress(OSError):
                context.wrap_socket(plain, server_side=True).close()

    thread = threading.Thread(target=greet, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(5)
