"""Malformed messages to a site, to the server and to the exchange: each is refused, none does harm.

Everything is drawn from seeded generators. Malformed files are in test_fuzz.py.
"""

import contextlib
import json
from collections import Counter
from random import Random
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict

from fedda import records
from fedda.errors import Code
from fedda.exchange import Group, frames
from fedda.exchange.host import RemoteSession
from fedda.exchange.meeting import Meeting
from fedda.lane.lane_host import LaneHost
from tests.fuzzing import mutated, odd, peak
from tests.listed import cells, fits
from tests.local_grid import Bench, Node
from tests.sockets import FOLDER

ROOM = 200  # megabytes that a whole test may take
# How many messages are drawn.
counts = pytest.mark.parametrize(
    "count",
    [
        pytest.param(60, marks=pytest.mark.slow, id="few"),
        pytest.param(
            400,
            marks=pytest.mark.nightly(
                "clients/node", "clients/shared", "clients/site", "fedda/wire", "strategies"
            ),
            id="many",
        ),
    ],
)

# ---- the exchange --------------------------------------------------------------------------------

SIZE, SYNCS = 6, 3
SECRET = 1234.5
GROUPS = [Group("pair", SIZE, SYNCS, ("a", "b")), Group("others", SIZE, SYNCS, ("b",))]


def frame(draw: Random) -> bytes:
    """Any frame of a site, often nearly what is due."""
    values = np.full(draw.choice([SIZE, SIZE, SIZE, 0, SIZE + 1, 5000]), SECRET, np.float32)
    if values.size and draw.random() < 0.2:
        values[draw.randrange(values.size)] = draw.choice([np.nan, np.inf, -np.inf])
    group = draw.choice(["pair"] * 4 + ["others", "none", "x" * 300, "a\nb", ""])
    index = draw.choice([0, 0, 0, 1, 2, SYNCS, 2**40, 2**64 - 1])
    examples = draw.choice([256, 256, 0, 1, 2**64 - 1])
    kinds = [frames.gradient(group, index, examples, values)] * 4
    kinds += [frames.LEAVE, b"", frames.total("pair", index, values)]
    data = draw.choice(kinds)
    return mutated(draw, data) if draw.random() < 0.3 else data


def test_any_sequence_of_frames_ends_a_session_in_one_sentence_or_not_at_all() -> None:
    draw, seen = Random("sessions"), Counter[str]()
    with peak(ROOM), contextlib.closing(LaneHost(FOLDER)) as host:
        for _ in range(400):
            texts: list[str] = []
            meeting = Meeting(
                GROUPS, join=60, wait=60, rejoin=0, notice=lambda *n, t=texts: t.append(n[2])
            )
            with RemoteSession(meeting, host) as session:
                for _ in range(draw.randint(1, 6)):
                    session._take(draw.choice(["a", "a", "b"]), frame(draw))
            assert "failed at the server" not in meeting.ended, meeting.ended
            for text in [*texts, meeting.ended]:
                assert "\n" not in text and str(SECRET) not in text and len(text) < 400, text
            seen["ended" if meeting.ended else "open"] += 1
    assert seen["ended"] > 200, seen


# ---- requests to a site --------------------------------------------------------------------------

METHODS = ("fedavg", "kd3a", "dils", "feddadil", "fdan")
WORK = {"rounds-per-epoch", "epochs", "samples", "batch-size", "fixed-points", "distil", "atoms"}


def requests(bench: Bench) -> list[tuple[Message, set[str]]]:
    """Requests of a round and of its test -> each with the patterns of what may come back."""
    bench.round()
    asked = [m for m in bench.grid.requests if "step" in m.content]
    found, seen = [], set()
    for message in [*asked, bench.strategy.test_request()]:
        step = message.content["step"]
        key = (step["part"], step["hop"])
        if key not in seen:
            seen.add(key)
            cell = cells(bench.task.method, str(step["part"]), str(step["phase"]), str(step["hop"]))
            found.append((message, {*cell[1].arrays, *cell[1].numbers}))
    return found


def manifest(draw: Random, text: str) -> str:
    """Another layout of an array."""
    try:
        kind, floats, entries = json.loads(text)
    except ValueError:
        return text  # changed already
    place = draw.randrange(len(entries)) if entries else 0
    match draw.randrange(7):
        case 0:
            kind = draw.choice(["atoms", "gradient", "features", 3, None])
        case 1:
            floats = draw.choice(["float16", "float64", "object", "int64", "f4", None])
        case 2 if entries:
            entries[place][1] = draw.choice(["object", "float64", "<U9", "complex64", "V8", 1])
        case 3 if entries:
            shapes = [[10**10], [2**62, 2**62], [-1], [0], [1.5], "3", [True], [1] * 70]
            entries[place][2] = draw.choice(shapes)
        case 4 if entries:
            entries[place][0] = draw.choice(["", "y", "../w", "a" * 5000, 5, None, entries[0][0]])
        case 5:
            entries = entries * draw.choice([0, 2, 20_000])
        case _:
            return mutated(draw, text.encode()).decode(errors="replace")
    return json.dumps([kind, floats, entries])


def array(draw: Random, given: Array) -> Array:
    """Another array of Flower's: less or more bytes, a claim of 10 GB, or values not finite."""
    match draw.randrange(6):
        case 0:
            return Array(given.dtype, given.shape, given.stype, given.data[: len(given.data) // 2])
        case 1:
            return Array(given.dtype, given.shape, given.stype, given.data + b"\0" * 8)
        case 2:
            return Array("float32", (10**10,), draw.choice([given.stype, "numpy.ndarray"]), b"")
        case 3:
            return Array("object", (1,), "numpy.ndarray", b"\x80\x04cos\nsystem\n.")
        case 4:
            return Array(given.dtype, given.shape, given.stype, b"\xff" * len(given.data))
        case _:
            data = mutated(draw, given.data[:512]) + given.data[512:]
            return Array(given.dtype, given.shape, given.stype, data)


def table(draw: Random, entries: dict[str, Any]) -> dict[str, Any]:
    """Another table: an entry more, less or of another value."""
    key, value = draw.choice(list(entries)), odd(draw)
    match draw.randrange(5):
        case 0:
            return {k: v for k, v in entries.items() if k != key}
        case 1:
            more = draw.choice(["x", "options.x.y.z", "run.dir", "step.step", "a.b", "", "."])
            return entries | {more: value}
        case 2:
            numbers = (10**9, -1, 0, 2**62, 10**6)
            whole = [
                k for k, v in entries.items() if type(v) is int and k.split(".")[-1] not in WORK
            ]
            return entries | {draw.choice(whole): draw.choice(numbers)} if whole else entries
        case 3 if "class-names" in entries:
            big = "\n".join(map(str, range(draw.choice([10**5, 10**6]))))
            sizes = {"class-names": big, "shape": "3,9999,9999", "model.hidden": "60000,60000"}
            return entries | dict([draw.choice([*sizes.items()])])
        case _:
            return entries | ({key: value} if key.split(".")[-1] not in WORK else {})


def altered(draw: Random, honest: Message) -> Message:
    """Change a request in one or two places."""
    content: dict[str, Any] = dict(honest.content.items())
    kind = honest.metadata.message_type
    for _ in range(draw.choice((1, 1, 2))):
        tables = [n for n in content if n not in ("arrays", "manifests")]
        name = draw.choice(tables) if tables else "task"
        held = draw.choice([*content["arrays"]]) if content.get("arrays") else ""
        match draw.randrange(9):
            case 0:
                content.pop(draw.choice([*content, name]), None)
            case 1:
                more = draw.choice(["x", "metrics", "offer", "fitins", "a\nb", "exchange"])
                content[more] = draw.choice([ConfigRecord({"x": 1}), MetricRecord({"x": 1.0})])
            case 2 if held:
                text = manifest(draw, str(content.get("manifests", {}).get(held, "")))
                content["manifests"] = ConfigRecord(
                    dict(content.get("manifests", {})) | {held: text}
                )
            case 3 if held:
                more = array(draw, content["arrays"][held])
                content["arrays"] = ArrayRecord(dict(content["arrays"]) | {held: more})
            case 4 if held:
                other = draw.choice(["features", "teacher/x/y", "model\n", "", "discriminator/x"])
                for record, made in (("arrays", ArrayRecord), ("manifests", ConfigRecord)):
                    if held in content.get(record, {}):
                        given = dict(content[record])
                        content[record] = made(given | {other: given[held]})  # type: ignore
            case 5:
                kind = draw.choice(["train", "evaluate", "query", kind])
            case _ if name in content and len(content[name]):
                content[name] = ConfigRecord(table(draw, dict(content[name])))
    return Message(RecordDict(content), honest.metadata.dst_node_id, kind, ttl=60)


@counts
@pytest.mark.parametrize("method", METHODS)
def test_a_site_answers_any_request_with_a_code_or_with_what_is_listed(
    domains: list[Node],
    fresh_sites: None,
    method: str,
    count: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("CRITICAL", logger="fedda.site")
    bench, draw = Bench(domains, method), Random(method)
    honest, seen = requests(bench), Counter[str]()
    offer = set(
        ["role", "name", "examples", "tested", "classes", "shape", "columns", "version", "keys"]
    )
    with peak(ROOM):
        for _ in range(count):
            request, listed = draw.choice(honest)
            sent = altered(draw, request)
            reply = bench.grid.call(sent)
            if reply.has_error():
                code = Code(reply.error.code)
                assert code is not Code.INTERNAL, (sent.metadata.message_type, sent.content)
                assert reply.error.reason == code.public and not reply.has_content()
                seen["refused"] += 1
                if code is Code.LOST:  # another training of the same name has taken the place
                    bench = Bench(domains, method)
                    honest = requests(bench)
                continue
            arrays, tables = records.read(reply.content)
            names = {*arrays, *tables.get("metrics", {})}
            assert all(any(fits(name, p) for p in listed) for name in names), names
            assert set(tables.get("offer", {})) <= offer
            seen["answered"] += 1
    assert seen["refused"] > count / 2 and seen["answered"] > count / 200, seen


# ---- replies to the server -----------------------------------------------------------------------


SILENT = "no reply"


def forged(draw: Random, request: Message, reply: Message) -> Message:
    """Change a reply in one place, as a site with another program could."""
    other = altered(draw, Message(reply.content, reply_to=request))
    return Message(other.content, reply_to=request)


@counts
@pytest.mark.parametrize("method", ["fedavg", "feddadil"])
def test_the_server_refuses_any_forged_reply_in_one_sentence(
    domains: list[Node], fresh_sites: None, method: str, count: int
) -> None:
    bench, draw, seen = Bench(domains, method), Random(f"replies {method}"), Counter[str]()
    request = bench.begin()[0]
    honest = bench.call(request)
    with peak(ROOM):
        for _ in range(count):
            bench.begin()
            (request, *_) = bench.opened
            sent = forged(draw, request, honest)
            before = len(bench.notices)
            taken = bench.accept(sent)
            texts = [text for _, _, text in bench.notices[before:]]
            texts = [text for text in texts if not text.startswith(SILENT)]  # about the other sites
            assert len(taken) + len(texts) == 1, (taken, texts)
            for text in texts:
                assert "\n" not in text and len(text) < 600, text
            for each in taken:
                assert set(each.arrays) == set(records.read(honest.content)[0])
                for packed in each.arrays.values():
                    packed.check_finite("it")
            seen["taken" if taken else "refused"] += 1
    assert seen["refused"] > count / 2 and seen["taken"] > count / 100, seen
