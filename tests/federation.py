"""A small real federation for the live tests: our server, three sources and a target."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedda.ops.bundle import stage
from fedda.ops.federation import PROGRAM, Deployment
from fedda.ops.spawn import Process
from fedda.settings import RunConfig
from server.checkpoint import replace
from server.journal import Event, Journal
from server.simulation import simulate
from tests.local_grid import EXAMPLES, PLAIN, make_domains
from tests.patience import PATIENCE

MIN_IMAGES = 16  # of these small sites, which have fewer than a site should have

LIVE: dict[str, Any] = {
    **PLAIN,
    "rounds": 3,
    "model.name": "mlp",
    "model.hidden": "64",
    "train.batch-size": 16,
    "run.expect": 4,
    "wait.sites": 90.0,
    "wait.settle": 1.0,
    "wait.train": 90.0,
    "wait.evaluate": 90.0,
    # All sites have keys; what runs do of themselves then has a test of its own.
    "secure": "none",
    "kd3a.relay": "open",
}
# Options with which the sites of `make_domains` sum gradients over a few of their examples.
LOW = {name: ["--min-examples", "1"] for name in EXAMPLES}


class Federation(Deployment):
    """Three tiny sources and a target behind TLS and node keys, each its own process.

    Args:
        directory: holds all files.
        acting: start the sites with `tests.actor`, so that they can be told to misbehave.
        more: further arguments of `Deployment`.
    """

    def __init__(self, directory: Path, acting: bool = False, **more: Any) -> None:
        data = directory / "data"
        data.mkdir(parents=True)
        self.nodes = make_domains(data)
        sites = {n["name"]: (n["role"], Path(n["data"])) for n in self.nodes}
        super().__init__(directory, sites, patience=PATIENCE, **more)
        self.acting = acting
        self.app = stage(directory / "app")
        self.runs = directory / "runs"

    def start_site(self, name: str) -> Process:
        """Start one site's client, which lowers its limit to what so small a site has."""
        own, least = self.client_options.get(name, []), ["--min-images", str(MIN_IMAGES)]
        self.client_options[name] = own if "--min-images" in own else [*least, *own]
        return super().start_site(name)

    def act(self, name: str, acts: Mapping[str, Any]) -> None:
        """Tell a site what to do wrong from now on; see `tests.actor`."""
        replace(self._acts(name), json.dumps(acts).encode())

    def kill(self, name: str) -> None:
        """End a process at once, by its id, as a power cut would."""
        process = self.processes[name].popen
        process.kill()
        process.wait()

    def revive(self, name: str) -> None:
        """Start a site that has ended again, and wait until the server knows it."""
        self.processes[name].start()
        self.processes[name].wait_for("connected", PATIENCE)

    def mend(self) -> None:
        """Start the processes that have ended, and let every site behave again."""
        for name in self.processes.keys() - self.sites.keys() - {"superlink"}:
            self.processes.pop(name).stop()  # an operator's command of this test
        if not self.processes["superlink"].alive:
            self.start_server()
        for name in self.sites:
            self.act(name, {})
            if not self.processes[name].alive:
                self.revive(name)

    def begin(self, name: str, settings: Mapping[str, Any], app: Path | None = None) -> "Run":
        """Submit a run, as `fedda run` does."""
        flat = LIVE | {"run.dir": str(self.runs), "run.name": name} | dict(settings)
        return Run(self, self.runs / name, self.submit(app or self.app, flat), flat)

    def alone(self, name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        """Perform the same run in this process, without a server -> its results."""
        directory = self.directory / "alone"
        flat = LIVE | {"run.dir": str(directory), "run.name": name} | dict(settings)
        # The sites of the federation have the client's own limit.
        more = {"state-dir": str(directory / name), "threads": 1, "min-images": MIN_IMAGES}
        sites = [{**n, **more} for n in self.nodes]
        return simulate(RunConfig.parse(flat), sites, Journal(), "process")

    def _acts(self, name: str) -> Path:
        folder = self.directory / "acts"
        folder.mkdir(exist_ok=True)
        return folder / f"{name}.json"

    def _program(self, name: str) -> Sequence[Any]:
        if not (self.acting and name in self.sites):
            return super()._program(name)
        return [sys.executable, "-m", "tests.actor", self._acts(name)]


class Operator(Process):
    """A command of the operator, as a process."""

    def __init__(self, hub: Federation, command: Sequence[Any]) -> None:
        log = hub.logs / f"operator-{time.monotonic_ns()}.log"
        super().__init__("operator", [*PROGRAM, *map(str, command)], log, hub.env)
        hub.processes[log.stem] = self


class Run:
    """A run on a federation's server, seen through the journal that an operator reads."""

    def __init__(self, hub: Federation, folder: Path, run_id: int, flat: Mapping[str, Any]) -> None:
        self.hub = hub
        self.folder = folder
        self.id = run_id
        self.flat = flat

    def events(self) -> list[Event]:
        """Return the events that the journal holds by now."""
        path = self.folder / "journal.jsonl"
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("\n")]

    def find(self, event: str, **facts: Any) -> list[Event]:
        """Return the events of one kind that have all these facts."""
        events = [e for e in self.events() if e["event"] == event]
        return [e for e in events if all(e.get(k) == v for k, v in facts.items())]

    def wait_for(self, event: str, seconds: float = PATIENCE, **facts: Any) -> Event:
        """Wait until the journal has an event that `find` finds -> the last of them."""
        ends = time.monotonic() + seconds
        while not (events := self.find(event, **facts)):
            seen = [e for e in self.events() if e["event"] in ("trouble", "round", "failed")]
            assert time.monotonic() < ends and not self.find("failed"), (event, facts, seen)
            time.sleep(0.1)
        return events[-1]

    def finish(self, seconds: float = PATIENCE) -> dict[str, Any]:
        """Wait for the run's end -> its results."""
        state = self.hub.wait(self.id, seconds)
        log = (self.hub.home / "superlink.log").read_text(errors="replace")[-4000:]
        assert state.ending == "completed", f"{state}\n{self.events()[-3:]}\n{log}"
        return json.loads((self.folder / "results.json").read_text())


def rounds(results: Mapping[str, Any], method: str) -> dict[int, dict[str, Any]]:
    """Return what results say of a method's only training, by round."""
    (training,) = results["trainings"][method]
    return {entry["round"]: entry for entry in training["rounds"]}


def final_model(results: Mapping[str, Any], method: str) -> bytes:
    """Read the model file of a method's only training; equal models have equal bytes."""
    (training,) = results["trainings"][method]
    return Path(training["model"]).read_bytes()
