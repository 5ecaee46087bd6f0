"""A tiny federation in this process: its data, a grid whose sites can be told to misbehave, runs.

make_domains   three sources and a target as .npz files
ScriptedGrid   server.simulation's grid, recording what crossed, with a script of what goes wrong
Bench          one strategy with its grid and roster, to drive a round by hand
run            a whole run, with the events it wrote
stop_after     what ends a run after a round
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict

from clients.app import make_app
from clients.site.memory import resident
from fedda import models, plugins, records, wire
from fedda.exchange import LocalHost
from fedda.settings import RunConfig
from fedda.wire import Arrays, Kind, Packed
from server import run as server_run
from server.attendance import Sites
from server.journal import Event, Journal, Listener
from server.simulation import LocalGrid
from strategies.base import FedDA, Setup
from strategies.sites.mail import Mail
from strategies.sites.replies import Reply
from strategies.sites.roster import Roster

Node = dict[str, Any]
Script = Callable[[Message, Message], Sequence[Message]]  # a request and its reply -> what arrives

EXAMPLES = {"anna": 40, "bert": 50, "carl": 60, "town": 48}  # the last is the target
SOURCES = ["anna", "bert", "carl"]
TESTED, SIDE, CLASSES = 24, 8, 4

FAST: dict[str, Any] = {
    "rounds": 2,
    "model.name": "mlp",
    "model.sizes": "16",
    "train.batch-size": 16,
    "run.expect": len(EXAMPLES),
    "wait.sites": 0.3,
    "wait.settle": 0.0,
    "wait.train": 5.0,
    "wait.evaluate": 5.0,
    "feddadil.encoder-share": 0.0,
    "feddadil.samples": 24,
    "feddadil.batch-size": 12,
}

# For methods that sum gradients in mid-round, so that a single step does it; and with all that may
# cross: the loss that moves both encoders, and a target that shares its own.
ONE_STEP = {"exchange.p": 1, "exchange.min-examples": 1, "exchange.expose-features": True}
SETTINGS: dict[str, dict[str, Any]] = {
    "dils": ONE_STEP
    | {"dils.collaborator": "anna", "dils.pretrain": 0, "dils.loss": "cada", "dils.share": True},
    "fdan": ONE_STEP | {"fdan.scale": 1.0},
    "fdann": ONE_STEP,
    "fwdgrl": ONE_STEP,
    "mdan": ONE_STEP,
}


def make_domains(root: Path) -> list[Node]:
    """Each class lights one quarter of the image; domains differ in contrast, background, noise."""
    nodes = []
    for place, (name, examples) in enumerate(EXAMPLES.items()):
        rng = np.random.default_rng(place)
        arrays = {}
        for part, n in (("train", examples), ("test", TESTED)):
            y = np.arange(n) % CLASSES
            x = rng.normal(20 + 10 * place, 12, (n, SIDE, SIDE))
            half = SIDE // 2
            for image, label in zip(x, y, strict=True):
                top, left = half * (label // 2), half * (label % 2)
                image[top : top + half, left : left + half] += 120 - 15 * place
            arrays |= {f"x_{part}": x.clip(0, 255).astype(np.uint8), f"y_{part}": y}
        role = "target" if name == "town" else "source"
        if role == "target":
            del arrays["y_train"]
        np.savez(root / f"{name}.npz", **arrays)
        data = str(root / f"{name}.npz")
        nodes.append({"role": role, "name": name, "data": data, "min-examples": 1})
    return nodes


@dataclass
class Crossing:
    """One message that crossed, in the words of the contract."""

    way: str
    role: str
    site: str
    kind: str
    arrays: dict[str, str] = field(default_factory=dict)
    numbers: set[str] = field(default_factory=set)
    error: int = 0
    hop: str = ""


class ScriptedGrid(LocalGrid):
    """A LocalGrid that remembers what crossed and whose sites can be made to fail.

    Args:
        nodes: node configurations.
        script: by site, what arrives instead of its replies to training requests; nothing: the
            site never replies.
    """

    def __init__(self, nodes: Sequence[Node], script: Mapping[str, Script] | None = None) -> None:
        super().__init__(make_app(nodes), [{"partition-id": i} for i in range(len(nodes))])
        self.nodes = {number: node for number, node in enumerate(nodes, start=1)}
        self.script = dict(script or {})
        self.offline: set[str] = set()
        self.crossed: list[Crossing] = []
        self.requests: list[Message] = []
        self.replies: list[Message] = []

    def id_of(self, name: str) -> int:
        return next(number for number, node in self.nodes.items() if node["name"] == name)

    def get_node_ids(self) -> Iterable[int]:
        return [i for i, node in self.nodes.items() if node["name"] not in self.offline]

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        for message in messages:
            self.requests.append(message)
            self._note("to", self.nodes[message.metadata.dst_node_id], message)
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        for request, reply in self.answers(message_ids):
            node = self.nodes[request.metadata.dst_node_id]
            script = self.script.get(node["name"])
            if request.metadata.message_type != "train":
                script = None
            for arrived in script(request, reply) if script else [reply]:
                self.replies.append(arrived)
                self._note("from", node, arrived)
                yield arrived

    def call(self, request: Message) -> Message:
        """What a site answers to a request, past the script and the record."""
        return self._call(request)

    def _note(self, way: str, node: Node, message: Message) -> None:
        kind = message.metadata.message_type.split(".")[0]
        crossing = Crossing(way, node["role"], node["name"], kind)
        self.crossed.append(crossing)
        if message.has_error():
            crossing.error = message.error.code
            return
        for name, record in message.content.items():
            if name == "manifests":
                kinds = {n: str(wire.Manifest.parse(str(t)).kind) for n, t in record.items()}
                crossing.arrays |= kinds
            elif name in ("step", "metrics"):
                crossing.numbers |= set(record) - {"phase", "hop", "part"}
                crossing.hop = str(record.get("hop", ""))
            elif name not in ("arrays", "task"):
                crossing.numbers |= {f"{name}: {key}" for key in record}


# ---- scripts -----------------------------------------------------------------------------------


def never(request: Message, reply: Message) -> list[Message]:
    return []


def changed(
    request: Message,
    reply: Message,
    *,
    arrays: Mapping[str, Packed] | None = None,
    numbers: Mapping[str, Any] | None = None,
    without: Sequence[str] = (),
) -> Message:
    """A reply with more, other or fewer arrays and numbers than the site gave."""
    packed, tables = records.read(reply.content)
    packed = {n: p for n, p in {**packed, **(arrays or {})}.items() if n not in without}
    table = {n: v for n, v in {**tables["metrics"], **(numbers or {})}.items() if n not in without}
    return Message(records.write(packed, metrics=table), reply_to=request)


def reshaped(change: Callable[[Arrays], Arrays]) -> Script:
    """A site whose model passes through `change` before it is sent."""

    def script(request: Message, reply: Message) -> list[Message]:
        model = records.read(reply.content)[0]["model"].unpack()
        sent = wire.pack(change({n: a.copy() for n, a in model.items()}), Kind.MODEL)
        return [changed(request, reply, arrays={"model": sent})]

    return script


def raw(request: Message, **content: ConfigRecord | MetricRecord) -> Message:
    """A reply that does not even have the form of ours."""
    return Message(RecordDict(dict(content)), reply_to=request)


# ---- driving -----------------------------------------------------------------------------------


class Bench:
    """One strategy over a grid, as server.training would have made it."""

    def __init__(
        self,
        nodes: Sequence[Node],
        method: str,
        script: Mapping[str, Script] | None = None,
        /,
        **s: Any,
    ) -> None:
        self.config = RunConfig.parse(settings_of(method) | dotted(s))
        self.grid = ScriptedGrid(nodes, script)
        self.roster: Roster = Sites(self.grid, self.config, Journal()).gather()
        who, sites = self.roster, len(self.roster.nodes)
        self.task = self.config.task(method, 0, who.shape, who.classes, sites)
        extension = models.Extension.of(self.task.about, self.task.options)
        network = models.build(self.task.model, self.task.dims, self.task.classes, 0, extension)
        self.model: Arrays = {n: a.copy() for n, a in models.to_arrays(network).items()}
        self.notices: list[tuple[str, str, str]] = []
        setup = Setup(
            self.task,
            wire.pack(self.model, Kind.MODEL).manifest,
            wait=self.config.wait,
            guard=self.config.guard,
            summing=self.config.summing,
            notice=lambda *notice: self.notices.append(notice),
            exchange=LocalHost(),
        )
        self.strategy: FedDA = plugins.strategy(method)(setup, self.roster)
        self.opened: list[Message] = []

    def begin(self, server_round: int = 1) -> list[Message]:
        """The requests of a round."""
        sent = self.strategy.packed(self.model)
        requests = self.strategy.configure_train(server_round, sent, ConfigRecord(), self.grid)
        self.opened = list(requests)
        return self.opened

    def call(self, request: Message) -> Message:
        """What a site answers to a request; sites that sum gradients need the others to answer."""
        if "exchange" not in request.content:
            return self.grid.call(request)
        answers = self.grid.answers(self.grid.push_messages(self.opened))
        return next(reply for asked, reply in list(answers) if asked is request)

    def round(self, server_round: int = 1) -> tuple[Arrays, dict[str, Any]]:
        """One round -> the next model, its numbers."""
        replies = Mail(self.grid).deliver(self.begin(server_round), self.config.wait.train)
        arrays, numbers = self.strategy.aggregate_train(server_round, replies)
        assert arrays is not None and numbers is not None
        self.model = self.unpack(arrays)
        return self.model, dict(numbers)

    def unpack(self, arrays: Any) -> Arrays:
        text = self.strategy.setup.model.text
        return records.from_arrays(arrays, {"model": text})["model"].unpack()

    def accept(self, *replies: Message) -> list[Reply]:
        return list(self.strategy.accept(iter(replies)))


def sent_by(bench: Bench, name: str) -> Arrays:
    """The model that a site trained, from its last reply that holds one."""
    replies = [
        reply
        for reply in bench.grid.replies
        if reply.metadata.src_node_id == bench.grid.id_of(name) and "arrays" in reply.content
    ]
    return records.read(replies[-1].content)[0]["model"].unpack()


def assert_close(found: Arrays, wanted: Mapping[str, Any], within: float) -> None:
    """Models are equal but for rounding; counters are not looked at."""
    assert list(found) == list(wanted)
    for name, array in found.items():
        if array.dtype.kind == "f":
            np.testing.assert_allclose(
                array.ravel(), np.ravel(wanted[name]), rtol=within, atol=within, err_msg=name
            )


def settings_of(method: str) -> dict[str, Any]:
    """What makes a method's run over these sites short."""
    return FAST | {"method": method} | SETTINGS.get(method, {})


def dotted(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Keyword arguments as settings: kd3a__batchnorm -> kd3a.batchnorm."""
    return {k.replace("__", ".").replace("_", "-"): v for k, v in settings.items()}


def run(
    nodes: Sequence[Node],
    settings: Mapping[str, Any],
    *listeners: Listener,
    script: Mapping[str, Script] | None = None,
    grid: ScriptedGrid | None = None,
) -> tuple[dict[str, Any], list[Event]]:
    """A whole run with fresh sites -> results.json's content, and the events in order."""
    resident.cache_clear()
    events: list[Event] = []
    journal = Journal(None, events.append, *listeners)
    method = str(settings.get("method", "kd3a"))
    config = RunConfig.parse(FAST | SETTINGS.get(method, {}) | dict(settings))
    return server_run.execute(config, grid or ScriptedGrid(nodes, script), journal), events


def stop_after(server_round: int) -> Listener:
    """What ends a run as Ctrl-C would, once a round is done."""

    def listen(event: Event) -> None:
        if event["event"] == "round" and event["round"] == server_round:
            raise KeyboardInterrupt

    return listen
