"""Processes killed at random moments and started again: the run ends as if nothing had happened.

    FEDDA_KILLS=20 pytest -s tests/test_kills.py

kills so often in runs of each method, and shows what became of each. What kills the server's side
ends the run with one sentence; the run is then resumed, as that sentence says.
"""

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.federation import (
    LIVE,
    LOW,
    PATIENCE,
    Federation,
    Operator,
    descendants,
    final_model,
    processes_with,
    rounds,
    wait_until,
)
from tests.local_grid import SMALL_SUMS

KILLS = int(os.environ.get("FEDDA_KILLS", "1"))  # per method
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300 + 240 * KILLS)]

PAIR = SMALL_SUMS | {
    "dils.collaborator": "bert",
    "dils.pretrain": 1,
    "dils.discriminator.sizes": "8",
}
FAR = {"wait.train": 3600.0, "wait.evaluate": 3600.0, "wait.settle": 30.0, "wait.min-sources": 3}
SETTINGS: dict[str, dict[str, Any]] = {"kd3a": FAR, "dils": FAR | PAIR}
VICTIMS = {
    "kd3a": ("source", "target", "serverapp", "superlink", "operator"),
    "dils": ("superlink", "source", "operator", "target", "serverapp"),
}
LATEST = 4.0  # seconds after the beginning of a round


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    folder = tmp_path_factory.mktemp("kills")
    database = folder / "hub" / "state.db"
    with Federation(folder / "hub", database=database, client_options=LOW) as made:
        yield made
    assert processes_with(str(folder)) == []


@dataclass
class Kill:
    """Which process is killed when: in a round, after some seconds; and when it is back."""

    victim: str
    round: int
    after: float
    back: float

    @classmethod
    def draw(cls, method: str, number: int) -> "Kill":
        draws = random.Random(f"{method}-{number}")
        victim = VICTIMS[method][number % len(VICTIMS[method])]
        if victim == "source":
            victim = "bert" if method == "dils" else draws.choice(("anna", "bert", "carl"))
        return cls(
            "town" if victim == "target" else victim,
            draws.randint(1, 3),
            draws.uniform(0, LATEST),
            draws.choice((0.0, 2.0)),
        )

    def carry_out(self, hub: Federation, operator: Operator) -> None:
        """Kill the process, and start it again if it is not for the operator to do so."""
        if self.victim == "serverapp":
            for pid in descendants(hub.processes["superlink"].popen.pid, "flwr-serverapp"):
                os.kill(pid, signal.SIGKILL)
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


def events(folder: Path) -> list[dict[str, Any]]:
    journal = folder / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True) if journal.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def begun(folder: Path, number: int) -> Callable[[], bool]:
    """Whether a round of a run has begun."""
    return lambda: any(
        e["event"] == "training" if number == 1 else e.get("round", 0) >= number - 1
        for e in events(folder)
        if e["event"] in ("training", "round")
    )


def ended(folder: Path) -> bool:
    return any(e["event"] in ("done", "failed") for e in events(folder))


def resume(hub: Federation, folder: Path) -> Operator:
    return Operator(hub, ["run", "--resume", folder])


def survive(hub: Federation, method: str, name: str, kill: Kill) -> tuple[str, dict[str, Any]]:
    """Run with one kill -> what the operator was told, and the results."""
    flat = LIVE | SETTINGS[method]
    changes = [part for key, value in flat.items() for part in ("-c", f"{key}={value}")]
    begin = ["run", method, "--server", hub.home, "--dir", hub.runs, "--name", name]
    operator = Operator(hub, [*begin, "--baseline", "none", *changes])
    folder = hub.runs / name
    there = begun(folder, kill.round)
    wait_until(lambda: there() or not operator.alive, PATIENCE, f"{name} has not begun")
    assert there(), operator.text()
    time.sleep(kill.after)
    over = ended(folder)
    kill.carry_out(hub, operator)
    said = ""
    if kill.victim == "operator":
        wait_until(lambda: ended(folder), PATIENCE, f"{name} does not end: {events(folder)[-3:]}")
    elif operator.popen.wait(PATIENCE) != 0:
        said = next(x for x in reversed(operator.text().splitlines()) if x.startswith("error: "))
        assert over or kill.victim in ("serverapp", "superlink"), operator.text()
    if said or not (folder / "results.json").exists():
        operator = resume(hub, folder)
        assert operator.popen.wait(PATIENCE) == 0, operator.text()
    return said, json.loads((folder / "results.json").read_text())


def accuracies(results: dict[str, Any], method: str) -> list[Any]:
    return [entry.get("accuracy") for entry in rounds(results, method).values()]


@pytest.mark.parametrize("method", SETTINGS)
def test_a_killed_process_changes_nothing(hub: Federation, method: str) -> None:
    whole = hub.alone(method, SETTINGS[method] | {"method": method})
    wrong = []
    for number in range(KILLS):
        kill = Kill.draw(method, number)
        began = time.monotonic()
        try:
            said, found = survive(hub, method, f"{method}-{number}", kill)
            assert final_model(found, method) == final_model(whole, method), "another model"
            assert accuracies(found, method) == accuracies(whole, method), "other tests"
            outcome = f"the same bits; {said or 'nobody noticed'}"
        except Exception as error:
            outcome = f"WRONG: {str(error)[:1500]}"
            wrong.append(f"{method} {number}, {kill}: {outcome}")
        hub.mend()
        print(f"\n{method} {number}, {kill}: {outcome} [{time.monotonic() - began:.0f} s]")
    assert not wrong, "\n".join(wrong)
