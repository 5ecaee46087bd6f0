"""Nothing that the contract does not list leaves a site: many random replies, and an own judgement.

The judgement (tests/listed.py) is made from the printed table of `fedda methods --wire` and from
the layouts of honest replies. The check on the way out must agree with it in every case.
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import pytest
from flwr.app import Message

from clients.site import boundary
from clients.site.memory import Site, resident
from clients.site.request import Request
from fedda import plugins, records
from fedda.errors import WireError
from fedda.wire import packing
from fedda.wire.packing import Arrays, Kind, Packed
from tests.fuzzing import odd
from tests.listed import Cell, Layout, cells
from tests.local_grid import Bench, Node

EACH = 1100  # random replies per method: 11,000 in all
SITES = 4
NAMES = ("anna", "bert", "carl", "town", "x" * 64, "x" * 65, "a/b", "", ".", "ä", "\n", "0.25,0.5")
KINDS = tuple(Kind)


@dataclass
class Sample:
    """A request to a site with its honest reply."""

    asked: Message
    request: Request
    site: Site
    cell: Cell
    arrays: dict[str, Packed]
    numbers: dict[str, Any]


def samples(bench: Bench) -> Iterator[Sample]:
    """Run a round and its test -> one request of each part and hop."""
    bench.round()
    answers = {m.metadata.reply_to_message_id: m for m in bench.grid.replies}
    test = bench.strategy.test_request()
    answers[test.metadata.message_id] = bench.grid.call(test)
    seen = set()
    for asked in [*bench.grid.requests, test]:
        if "step" not in asked.content:
            continue
        _, tables = records.read(asked.content)
        request = Request.make(tables["task"], tables["step"], records.read(asked.content)[0])
        key = (request.part, request.hop)
        if key in seen:
            continue
        seen.add(key)
        arrays, replied = records.read(answers[asked.metadata.message_id].content)
        _, leaves = cells(request.task.method, request.part, request.stage.phase.name, request.hop)
        site = resident(tuple(sorted(bench.grid.nodes[asked.metadata.dst_node_id].items())))
        yield Sample(asked, request, site, leaves, dict(arrays), replied["metrics"])


def layouts_of(found: list[Sample]) -> dict[str, Layout]:
    """The layouts of all arrays that honest sites send, by name before a `/`."""
    return {
        name.split("/")[0]: [(e.name, e.dtype, e.shape) for e in packed.manifest.entries]
        for sample in found
        for name, packed in sample.arrays.items()
    }


def other_arrays(draw: Random, arrays: Arrays) -> Arrays:
    """Change one entry of a packed array: its name, type, shape or place."""
    if not arrays:
        return {"features": np.zeros((40, 16), np.float32)}
    name = draw.choice(list(arrays))
    array, rest = arrays[name], {n: a for n, a in arrays.items() if n != name}
    match draw.randrange(7):
        case 0:
            return rest
        case 1:
            return {**rest, name: array}  # at the end: the same only for the last
        case 2:
            return arrays | {name: array.astype(draw.choice(sorted(packing.DTYPES)))}
        case 3:
            return arrays | {name: array.reshape(draw.choice([(-1,), (1, *array.shape)]))}
        case 4:
            return arrays | {name: np.zeros(draw.choice([(0,), (40, 16), (1,), ()]), array.dtype)}
        case 5:
            return arrays | {draw.choice(["features", "y", name + "2", ""]): array}
        case _:
            return {draw.choice([n, n + " ", n.upper()]): a for n, a in arrays.items()}


def other(
    draw: Random, arrays: dict[str, Packed], numbers: dict[str, Any], pool: dict[str, Packed]
) -> tuple[dict[str, Packed], dict[str, Any]]:
    """Change a reply in one place; `pool` has all arrays of the method's honest replies."""
    arrays, numbers = dict(arrays), dict(numbers)
    roots = [*pool, *numbers, "teacher", "gradient", "focus", "weight", "label-0", "features"]
    root = draw.choice(roots).split("/")[0]
    name = draw.choice([root, f"{root}/{draw.choice(NAMES)}"])
    match draw.randrange(8):
        case 0 if arrays:
            del arrays[draw.choice(list(arrays))]
        case 1 if pool:
            arrays[name] = draw.choice(list(pool.values()))
        case 2 if arrays:
            key = draw.choice(list(arrays))
            packed = arrays[key]
            changed = other_arrays(draw, packed.unpack())
            arrays[key] = packing.pack(changed, packed.manifest.kind)
        case 3 if arrays:
            key = draw.choice(list(arrays))
            arrays[key] = packing.pack(arrays[key].unpack(), draw.choice(KINDS))
        case 4:
            numbers[name] = draw.choice([0.5, 3, odd(draw)])
        case 5:
            wrong = [True, "0.5", np.float64(1.0), np.int64(1), [0.1] * 40, None, odd(draw)]
            numbers[draw.choice([*numbers, name])] = draw.choice(wrong)
        case 6:
            numbers |= {f"{root}/{draw.choice('abcdefgh')}": 0.5 for _ in range(draw.randint(1, 9))}
        case 7 if numbers:
            del numbers[draw.choice(list(numbers))]
    return arrays, numbers


def passes(sample: Sample, arrays: Mapping[str, Packed], numbers: Mapping[str, Any]) -> bool:
    """Whether the check on the way out lets a reply leave."""
    rule, site = sample.request.contract.leaves, sample.site
    try:
        boundary._check(site, sample.request, rule, arrays, numbers, "out")  # pyright: ignore
    except WireError as error:
        assert "\n" not in str(error)
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize("method", plugins.methods())
def test_only_listed_replies_pass(domains: list[Node], fresh_sites: None, method: str) -> None:
    found = list(samples(Bench(domains, method)))
    layouts, draw = layouts_of(found), Random(method)
    pool = {name: packed for sample in found for name, packed in sample.arrays.items()}
    seen: Counter[bool] = Counter()
    for sample in found:
        assert sample.cell.allows(sample.arrays, sample.numbers, layouts, SITES)
        assert passes(sample, sample.arrays, sample.numbers)
    for _ in range(EACH):
        sample = draw.choice(found)
        arrays, numbers = sample.arrays, sample.numbers
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            arrays, numbers = other(draw, arrays, numbers, pool)
        listed = sample.cell.allows(arrays, numbers, layouts, SITES)
        assert passes(sample, arrays, numbers) == listed, (list(arrays), numbers)
        seen[listed] += 1
    assert seen[False] > EACH / 3 and seen[True] > EACH / 20, seen
