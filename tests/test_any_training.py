"""Whatever a server's settings make of a round, nothing that leaves a site shows a single image.

The weights are honest ones: drawn from the seed, or trained. What a made model can do is in
test_crafted.py.
"""

import math
from collections import Counter
from random import Random
from typing import Any

import annotated_types as at
import numpy as np
import pytest
import torch

from fedda import plugins, records
from fedda.config import PrivacyConfig, TrainConfig
from fedda.config.sections import Section
from fedda.errors import Code, FeddaError
from tests.asking import closest
from tests.local_grid import SIDE, Bench, Node

LEAST = 16  # images of a block and of a step
METHODS = sorted(plugins.own_methods())
WORK = {"rounds-per-epoch", "epochs", "views", "batch-size", "steps", "critic-steps", "pretrain"}
HEAVY = WORK | {"samples", "fixed-points", "distil", "frequencies", "gain-images"}
Ranges = dict[str, tuple[float, float, type]]

counts = pytest.mark.parametrize(
    "count",
    [
        pytest.param(12, marks=pytest.mark.slow, id="few"),
        pytest.param(
            60, marks=pytest.mark.nightly("clients", "fedda/train.py", "fedda/config"), id="some"
        ),
        pytest.param(300, marks=pytest.mark.nightly("tests/test_any_training.py"), id="many"),
    ],
)


def ranges(section: type[Section], prefix: str) -> Ranges:
    """The numbers that a server may set, by key: least, most and type."""
    found: Ranges = {}
    for name, field in section.model_fields.items():
        key, kind = f"{prefix}.{field.alias or name}", field.annotation
        if isinstance(kind, type) and issubclass(kind, Section):
            found |= ranges(kind, key)
        elif kind in (int, float):
            least = [m.ge if isinstance(m, at.Ge) else m.gt for m in field.metadata
                     if isinstance(m, at.Ge | at.Gt)]  # fmt: skip
            most = [m.le if isinstance(m, at.Le) else m.lt for m in field.metadata
                    if isinstance(m, at.Le | at.Lt)]  # fmt: skip
            assert least and most, f"{key} has no range, so a server may set it to anything"
            found[key] = float(least[0]), float(most[0]), kind  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize("method", plugins.own_methods())
def test_every_number_that_a_server_may_set_has_a_range(method: str) -> None:
    assert ranges(plugins.method(method).config, method) is not None
    assert len(ranges(TrainConfig, "train")) > 9 and ranges(PrivacyConfig, "privacy")


def drawn(draw: Random, method: str) -> dict[str, Any]:
    """Some settings at the ends of their ranges or between, and some choices."""
    known = ranges(TrainConfig, "train") | ranges(plugins.method(method).config, method)
    known = {k: v for k, v in known.items() if k.split(".")[-1] not in HEAVY}
    chosen: dict[str, Any] = {}
    for key in draw.sample(sorted(known), min(len(known), draw.choice((1, 2, 4, 8)))):
        least, most, kind = known[key]
        low = max(least, min(1e-6, most))
        between = math.exp(draw.uniform(math.log(low), math.log(most)))
        chosen[key] = kind(draw.choice((least, most, between, between)))
    chosen["train.batch-size"] = draw.choice((2, LEAST - 1, LEAST, LEAST, 20, 1000))
    chosen["train.optimizer"] = draw.choice(("sgd", "adam", "adadelta"))
    chosen["train.sampler"] = draw.choice(("shuffle", "balanced"))
    chosen["train.rounds-per-epoch"] = draw.choice((0.5, 1.0, 2.0))
    chosen["model.name"] = draw.choice(("identity", "mlp", "mlp"))
    return chosen | {"model.hidden": "16" if chosen["model.name"] == "mlp" else ""}


def images_of(node: Node) -> torch.Tensor:
    with np.load(node["data"]) as file:
        return torch.from_numpy(file["x_train"]).double().flatten(1) / 255


def rows(values: np.ndarray) -> torch.Tensor:
    """What may be rows over an image's values -> (n, d)."""
    flat, d = torch.from_numpy(np.array(values, np.float64)).flatten(), SIDE * SIDE
    return flat[: len(flat) // d * d].reshape(-1, d)


@counts
@pytest.mark.parametrize("method", METHODS)
def test_no_reply_shows_an_image(
    domains: list[Node], fresh_sites: None, method: str, count: int
) -> None:
    nodes = [n | {"min-images": LEAST, "min-examples": 2 * LEAST} for n in domains]
    x, seen, draw = torch.cat([images_of(n) for n in nodes]), Counter[str](), Random(method)
    for _ in range(count):
        settings, left = drawn(draw, method), []
        try:
            bench = Bench(nodes, method, **settings)
            sent = dict(bench.model)
            bench.round()
        except FeddaError:
            seen["refused"] += 1
            continue
        seen["answered"] += 1
        for reply in bench.grid.replies:
            assert reply.has_content() or reply.error.code != Code.INTERNAL, settings
            for packed in records.read(reply.content)[0].values() if reply.has_content() else ():
                for name, after in packed.unpack().items():
                    before = sent.get(name)
                    known = before is not None and before.shape == after.shape
                    left += [after, after - before] if known else [after]
        close = max((closest(rows(v), x) for v in left if v.size >= SIDE * SIDE), default=0.0)
        assert close < 0.999, (settings, close)
    assert seen["answered"], seen
