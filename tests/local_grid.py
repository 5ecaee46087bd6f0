"""A tiny federation in this process: its data, a grid that can make sites misbehave, and runs.

make_domains   three sources and a target as .npz files
ScriptedGrid   server.simulation's grid; it records all messages and can drop or change replies
Bench          one strategy with its grid and roster, to run single rounds by hand
run            a whole run -> its results and the events it wrote
stop_after     a listener that ends a run after a given round
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict

from clients import app
from clients.app import make_app
from clients.policy.rules import Policy
from clients.site.memory import resident
from fedda import models, plugins, records
from fedda.algorithms import kd3a
from fedda.exchange import LocalHost
from fedda.ops import keys
from fedda.records import arrays_of
from fedda.settings import RunConfig
from fedda.wire import packing
from fedda.wire.packing import Arrays, Kind, Packed
from server import run as server_run
from server.journal import Event, Journal, Listener
from server.presence import Sites
from server.simulation import LocalGrid
from server.start import task_for
from strategies.base import FedDA, Setup
from strategies.sites.mail import Mail
from strategies.sites.replies import Reply
from strategies.sites.roster import Roster

Node = dict[str, Any]
# From a request and the site's reply, the replies that arrive at the server.
Script = Callable[[Message, Message], Sequence[Message]]

EXAMPLES = {"anna": 40, "bert": 50, "carl": 60, "town": 48}  # the last is the target
SOURCES = ["anna", "bert", "carl"]
TESTED, SIDE, CLASSES = 24, 8, 4

# No more than one pass over a site's few examples in a round, and KD3A by the paper.
PLAIN: dict[str, Any] = {
    "model.hidden": "",
    "model.dropout": 0.0,
    "train.steps": 0,
    "train.carry-momentum": False,
    "train.weight-decay": 0.0,
    **{f"kd3a.{name}": value for name, value in kd3a.PRESETS["paper"].items()},
    "kd3a.focus-from": 0.01,
    "guard.max-update": 0.0,  # else a source of few examples is scaled down beside others
}
FAST: dict[str, Any] = {
    **PLAIN,
    "rounds": 2,
    "model.name": "mlp",
    "model.hidden": "16",
    "train.batch-size": 16,
    "train.lr": 0.05,
    "run.expect": len(EXAMPLES),
    "wait.sites": 0.3,
    "wait.settle": 0.0,
    "wait.train": 30.0,  # the first training of a process imports for seconds on a busy machine
    "wait.evaluate": 5.0,
    "feddadil.encoder-share": 0.0,
    "feddadil.samples": 24,
    "feddadil.batch-size": 12,
}

# For methods that sum gradients within a round: exchange after every step. DILS is set so that all
# that may cross does cross: its loss trains both encoders, and the target sends its model.
ONE_STEP = {"exchange.p": 1, "exchange.min-examples": 1, "exchange.expose-features": True}
SMALL_SUMS = ONE_STEP | {"exchange.min-examples": 16}  # over a batch, as most live tests need
# Centring, SHOT and its heirs begin with the phase in which the target adapts the run's own model.
SETTINGS: dict[str, dict[str, Any]] = {
    "centring": {"centring.plain-share": 0.0},
    "comda": {"comda.epochs": 0},
    "decision": {"decision.epochs": 0},
    "dils": ONE_STEP
    | {"dils.collaborator": "anna", "dils.pretrain": 0, "dils.loss": "cada", "dils.share": True},
    # Small networks; the attention has tests of its own, as it is a second request to the target.
    "fada": ONE_STEP | {"fada.weighting": "examples", "fada.layers.disentangler": "12,10"},
    "fdan": ONE_STEP | {"fdan.scale": 1.0},
    "fdann": ONE_STEP,
    "fruda": ONE_STEP | {"fruda.pretrain": 0, "fruda.epochs": 1, "fruda.measure.steps": 4},
    "fwdgrl": ONE_STEP,
    "mdan": ONE_STEP,
    "shot": {"shot.epochs": 0},
}


def make_domains(root: Path) -> list[Node]:
    """Make images whose class lights one quarter; domains differ in contrast, background, noise."""
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
        node = {"role": role, "name": name, "data": data, "reproducible": True}
        nodes.append(node | {"min-images": 2, "min-examples": 1})
    return nodes


@dataclass
class Crossing:
    """One message between server and site, described in the terms of the contract."""

    way: str
    role: str
    site: str
    kind: str
    arrays: dict[str, str] = field(default_factory=dict)
    numbers: set[str] = field(default_factory=set)
    error: int = 0
    hop: str = ""


class ScriptedGrid(LocalGrid):
    """A LocalGrid that records all messages and can make sites fail.

    Args:
        nodes: node configurations.
        script: by site name, a function that returns the replies which arrive in place of the
            site's reply to a training request; with an empty list the site never replies.
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
            node = self.nodes[message.metadata.dst_node_id]
            self._note("to", node, message)
            size = sum(len(array.data) for array in arrays_of(message.content))
            most = app.most_bytes(message, node)  # 0: the site will refuse the request
            assert size <= most or not most, f"{size} bytes, but {most} fit the run's model"
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
                if "step" in request.content:
                    self.crossed[-1].hop = str(request.content["step"]["hop"])
                yield arrived

    def call(self, request: Message) -> Message:
        """Return a site's answer to a request, without the script and without recording it."""
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
                kinds = {n: str(packing.Manifest.parse(str(t)).kind) for n, t in record.items()}
                crossing.arrays |= kinds
            elif name in ("step", "metrics"):
                crossing.numbers |= set(record) - {"phase", "hop", "part"}
                crossing.hop = str(record.get("hop", ""))
            elif name == "kept":  # models that come now, or that came with an earlier request
                crossing.arrays |= dict.fromkeys(record, "model")
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
    """Return the reply with arrays and numbers added, replaced or removed."""
    packed, tables = records.read(reply.content)
    packed = {n: p for n, p in {**packed, **(arrays or {})}.items() if n not in without}
    table = {n: v for n, v in {**tables["metrics"], **(numbers or {})}.items() if n not in without}
    return Message(records.write(packed, metrics=table), reply_to=request)


def reshaped(change: Callable[[Arrays], Arrays]) -> Script:
    """Return a script that applies `change` to the model that a site sends."""

    def script(request: Message, reply: Message) -> list[Message]:
        model = records.read(reply.content)[0]["model"].unpack()
        sent = packing.pack(change({n: a.copy() for n, a in model.items()}), Kind.MODEL)
        return [changed(request, reply, arrays={"model": sent})]

    return script


def times(values: np.ndarray, factor: float) -> np.ndarray:
    """Return values times a factor; counters stay."""
    return (values * factor).astype(values.dtype) if values.dtype.kind == "f" else values


def raw(request: Message, **content: ConfigRecord | MetricRecord) -> Message:
    """Return a reply that does not have the form of fedda's replies."""
    return Message(RecordDict(dict(content)), reply_to=request)


# ---- single rounds, whole runs -----------------------------------------------------------------


class Bench:
    """One strategy over a grid, set up as server.training sets it up."""

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
        self.task = task_for(self.config, method, 0, self.roster)
        extension = models.Extension.of(self.task.about, self.task.options)
        network = models.build(self.task.model, self.task.dims, self.task.classes, 0, extension)
        self.model: Arrays = {n: a.copy() for n, a in models.to_arrays(network).items()}
        self.notices: list[tuple[str, str, str]] = []
        setup = Setup(
            self.task,
            packing.layout(self.model, Kind.MODEL, self.task.wire.dtype),
            wait=self.config.wait,
            guard=self.config.guard,
            summing=self.config.summing,
            notice=lambda *notice: self.notices.append(notice),
            exchange=LocalHost(),
        )
        self.strategy: FedDA = plugins.strategy(method)(setup, self.roster)
        self.opened: list[Message] = []

    def begin(self, server_round: int = 1) -> list[Message]:
        """Return the requests of a round."""
        sent = self.strategy.packed(self.model)
        requests = self.strategy.configure_train(server_round, sent, ConfigRecord(), self.grid)
        self.opened = list(requests)
        return self.opened

    def call(self, request: Message) -> Message:
        """Return a site's answer; where sites sum gradients, all of them answer together."""
        if "exchange" not in request.content:
            return self.grid.call(request)
        answers = self.grid.answers(self.grid.push_messages(self.opened))
        return next(reply for asked, reply in list(answers) if asked is request)

    def round(self, server_round: int = 1) -> tuple[Arrays, dict[str, Any]]:
        """Run one round -> the next model, the round's numbers."""
        replies = Mail(self.grid).deliver(self.begin(server_round), self.config.wait.train)
        arrays, numbers = self.strategy.aggregate_train(server_round, replies)
        assert arrays is not None and numbers is not None
        self.model = self.unpack(arrays)
        return self.model, dict(numbers)

    def unpack(self, arrays: Any) -> Arrays:
        text = packing.layout(self.model, Kind.MODEL).text
        return records.from_arrays(arrays, {"model": text})["model"].unpack()

    def accept(self, *replies: Message) -> list[Reply]:
        return list(self.strategy.accept(iter(replies)))


def sent_by(bench: Bench, name: str) -> Arrays:
    """Return the model that a site trained, from its last reply that holds a model."""
    replies = [
        reply
        for reply in bench.grid.replies
        if reply.metadata.src_node_id == bench.grid.id_of(name) and "arrays" in reply.content
    ]
    return records.read(replies[-1].content)[0]["model"].unpack()


def failures(bench: Bench) -> set[tuple[str, int]]:
    """The sites that answered with an error, and its code."""
    return {(c.site, c.error) for c in bench.grid.crossed if c.error}


def keyed(nodes: Sequence[Node], folder: Path) -> list[Node]:
    """The sites with a node key each, for their role only, and the public keys of all."""
    for node in nodes:
        keys.add(folder, node["name"], node["role"])
    own = {"peers": str(folder / "peers")}
    return [n | own | {"key": str(folder / "nodes" / n["name"])} for n in nodes]


def ruled(nodes: Sequence[Node], text: str, folder: Path, **more: Any) -> list[Node]:
    """The sites with a policy, which a file in the folder holds."""
    (folder / "policy.toml").write_text(text)
    rules = Policy.read(folder / "policy.toml").model_dump_json(by_alias=True)
    return [n | {"policy": rules} | more for n in nodes]


def assert_close(found: Arrays, wanted: Mapping[str, Any], within: float) -> None:
    """Check that models are equal up to rounding; counters are not compared."""
    assert list(found) == list(wanted)
    for name, array in found.items():
        if array.dtype.kind == "f":
            np.testing.assert_allclose(
                array.ravel(), np.ravel(wanted[name]), rtol=within, atol=within, err_msg=name
            )


def assert_mean_of_sources(bench: Bench, weighting: str) -> None:
    """A round's model is the mean of the sources' models, weighted by the roster's counts."""
    model, numbers = bench.round()
    counts = [EXAMPLES[s] if weighting == "examples" else 1 for s in SOURCES]
    shares = {s: n / sum(counts) for s, n in zip(SOURCES, counts, strict=True)}
    weights = bench.strategy.weights
    assert set(weights) == set(shares)
    np.testing.assert_allclose([weights[s] for s in SOURCES], [*shares.values()], rtol=1e-9)
    sites = {s: sent_by(bench, s) for s in SOURCES}
    wanted = {n: sum(w * sites[s][n] for s, w in shares.items()) for n in model}
    assert_close(model, wanted, 1e-6)
    assert numbers["loss"] > 0


def settings_of(method: str) -> dict[str, Any]:
    """Return settings with which a method's run over these sites is short."""
    return FAST | {"method": method} | SETTINGS.get(method, {})


def dotted(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Turn keyword arguments into settings: kd3a__batchnorm -> kd3a.batchnorm."""
    return {k.replace("__", ".").replace("_", "-"): v for k, v in settings.items()}


def run(
    nodes: Sequence[Node],
    settings: Mapping[str, Any],
    *listeners: Listener,
    script: Mapping[str, Script] | None = None,
    grid: ScriptedGrid | None = None,
) -> tuple[dict[str, Any], list[Event]]:
    """Do a whole run; its sites remember nothing -> results.json's content, events in order."""
    resident.cache_clear()
    events: list[Event] = []
    journal = Journal(None, events.append, *listeners)
    method = str(settings.get("method", "kd3a"))
    config = RunConfig.parse(FAST | SETTINGS.get(method, {}) | dict(settings))
    return server_run.execute(config, grid or ScriptedGrid(nodes, script), journal), events


def stop_after(server_round: int) -> Listener:
    """Return a listener that ends a run after a round, as Ctrl-C would."""

    def listen(event: Event) -> None:
        if event["event"] == "round" and event["round"] == server_round:
            raise KeyboardInterrupt

    return listen
