"""Starting and stopping a whole federation as plain processes on this machine.

For the demo and the tests: one server and one client per site, each in its own process, all on
127.0.0.1. They all end with the `with` block, also if this process is killed.
"""

import contextlib
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from fedda.errors import RunError
from fedda.halves import IN_WHEEL, ROOT, load
from fedda.ops import certificate, keys
from fedda.ops.flwr_home import OFFLINE
from fedda.ops.spawn import LOOPBACK, Process, Reserved, scripts_first

PROGRAM = (sys.executable, "-m", "fedda")


class Deployment:
    """A server and one client per site; they run during a `with` block."""

    def __init__(
        self,
        directory: Path,
        sites: Mapping[str, tuple[str, Path]],
        *,
        insecure: bool = False,
        threads: int = 1,
        database: Path | None = None,
        server_options: Sequence[str] = (),
        client_options: Mapping[str, Sequence[str]] | None = None,
        env: Mapping[str, str] | None = None,
        patience: float = 90.0,
    ) -> None:
        """Describe the federation; entering the block starts it.

        Args:
            directory: folder for keys, logs and state.
            sites: role and data of each site, by its name.
            insecure: do without TLS and keys.
            threads: of torch, per site.
            database: file of the server's state, if it is to survive a restart.
            server_options: further options of `fedda superlink`.
            client_options: further options of `fedda-client`, by site.
            env: further environment variables of every process.
            patience: seconds to wait until the server is ready, and until all sites are online.
        """
        self.directory = Path(directory).absolute()
        self.home = self.directory / "server"
        self.logs = self.directory / "logs"
        self.sites = dict(sites)
        self.insecure = insecure
        self.threads = threads
        self.database = database
        self.server_options = server_options
        self.client_options = dict(client_options or {})
        self.patience = patience
        self._reserved = Reserved(), Reserved()
        self.port, self.admin_port = (each.port for each in self._reserved)
        self._open = contextlib.ExitStack()
        self.processes: dict[str, Process] = {}
        places = [] if IN_WHEEL else [str(ROOT)]  # in the wheel all is where Python looks anyway
        self.env = {
            **os.environ,
            **OFFLINE,
            "PATH": scripts_first(os.environ.get("PATH")),
            "PYTHONPATH": os.pathsep.join([*places, *filter(None, [os.environ.get("PYTHONPATH")])]),
            "PYTHONUNBUFFERED": "1",
            "FLWR_HOME": str(self.home / "flwr"),
            **(env or {}),
        }

    @property
    def ca(self) -> Path | None:
        return None if self.insecure else self.home / "ca.crt"

    @property
    def traffic(self) -> Path:
        """The file in which the server counts requests and bytes per route."""
        return self.directory / "traffic.json"

    def __enter__(self) -> Self:
        try:
            self._keys()
            self.start_server()
            for name in self.sites:
                self.start_site(name)
            self.wait_for_sites()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def start_server(self) -> Process:
        """Start the server, and wait until it is ready for requests."""
        options = ["--dir", self.home, "--host", LOOPBACK, "--port", self.port]
        options += ["--admin-port", self.admin_port, "--traffic", self.traffic]
        options += ["--reserved"]
        options += ["--insecure"] if self.insecure else []
        options += ["--database", self.database] if self.database else []
        options += self.server_options
        process = self._start("superlink", ["superlink", *options])
        process.wait_for("ready:", self.patience)
        return process

    def start_site(self, name: str) -> Process:
        """Start one site's client."""
        role, data = self.sites[name]
        options = ["--role", role, "--data", Path(data).absolute(), "--name", name]
        options += ["--superlink", f"{LOOPBACK}:{self.port}", "--threads", self.threads]
        options += ["--state-dir", self.directory / "state" / name, "--reproducible"]
        if self.insecure:
            options += ["--insecure"]
        else:
            options += ["--ca", self.home / "ca.crt", "--key", self.home / "nodes" / name]
            options += ["--peers", self.home / "peers"]
        options += self.client_options.get(name, [])
        return self._start(name, ["client", *options])

    def wait_for_sites(self) -> None:
        """Wait until the server reports every site as online."""
        deadline = time.monotonic() + self.patience
        needed = len(self.sites)
        with self.control() as control:
            while True:
                with contextlib.suppress(RunError):  # a server that all sites dial at once is slow
                    if sum(site.online for site in control.sites()) >= needed:
                        return
                for process in self.processes.values():
                    if not process.alive:
                        process.wait_for("\0", 0)  # raises, as the process has ended
                if time.monotonic() > deadline:
                    tails = "\n".join(f"{p.name}: {p.tail(3)}" for p in self.processes.values())
                    raise RunError(
                        f"not all {needed} sites joined within {self.patience:.0f} s; the ends of "
                        f"the logs in {self.logs}:\n{tails}"
                    )
                time.sleep(0.5)

    def control(self) -> Any:
        """An operator's connection to the server (`server.superlink.control.Control`)."""
        address = f"{LOOPBACK}:{self.admin_port}"
        return load("server", "superlink.control").Control(address, self.ca)

    def submit(self, app: Path, run_config: Mapping[str, Any] | None = None) -> int:
        """Start a run of a Flower app and return its id.

        Raises:
            RunError: the server refused it.
        """
        with self.control() as control:
            return control.start_run(app, run_config or {})

    def status(self, run_id: int) -> Any:
        """How far a run is (`server.superlink.control.RunState`)."""
        with self.control() as control:
            return control.run_state(run_id)

    def wait(self, run_id: int, seconds: float) -> Any:
        """Wait for the end of a run.

        Raises:
            RunError: no server answers; or the run did not end in time, with the server's last log.
        """
        deadline = time.monotonic() + seconds
        server = self.processes["superlink"]
        with self.control() as control:
            while True:
                state = control.run_state(run_id)
                if state.ended:
                    return state
                if time.monotonic() > deadline:
                    raise RunError(
                        f"run {run_id} is {state} after {seconds:.0f} s; Flower's log is "
                        f"{self.home / 'superlink.log'}, and the end of {server.log}:\n"
                        f"{server.tail()}"
                    )
                time.sleep(0.3)

    def stop(self) -> None:
        """End every process, the clients first, so that they can sign off at the server."""
        started = list(self.processes.values())
        for process in started[1:]:
            if process.alive:
                process.popen.terminate()
        for process in [*started[1:], *started[:1]]:
            process.stop()
        self._open.close()
        for port in self._reserved:
            port.close()

    def _keys(self) -> None:
        if self.insecure:
            return
        if not (self.home / "ca.crt").exists():
            certificate.init(self.home, [LOOPBACK])
        for name in self.sites:
            if name not in keys.names(self.home):
                keys.add(self.home, name)

    def _program(self, name: str) -> Sequence[Any]:
        """The program that a site, or the `superlink`, runs; its arguments follow."""
        return PROGRAM

    def _start(self, name: str, arguments: Sequence[Any]) -> Process:
        command = [*self._program(name), *arguments, "--parent-pid", os.getpid()]
        process = Process(name, list(map(str, command)), self.logs / f"{name}.log", self.env)
        self.processes[name] = process
        return process
