"""Light sites: they speak to a server as real ones do, and answer at once, without torch or data.

Each site has its own node key, session and heartbeats: the connection is that of
`fedda-client` (`clients.node.resident`), the work is not. A source sends back the model that it was
sent, each value changed by a few millionths, so that no two sites send the same bytes. The target
tests nothing and reports plausible numbers. Several sites run as threads of one process, as a
hundred processes would need more memory than a small machine has.

The benchmarks start this program; `federation` describes such a federation.
"""

import os
import socket
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from flwr.app import Context, Message

from fedda import __version__, records
from fedda.config import IMAGES_HIDE
from fedda.halves import load
from fedda.ops.federation import Deployment
from fedda.ops.spawn import LOOPBACK, Process, watch_parent
from fedda.wire.packing import Kind, Packed, pack

resident: Any = load("clients", "node.resident")
FEATURES, CLASSES = 64, 10
EXAMPLES = IMAGES_HIDE  # as many as a real site beside them has, so that none counts less
PER_PROCESS = 25  # sites
CHANGE = 1e-5  # how much a site changes each value of a model, relatively
TROUBLES = ("refused", "failed", "lost", "dropped", "waiting")
# What a test reports, and a calibration: plausible numbers of ten classes.
TESTED = {"accuracy": 0.5, "loss": 1.5, "tested": float(EXAMPLES), "seconds": 0.0}
CALIBRATED = {"accuracy": 0.5, "tested": 10.0, "held": 10.0, "confidence": 0.5, "ece": 0.1}
CALIBRATED |= {"threshold-confidence": 0.5, "threshold-entropy": 0.5, "seconds": 0.0}


def offer(name: str) -> dict[str, Any]:
    """What a site says of its data; `target` in its name makes it the target."""
    role = "target" if name == "target" else "source"
    classes = [str(n) for n in range(CLASSES)] if role == "source" else []
    about = {"examples": EXAMPLES, "tested": EXAMPLES, "classes": classes, "shape": [FEATURES]}
    return {
        "role": role,
        "name": name,
        **about,
        "columns": [],
        "version": __version__,
        "keys": False,
    }


def changed(model: Packed, site: str, server_round: int) -> Packed:
    """A model as a site sends it back: a little larger in one round, and smaller in another."""
    drawn = sha256(f"{site} {server_round}".encode()).digest()
    factor = 1 + CHANGE * (int.from_bytes(drawn[:4]) / 2**31 - 1)
    arrays = model.unpack()
    scaled = {
        n: (a * factor).astype(a.dtype) if a.dtype.kind == "f" else a for n, a in arrays.items()
    }
    return pack(scaled, Kind.MODEL, model.manifest.floats)


def program(name: str) -> Callable[[Message, Context], Message]:
    """The ClientApp of a site."""

    def answer(message: Message, _: Context) -> Message:
        kind = message.metadata.message_type
        arrays, tables = records.read(message.content)
        if kind == "query":
            content = records.write(offer=offer(name))
        elif kind == "train":
            model = changed(arrays["model"], name, int(tables["step"]["round"]))
            content = records.write({"model": model}, metrics={"loss": 1.0, "seconds": 0.0})
        else:
            numbers = TESTED if tables["step"]["hop"] == "test" else CALIBRATED
            content = records.write(metrics=numbers)
        return Message(content, reply_to=message)

    return answer


class Light(Deployment):
    """A real server, and light sites: sources, and a target called `target`."""

    def __init__(self, directory: Path, sites: int, real: Mapping[str, Path] | None = None) -> None:
        """Describe the federation.

        Args:
            directory: folder for keys, logs and state.
            sites: how many light ones.
            real: data of further sources, by name, each a real `fedda-client`.
        """
        names = [f"source-{n:03}" for n in range(sites - 1)] + ["target"]
        roles = {n: ("target" if n == "target" else "source", directory) for n in names}
        roles |= {name: ("source", data) for name, data in (real or {}).items()}
        super().__init__(directory, roles, patience=180.0 + 0.5 * sites)
        self.groups = [names[i : i + PER_PROCESS] for i in range(0, len(names), PER_PROCESS)]

    def start_site(self, name: str) -> Process:
        """Start the process of a light site's group with the first site of it."""
        group = next((group for group in self.groups if name in group), None)
        if group is None:
            return super().start_site(name)
        if name != group[0]:
            return self.processes[group[0]]
        address = f"127.0.1.{self.groups.index(group) + 1}" if sys.platform == "linux" else LOOPBACK
        # Sites have machines of their own: here their many threads must not slow the server.
        command = ["nice", "-n", "15", sys.executable, __file__, f"{LOOPBACK}:{self.port}"]
        command += [self.home, address, *group]
        process = Process(name, [*map(str, command)], self.logs / f"{name}.log", self.env)
        self.processes[name] = process
        return process

    def _start(self, name: str, arguments: Sequence[Any]) -> Process:
        """Let the server take the connections of many sites from this machine's one address."""
        more = ["--address-connections", 10 * len(self.sites)]
        return super()._start(name, [*arguments, *(more if name == "superlink" else [])])

    def troubles(self) -> list[str]:
        """What went wrong at sites, a line each."""
        lines = [
            line for group in self.groups for line in self.processes[group[0]].text().splitlines()
        ]
        return [line for line in lines if line.split(" ")[0] in TROUBLES]


def serve(superlink: str, home: Path, name: str) -> None:
    """Be one site, without end."""
    state = home.parent / "state" / name
    state.mkdir(parents=True, exist_ok=True)

    def tell(kind: str, text: str) -> None:
        if kind in (*TROUBLES, "connected"):
            print(kind, name, text, flush=True)

    resident.serve(
        program(name),
        superlink=superlink,
        node_config={"name": name},
        root_certificates=home / "ca.crt",
        key=home / "nodes" / name,
        state=state,
        on_event=tell,
    )


def call_from(address: str) -> None:
    """Dial from this address of this machine, as a site on a machine of its own would."""
    dial = socket.create_connection

    def create_connection(to: Any, timeout: Any = None, source_address: Any = None) -> Any:
        return dial(to, timeout, source_address or (address, 0))

    socket.create_connection = create_connection  # type: ignore[assignment]


def main() -> None:
    superlink, home, address, *names = sys.argv[1:]
    watch_parent(os.getppid())
    call_from(address)
    threads = [threading.Thread(target=serve, args=(superlink, Path(home), name)) for name in names]
    for thread in threads:
        thread.daemon = True
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
