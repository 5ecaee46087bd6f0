"""What crosses the wire, method by method: exactly what is listed, and nothing else gets through.

A refusal happens twice. The site's bridge refuses to send, so that a mistake in a method does not
leak; the server refuses to accept, so that a site with other code cannot bring in what it likes.
"""

import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

from clients import base
from clients.site import resident
from fedda import records, wire
from fedda.config import LazyConfig, methods
from fedda.errors import Code, DataError, FeddaError, public
from fedda.folders import load_half
from fedda.wire import MODEL, Kind, Packed, Role
from server.ledger import Ledger
from tests.local_grid import Bench, Node, ScriptedGrid, changed, raw, reshaped, run

SECRET = "secret-sample-42"
SOURCES = ("anna", "bert", "carl")

TRAINED = {"loss", "steps", "seconds"}
AVERAGED = {
    ("to", "source", "train"): ({"model": "model"}, {"round"}),
    ("from", "source", "train"): ({"model": "model"}, TRAINED),
}
TESTED = {
    ("to", "target", "evaluate"): ({"model": "model"}, {"round"}),
    ("from", "target", "evaluate"): (
        {},
        {"accuracy", "loss", "tested", "infomax", "seconds"},
    ),
}
EXCHANGE = {f"exchange: {key}" for key in ("host", "port", "certificate", "ticket", "node", "wait")}
EXCHANGE |= {f"exchange: {key}" for key in ("groups", *LazyConfig().flat())}
SUMMED = {"discriminator-loss", "discriminator-accuracy"}
HEADS = {f"accuracy-{head}" for head in ("reconstruction", "ensemble", "encoder")}
CROSSES: dict[str, dict[tuple[str, str, str], tuple[dict[str, str], set[str]]]] = {
    "adabn": AVERAGED
    | {
        ("to", "target", "train"): ({"model": "model"}, {"round"}),
        ("from", "target", "train"): ({"model": "model"}, {"steps", "seconds"}),
    },
    # With all that may cross: the loss that moves both encoders, and a target that shares its own.
    "dils": {
        ("to", "source", "train"): ({"model": "model"}, {"round", "steps"} | EXCHANGE),
        ("to", "target", "train"): ({"model": "model"}, {"round", "steps"} | EXCHANGE),
        ("from", "source", "train"): ({"model": "model"}, TRAINED | SUMMED),
        ("from", "target", "train"): ({"model": "model"}, TRAINED | SUMMED),
        ("to", "target", "evaluate"): ({}, {"round"}),
    },
    "fdan": {
        ("to", "source", "train"): ({"model": "model"}, {"round", "steps", "scale"} | EXCHANGE),
        ("to", "target", "train"): ({"model": "model"}, {"round", "steps", "scale"} | EXCHANGE),
        ("from", "source", "train"): ({"model": "model"}, TRAINED | {"mmd"}),
        ("from", "target", "train"): (
            {"model": "model", "witness": "gradient"},
            {"steps", "seconds", "mmd"},
        ),
    },
    "fdann": {
        ("to", "source", "train"): ({"model": "model"}, {"round", "steps"} | EXCHANGE),
        ("to", "target", "train"): ({"model": "model"}, {"round", "steps"} | EXCHANGE),
        ("from", "source", "train"): ({"model": "model"}, TRAINED | SUMMED),
        ("from", "target", "train"): (
            {"model": "model", "discriminator": "model"},
            {"steps", "seconds"} | SUMMED,
        ),
    },
    "fwdgrl": {
        ("to", "source", "train"): ({"model": "model"}, {"round", "steps"} | EXCHANGE),
        ("to", "target", "train"): ({"model": "model"}, {"round", "steps"} | EXCHANGE),
        ("from", "source", "train"): ({"model": "model"}, TRAINED | {"discriminator-loss"}),
        ("from", "target", "train"): (
            {"model": "model", "discriminator": "model"},
            {"steps", "seconds", "discriminator-loss"},
        ),
    },
    "fedavg": AVERAGED,
    "feddadil": {
        (way, role, "train"): (
            {"atoms": "atoms"} if way == "from" else {"atoms": "atoms", "model": "model"},
            {"round"} if way == "to" else {*TRAINED, "reconstruction"},
        )
        for way in ("to", "from")
        for role in ("source", "target")
    }
    | {  # the encoder was there in the round's training already
        ("to", "target", "evaluate"): ({"atoms": "atoms"}, {"round"}),
        ("from", "target", "evaluate"): (
            {},
            {"accuracy", "loss", "tested", "infomax", "seconds", *HEADS},
        ),
    },
    "fedprox": AVERAGED,
    "kd3a": AVERAGED
    | {
        ("to", "target", "train"): (
            {"model": "model", **{f"teacher/{s}": "model" for s in SOURCES}},
            {"round"},
        ),
        ("from", "target", "train"): (
            {"model": "model"},
            {*TRAINED, "kept", *(f"focus/{s}" for s in SOURCES)},
        ),
    },
}


@pytest.mark.parametrize("method", methods())
def test_exactly_this_crosses(domains: list[Node], runs: dict[str, str], method: str) -> None:
    assert method in CROSSES, f"say here what {method} sends, per direction, role and request"
    grid = ScriptedGrid(domains)
    settings = runs | {"method": method, "rounds": 1}
    results, _ = run(domains, settings, grid=grid)
    assert results["events"] == []
    seen = {}
    for c in grid.crossed:
        if c.kind == "query":
            offer = {f"offer: {key}" for key in wanted_offer()} if c.way == "from" else set()
            assert (c.arrays, c.numbers) == ({}, offer)
            continue
        key = (c.way, c.role, c.kind)
        assert seen.setdefault(key, (c.arrays, c.numbers)) == (c.arrays, c.numbers)
    assert seen == TESTED | CROSSES[method]


def test_what_more_a_target_is_told_where_teachers_move(
    domains: list[Node], runs: dict[str, str]
) -> None:
    """The authors' teachers and a second stage: counts and weights, and only to the target."""
    chosen = {"kd3a.teacher-batchnorm": "updated", "kd3a.smoothing": 0.9, "kd3a.batchnorm": "loss"}
    grid = ScriptedGrid(domains)
    results, _ = run(domains, runs | {"method": "kd3a", "rounds": 2} | chosen, grid=grid)
    assert results["events"] == []
    sites = (*SOURCES, "town")
    counts, past = ({f"{what}/{s}" for s in sites} for what in ("examples", "past"))
    seen = [(c.way, c.role, c.numbers) for c in grid.crossed if c.kind == "train"]
    assert [n for way, role, n in seen if (way, role) == ("to", "target")] == [
        {"round", *counts},
        {"round", "stage"},
        {"round", *counts, *past},
        {"round", "stage"},
    ]
    assert all(n == {"round"} for way, role, n in seen if (way, role) == ("to", "source"))
    back = CROSSES["kd3a"]["from", "target", "train"][1]
    assert all(n in (back, TRAINED) for way, role, n in seen if (way, role) == ("from", "target"))


def wanted_offer() -> set[str]:
    return {"role", "name", "examples", "tested", "classes", "shape", "version"}


def test_what_a_site_is_told_and_tells_of_itself(domains: list[Node]) -> None:
    bench = Bench(domains, "kd3a")
    request = bench.begin()[0]
    assert set(request.content) == {"arrays", "manifests", "task", "step"}
    assert not [
        k for k in request.content["task"] if k.startswith(("run.", "wait", "guard", "track"))
    ]
    target = next(n for n in bench.roster.nodes if n.role == "target")
    assert (target.examples, target.tested, target.classes) == (48, 24, ())


# ---- the site refuses to send ------------------------------------------------------------------

# Another method's halves, but for a few lines.
INHERIT = ("adabn", "fedprox", "fdan", "fwdgrl", "dils")
roles = pytest.mark.parametrize(
    ("method", "role"),
    [
        pytest.param(method, role, marks=[pytest.mark.slow] * (method in INHERIT))
        for method in methods()
        for role in ("source", "target")
        if ("to", role, "train") in CROSSES.get(method, AVERAGED)
    ],
)


def train_request(bench: Bench, role: str) -> Message:
    """The request that a site of a role trains on."""
    requests = bench.begin()
    if "exchange" in requests[0].content:
        roles = {n.id: n.role for n in bench.roster.nodes}
        return next(q for q in requests if roles[q.metadata.dst_node_id] == role)
    if role == "source":
        return requests[0]
    bench.round()
    target = bench.roster.target
    bench.begin()
    bench.strategy._asked = {target.name}
    return next(
        q
        for q in bench.grid.requests
        if (q.metadata.dst_node_id, q.metadata.message_type) == (target.id, "train")
    )


def features(shape: tuple[int, ...]) -> Packed:
    return wire.pack({"z": np.full(shape, 42, np.float32)}, Kind.MODEL)


Change = Callable[[dict[str, Any], dict[str, Packed]], None]  # of a reply's numbers and arrays


def per_sample(numbers: dict[str, Any], arrays: dict[str, Packed]) -> None:
    numbers["steps"] = [0.25] * 40


def text(numbers: dict[str, Any], arrays: dict[str, Packed]) -> None:
    numbers["steps"] = SECRET


def tensor(numbers: dict[str, Any], arrays: dict[str, Packed]) -> None:
    numbers["steps"] = torch.ones(())


def unlisted_number(numbers: dict[str, Any], arrays: dict[str, Packed]) -> None:
    numbers["label-0"] = 1.0


def many_numbers(numbers: dict[str, Any], arrays: dict[str, Packed]) -> None:
    numbers |= {f"focus/{i}": 0.5 for i in range(40)}


def extra_array(numbers: dict[str, Any], arrays: dict[str, Packed]) -> None:
    arrays["features"] = features((40, 16))


def features_as_the_model(numbers: dict[str, Any], arrays: dict[str, Packed]) -> None:
    arrays["model"] = features((40, 16))


def features_as_the_array(numbers: dict[str, Any], arrays: dict[str, Packed]) -> None:
    name, packed = next(iter(arrays.items()))
    arrays[name] = wire.pack(features((40, 16)).unpack(), packed.manifest.kind)


def features_within_the_model(numbers: dict[str, Any], arrays: dict[str, Packed]) -> None:
    name, packed = next(iter(arrays.items()))  # a model, or atoms
    grown = packed.unpack() | {"more": np.zeros((40, 16), np.float32)}
    arrays[name] = wire.pack(grown, packed.manifest.kind)


def other_kind(numbers: dict[str, Any], arrays: dict[str, Packed]) -> None:
    name, packed = next(iter(arrays.items()))
    arrays[name] = wire.pack(packed.unpack(), Kind.GRADIENT)


LEAKS: list[Change] = [
    per_sample,
    text,
    tensor,
    unlisted_number,
    many_numbers,
    extra_array,
    features_as_the_model,
    features_as_the_array,
    features_within_the_model,
    other_kind,
]


def answer(
    bench: Bench,
    role: str,
    monkeypatch: pytest.MonkeyPatch,
    change: Change | None = None,
    error: BaseException | None = None,
) -> Message:
    """What a site replies when its method's code is changed."""
    request = train_request(bench, role)
    half = load_half("clients", bench.task.method)
    made = half.Source if role == "source" else half.Target
    train, outgoing = made.train, made.outgoing

    def changed_train(self: base.Client, request: base.Request) -> dict[str, Any]:
        if error:
            raise error
        numbers = train(self, request)
        if change:
            change(numbers, outgoing(self, request))
        return numbers

    def changed_outgoing(self: base.Client, request: base.Request) -> dict[str, Packed]:
        arrays = outgoing(self, request)
        if change:
            change({"steps": 0}, arrays)
        return arrays

    monkeypatch.setattr(made, "train", changed_train)
    monkeypatch.setattr(made, "outgoing", changed_outgoing)
    return bench.call(request)


@roles
def test_the_honest_client_is_not_refused(
    domains: list[Node], monkeypatch: pytest.MonkeyPatch, method: str, role: str
) -> None:
    bench = Bench(domains, method)
    reply = answer(bench, role, monkeypatch)
    assert not reply.has_error()
    assert len(bench.accept(reply)) == 1


@roles
@pytest.mark.parametrize("leak", LEAKS, ids=lambda c: c.__name__)
def test_a_site_refuses_to_send_what_is_not_listed(
    domains: list[Node],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    method: str,
    role: str,
    leak: Change,
) -> None:
    reply = answer(Bench(domains, method), role, monkeypatch, leak)
    assert reply.has_error() and not reply.has_content()
    assert (reply.error.code, reply.error.reason) == (Code.WIRE, Code.WIRE.public)
    assert SECRET not in str(reply)
    assert "to be sent" in caplog.text  # the site's own log says what it was


@roles
def test_values_that_are_not_finite_stay_at_the_site(
    domains: list[Node], monkeypatch: pytest.MonkeyPatch, method: str, role: str
) -> None:
    def spoil(numbers: dict[str, Any], arrays: dict[str, Packed]) -> None:
        numbers["steps"] = float("nan")

    reply = answer(Bench(domains, method), role, monkeypatch, spoil)
    assert reply.error.code == Code.NOT_FINITE


@roles
@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError(SECRET), Code.INTERNAL),
        (KeyError(SECRET), Code.INTERNAL),
        (FeddaError(SECRET), Code.INTERNAL),
        (DataError(SECRET), Code.DATA),
        (MemoryError(SECRET), Code.MEMORY),
        (torch.OutOfMemoryError(SECRET), Code.MEMORY),
        (RecursionError(SECRET), Code.INTERNAL),
    ],
    ids=lambda v: type(v).__name__,
)
def test_what_an_exception_quotes_stays_at_the_site(
    domains: list[Node],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    method: str,
    role: str,
    error: Exception,
    code: Code,
) -> None:
    bench = Bench(domains, method)
    reply = answer(bench, role, monkeypatch, error=error)
    assert (reply.error.code, reply.error.reason) == (code, code.public)
    assert SECRET not in str(reply) + str(reply.metadata)
    assert SECRET in caplog.text  # the site itself is told
    assert bench.accept(reply) == []
    assert SECRET not in str(bench.notices) and code.public in str(bench.notices)


@pytest.mark.parametrize("kind", ["query", "evaluate"])
def test_no_other_answer_quotes_data_either(
    domains: list[Node], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    bench = Bench(domains, "kd3a")
    resident.cache_clear()

    def fail(*args: object, **kwargs: object) -> None:
        raise ValueError(SECRET)

    for name in ("describe", "load_target", "load_evaluation"):
        monkeypatch.setattr(f"fedda.data.{name}", fail)
    bench.begin()
    request = bench.strategy.request(
        bench.roster.target, {"model": bench.strategy.model}, kind=kind
    )
    reply = bench.grid.call(request)
    resident.cache_clear()
    assert reply.error.code == Code.INTERNAL
    assert SECRET not in str(reply)


@pytest.mark.parametrize(
    "content",
    [
        {"features": ConfigRecord({"x": 1})},
        {"task": ConfigRecord({"method": "kd3a"})},
        {"task": MetricRecord({"x": 1}), "step": ConfigRecord({"round": 1})},
    ],
)
def test_a_site_refuses_a_request_that_is_none(
    domains: list[Node], content: dict[str, Any]
) -> None:
    bench = Bench(domains, "kd3a")
    reply = bench.grid.call(Message(RecordDict(content), 1, "train", ttl=60))
    assert reply.error.code == Code.WIRE


def test_a_site_refuses_settings_and_arrays_it_does_not_know(domains: list[Node]) -> None:
    bench = Bench(domains, "kd3a")
    node = bench.roster.sources[0]
    bench.begin()
    strategy = bench.strategy
    asked = strategy.request(node, {"model": strategy.model, "teacher/bert": strategy.model})
    assert bench.grid.call(asked).error.code == Code.WIRE  # teachers are for targets
    other = wire.pack({"w": np.zeros(3, np.float32)}, Kind.MODEL)
    assert bench.grid.call(strategy.request(node, {"model": other})).error.code == Code.WIRE
    unknown = strategy.request(node, {"model": strategy.model})
    unknown.content["task"]["run.dir"] = "/"  # type: ignore[index]
    assert bench.grid.call(unknown).error.code == Code.CONFIG
    late = strategy.request(node, {"model": strategy.model})
    late.metadata.__dict__["_created_at"] -= 3600
    assert bench.grid.call(late).error.code == Code.EXPIRED


@roles
@pytest.mark.parametrize("number", [{"label-0": 1.0}, {"focus/anna": 0.5}, {"stage": "2"}])
def test_a_site_refuses_a_request_with_numbers_that_are_not_listed(
    domains: list[Node], method: str, role: str, number: dict[str, Any]
) -> None:
    bench = Bench(domains, method)
    request = train_request(bench, role)
    for name, value in number.items():
        request.content["step"][name] = value  # type: ignore[index]
    assert bench.grid.call(request).error.code == Code.WIRE


def test_counts_and_weights_of_other_sites_are_for_targets(domains: list[Node]) -> None:
    bench = Bench(domains, "kd3a")
    bench.begin()
    for kind, node in (("train", bench.roster.sources[0]), ("evaluate", bench.roster.target)):
        told = {"examples/bert": 30.0}
        request = bench.strategy.request(node, {"model": bench.strategy.model}, told, kind=kind)
        assert bench.grid.call(request).error.code == Code.WIRE


def test_the_target_has_no_part_in_training_where_only_sources_train(domains: list[Node]) -> None:
    bench = Bench(domains, "fedavg")
    bench.begin()
    request = bench.strategy.request(bench.roster.target, {"model": bench.strategy.model})
    assert bench.grid.call(request).error.code == Code.WIRE


# ---- the server refuses to accept --------------------------------------------------------------


def plain_arrays(request: Message, reply: Message) -> Message:
    arrays = ArrayRecord({"model": Array(np.ones(3, np.float32))})
    text = ConfigRecord({"model": "[]"})
    metrics = MetricRecord({"loss": 1.0})
    content = {"arrays": arrays, "manifests": text, "metrics": metrics}
    return Message(RecordDict(content), reply_to=request)  # type: ignore[arg-type]


def array_of(reply: Message) -> tuple[str, Packed]:
    """What a reply is about: the model, or atoms."""
    return next(iter(records.read(reply.content)[0].items()))


def features_instead(request: Message, reply: Message) -> Message:
    name, packed = array_of(reply)
    z = wire.pack(features((40, 16)).unpack(), packed.manifest.kind)
    return changed(request, reply, arrays={name: z})


def gradients_instead(request: Message, reply: Message) -> Message:
    return changed(request, reply, arrays={array_of(reply)[0]: wire.pack({}, Kind.GRADIENT)})


Forged = Callable[[Message, Message], Message]
FORGED: dict[str, tuple[Forged, str]] = {
    "extra array": (
        lambda q, r: changed(q, r, arrays={"features": features((40, 16))}),
        "no array 'features'",
    ),
    "features as the model": (
        features_instead,
        r"'(model|atoms)' is not this run's (model|atoms)",
    ),
    "other kind": (
        gradients_instead,
        r"'(model|atoms)' is of kind gradient",
    ),
    "no array": (
        lambda q, r: changed(q, r, without=[array_of(r)[0]]),
        r"sent no (model|atoms)",
    ),
    "no steps": (lambda q, r: changed(q, r, without=["steps"]), "sent no steps"),
    "per-sample list": (
        lambda q, r: changed(q, r, numbers={"steps": [0.25] * 40}),
        "'steps' must be a single number",
    ),
    "unlisted number": (
        lambda q, r: changed(q, r, numbers={"label-0": 1.0}),
        "no number 'label-0'",
    ),
    "many numbers": (
        lambda q, r: changed(q, r, numbers={f"focus/{i}": 1.0 for i in range(40)}),
        "focus/",
    ),
    "nan": (
        lambda q, r: changed(q, r, numbers={"steps": float("nan")}),
        "steps from .* not finite",
    ),
    "plain arrays": (plain_arrays, "is serialised as 'numpy.ndarray'"),
    "other records": (lambda q, r: raw(q, fitres=ConfigRecord({"x": 1})), "record 'fitres'"),
    "no records": (lambda q, r: raw(q), r"tables \[\]"),
    "offer": (
        lambda q, r: raw(q, offer=ConfigRecord({"name": "x"}), metrics=MetricRecord({"loss": 1})),
        "sent tables",
    ),
}


@roles
@pytest.mark.parametrize("case", FORGED)
def test_the_server_refuses_what_is_not_listed(
    domains: list[Node], method: str, role: Role, case: str
) -> None:
    forge, message = FORGED[case]
    bench = Bench(domains, method)
    if case in ("no model", "no array") and not bench.strategy.contract.leaves[role].arrays:
        pytest.skip("a reply without one is as it should be")
    request = train_request(bench, role)
    forged = forge(request, bench.call(request))
    assert list(bench.strategy.accept([forged], needs={"steps"})) == []
    name = "anna" if role == "source" else "town"
    refused = [text for what, site, text in bench.notices if (what, site) == ("refused", name)]
    assert len(refused) == 1
    assert re.search(message, refused[0])
    Ledger().count(forged, 1, role, "from")  # counting what came never fails


def test_replies_that_nobody_asked_for_are_dropped(domains: list[Node]) -> None:
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


def test_a_number_about_no_site_of_the_run_is_refused(domains: list[Node]) -> None:
    bench = Bench(domains, "kd3a")
    request, *_ = bench.begin()
    reply = changed(request, bench.grid.call(request), numbers={"focus/sample-42": 1.0})
    notices: list[str] = []
    listed = frozenset({"loss", "steps", "seconds", "focus/*"})
    bench.strategy.contract = wire.Contract({}, {"source": wire.Rule(MODEL, listed)})
    bench.strategy.notice = lambda what, site, text: notices.append(text)
    assert not bench.accept(reply)
    assert "about no site here" in notices[0]


@pytest.mark.parametrize("code", [int(Code.DATA), 2, 31337])
def test_an_errors_text_is_ours_whatever_came_with_it(domains: list[Node], code: int) -> None:
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


def test_a_site_trains_no_round_on_fewer_images_than_it_allows(domains: list[Node]) -> None:
    """The server asks for a quarter of an epoch; one site wants at least 16 of its 40 images."""
    nodes = [n | {"min-images": 16} if n["name"] == "anna" else n for n in domains]
    bench = Bench(nodes, "fedavg", train__rounds_per_epoch=4.0)
    bench.round()
    assert [n[:2] for n in bench.notices] == [("failed", "anna")]
    assert bench.notices[0][2] == Code.CONFIG.public
    assert set(bench.strategy.weights) == {"bert", "carl"}


@pytest.mark.parametrize("number", [0, -1, 3, 1.5])
def test_a_request_for_no_round_of_the_run_is_refused(domains: list[Node], number: float) -> None:
    bench = Bench(domains, "fedavg")
    bench.begin()
    node = bench.roster.sources[0]
    request = bench.strategy.request(node, {"model": bench.strategy.model}, {"round": number})
    assert bench.grid.call(request).error.code == Code.WIRE
