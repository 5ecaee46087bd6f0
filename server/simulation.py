"""Run over folders of this machine without a server: in this process, or on Ray."""

import os
import signal
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count, product
from pathlib import Path
from types import FrameType
from typing import Any, Literal
from uuid import uuid4

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp

from fedda import models, plugins
from fedda.data import Description, Reading, describe, domains
from fedda.data.form import AS_IT_IS
from fedda.errors import ConfigError, QuorumError, RunError
from fedda.exchange import Turns
from fedda.exchange.in_process import give_up
from fedda.flower import TaskIdentity
from fedda.halves import load
from fedda.ops import keys
from fedda.ops.engines import check_engine
from fedda.ops.spawn import LANES
from fedda.settings import RunConfig
from fedda.wire import Role

from . import looking, run, sequence
from .journal import Journal
from .rehearsal import rehearse as rehearse_exchange
from .start import check_start, start_of
from .strategy_modules import roster

Engine = Literal["process", "ray"]
FEATURES = "features"  # in the folder of all runs: what frozen networks give for images
# Whoever simulates has all sites' data, so nobody need be kept from computing one site's part.
ANY_GROUP = '{"secure": {"pairs": true, "changes": 1000000000}}'  # a site's policy
MAY_LOOK = '{"leaving": {"look": true}}'
SITES = "sites"  # in the run's folder: the state folders of the simulated sites


class LocalGrid(Grid):
    """A Grid that answers each message by calling a ClientApp in this process.

    A site works only when its reply is fetched, so that one reply at a time is in memory. Sites
    that sum gradients in mid-round each have a thread, and the threads take turns.
    """

    in_process = True

    def __init__(self, app: ClientApp, nodes: Sequence[Mapping[str, Any]]) -> None:
        self.app = app
        self.contexts = {
            number: Context(1, number, dict(node), RecordDict(), {})
            for number, node in zip(count(1), nodes, strict=False)
        }
        self._open: dict[str, Message] = {}
        _identify()

    def set_run(self, run: Any) -> None:
        """Nothing to set: there is one run."""

    @property
    def run(self) -> Any:
        raise NotImplementedError("a local grid has no Flower run")

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        return list(self.contexts)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        ids = []
        for message in messages:
            ids.append(str(uuid4()))
            message.metadata.__dict__["_message_id"] = ids[-1]
            self._open[ids[-1]] = message
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        for _, reply in self.answers(message_ids):
            yield reply
            del reply  # so that it is freed before the next one is made

    def answers(self, message_ids: Iterable[str]) -> Iterator[tuple[Message, Message]]:
        """Yield each request with its reply."""
        for message_id in list(message_ids):
            message = self._open.pop(message_id, None)
            if message is None:
                continue
            exchange = "exchange" in message.content
            begun = [message, *self._invited()] if exchange else [message]
            # A site's time begins with its turn: those before it do not use up its deadline.
            for each in begun:
                each.metadata.__dict__["_created_at"] = time.time()
            if exchange:
                yield from self._together(begun)
            else:
                yield message, self._call(message)

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return list(self.pull_messages(self.push_messages(messages)))

    def _invited(self) -> Iterator[Message]:
        """The other open requests that carry an invitation to the exchange."""
        for message_id, message in list(self._open.items()):
            if "exchange" in message.content:
                yield self._open.pop(message_id)

    def _together(self, messages: list[Message]) -> Iterator[tuple[Message, Message]]:
        def call(message: Message) -> Message:
            reply = self._call(message)
            if reply.has_error():
                give_up(str(message.content["exchange"]["ticket"]))
            return reply

        calls = {str(i): partial(call, message) for i, message in enumerate(messages)}
        done = Turns(list(calls)).together(calls)
        for message, reply in zip(messages, done.values(), strict=True):
            yield message, reply.result()

    def _call(self, message: Message) -> Message:
        context = self.contexts[message.metadata.dst_node_id]
        return self.app(message=message, context=context)


def simulate(
    config: RunConfig, sites: Sequence[Mapping[str, Any]], journal: Journal, engine: Engine
) -> dict[str, Any]:
    """Run over sites of this machine -> the content of results.json, the same on either engine.

    Args:
        config: the run.
        sites: node configurations: role, name, data, and any other setting of a client. A site
            without a state-dir gets one in the run's folder.
        journal: receives every event of the run.
        engine: `process` calls the clients one after the other, `ray` uses Flower's simulation.

    Raises:
        ConfigError: the run is to wait for sites that join later, or the engine is not installed.
    """
    check_closed(config)
    check_engine(engine)
    journal.write("started", engine=engine)
    place = Path(config.run.dir).absolute() / config.run.name / SITES
    # One person has the data of all simulated sites, so a site needs no minimum and no secret of
    # its own.
    mine = {"state-dir": str(place), "min-examples": 1, "reproducible": True}
    mine |= {"features-dir": str(place.parent.parent / FEATURES), "weights": config.model.weights}
    if engine == "ray":  # which serves each request of a site by any of its processes
        mine["forgetful"] = True
    sites = [mine | dict(site) for site in sites]
    if config.hides:
        sites = _with_keys(sites, place.parent)
    everyone = config.run.model_copy(update={"expect": len(sites)})
    config = config.model_copy(update={"run": everyone})
    make_app = load("clients", "app").make_app
    if engine == "process":
        nodes = [{"partition-id": i} for i in range(len(sites))]
        failures: dict[tuple[str, str], tuple[BaseException, BaseException, str]] = {}
        try:
            return run.execute(config, LocalGrid(make_app(sites, failures), nodes), journal)
        except QuorumError as error:
            for (site, _), (first, _, told) in failures.items():
                if told in str(error):
                    raise QuorumError(f"{error} {site} {plugins.failed(first)}") from first
            raise
    with tempfile.TemporaryDirectory(prefix="fedda-") as folder:  # where sites sum gradients
        os.environ[LANES] = folder
        sites = [site | {"server": f"unix:{folder}"} for site in sites]
        try:
            return _on_ray(config, make_app(sites), len(sites), journal)
        finally:
            del os.environ[LANES]


def look(config: RunConfig, sites: Sequence[Mapping[str, Any]], journal: Journal) -> dict[str, Any]:
    """Look at sites of this machine (`fedda look`) -> the content of look.json."""
    sites = [{"policy": MAY_LOOK, "reproducible": True, **site} for site in sites]
    at_once = {"expect": len(sites)}
    config = config.model_copy(update={"run": config.run.model_copy(update=at_once)})
    grid = LocalGrid(
        load("clients", "app").make_app(sites), [{"partition-id": i} for i in range(len(sites))]
    )
    names = {number: str(site["name"]) for number, site in enumerate(sites, start=1)}
    return looking.execute(config, grid, journal, names)


def _with_keys(sites: Sequence[Mapping[str, Any]], folder: Path) -> list[dict[str, Any]]:
    """Give simulated sites the keys that hide models; `fedda keys` makes those of others."""
    for site in sites:
        if str(site["name"]) not in keys.names(folder):
            keys.add(folder, str(site["name"]))
    made = {"peers": str(folder / "peers"), "policy": ANY_GROUP}
    return [{"key": str(folder / "nodes" / str(s["name"])), **made, **s} for s in sites]


def check_closed(config: RunConfig) -> None:
    """Refuse a run that waits for sites that join later.

    Raises:
        ConfigError: it would wait for ever.
    """
    if config.open:
        raise ConfigError(
            f"{config.method}.open is true, but nobody can join a simulation after its start; set "
            "it to false, or start a server and clients (see fedda superlink --help)."
        )


def rehearse(
    config: RunConfig,
    sites: Sequence[Mapping[str, Any]],
    describe: Callable[[str, Role, Reading], Description] = describe,
) -> tuple[str, ...]:
    """Read the sites' data, form their roster, rehearse an exchange of gradients -> the classes.

    This finds errors in data and settings before anything runs.

    Args:
        config: the run.
        sites: node configurations, as for `simulate`.
        describe: reads a site's folder; a caller that rehearses often can pass one with a cache.

    Raises:
        ConfigError: a method's code lacks something, or cannot exchange gradients with these sites
            and settings, the model that the run starts from does not fit, or the run is to wait for
            sites that join later.
        DataError: a folder cannot be read.
        ModelError: the model that the run starts from cannot be read.
        RosterError: the sites' offers do not fit together.
    """
    check_closed(config)
    start = start_of(config)
    offer = load("clients", "site.memory").offer
    found = {str(s["name"]): describe(s["data"], s["role"], Reading.said(s)) for s in sites}
    offers = (offer(s["role"], s["name"], found[str(s["name"])]) for s in sites)
    nodes = [roster.Node.read(i, o) for i, o in enumerate(offers, 1)]
    wanted = models.inputs(config.input, config.model)
    classes = run.classes_without_sources(config, start)
    members = roster.form(nodes, wanted, classes, config.sources)
    check_start(config, start, members)
    _identify()
    targets = sequence.order(config, members)
    for node in members.nodes:
        if node.role == "source" or (node.name in targets and config.run.evaluate):
            about = config.input.window, config.input.missing, members.columns
            found[node.name].check_fit(members.classes, *about)
        found[node.name].check_size(2)  # BatchNorm cannot learn from one image
    for method in config.trainings:
        plugins.check(method)
    for method, target in product(config.trainings, targets):
        aim = sequence.facing(config, method, members, target, targets)
        rehearse_exchange(config, method, aim)
    return members.classes


def _on_ray(config: RunConfig, client: ClientApp, nodes: int, journal: Journal) -> dict[str, Any]:
    from flwr.simulation import run_simulation  # imports Ray, which takes seconds

    results: dict[str, Any] = {}
    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        while len(list(grid.get_node_ids())) < nodes:  # the engine registers them after the start
            time.sleep(0.1)
        fetch = grid.pull_messages

        def fetch_unless_stopped(ids: Iterable[str]) -> Iterable[Message]:
            if stopped.is_set():
                raise KeyboardInterrupt
            return fetch(ids)

        grid.pull_messages = fetch_unless_stopped  # pyright: ignore
        with suppress(KeyboardInterrupt):  # the journal has it; the main thread raises it again
            results.update(run.execute(config, grid, journal, _slots))

    resources: Any = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    with _noting_ctrl_c() as stopped:
        run_simulation(server, client, num_supernodes=nodes, backend_config=resources)
    if stopped.is_set() and not results:
        raise KeyboardInterrupt
    if not results:
        raise RunError("The simulation ended without results; its own messages above say why.")
    return results


@contextmanager
def _noting_ctrl_c() -> Iterator[threading.Event]:
    """Set an event at the first Ctrl-C or SIGTERM; a second one interrupts at once.

    The run's thread ends itself at the event, and Flower then ends Ray after its last reply. Were
    Ray ended first, threads that wait for a site's reply could wait for ever. A signal that is
    ignored, as Ctrl-C is under nohup, stays ignored.
    """
    stopped = threading.Event()
    before = {each: signal.getsignal(each) for each in (signal.SIGINT, signal.SIGTERM)}
    handlers = {each: handler for each, handler in before.items() if callable(handler)}
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return

    def note(number: int, frame: FrameType | None) -> None:
        if stopped.is_set():
            handlers[signal.Signals(number)](number, frame)
        stopped.set()

    for each in handlers:
        signal.signal(each, note)
    try:
        yield stopped
    finally:
        for each, handler in handlers.items():
            signal.signal(each, handler)


def _identify() -> None:
    """Set the task ids that Flower writes into messages; only a Flower process has real ones."""
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1


@contextmanager
def identity() -> Iterator[None]:
    """Put back, after the `with` block, the task ids that Flower had in this process before."""
    names = ("_task_id", "_run_id", "_node_id")  # the public ones raise an error while unset
    before = {name: getattr(TaskIdentity, name) for name in names}
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(TaskIdentity, name, value)


def _slots() -> int:
    """How many sites Ray lets work at the same time: one per CPU."""
    import ray

    return sum(int(node["Resources"].get("CPU", 0)) for node in ray.nodes())


def folders(
    root: Path,
    target: str,
    poison: Mapping[str, float],
    threads: int = 1,
    reading: Reading = AS_IT_IS,
) -> list[dict[str, Any]]:
    """Make one site of each folder (or .npz file) of `root` -> node configurations, by name.

    Args:
        root: the folder that holds them.
        target: name of the site that joins as target, or several names separated by commas.
        poison: percent of labels to flip, by source.
        threads: number of CPU threads of each site; with the same number both engines give
            bit-identical results.
        reading: names of the tables' columns.

    Raises:
        RunError: `root` or a target does not exist, or a poisoned site is not a source.
    """
    found = domains(root, reading, {target, *target.split(",")})
    targets = {target} if target in found else {*target.split(",")}
    if missing := sorted(targets - set(found)):
        names = ", ".join(found) or "nothing"
        lacks = f"{root} has no domain '{missing[0]}', it"
        raise RunError(
            f"{lacks if missing[0] else f'no target is named, and {root}'} has {names}; choose one "
            "as --target, or several with commas."
        )
    odd = sorted(set(poison) - (set(found) - targets))
    if odd:
        raise RunError(f"'{odd[0]}' is not a source in {root}, so it cannot be poisoned.")
    return [
        {
            "role": "target" if name in targets else "source",
            "name": name,
            "data": str(path.resolve()),
            "poison": float(poison.get(name, 0)),
            "threads": threads,
        }
        for name, path in found.items()
    ]
