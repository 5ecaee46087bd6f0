"""One SuperLink behind two listeners: sites reach the Fleet API, local operators reach everything.

The same application, and so the same state, is served twice in one process: on a public address
behind `filter.FleetOnly`, `site_calls.SiteCalls` and the limits of `listener`; and on loopback
without them, but not to web pages, nor to other accounts than this one. Only this package uses
anything of flwr's SuperLink beyond its documented command line.
"""

import asyncio
import contextlib
import errno
import logging
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

from fedda import flower
from fedda.errors import RunError, reason
from fedda.ops import spawn, system
from fedda.ops.address import Address
from fedda.ops.allocator import one_pool
from fedda.ops.flwr_home import OFFLINE

from ..watching.console import Told
from ..watching.live import Live
from ..watching.status import ServerStatus
from .authentication import Guard
from .fab_unpack import unpacked_first
from .filter import FleetOnly, LocalOnly, Traffic, shortened
from .listener import Listener, ListenerLimits, Loop, Protocol
from .port_owner import Local
from .rejections import Nodes, Rejections
from .relay import Relay
from .site_calls import SiteCalls
from .waiting import Waiting

TRAFFIC_EVERY_S = 2.0
TRIES = 5  # how often the SuperExec is started again
SERVERAPP = "flwr-serverapp"  # flwr's program that runs a ServerApp
TASK_POLL = "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"  # seconds until a run begins, at most; default 1

log = logging.getLogger("fedda.superlink")

S = TypeVar("S", bound=socket.socket)


class Tls(NamedTuple):
    """The authority's certificate, the server's own, and its private key."""

    ca: Path
    certificate: Path
    key: Path


@dataclass(frozen=True)
class GatewaySettings:
    """Where the server listens, and which files it keeps.

    Without `tls` it speaks plain HTTP and takes any site: for development only. `registered` is the
    file that `control.Folder` writes: with it, a run takes a site only by its registered name.
    `reserved` says that the ports are held by another process of this user (`spawn.Reserved`). With
    `any_app`, runs of other apps than this one are taken, for tests.
    """

    host: str = spawn.LOOPBACK
    port: int = 8443
    admin_port: int = 8000
    tls: Tls | None = None
    database: Path | None = None
    traffic: Path | None = None
    registered: Path | None = None
    limits: ListenerLimits = field(default_factory=ListenerLimits)
    reserved: bool = False
    any_app: bool = False


TODO = {  # what helps if a port cannot be had
    errno.EADDRINUSE: "stop the program that uses it, or choose another with --port or "
    "--admin-port",
    errno.EACCES: "this account may not use it; choose one from 1024 with --port or --admin-port",
}


def run(
    settings: GatewaySettings,
    every: Callable[[], None],
    ready: Callable[[], None],
    say: Callable[[str], None],
) -> None:
    """Serve until SIGINT or SIGTERM, then stop everything that was started for it.

    Args:
        settings: addresses, certificates, files.
        every: called from a thread about every two seconds once the admin listener is up; the
            first call is over before the public listener takes its first request.
        ready: called when both listeners are up.
        say: writes a line: which sites come and go, and what happens to runs.

    Raises:
        RunError: a port is taken, or flwr's own programs are missing.
    """
    one_pool()
    spawn.adopt_orphans()
    os.environ.update({**OFFLINE, spawn.SERVER_PID: str(os.getpid())})
    os.environ.setdefault(TASK_POLL, "0.1")
    if settings.registered is not None:
        os.environ[spawn.REGISTERED] = str(settings.registered)
    most = system.connections(settings.limits.in_all)
    public = _listen(settings.host, settings.port, Listener, settings.reserved)
    public.limits = settings.limits.within(most)
    admin = _listen(spawn.LOOPBACK, settings.admin_port, Local, settings.reserved)
    with contextlib.ExitStack() as stack:
        for each in (public, admin):
            stack.callback(each.close)
        _find_programs()
        app = superlink(settings)
        traffic = Traffic()
        relay = stack.enter_context(Relay(traffic))
        runner = stack.enter_context(asyncio.Runner(loop_factory=Loop))
        runner.get_loop().takes = relay.takes  # type: ignore[attr-defined]
        runner.run(_serve(settings, app, public, admin, relay, traffic, every, ready, say))


def superlink(settings: GatewaySettings) -> Any:
    """Build flwr's SuperLink application as its own command would, from `Settings`."""
    tls = settings.tls
    contents = None
    if tls is not None:
        contents = (tls.ca.read_bytes(), tls.certificate.read_bytes(), tls.key.read_bytes())
    config = flower.SuperLinkLifespanConfig(
        control_address=f"{spawn.LOOPBACK}:{settings.admin_port}",
        health_server_address=None,
        host=spawn.LOOPBACK,
        port=settings.admin_port,
        insecure=tls is None,
        certificates=contents,
        superexec_auth_secret=None,
        authn_plugin=flower.load_control_authn_plugin(),
        event_log_plugin=None,
        fleet_event_log_plugin=None,
        enable_event_log=False,
        artifact_provider=None,
        enable_supernode_auth=tls is not None,
        fleet_api_type="grpc-rere",
        fleet_api_address=None,
        simulation=False,
        ssl_ca_certfile=None if tls is None else str(tls.ca),
        ssl_certfile=None if tls is None else str(tls.certificate),
        ssl_keyfile=None if tls is None else str(tls.key),
        database=str(settings.database or ":flwr-in-memory:"),
        isolation="subprocess",
        runtime_dependency_install=False,
    )
    return flower.create_app(config, flower.SuperLinkLifespan)


async def _serve(
    settings: GatewaySettings,
    app: Any,
    listener: Listener,
    operators: Local,
    relay: Relay,
    traffic: Traffic,
    every: Callable[[], None],
    ready: Callable[[], None],
    say: Callable[[str], None],
) -> None:
    import uvicorn

    class Server(uvicorn.Server):
        """uvicorn's server without its signal handlers: two of them in one process would clash."""

        @contextlib.contextmanager
        def capture_signals(self) -> Iterator[None]:
            yield

    tls = settings.tls

    def server(application: Any, lifespan: Literal["on", "off"] = "off", **more: Any) -> Server:
        return Server(
            uvicorn.Config(
                application,
                lifespan=lifespan,
                ws="none",
                log_level="warning",
                access_log=False,
                timeout_graceful_shutdown=2,
                timeout_keep_alive=60,
                server_header=False,
                proxy_headers=False,  # else a caller could say that it is another
                **more,
            )
        )

    encrypted: dict[str, Any] = {}
    if tls is not None:
        encrypted = {"ssl_certfile": tls.certificate, "ssl_keyfile": str(tls.key)}

    state = app.state.linkstate_factory.state()
    unpacked_first(state, settings.any_app)
    nodes = Nodes(state)
    caller = None if tls is None else Guard(state.get_node_id_by_public_key, nodes.revoked).caller
    turned = Rejections(nodes.name)
    waiting = Waiting(state)
    short = shortened(app, guarded=caller is not None)
    sites = SiteCalls(short, traffic, caller, waiting, turned)
    watched = ServerStatus(app.state.linkstate_factory.state, relay.working, settings.registered)
    told = Told(watched.newest, say, lambda: [*turned.news(), *listener.news()])
    live = Live(shortened(app), watched, watched.newest)
    local = LocalOnly(live, settings.admin_port, operators.strangers)
    admin = server(local, "on", **encrypted)
    public = server(FleetOnly(sites, traffic), http=Protocol, **encrypted)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for each in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(each, stop.set)

    tasks = [asyncio.create_task(admin.serve([operators]))]
    children: list[int | None] = []
    try:
        await _until(lambda: admin.started or tasks[0].done())
        if not admin.started:
            raise RunError("the SuperLink did not start; its own log says why")
        children.append(_superexec(app))
        await asyncio.to_thread(every)
        tasks.append(asyncio.create_task(public.serve([listener])))
        await _until(lambda: public.started or tasks[-1].done())
        ready()

        def tend() -> None:
            if len(children) > TRIES:
                raise RunError("Flower's SuperExec ends each time: superlink.log says why")
            if _begun_again(app):
                children.append(_superexec(app))
                say("Flower's SuperExec, which begins runs, had ended; it was started again")
            every()
            try:
                told.look()
            except Exception:  # it may not end a server that sites depend on
                log.exception("the console cannot be told; trying again soon")

        await _tend(stop, tasks, tend, settings.traffic, traffic)
        if not stop.is_set():
            why = [task.exception() for task in tasks if task.done()]
            raise RunError(f"the server takes no calls any more ({why[0]}): start it again")
    finally:
        live.close()
        waiting.close()
        public.should_exit = admin.should_exit = True
        await asyncio.gather(*tasks, return_exceptions=True)
        for group in children:
            await asyncio.to_thread(_end_group, group)
        if settings.traffic is not None:
            traffic.write(settings.traffic)


async def _tend(
    stop: asyncio.Event,
    tasks: list[asyncio.Task[None]],
    every: Callable[[], None],
    file: Path | None,
    traffic: Traffic,
) -> None:
    """Write the traffic and call `every` again and again, until `stop` or the end of a listener."""
    while not stop.is_set() and not any(task.done() for task in tasks):
        if file is not None:
            traffic.write(file)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), TRAFFIC_EVERY_S)
        if not stop.is_set():
            await asyncio.to_thread(every)


async def _until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.02)


def _superexec(app: Any) -> int | None:
    """The process that starts ServerApps; it leads a process group of its own."""
    process = app.state.superlink_lifespan.superexec_process
    return None if process is None else process.pid


def _begun_again(app: Any) -> bool:
    """Start the SuperExec again if it has ended, as no run would begin -> whether it had."""
    lifespan = app.state.superlink_lifespan
    process = lifespan.superexec_process
    if process is None or process.poll() is None:
        return False
    lifespan.superexec_process = subprocess.Popen(process.args, start_new_session=True)
    return True


def _end_group(group: int | None, patience: float = 3.0) -> None:
    """End the SuperExec and its ServerApps, which flwr would leave to end by themselves."""
    if group is None:
        return
    for number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(group, number)
            ends = time.monotonic() + patience
            while time.monotonic() < ends:
                with contextlib.suppress(ChildProcessError):
                    while os.waitpid(-group, os.WNOHANG)[0]:
                        pass
                os.killpg(group, 0)
                time.sleep(0.05)
        except ProcessLookupError:
            return


def _listen(host: str, port: int, kind: type[S] = socket.socket, reserved: bool = False) -> S:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio switches Nagle's algorithm off only where the protocol is named; with it on, most
    # answers wait 40 ms for the other side's acknowledgement.
    listener = kind(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if reserved:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        listener.bind((host, port))
        listener.listen()  # two sockets that nobody listens on can have one port
    except OSError as error:
        listener.close()
        todo = TODO.get(error.errno or 0, "give --host an address of this machine; 0.0.0.0 is all")
        raise RunError(
            f"cannot listen on {Address(host, port)} ({reason(error)}): {todo}"
        ) from error
    listener.set_inheritable(False)
    return listener


def _find_programs() -> None:
    """Put this Python's scripts on PATH, as flwr starts its helpers by their bare names."""
    os.environ["PATH"] = spawn.scripts_first(os.environ.get("PATH"))
    for program in ("flower-superexec", SERVERAPP):
        if shutil.which(program) is None:
            raise RunError(
                f"flwr's program {program} is nowhere on PATH: install flwr into the "
                "environment that runs fedda"
            )
