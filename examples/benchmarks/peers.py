"""The same FedAvg on fedda, Flower alone and NVIDIA FLARE, beside bare TLS: seconds, memory, CPU.

    python examples/benchmarks/peers.py
    python examples/benchmarks/peers.py --clients 3 8 --mb 0.01 45 --repeats 2
    python examples/benchmarks/peers.py --peer fedda --peer nvflare --clients 3 --mb 250

Each peer runs as its users run it: a server and a program per client, on loopback, with TLS and a
key or certificate per client. Clients send back the model that they were sent, so that what is
timed is what federating costs. Sizes are those of one model; repeats take turns, so that all peers
meet the same machine.

- fedda: `fedda superlink`, `fedda-client` and a run of FedAvg without secure sums, as the others
  have none. Its clients train, for which they have few vectors, and the target is one more, which
  tests each model: neither is in the seconds of a round, but both are in the processor time.
- flower: `flower-superlink`, `flower-supernode` and Flower's own FedAvg (peers_flower.py).
- nvflare: FLARE's FedAvg for arrays, started by its proof-of-concept commands, whose server and
  clients have certificates (peers_nvflare.py). It is installed into an environment of its own.
- bare: sockets with TLS that move the same bytes and nothing else: the limit (peers_bare.py).

The last line is one JSON object: figure -> `peer, clients, megabytes` -> median over the repeats.

    round_s        from the start of a round to the start of the next, median over the rounds of a
                   run but the first
    first_round_s  from the order to run until the first round is over
    server_cpu_s   seconds of processor of all server processes in such a round
    sites_cpu_s    the same of all clients' processes
    over_bare      round_s of each peer over that of `bare`
    server_models  peak memory of the server's processes, less that with the smallest model, in
                   models; only for models of 10 MB and more
"""

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import live
import numpy as np
import processes

from fedda.errors import RunError
from fedda.halves import load
from fedda.ops import certificate, keys
from fedda.ops.federation import Deployment
from fedda.ops.spawn import LOOPBACK, Process, quiet_port, scripts_first
from fedda.results.escaping import markdown

HERE = Path(__file__).parent
TOKEN = "FEDDA_PEERS"  # an environment variable that all processes of one trial inherit
FIGURES = ("round_s", "first_round_s", "server_cpu_s", "sites_cpu_s", "over_bare", "server_models")
LARGE = 10.0  # MB
LOOK = 0.25  # seconds


@dataclass(frozen=True)
class Look:
    """What a trial's processes have used at one moment: seconds of processor, bytes."""

    at: float
    server_cpu: float
    sites_cpu: float
    server_memory: int


@dataclass
class Trial:
    """One run of one peer: when it was ordered, when each round began, and what it used.

    Attributes:
        stamps: seconds since 1970 at which rounds began, and the last one's end.
        seconds: of each round; by default from stamp to stamp.
        members: its processes now, with anything of each; by default all that have its token.
    """

    token: str
    is_server: Callable[[int, str], bool]
    ordered: float = 0.0
    stamps: Sequence[float] = ()
    seconds: Sequence[float] = ()
    members: Callable[[], dict[int, str]] | None = None
    looks: list[Look] = field(default_factory=list)
    _spent: dict[int, tuple[bool, float]] = field(default_factory=dict)

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Look at all processes of the trial, in a thread, while a block runs."""
        over = threading.Event()

        def watch() -> None:
            self.look()
            while not over.wait(LOOK):
                self.look()
            self.look()

        thread = threading.Thread(target=watch)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def look(self) -> None:
        """Record what the processes have used; those that have ended keep their last figures."""
        memory = 0
        every = with_token(self.token) if self.members is None else self.members()
        for pid, line in every.items():
            with contextlib.suppress(OSError, IndexError):
                here = self._spent.get(pid, (self.is_server(pid, line), 0.0))[0]
                self._spent[pid] = here, processes.seconds(pid)
                memory += processes.resident(pid) if here else 0
        server = sum(cpu for here, cpu in self._spent.values() if here)
        sites = sum(cpu for here, cpu in self._spent.values() if not here)
        self.looks.append(Look(time.time(), server, sites, memory))

    def figures(self) -> dict[str, float]:
        """The figures of the head of this file, with `peak_mb` in place of `server_models`."""
        counted = self.stamps[1:]
        rounds = len(counted) - 1
        seconds = self.seconds or [b - a for a, b in pairwise(self.stamps)]
        return {
            "round_s": statistics.median(seconds[1:]),
            "first_round_s": self.stamps[1] - self.ordered,
            "server_cpu_s": self._between(counted, [e.server_cpu for e in self.looks]) / rounds,
            "sites_cpu_s": self._between(counted, [e.sites_cpu for e in self.looks]) / rounds,
            "peak_mb": max(look.server_memory for look in self.looks) / 1e6,
        }

    def _between(self, stamps: Sequence[float], spent: Sequence[float]) -> float:
        """Of what had been spent at each look, what was spent from the first stamp to the last.

        Rounds of a tiny model may all lie between two looks, so what was spent there is shared out.
        """
        first, last = np.interp([stamps[0], stamps[-1]], [look.at for look in self.looks], spent)
        return float(last - first)


def with_token(token: str) -> dict[int, str]:
    """All processes but this one whose environment has the token -> their command lines."""
    found = {}
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            ours = entry.name.isdigit() and int(entry.name) != os.getpid()
            if ours and f"{TOKEN}={token}".encode() in (entry / "environ").read_bytes():
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                found[int(entry.name)] = line
    return found


def below(pid: int) -> Callable[[int, str], bool]:
    """Whether a process is this one or was started by it."""
    return lambda each, _: each in processes.server(pid)


# ---- the peers ---------------------------------------------------------------------------------


def fedda(folder: Path, token: str, clients: int, mb: float, rounds: int) -> Trial:
    """Run fedda's FedAvg over resident clients."""
    app = live.stage(folder / "app")
    sites = live.domains(folder / "data", clients)
    with Deployment(
        folder / "served", sites, patience=180, server_options=["--any-app"]
    ) as deployment:
        trial = Trial(token, below(deployment.processes["superlink"].popen.pid))
        settings = {"method": "fedavg", "secure": "none", "rounds": rounds, **live.mlp(mb)}
        trial.ordered = time.time()
        with trial.watched():
            measured = live.run(deployment, app, "peer", settings, seconds=1200)
    since = time.time() - time.perf_counter()
    trial.stamps = [waves[0].began + since for waves in measured.rounds]
    trained = [sum(w.worked for w in waves if w.kind == "train") for waves in measured.rounds]
    trial.seconds = [a - b for a, b in zip(measured.untested(), trained, strict=False)]
    return trial


def flower(folder: Path, token: str, clients: int, mb: float, rounds: int) -> Trial:
    """Run Flower's FedAvg over its own SuperNodes, without fedda."""
    home, port = folder / "served", quiet_port()
    certificate.init(home, [LOOPBACK])
    path = scripts_first(os.environ.get("PATH"))
    env = {**os.environ, "PATH": path, "FLWR_HOME": str(folder / "flwr")}
    tls = ["--ssl-certfile", home / "server.pem", "--ssl-keyfile", home / "server.key"]
    tls += ["--ssl-ca-certfile", home / "ca.crt"]
    app, stamps = folder / "app", folder / "stamps.txt"
    write_flower_app(app)
    with contextlib.ExitStack() as stack:

        def start(name: str, *command: object) -> Process:
            process = Process(name, list(map(str, command)), folder / f"{name}.log", env)
            stack.callback(process.stop)
            return process

        server = start(
            "superlink",
            *("flower-superlink", "--host", LOOPBACK, "--port", port, *tls),
            *("--enable-supernode-auth", "--disable-runtime-dependency-installation"),
        )
        listening(port, server)
        connect = load("server", "superlink.control").Control
        control = stack.enter_context(connect(f"{LOOPBACK}:{port}", home / "ca.crt"))
        for number in range(clients):
            key = keys.add(home, f"site-{number}")
            control.register(keys.public_keys(home)[f"site-{number}"], f"site-{number}")
            start(
                f"site-{number}",
                *("flower-supernode", "--superlink", f"{LOOPBACK}:{port}"),
                *("--root-certificates", home / "ca.crt", "--port", quiet_port()),
                *("--auth-supernode-private-key", key),
            )
        trial = Trial(token, below(server.popen.pid))
        settings = {"clients": clients, "mb": mb, "rounds": rounds, "stamps": str(stamps)}
        trial.ordered = time.time()
        with trial.watched():
            wait_for_run(control, control.start_run(app, settings), server)
    trial.stamps = [float(line) for line in stamps.read_text().split()]
    return trial


def bare(folder: Path, token: str, clients: int, mb: float, rounds: int) -> Trial:
    """Move the same bytes over sockets with TLS."""
    certificate.init(folder / "served", [LOOPBACK])
    port, stamps = quiet_port(), folder / "stamps.txt"
    words = [*map(str, (folder / "served", port, clients, mb, rounds, stamps))]
    program = [sys.executable, str(HERE / "peers_bare.py")]

    def start(role: str, number: int = 0) -> Process:
        log = folder / f"{role}-{number}.log"
        return Process(role, [*program, role, *words], log, os.environ)

    server = start("serve")
    trial = Trial(token, below(server.popen.pid), time.time())
    listening(port, server)
    with trial.watched():
        started = [start("client", number) for number in range(clients)]
        for process in (server, *started):
            if process.popen.wait(600):
                raise RunError(f"The bare {process.name} failed:\n{process.tail()}")
    trial.stamps = [float(line) for line in stamps.read_text().split()]
    return trial


def listening(port: int, server: Process, seconds: float = 30) -> None:
    """Wait until a server listens, without a connection, which it would take for a client's.

    Raises:
        RunError: it has ended, or did not in time.
    """
    ends = time.monotonic() + seconds
    while f":{port:04X} 00000000:0000 0A" not in Path("/proc/net/tcp").read_text():
        if not server.alive or time.monotonic() > ends:
            raise RunError(f"{server.name} does not listen:\n{server.tail()}")
        time.sleep(0.1)


def write_flower_app(folder: Path) -> None:
    """Write peers_flower.py as an app that Flower takes."""
    folder.mkdir(parents=True)
    (folder / "peers_flower.py").write_text((HERE / "peers_flower.py").read_text())
    (folder / "pyproject.toml").write_text(
        '[project]\nname = "peer"\nversion = "1.0.0"\ndependencies = []\n'
        '[tool.flwr.app]\npublisher = "fedda"\n'
        '[tool.flwr.app.components]\nserverapp = "peers_flower:server"\n'
        'clientapp = "peers_flower:client"\n'
        '[tool.flwr.app.config]\nclients = 0\nmb = 0.0\nrounds = 0\nstamps = ""\n'
    )


def wait_for_run(control: Any, run: int, server: Process, seconds: float = 1200) -> None:
    """Wait for the end of a run.

    Raises:
        RunError: it failed or took longer.
    """
    ends = time.monotonic() + seconds
    while not (state := control.run_state(run)).ended:
        if time.monotonic() > ends:
            raise RunError(f"Flower's run is {state} after {seconds:.0f} s:\n{server.tail()}")
        time.sleep(0.3)
    if state.ending != "completed":
        raise RunError(f"Flower's run ended as {state}:\n{server.tail()}")


def nvflare(
    folder: Path, token: str, clients: int, mb: float, rounds: int, place: Path, version: str
) -> Trial:
    """Run FLARE's FedAvg by its proof-of-concept commands, in an environment of its own."""
    python = install(place, f"nvflare=={version}", "numpy")
    trial = Trial(token, lambda _, line: "fed.app.server" in line or "runner_process" in line)
    env = {**os.environ, "NVFLARE_POC_WORKSPACE": str(folder / "poc")}
    command = [python, HERE / "peers_nvflare.py", folder, clients, mb, rounds]
    with trial.watched(), (folder / "nvflare.log").open("wb") as log:
        done = subprocess.run(list(map(str, command)), env=env, stdout=log, stderr=log, check=False)
    if done.returncode or not (folder / "stamps.json").exists():
        tail = "\n".join((folder / "nvflare.log").read_text().splitlines()[-15:])
        raise RunError(f"FLARE's run failed:\n{tail}")
    found = json.loads((folder / "stamps.json").read_text())
    trial.ordered, trial.stamps = found["ordered"], found["stamps"]
    return trial


def install(place: Path, *packages: str) -> Path:
    """Install packages into an environment of their own, unless it is there -> its Python."""
    python = place / "bin" / "python"
    if not python.exists():
        live.say(f"installing {' and '.join(packages)} into {place}")
        subprocess.run([sys.executable, "-m", "venv", place], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *packages], check=True)
    return python


# ---- the trials --------------------------------------------------------------------------------


def measure(peer: str, args: argparse.Namespace, clients: int, mb: float) -> dict[str, float]:
    """Run one trial, and end whatever it left running."""
    token = uuid.uuid4().hex
    os.environ[TOKEN] = token
    rounds = args.rounds if mb < LARGE else args.large_rounds
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        try:
            started = {"fedda": fedda, "flower": flower, "bare": bare}.get(peer)
            if started is not None:
                trial = started(folder, token, clients, mb, rounds)
            else:
                place = args.nvflare.absolute()
                trial = nvflare(folder, token, clients, mb, rounds, place, args.version)
        finally:
            for pid in with_token(token):
                with contextlib.suppress(OSError):
                    os.kill(pid, 9)
    found = trial.figures()
    live.say(
        f"{peer}, {clients} clients, {mb:g} MB: { {k: round(v, 2) for k, v in found.items()} }"
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    peers = ("fedda", "flower", "nvflare", "bare")
    parser.add_argument("--peer", action="append", choices=peers, help="again for more; all")
    parser.add_argument("--clients", type=int, nargs="+", default=[3, 8])
    parser.add_argument("--mb", type=float, nargs="+", default=[0.01, 45.0], help="of the model")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--large-rounds", type=int, default=5, help="from 10 MB on")
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--nvflare", type=Path, default=Path("peers-nvflare"), help="environment")
    parser.add_argument("--version", default="2.9.0", help="of nvflare")
    args = parser.parse_args()
    load = os.getloadavg()[0]
    tried: dict[tuple[str, int, float], list[dict[str, float]]] = {}
    for _ in range(args.repeats):
        for clients in args.clients:
            for mb in sorted(args.mb):
                for peer in args.peer or peers:
                    found = measure(peer, args, clients, mb)
                    tried.setdefault((peer, clients, mb), []).append(found)
    rows = {
        key: {name: statistics.median(each[name] for each in all_) for name in all_[0]}
        for key, all_ in tried.items()
    }
    smallest = min(args.mb)
    for (peer, clients, mb), row in rows.items():
        if mb >= LARGE > smallest:
            more = row["peak_mb"] - rows[peer, clients, smallest]["peak_mb"]
            row["server_models"] = more / (mb - smallest)
        if limit := rows.get(("bare", clients, mb)):
            row["over_bare"] = row["round_s"] / limit["round_s"]
    named = {f"{peer}, {k} clients, {mb:g} MB": row for (peer, k, mb), row in rows.items()}
    table = [
        [n, *(f"{row[f]:.3g}" if f in row else "" for f in FIGURES)] for n, row in named.items()
    ]
    print("\n".join(markdown(["", *FIGURES], table)))
    figures = {f: {n: round(row[f], 4) for n, row in named.items() if f in row} for f in FIGURES}
    print(json.dumps({**figures, "load_before": round(load, 2)}))


if __name__ == "__main__":
    main()
