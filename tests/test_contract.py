"""What crosses the wire in each method: exactly what is listed, and nothing else gets through.

Both check. A site's boundary refuses to send unlisted content, so that a mistake in a method
leaks nothing; the server refuses to accept it, so that a site with other code cannot inject it.
"""

import re
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from clients import app, base
from clients.site import boundary
from clients.site.memory import resident
from clients.site.request import Request
from fedda import plugins, records, wire
from fedda.errors import Code, DataError, FeddaError, public
from fedda.methods import Method
from fedda.wire import MODEL, packing
from fedda.wire.packing import Kind, Packed
from server.journal import Event
from server.ledger import Ledger
from tests import crossed
from tests.local_grid import Bench, Node, ScriptedGrid, changed, raw, reshaped, run

SECRET = "secret-sample-42"
SOURCES = ("anna", "bert", "carl")

TRAINED = {"loss", "steps", "seconds"}
TITLES = [*crossed.titles(plugins.methods())]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("title", "method", "perform"), TITLES, ids=[title for title, *_ in TITLES]
)
def test_exactly_what_the_reviewed_list_has_crosses(
    domains: list[Node], tmp_path: Path, title: str, method: str, perform: Any
) -> None:
    """Renew it with `python -m tests.crossed`."""
    grid = perform(method, domains, tmp_path)
    assert crossed.lines(title, crossed.seen(grid)) == crossed.reviewed()[title]
    assert_as_asked(grid, method)
    assert_coarse(grid)


@pytest.mark.contrib
def test_every_method_is_in_the_list() -> None:
    assert [*crossed.reviewed()] == [title for title, *_ in TITLES]


def assert_as_asked(grid: ScriptedGrid, method: str) -> None:
    """Check offers, and that who has gradients to sum is invited."""
    for c in grid.crossed:
        if c.kind == "query":
            offer = {f"offer: {key}" for key in wanted_offer()} if c.way == "from" else set()
            assert (c.arrays, c.numbers) == ({}, offer)
    for request in [q for q in grid.requests if q.metadata.message_type == "train"]:
        phase = plugins.method(method).phase(heading(request, "phase"))
        part = phase.part(heading(request, "hop"), heading(request, "part"))
        assert part is not None
        assert ("exchange" in request.content) is bool(part.gradients)


COUNTS = {"steps", "tested", "held", "predicted", "refused"}
# Over few images an accuracy is as coarse as they are few; epsilon follows from settings alone.
FINE = {"accuracy", "epsilon"}


def assert_coarse(grid: ScriptedGrid) -> None:
    """Check that every number of a reply is coarse."""
    seen = set()
    for reply in grid.replies:
        if reply.metadata.message_type.split(".")[0] == "query" or reply.has_error():
            continue
        for name, value in records.read(reply.content)[1].get("metrics", {}).items():
            kind = name.split("/")[0]
            seen.add(kind)
            if isinstance(value, list):  # in tens at a real site
                assert kind in wire.ANSWERS and all(type(n) is int for n in value)
            elif kind in COUNTS:
                assert value == int(value), name
            elif kind.split("-")[0] not in FINE:
                assert value == float(f"{value:.3g}"), (name, value)
                if kind in ("loss", "kept", "error", "distance", "seconds"):
                    assert value == round(value, 2), (name, value)
    assert "seconds" in seen


def test_only_the_target_gets_counts_and_weights_of_other_sites(
    domains: list[Node], runs: dict[str, str]
) -> None:
    """With the authors' teachers and a second stage, only the target gets counts and weights."""
    chosen = {"kd3a.teacher-batchnorm": "updated", "kd3a.smoothing": 0.9, "kd3a.batchnorm": "loss"}
    grid = ScriptedGrid(domains)
    results, _ = run(domains, runs | {"method": "kd3a", "rounds": 2} | chosen, grid=grid)
    assert results["events"] == []
    sites = (*SOURCES, "town")
    counts, past = ({f"{what}/{s}" for s in sites} for what in ("examples", "past"))
    seen = [c for c in grid.crossed if c.kind == "train"]
    moments = ("match_moments", {"round"})
    asked = [(c.hop, c.numbers) for c in seen if (c.way, c.role) == ("to", "target")]
    assert asked[:2] == [("distil", {"round", *counts}), moments]
    assert asked[2:] == [("distil", {"round", *counts, *past}), moments]
    to_sources = [(c.hop, c.numbers) for c in seen if (c.way, c.role) == ("to", "source")]
    assert to_sources == [("train", {"round"})] * 2 * len(SOURCES)
    back = {*TRAINED, "kept", *(f"focus/{s}" for s in SOURCES)}
    from_target = [c.numbers for c in seen if (c.way, c.role) == ("from", "target")]
    assert from_target == [back, TRAINED] * 2


def wanted_offer() -> set[str]:
    about = {"role", "name", "examples", "tested", "classes", "shape", "columns"}
    return about | {"version", "keys"}


# A part that sends a model with numbers about each site. The check is one function for all methods;
# a test below shows that every hop of each method goes through it.
IN_GATE = {"kd3a", "feddadil", "shot"}


def train_request(bench: Bench, role: str) -> Message:
    """Return the training request for a site of a role."""
    if role == "source":
        return bench.begin()[0]
    bench.round()
    target, phase = bench.roster.target, bench.strategy.phase
    bench.begin()
    found = next(
        q
        for q in bench.grid.requests
        if (q.metadata.dst_node_id, q.metadata.message_type) == (target.id, "train")
    )
    part = phase.part(heading(found, "hop"), "target")
    assert part is not None
    layouts = phase.layouts(bench.task.options, bench.strategy.setup.model)
    bench.strategy.post.open[target.name] = (part, layouts, None)
    return found


def heading(request: Message, name: str) -> str:
    """Return a value of the request's own heading."""
    return str(request.content["step"][name])  # type: ignore[index]


def readdressed(request: Message, node_id: int = 0, kind: str = "", **step: Any) -> Message:
    """Return a request with another site, kind or heading; None removes a value of the heading."""
    was = request.metadata
    fields = {**request.content["step"], **step}  # type: ignore[arg-type]
    fields = {name: value for name, value in fields.items() if value is not None}
    content = RecordDict({**request.content, "step": ConfigRecord(fields)})
    return Message(content, node_id or was.dst_node_id, kind or was.message_type, ttl=60)


def features(shape: tuple[int, ...]) -> Packed:
    return packing.pack({"z": np.full(shape, 42, np.float32)}, Kind.MODEL)


Change = Callable[[dict[str, Any], dict[str, Packed]], None]  # changes a reply's numbers and arrays


def number(name: str, value: object) -> Change:
    return lambda numbers, arrays: numbers.update({name: value})


# What no rule lists is told by name in test_wire.py.
LEAKS: dict[str, Change] = {
    "a text": number("steps", SECRET),
    "a tensor": number("steps", torch.ones(())),
    "many numbers": lambda numbers, _: numbers.update({f"focus/{i}": 0.5 for i in range(40)}),
    "an extra array": lambda _, arrays: arrays.update(features=features((40, 16))),
    "not a number": number("steps", float("nan")),
}


def answer(
    bench: Bench,
    role: str,
    monkeypatch: pytest.MonkeyPatch,
    change: Change | None = None,
    error: BaseException | None = None,
) -> Message:
    """Return a site's reply when its method's code is changed."""
    request = train_request(bench, role)
    hop, part = heading(request, "hop"), heading(request, "part")
    made = plugins.client(bench.task.method, part)  # type: ignore[arg-type]
    train, outgoing = getattr(made, hop), made.outgoing

    def changed_train(self: base.Client) -> dict[str, Any]:
        if error:
            raise error
        numbers = train(self)
        if change:
            change(numbers, outgoing(self))
        return numbers

    def changed_outgoing(self: base.Client) -> dict[str, Packed]:
        arrays = outgoing(self)
        if change:
            change({"steps": 0}, arrays)
        return arrays

    monkeypatch.setattr(made, hop, changed_train)
    monkeypatch.setattr(made, "outgoing", changed_outgoing)
    return bench.call(request)


@pytest.mark.parametrize("leak", LEAKS)
def test_a_site_refuses_to_send_what_is_not_listed(
    domains: list[Node],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    leak: str,
) -> None:
    reply = answer(Bench(domains, "kd3a"), "target", monkeypatch, LEAKS[leak])
    assert reply.has_error() and not reply.has_content()
    code = Code.NOT_FINITE if leak == "not a number" else Code.WIRE
    assert (reply.error.code, reply.error.reason) == (code, code.public)
    assert SECRET not in str(reply)
    # The site's own log names the content.
    assert code is Code.NOT_FINITE or "to be sent" in caplog.text


RAISED = dict.fromkeys((ValueError, KeyError, FeddaError, RecursionError), Code.INTERNAL)
RAISED |= {DataError: Code.DATA} | dict.fromkeys((MemoryError, torch.OutOfMemoryError), Code.MEMORY)


@pytest.mark.parametrize(("error", "code"), RAISED.items())
def test_the_text_of_an_exception_stays_at_the_site(
    domains: list[Node],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: type[Exception],
    code: Code,
) -> None:
    bench = Bench(domains, "kd3a")
    reply = answer(bench, "source", monkeypatch, error=error(SECRET))
    assert (reply.error.code, reply.error.reason) == (code, code.public)
    assert SECRET not in str(reply) + str(reply.metadata)
    assert SECRET in caplog.text  # the site's own log has the full text
    assert bench.accept(reply) == []
    assert SECRET not in str(bench.notices) and code.public in str(bench.notices)


@pytest.mark.parametrize("kind", ["query", "evaluate"])
def test_errors_outside_of_training_quote_no_data_either(
    domains: list[Node], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    bench = Bench(domains, "kd3a")
    resident.cache_clear()

    def fail(*args: object, **kwargs: object) -> None:
        raise ValueError(SECRET)

    for name in ("describe", "load_target", "load_evaluation"):
        monkeypatch.setattr(f"fedda.data.{name}", fail)
    bench.begin()
    request = readdressed(bench.strategy.test_request(), kind=kind)
    if kind == "query":  # it holds no training
        request = Message(RecordDict(), request.metadata.dst_node_id, kind, ttl=60)
    reply = bench.grid.call(request)
    resident.cache_clear()
    assert reply.error.code == Code.INTERNAL
    assert SECRET not in str(reply)


MALFORMED: list[dict[str, Any]] = [
    {"features": ConfigRecord({"x": 1})},
    {"task": ConfigRecord({"method": "kd3a"})},
    {"task": MetricRecord({"x": 1}), "step": ConfigRecord({"round": 1})},
]


def test_a_site_refuses_records_settings_and_arrays_it_does_not_know(domains: list[Node]) -> None:
    bench = Bench(domains, "kd3a")
    for content in MALFORMED:
        reply = bench.grid.call(Message(RecordDict(content), 1, "train", ttl=60))
        assert reply.error.code == Code.WIRE, content
    node = bench.roster.sources[0]
    bench.begin()
    strategy = bench.strategy
    asked = strategy.request(node, {"model": strategy.model, "teacher/bert": strategy.model})
    assert bench.grid.call(asked).error.code == Code.WIRE  # only targets get teachers
    other = packing.pack({"w": np.zeros(3, np.float32)}, Kind.MODEL)
    assert bench.grid.call(strategy.request(node, {"model": other})).error.code == Code.WIRE
    unknown = strategy.request(node, {"model": strategy.model})
    unknown.content["task"]["run.dir"] = "/"  # type: ignore[index]
    assert bench.grid.call(unknown).error.code == Code.CONFIG
    late = strategy.request(node, {"model": strategy.model})
    late.metadata.__dict__["_created_at"] -= 3600
    assert bench.grid.call(late).error.code == Code.EXPIRED


@pytest.mark.parametrize("number", [{"label-0": 1.0}, {"focus/anna": 0.5}, {"stage": "2"}])
def test_a_site_refuses_a_request_with_numbers_that_are_not_listed(
    domains: list[Node], number: dict[str, Any]
) -> None:
    bench = Bench(domains, "kd3a")
    request = train_request(bench, "target")
    for name, value in number.items():
        request.content["step"][name] = value  # type: ignore[index]
    assert bench.grid.call(request).error.code == Code.WIRE


def test_sources_refuse_counts_of_other_sites(domains: list[Node]) -> None:
    bench = Bench(domains, "kd3a")
    request, *_ = bench.begin()
    for honest in (request, bench.strategy.test_request()):
        assert not bench.grid.call(honest).has_error()
        honest.content["step"]["examples/bert"] = 30.0  # type: ignore[index]
        assert bench.grid.call(honest).error.code == Code.WIRE


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Record the hops that sites have begun to answer."""
    hops: list[str] = []
    begin = base.Client.begin

    def noted(self: base.Client, request: Request) -> None:
        hops.append(request.hop)
        begin(self, request)

    monkeypatch.setattr(base.Client, "begin", noted)
    return hops


def assert_refused(bench: Bench, request: Message, begun: list[str]) -> None:
    """Check that a site answers with an error code alone and begins no work."""
    before = list(begun)
    reply = bench.grid.call(request)
    assert reply.has_error() and not reply.has_content()
    assert (reply.error.code, reply.error.reason) == (Code.WIRE, Code.WIRE.public)
    assert begun == before


@pytest.mark.parametrize(
    ("step", "why"),
    [
        ({"phase": "adapt"}, "round 1 belongs to 'pretrain'"),
        ({"phase": "adapt", "hop": "adapt"}, "round 1 belongs to 'pretrain'"),
        ({"round": 2}, "round 2 belongs to 'adapt'"),
        ({"phase": "Pretrain"}, "belongs to"),
        ({"phase": ""}, "belongs to"),
        ({"phase": 1}, "belongs to"),
        ({"phase": None}, "belongs to"),
        ({"round": None}, "for round None of 2"),
        ({"hop": "adapt"}, "for 'adapt' in its phase 'pretrain'"),  # a hop of the other phase
        ({"hop": "outgoing"}, "for 'outgoing' in its phase"),  # a method of the class, but no hop
        ({"hop": "__init__"}, "for '__init__' in its phase"),
        ({"hop": ""}, "for '' in its phase"),
        ({"hop": 1}, "for '1' in its phase"),
        ({"hop": None}, "in its phase"),
        ({"part": "source"}, "asks no source for 'train'"),
        ({"part": "target"}, "asks no target for 'train'"),
        ({"part": "Collaborator"}, "asks no Collaborator for 'train'"),
        ({"part": ""}, "asks no  for 'train'"),
        ({"part": None}, "for 'train'"),
        ({"hop": "test"}, "asks no collaborator for 'test'"),
    ],
    ids=str,
)
def test_a_site_refuses_a_request_whose_heading_is_not_the_methods(
    domains: list[Node],
    begun: list[str],
    caplog: pytest.LogCaptureFixture,
    step: dict[str, Any],
    why: str,
) -> None:
    bench = Bench(domains, "dils", dils__pretrain=1)
    (request,) = bench.begin()
    assert_refused(bench, readdressed(request, **step), begun)
    assert why in caplog.text
    assert not bench.grid.call(request).has_error()
    assert begun == ["train"]


@pytest.mark.parametrize(
    ("role", "hop", "kind", "why"),
    [
        ("source", "train", "evaluate", "asks for 'train', not for a test"),
        ("target", "estimate", "evaluate", "asks for 'estimate', not for a test"),
        ("target", "test", "train", "A training request asks for a test"),
    ],
)
def test_tests_and_trainings_have_separate_kinds_of_messages(
    domains: list[Node],
    begun: list[str],
    caplog: pytest.LogCaptureFixture,
    role: str,
    hop: str,
    kind: str,
    why: str,
) -> None:
    bench, request = asked(domains, role, hop)
    begun.clear()
    assert_refused(bench, readdressed(request, kind=kind), begun)
    assert why in caplog.text
    assert not bench.grid.call(request).has_error()
    assert begun == [hop]


def asked(domains: list[Node], role: str, hop: str) -> tuple[Bench, Message]:
    """A request for a hop of AdaBN, whose every request contains only the model."""
    bench = Bench(domains, "adabn")
    if hop != "test":
        return bench, train_request(bench, role)
    bench.begin()
    return bench, bench.strategy.test_request()


@pytest.mark.parametrize("hop", ["estimate", "test"])
def test_a_source_refuses_the_part_of_a_target(
    domains: list[Node], begun: list[str], caplog: pytest.LogCaptureFixture, hop: str
) -> None:
    bench, request = asked(domains, "target", hop)
    begun.clear()
    for node in bench.roster.sources:
        assert_refused(bench, readdressed(request, node.id), begun)
        assert "asks this source for the part of a target, which it cannot play" in caplog.text
        caplog.clear()
    assert not bench.grid.call(request).has_error()
    assert begun == [hop]


@pytest.mark.parametrize(("method", "part"), [("fedavg", "source"), ("dils", "collaborator")])
def test_a_target_refuses_a_part_that_needs_labels(
    domains: list[Node], begun: list[str], caplog: pytest.LogCaptureFixture, method: str, part: str
) -> None:
    settings = {"dils__pretrain": 1} if method == "dils" else {}
    bench = Bench(domains, method, **settings)
    request, *_ = bench.begin()
    assert heading(request, "part") == part
    assert_refused(bench, readdressed(request, bench.roster.target.id), begun)
    assert f"asks this target for the part of a {part}, which it cannot play" in caplog.text
    assert not bench.grid.call(request).has_error()
    assert begun == ["train"]


def test_a_target_accepts_the_part_of_a_collaborator_without_labels(
    domains: list[Node], begun: list[str]
) -> None:
    """A target that has adapted can thus be the collaborator of the next target."""
    bench = Bench(domains, "dils", dils__loss="adda")
    request, _ = bench.begin()
    assert (heading(request, "hop"), heading(request, "part")) == ("adapt", "collaborator")
    bench.strategy.adjourn()  # so that the exchange waits for no other site
    bench.grid.call(readdressed(request, bench.roster.target.id))
    assert begun == ["adapt"]


LOOK = wire.Part(wire.Rule(MODEL), wire.Rule(numbers=frozenset({wire.STEPS, wire.SECONDS})))


@pytest.fixture
def looking(monkeypatch: pytest.MonkeyPatch) -> Method:
    """F-DANN with a second hop, in which the target reports a number and sums no gradient."""
    found = plugins.method("fdann")
    (align,) = found.phases
    hops = {**align.hops, "look": {"target": LOOK}}
    changed = replace(found, phases=(replace(align, hops=hops),))

    class Target(plugins.client("fdann", "target")):
        def look(self) -> dict[str, Any]:
            return {"steps": 1}

        def outgoing(self) -> dict[str, Packed]:
            return {} if self.request.hop == "look" else super().outgoing()

    monkeypatch.setattr(plugins.algorithm("fdann"), "METHOD", changed)
    monkeypatch.setattr("clients.fdann.Target", Target)
    return changed


def test_only_requests_to_sum_in_an_open_session_carry_invitations(
    domains: list[Node], looking: Method
) -> None:
    bench = Bench(domains, "fdann")
    bench.grid.offline = {"carl"}
    asked = bench.begin()
    strategy, nodes = bench.strategy, {node.name: node for node in bench.roster.nodes}

    def invited(name: str, hop: str) -> bool:
        request = strategy.request(nodes[name], {"model": strategy.model}, hop=hop)
        return "exchange" in request.content

    assert {q.content["exchange"]["node"] for q in asked} == {"anna", "bert", "town"}  # type: ignore[index]
    assert invited("anna", "align") and invited("town", "align")
    assert not invited("carl", "align")  # carl is not a member of the session
    assert not invited("town", "look")
    assert "exchange" not in strategy.test_request().content
    strategy.adjourn()
    assert not [hop for hop in ("align", "look") if invited("town", hop)]
    assert "exchange" not in strategy.test_request().content


def test_a_site_refuses_an_invitation_in_a_hop_without_sums(
    domains: list[Node], looking: Method, begun: list[str]
) -> None:
    bench = Bench(domains, "fdann")
    target = bench.roster.target
    summing = next(q for q in bench.begin() if q.metadata.dst_node_id == target.id)
    look = bench.strategy.request(target, {"model": bench.strategy.model}, hop="look")
    for request in (look, bench.strategy.test_request()):
        assert not bench.grid.call(request).has_error()
        request.content["exchange"] = summing.content["exchange"]
        assert_refused(bench, request, begun)
    assert begun == ["look", "test"]


def plain_arrays(request: Message, reply: Message) -> Message:
    arrays = ArrayRecord({"model": Array(np.ones(3, np.float32))})
    text = ConfigRecord({"model": "[]"})
    metrics = MetricRecord({"loss": 1.0})
    content = {"arrays": arrays, "manifests": text, "metrics": metrics}
    return Message(RecordDict(content), reply_to=request)  # type: ignore[arg-type]


Forged = Callable[[Message, Message], Message]
NUMBER: dict[str, Any] = {"label-0": 1.0}


def numbers(**values: object) -> Forged:
    return lambda request, reply: changed(request, reply, numbers=values)


FORGED: dict[str, tuple[Forged, str]] = {
    "extra array": (
        lambda q, r: changed(q, r, arrays={"features": features((40, 16))}),
        "no array 'features'",
    ),
    "no array": (lambda q, r: changed(q, r, without=["model"]), "sent no model"),
    "no steps": (lambda q, r: changed(q, r, without=["steps"]), "sent no steps"),
    "many numbers": (numbers(**{f"focus/{i}": 1.0 for i in range(40)}), "focus/"),
    "nan": (numbers(steps=float("nan")), "steps from .* not finite"),
    "plain arrays": (plain_arrays, "is serialised as 'numpy.ndarray'"),
    "other records": (lambda q, r: raw(q, fitres=ConfigRecord({"x": 1})), "record 'fitres'"),
    "no records": (lambda q, r: raw(q), r"tables \[\]"),
    "offer": (
        lambda q, r: raw(q, offer=ConfigRecord({"name": "x"}), metrics=MetricRecord({"loss": 1})),
        "sent tables",
    ),
}


@pytest.mark.parametrize("case", FORGED)
def test_the_server_refuses_what_is_not_listed(domains: list[Node], case: str) -> None:
    forge, message = FORGED[case]
    bench = Bench(domains, "kd3a")
    request = train_request(bench, "target")
    node = bench.roster.by_id(request.metadata.dst_node_id)
    assert node is not None
    forged = forge(request, bench.call(request))
    assert list(bench.strategy.accept([forged], needs={"steps"})) == []
    refused = [text for what, site, text in bench.notices if (what, site) == ("refused", node.name)]
    assert len(refused) == 1
    assert re.search(message, refused[0])
    # Counting received bytes never fails.
    Ledger(Path(), bench.grid, "").message("from", node.name, node.role, 1, forged)


def test_no_model_leaves_a_site_whose_training_diverged(
    domains: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    release = boundary.release

    def diverged(site: Any, request: Request, arrays: Any, numbers: Any) -> Any:
        values = arrays["model"].unpack()
        name = next(iter(values))
        values[name] = np.full_like(values[name], np.nan)
        return release(site, request, {"model": packing.pack(values, Kind.MODEL)}, numbers)

    monkeypatch.setattr(boundary, "release", diverged)
    bench = Bench(domains, "fedavg")
    reply = bench.call(train_request(bench, "source"))
    assert reply.has_error() and reply.error.code == Code.NOT_FINITE


CHECKS = pytest.mark.nightly(
    "clients/site/boundary.py", "clients/app.py", "strategies/sites/replies.py"
)


def hops() -> Iterator[Any]:
    """Yield each request that a method knows: its name, phase, hop and part."""
    for method in plugins.methods():
        found = plugins.method(method)
        for phase in found.phases:
            asked = [(hop, part) for hop, parts in phase.hops.items() for part in parts]
            asked.append(("test", "target"))
            marks = [CHECKS] * (method not in IN_GATE)
            yield from (pytest.param(method, phase.name, *each, marks=marks) for each in asked)


class Forging(ScriptedGrid):
    """Forges the first request of one kind, what its site sends, and what arrives instead.

    Args:
        nodes: node configurations.
        asked: phase, hop and part of the request.
        monkeypatch: changes the site's code, which then wants to send a number too many.
    """

    def __init__(
        self, nodes: list[Node], asked: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        super().__init__(nodes)
        self.asked, self.site, self.done = asked, 0, False
        self.wanted: Message | None = None
        served, release, received = threading.local(), boundary.release, app._read

        def read(message: Message, allowed: Any) -> Any:
            served.message = message
            return received(message, allowed)

        def forged(site: Any, request: Request, arrays: Any, numbers: Any) -> Any:
            if self._chosen(served.message):
                numbers, content = {**numbers, **NUMBER}, {"metrics": {**numbers, **NUMBER}}
                self.wanted = Message(records.write(arrays, **content), reply_to=served.message)
            return release(site, request, arrays, numbers)

        monkeypatch.setattr(app, "_read", read)
        monkeypatch.setattr(boundary, "release", forged)

    def _chosen(self, message: Message) -> bool:
        if "step" not in message.content or self.done:
            return False
        if tuple(heading(message, name) for name in ("phase", "hop", "part")) != self.asked:
            return False
        self.site = self.site or message.metadata.dst_node_id
        return message.metadata.dst_node_id == self.site

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        messages = list(messages)
        for message in [each for each in messages if self._chosen(each)]:
            if "kept" in message.content:  # a refused request would use up what the site has kept
                continue
            self.done = True  # as to what the site sends, it is honest here
            reply = self.call(readdressed(message, **NUMBER))
            self.done = False
            assert reply.has_error() and reply.error.code == Code.WIRE
        return super().push_messages(messages)

    def answers(self, message_ids: Iterable[str]) -> Iterator[tuple[Message, Message]]:
        for request, reply in super().answers(message_ids):
            if not self._chosen(request):
                yield request, reply
                continue
            assert reply.has_error() and reply.error.code == Code.WIRE
            assert self.wanted is not None
            self.done = True
            yield request, self.wanted  # as if the site did not check


# Settings of the hops that no other setting of these tests leads to.
WITH: dict[tuple[str, str], dict[str, Any]] = {
    ("fada", "attend"): {"fada.weighting": "attention"},
    ("kd3a", "match_moments"): {"kd3a.batchnorm": "loss"},
}


@pytest.mark.parametrize(("method", "phase", "hop", "part"), [*hops()])
def test_every_hop_goes_through_the_check_of_both_sides(
    domains: list[Node],
    runs: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    phase: str,
    hop: str,
    part: str,
) -> None:
    grid = Forging(domains, (phase, hop, part), monkeypatch)

    refused: list[tuple[str, str]] = []

    def listen(event: Event) -> None:
        if grid.done and event["event"] == "trouble":
            refused.append((event["what"], event["text"]))
            raise KeyboardInterrupt

    settings: dict[str, Any] = runs | {"method": method} | WITH.get((method, hop), {})
    if phase == plugins.method(method).phases[0].name:
        settings |= crossed.FIRST_PHASE.get(method, {})
    with pytest.raises(KeyboardInterrupt):
        run(domains, settings, listen, grid=grid)
    ((what, text),) = refused
    assert what == "refused" and "no number 'label-0'" in text


def test_replies_without_an_open_request_are_dropped(domains: list[Node]) -> None:
    bench = Bench(domains, "fedavg")
    request = bench.begin()[0]
    reply = bench.grid.call(request)
    assert len(bench.accept(reply, reply)) == 1  # the second is a duplicate
    assert ("stale", "anna") in [n[:2] for n in bench.notices]
    assert bench.accept(reply) == []  # a replay, after the round
    stranger = bench.grid.call(request)
    stranger.metadata.__dict__["_src_node_id"] = 99
    bench.begin()
    assert bench.accept(stranger) == []
    assert ("stale", "") in [n[:2] for n in bench.notices]


def test_a_number_about_an_unknown_site_is_refused(domains: list[Node]) -> None:
    bench = Bench(domains, "kd3a")
    request, *_ = bench.begin()
    reply = changed(request, bench.grid.call(request), numbers={"focus/sample-42": 1.0})
    listed = frozenset({"loss", "steps", "seconds", "focus/*"})
    bench.strategy.post.open["anna"] = (wire.Part(leaves=wire.Rule(MODEL, listed)), {}, None)
    assert not bench.accept(reply)
    assert "about no site here" in bench.notices[0][2]


@pytest.mark.parametrize("code", [int(Code.DATA), 2, 31337])
def test_the_text_of_a_received_error_is_replaced_by_a_known_one(
    domains: list[Node], code: int
) -> None:
    bench = Bench(domains, "fedavg")
    request, *_ = bench.begin()
    assert not bench.accept(Message(Error(code, "secret-sample-42"), reply_to=request))
    what, site, text = bench.notices[0]
    assert (what, site) == ("failed", "anna")
    assert text == (Code.DATA.public if code == Code.DATA else public(code))
    assert "secret" not in text


def test_statistics_that_explode_are_refused(domains: list[Node]) -> None:
    def explode(model: Any) -> Any:
        name = next(n for n in model if n.endswith("running_mean"))
        model[name][:] = 3e38
        return model

    bench = Bench(domains, "fedavg", {"anna": reshaped(explode)})
    bench.round()
    assert "guard.max-statistics" in {n[1]: n[2] for n in bench.notices}["anna"]


def test_a_site_refuses_to_train_on_fewer_images_than_it_allows(domains: list[Node]) -> None:
    """The server asks for a quarter of an epoch; one site wants at least 16 of its 40 images."""
    nodes = [n | {"min-images": 16} if n["name"] == "anna" else n for n in domains]
    bench = Bench(nodes, "fedavg", train__rounds_per_epoch=4.0)
    bench.round()
    assert [n[:2] for n in bench.notices] == [("failed", "anna")]
    assert bench.notices[0][2] == Code.CONFIG.public
    assert set(bench.strategy.weights) == {"bert", "carl"}


@pytest.mark.parametrize("number", [0, -1, 3, 1.5])
def test_a_request_for_a_round_outside_the_run_is_refused(
    domains: list[Node], number: float
) -> None:
    bench = Bench(domains, "fedavg")
    bench.begin()
    node = bench.roster.sources[0]
    request = bench.strategy.request(node, {"model": bench.strategy.model}, {"round": number})
    assert bench.grid.call(request).error.code == Code.WIRE
