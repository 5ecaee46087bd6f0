"""Processes killed at points that have a name, and started again: a run ends as if nothing were.

A site is killed at what `tests.actor` lets it hold. The program of a run stops where its journal or
its checkpoint is written, since the app of these tests, a copy of the real one, watches for that.
What kills the server's side ends the run, which is then resumed.

    FEDDA_KILLS=20 FEDDA_KILLS_SEED=7 pytest -s tests/test_kills.py --ring nightly -k random

kills so often at random moments of each method's runs, and shows what became of each.
"""

import json
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from fedda.ops.bundle import stage
from server import checkpoint
from tests.federation import LIVE, Federation, Operator, final_model, rounds
from tests.local_grid import SMALL_SUMS
from tests.patience import PATIENCE, wait_until
from tests.processes import is_alive, program_of, wait_for_act

pytestmark = pytest.mark.slow

PAIR = SMALL_SUMS | {
    "dils.collaborator": "bert",
    "dils.pretrain": 1,
    "dils.discriminator.sizes": "8",
}
# Nothing but the kill may end a wait, nor a round.
FAR = {"wait.train": 3600.0, "wait.evaluate": 3600.0, "wait.settle": PATIENCE}
FAR |= {"wait.sites": PATIENCE, "wait.min-sources": 3}
# A site whose exchange died with the server's program waits so long for it, and answers no one.
LONG = {"exchange.join": 3600.0, "exchange.rejoin": PATIENCE / 12, "exchange.wait": 3600.0}
SETTINGS: dict[str, dict[str, Any]] = {"kd3a": FAR, "dils": FAR | PAIR | LONG}

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
def whole(hub: Federation, method: str) -> dict[str, Any]:
    return hub.alone(f"whole-{method}", SETTINGS[method] | {"method": method})


def assert_unchanged(hub: Federation, method: str, results: dict[str, Any]) -> None:
    """Check that a run's model and tests are those of a run without a server, bit by bit."""
    wanted = whole(hub, method)
    assert final_model(results, method) == final_model(wanted, method), "another model"
    assert accuracies(results, method) == accuracies(wanted, method), "other tests"


def accuracies(results: dict[str, Any], method: str) -> list[Any]:
    return [entry.get("accuracy") for entry in rounds(results, method).values()]


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
    run = hub.begin(f"killed-{site}", SETTINGS["kd3a"] | {"method": "kd3a"})
    wait_for_act(hub, run.folder, site, f"{hold} in round {step}")
    assert not run.find("round", round=2)
    hub.kill(site)
    hub.act(site, {})
    hub.revive(site)
    assert_unchanged(hub, "kd3a", run.finish())


@pytest.mark.parametrize(
    "point", ["half written", *(pytest.param(p, marks=NIGHTLY) for p in POINTS if "half" not in p)]
)
def test_a_killed_program_is_resumed_after_its_last_checkpoint(
    hub: Federation, halting: Path, point: str
) -> None:
    """It stops at the point, and is killed there."""
    where, after = POINTS[point]
    at, stopped = hub.directory / "at", hub.directory / "stopped"
    settings = SETTINGS["kd3a"] | {"method": "kd3a"}
    hub.act("bert", {"2": ["hold", 0]})
    run = hub.begin(f"program-{point[:4]}", settings, halting)
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
    results = hub.begin(run.folder.name, settings | {"run.resume": True}, halting).finish()
    assert [e["round"] for e in run.find("training")] == [0, after]
    assert_unchanged(hub, "kd3a", results)


def words(hub: Federation, method: str, name: str) -> list[Any]:
    """The command line that begins a run."""
    flat = LIVE | SETTINGS[method]
    changes = [part for key, value in flat.items() for part in ("-c", f"{key}={value}")]
    begin = ["run", method, "--server", hub.home, "--dir", hub.runs, "--name", name]
    return [*begin, "--baseline", "none", *changes]


def events(folder: Path) -> list[dict[str, Any]]:
    journal = folder / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True) if journal.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def ended(folder: Path) -> bool:
    return any(e["event"] in ("done", "failed") for e in events(folder))


# ---- kills at random moments ---------------------------------------------------------------------

KILLS = int(os.environ.get("FEDDA_KILLS", "1"))  # per method
VICTIMS = ("source", "target", "serverapp", "superlink", "operator")
LATEST = 1.0  # seconds after the beginning of a round, of which some take a third


@dataclass
class Kill:
    """Which process is killed when: in a round, after some seconds; and when it is back."""

    victim: str
    round: int
    after: float
    back: float

    @classmethod
    def draw(cls, method: str, draws: random.Random) -> "Kill":
        victim = draws.choice(VICTIMS)
        if victim == "source":
            victim = "bert" if method == "dils" else draws.choice(("anna", "bert", "carl"))
        return cls(
            "town" if victim == "target" else victim,
            draws.randint(1, 3),
            draws.uniform(0, LATEST),
            draws.choice((0.0, 2.0)),
        )

    def carry_out(self, hub: Federation, operator: Operator, folder: Path) -> None:
        """Kill the process, and start it again if it is not for the operator to do so."""
        if self.victim == "serverapp":
            if is_alive(program := program_of(folder)):
                os.kill(program, signal.SIGKILL)
            return
        if self.victim == "operator":
            operator.popen.kill()
            operator.popen.wait()
            return
        hub.kill(self.victim)
        time.sleep(self.back)
        if self.victim == "superlink":
            hub.start_server()
        else:
            hub.revive(self.victim)


def begun(folder: Path, number: int) -> Callable[[], bool]:
    """Whether a round of a run has begun."""
    return lambda: any(
        e["event"] == "training" if number == 1 else e.get("round", 0) >= number - 1
        for e in events(folder)
        if e["event"] in ("training", "round")
    )


def survive(hub: Federation, method: str, name: str, kill: Kill) -> tuple[str, dict[str, Any]]:
    """Run with one kill -> what the operator was told, and the results."""
    operator = Operator(hub, words(hub, method, name))
    folder = hub.runs / name
    there = begun(folder, kill.round)
    wait_until(lambda: there() or not operator.alive, f"{name} has not begun")
    assert there(), operator.text()
    time.sleep(kill.after)
    over = ended(folder)
    kill.carry_out(hub, operator, folder)
    said = ""
    if kill.victim == "operator":
        wait_until(lambda: ended(folder), f"{name} does not end: {events(folder)[-3:]}")
    elif operator.popen.wait(PATIENCE) != 0:
        said = next(x for x in reversed(operator.text().splitlines()) if x.startswith("error: "))
        assert over or kill.victim in ("serverapp", "superlink"), operator.text()
    if said or not (folder / "results.json").exists():
        operator = Operator(hub, ["run", "--resume", folder])
        assert operator.popen.wait(PATIENCE) == 0, operator.text()
    return said, json.loads((folder / "results.json").read_text())


@pytest.mark.nightly("server", "clients/node", "tests/actor.py")
@pytest.mark.timeout(300 + 240 * KILLS)
@pytest.mark.parametrize("method", SETTINGS)
def test_a_process_killed_at_a_random_moment_changes_nothing(hub: Federation, method: str) -> None:
    seed = os.environ.get("FEDDA_KILLS_SEED") or str(random.SystemRandom().randrange(10**6))
    print(f"\nFEDDA_KILLS_SEED={seed}")
    draws, wrong = random.Random(f"{seed}-{method}"), []
    for number in range(KILLS):
        kill = Kill.draw(method, draws)
        try:
            said, found = survive(hub, method, f"{method}-{number}", kill)
            assert_unchanged(hub, method, found)
            outcome = f"the same bits; {said or 'nobody noticed'}"
        except Exception as error:
            outcome = f"WRONG: {str(error)[:1500]}"
            wrong.append(f"{method} {number}, {kill}: {outcome}")
        hub.mend()
        print(f"\n{method} {number}, {kill}: {outcome}")
    assert not wrong, f"FEDDA_KILLS_SEED={seed}\n" + "\n".join(wrong)
