"""Processes killed at points that have a name, and started again: a run ends as if nothing were.

A site is killed at what `tests.actor` lets it hold. The program of a run stops where its journal or
its checkpoint is written, since the app of these tests, a copy of the real one, watches for that.
What kills the server's side ends the run, which is then resumed.
"""

import os
import signal
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fedda.ops.bundle import stage
from server import checkpoint
from tests.federation import Federation, final_model, rounds
from tests.patience import PATIENCE, wait_until
from tests.processes import is_alive, program_of, wait_for_act

pytestmark = pytest.mark.slow

# Nothing but the kill may end a wait, nor a round.
KD3A: dict[str, Any] = {"method": "kd3a", "wait.train": 3600.0, "wait.evaluate": 3600.0}
KD3A |= {"wait.settle": PATIENCE, "wait.sites": PATIENCE, "wait.min-sources": 3}

# Added to the app that a server runs: it stops where the file `at` says, until that file is gone.
STOPS = """
import os, re, sys, time
from pathlib import Path

AT, STOPPED = Path({folder!r}, "at"), Path({folder!r}, "stopped")
OF = {{"open": 0, "os.rename": 1, "os.remove": 0}}  # which argument is the file

def stop(event, arguments):
    if event not in OF or "checkpoint" not in str(arguments[OF[event]]):
        return
    name = Path(os.fspath(arguments[OF[event]])).name
    name = re.sub(r"[.][0-9a-f]*-[0-9]+[.]part$", ".part", name)
    point = f"{{event}} {{name}}"
    if AT.exists() and AT.read_text() == point:
        STOPPED.write_text(str(os.getpid()))
        while AT.exists():
            time.sleep(0.05)

sys.addaudithook(stop)
"""
# Points in the second round -> the round of the checkpoint that the run is to go on after.
POINTS = {
    "before it is written": ("open .2.checkpoint.safetensors.part", 1),
    "half written": ("os.rename checkpoint.json", 1),
    "after it was written": ("os.remove 1.checkpoint.safetensors", 2),
}


@pytest.fixture(scope="module")
def halting(federation: Federation) -> Path:
    """The app of a run whose program can be stopped at the points above."""
    app = stage(federation.directory / "halting")
    with (app / "server" / "app.py").open("a") as file:
        file.write(STOPS.format(folder=str(federation.directory)))
    return app


@cache
def whole(hub: Federation) -> dict[str, Any]:
    return hub.alone("whole", KD3A)


def assert_unchanged(hub: Federation, results: dict[str, Any]) -> None:
    """Check that a run's model and tests are those of a run without a server, bit by bit."""
    wanted = whole(hub)
    assert final_model(results, "kd3a") == final_model(wanted, "kd3a"), "another model"
    assert accuracies(results) == accuracies(wanted), "other tests"


def accuracies(results: dict[str, Any]) -> list[Any]:
    return [entry.get("accuracy") for entry in rounds(results, "kd3a").values()]


# ---- kills at points that have a name ------------------------------------------------------------

NIGHTLY = pytest.mark.nightly("server/training.py", "server/checkpoint.py", "fedda/exchange")


@pytest.mark.parametrize(
    ("site", "step", "hold"),
    [
        pytest.param("carl", "2", "hold push", id="source whose reply is half sent"),
        pytest.param("town", "2 test", "hold", id="target in its test", marks=NIGHTLY),
    ],
)
def test_a_killed_site_changes_nothing(hub: Federation, site: str, step: str, hold: str) -> None:
    hub.act(site, {step: [hold, 0]})
    run = hub.begin(f"killed-{site}", KD3A)
    wait_for_act(hub, run.folder, site, f"{hold} in round {step}")
    assert not run.find("round", round=2)
    hub.kill(site)
    hub.act(site, {})
    hub.revive(site)
    assert_unchanged(hub, run.finish())


@pytest.mark.parametrize(
    "point", ["half written", *(pytest.param(p, marks=NIGHTLY) for p in POINTS if "half" not in p)]
)
def test_a_killed_program_is_resumed_after_its_last_checkpoint(
    hub: Federation, halting: Path, point: str
) -> None:
    """It stops at the point, and is killed there."""
    where, after = POINTS[point]
    at, stopped = hub.directory / "at", hub.directory / "stopped"
    hub.act("bert", {"2": ["hold", 0]})
    run = hub.begin(f"program-{point[:4]}", KD3A, halting)
    wait_for_act(hub, run.folder, "bert", "hold in round 2")
    stopped.unlink(missing_ok=True)
    at.write_text(where)
    try:
        hub.act("bert", {})
        wait_until(lambda: stopped.exists() and stopped.read_text(), f"it does not come to {point}")
        program = program_of(run.folder)
        assert int(stopped.read_text()) == program
        os.kill(program, signal.SIGKILL)
        wait_until(lambda: not is_alive(program), "the program does not end")
    finally:
        at.unlink()
    kept = checkpoint.read(run.folder / "kd3a-0")
    assert kept is not None and kept.round == after
    results = hub.begin(run.folder.name, KD3A | {"run.resume": True}, halting).finish()
    assert [e["round"] for e in run.find("training")] == [0, after]
    assert_unchanged(hub, results)
