"""A small real federation for the live tests: our server, echoing sites, a run that counts."""

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedda.processes import Deployment
from fedda.spawn import LOOPBACK, Process

SITE = """
import logging, os, sys
from pathlib import Path
from flwr.app import Message, RecordDict
from clients import resident
from fedda.errors import KeyFileError
from fedda.spawn import watch_parent

watch_parent(os.getppid())

logging.basicConfig(level=logging.INFO, stream=sys.stdout)

def app(message, context):
    if "boom" in message.content:
        raise ValueError("the sample patient-4711 is broken")
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

app = ServerApp()

@app.main()
def main(grid, context):
    config = context.run_config
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
        state = self.wait(self.submit(self.app, config), 60)
        assert state.succeeded, state
        return json.loads(out.read_text())

    def node_ids(self) -> set[int]:
        """The ids of the sites that are online."""
        with self.control() as control:
            return {site.node_id for site in control.sites() if site.online}

    def wait_until_online(self, count: int, seconds: float = 45) -> None:
        """Wait for so many sites to be online, no more and no fewer."""
        ends = time.monotonic() + seconds
        while len(self.node_ids()) != count:
            assert time.monotonic() < ends, f"{len(self.node_ids())} sites online, not {count}"
            time.sleep(0.2)
