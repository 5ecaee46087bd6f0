"""Small real federations for the live tests: our server with sites that echo, or that train."""

import json
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedda.ops.bundle import stage
from fedda.ops.federation import PROGRAM, Deployment
from fedda.ops.spawn import LOOPBACK, Process
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

SITE = """
import logging, os, sys, time
from pathlib import Path
from flwr.app import Message, RecordDict
from clients.node import resident
from fedda.errors import KeyFileError
from fedda.ops.spawn import watch_parent

watch_parent(os.getppid())

logging.basicConfig(level=logging.INFO, stream=sys.stdout)

def app(message, context):
    if "boom" in message.content:
        raise ValueError("the sample patient-4711 is broken")
    if (Path(state) / "nap").exists():
        print("napping", flush=True)
        time.sleep(600)
    return Message(RecordDict(dict(message.content)), reply_to=message)

superlink, name, ca, key, state = sys.argv[1:]
try:
    resident.serve(
        app, superlink=superlink, node_config={"name": name}, root_certificates=Path(ca),
        key=Path(key), state=Path(state),
        on_event=lambda kind, text: print(kind, text, flush=True),
    )
except KeyFileError as error:
    print(error, flush=True)
    sys.exit(3)
"""

PYPROJECT = """
[project]
name = "echo"
version = "1.0.0"
[tool.flwr.app]
publisher = "fedda"
[tool.flwr.app.components]
serverapp = "echo.server:app"
clientapp = "echo.client:app"
[tool.flwr.app.config]
out = ""
messages = 1
boom = false
"""

CLIENT = """
from flwr.clientapp import ClientApp

raise RuntimeError("the program that the server ships was imported at a site")
app = ClientApp()
"""

SERVER = """
import json, os, time
import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.serverapp import ServerApp
from server.lane_grid import lanes

app = ServerApp()

@app.main()
def main(grid, context):
    with lanes(grid) as grid:
        serve(grid, context.run_config)

def serve(grid, config):
    while len(nodes := sorted(grid.get_node_ids())) < 2:
        time.sleep(0.1)
    seconds, errors = [], []
    for _ in range(config["messages"]):
        began = time.monotonic()
        messages = []
        for node in nodes:
            content = RecordDict({"x": ArrayRecord({"x": Array(np.zeros(256, np.float32))})})
            if config["boom"]:
                content["boom"] = ConfigRecord({})
            messages.append(Message(content, node, "train", ttl=60))
        open_ids = set(grid.push_messages(messages))
        while open_ids:
            for reply in grid.pull_messages(list(open_ids)):
                open_ids.discard(reply.metadata.reply_to_message_id)
                if reply.has_error():
                    errors.append([reply.error.code, reply.error.reason])
            time.sleep(0.02)
        seconds.append(time.monotonic() - began)
    with open(config["out"] + ".part", "w") as file:
        json.dump({"seconds": seconds, "errors": errors}, file)
    os.replace(config["out"] + ".part", config["out"])
"""


class Echo(Deployment):
    """A server with database, TLS and keys, and sites that send back what they get."""

    def __init__(self, directory: Path, sites: Sequence[str] = ()) -> None:
        super().__init__(
            directory,
            {name: ("source", directory) for name in sites},
            database=directory / "state.db",
            server_options=["--any-app"],
            patience=PATIENCE,
        )
        self.app = directory / "app"
        (self.app / "echo").mkdir(parents=True)
        (self.app / "pyproject.toml").write_text(PYPROJECT)
        (self.app / "echo" / "__init__.py").touch()
        (self.app / "echo" / "client.py").write_text(CLIENT)
        (self.app / "echo" / "server.py").write_text(SERVER)

    def start_site(self, name: str) -> Process:
        state = self.directory / "state" / name
        state.mkdir(parents=True, exist_ok=True)
        files = [self.home / "ca.crt", self.home / "nodes" / name, state]
        command = [sys.executable, "-c", SITE, f"{LOOPBACK}:{self.port}", name, *map(str, files)]
        process = Process(name, command, self.logs / f"{name}.log", self.env)
        self.processes[name] = process
        return process

    def run(self, messages: int, boom: bool = False) -> dict[str, Any]:
        """Run the echo app to its end and return what it measured."""
        out = self.directory / "out.json"
        out.unlink(missing_ok=True)
        config = {"messages": messages, "boom": boom, "out": str(out)}
        state = self.wait(self.submit(self.app, config), PATIENCE)
        assert state.succeeded, state
        return json.loads(out.read_text())

    def node_ids(self) -> set[int]:
        """The ids of the sites that are online."""
        with self.control() as control:
            return {site.node_id for site in control.sites() if site.online}

    def wait_until_online(self, count: int, seconds: float = PATIENCE) -> None:
        """Wait until exactly this many sites are online."""
        ends = time.monotonic() + seconds
        while len(self.node_ids()) != count:
            assert time.monotonic() < ends, f"{len(self.node_ids())} sites online, not {count}"
            time.sleep(0.2)


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
        assert state.succeeded, f"{state}\n{self.events()[-3:]}\n{log}"
        return json.loads((self.folder / "results.json").read_text())


def rounds(results: Mapping[str, Any], method: str) -> dict[int, dict[str, Any]]:
    """Return what results say of a method's only training, by round."""
    (training,) = results["trainings"][method]
    return {entry["round"]: entry for entry in training["rounds"]}


def final_model(results: Mapping[str, Any], method: str) -> bytes:
    """Read the model file of a method's only training; equal models have equal bytes."""
    (training,) = results["trainings"][method]
    return Path(training["model"]).read_bytes()
