"""FedBN: a source trains from the others' mean, but from its own BatchNorm layers."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedda.wire.packing import Arrays
from tests.local_grid import SOURCES, Bench, Node, sent_by
from tests.test_plugins import Install, install

pytestmark = pytest.mark.usefixtures("fresh_sites")

PAGE = Path(__file__).parents[1] / "docs" / "first-method.md"
__all__ = ["install"]  # a fixture

CNN = {"model__name": "digit-cnn", "model__hidden": "", "train__lr": 0.01}


def norms(model: Arrays) -> set[str]:
    """The entries of the layers that have running statistics."""
    layers = {n.removesuffix("running_mean") for n in model if n.endswith("running_mean")}
    return {n for n in model if any(n.startswith(layer) for layer in layers)}


@pytest.mark.parametrize("settings", [{}, CNN], ids=["mlp", "cnn"])
def test_a_source_trains_as_fedavgs_from_the_mean_with_its_own_batchnorm(
    domains: list[Node], settings: dict[str, Any]
) -> None:
    """Algorithm 1, line by line: FedAvg's source is the twin, sent what this one begins with."""
    bench = Bench(domains, "fedbn", **settings)
    mean, _ = bench.round(1)
    first = {s: sent_by(bench, s) for s in SOURCES}
    kept = norms(mean)
    assert kept and not kept >= set(mean)
    bench.round(2)
    for name in SOURCES:
        plain = Bench(domains, "fedavg", **settings)
        plain.model = {n: first[name][n] if n in kept else a for n, a in mean.items()}
        plain.round(2)
        wanted, found = sent_by(plain, name), sent_by(bench, name)
        assert {n: a.tobytes() for n, a in found.items()} == {
            n: a.tobytes() for n, a in wanted.items()
        }


def test_the_target_has_the_sources_mean_weights_and_its_own_statistics(
    domains: list[Node],
) -> None:
    bench = Bench(domains, "fedbn", fedbn__weighting="uniform")
    model, _ = bench.round()
    sites = [sent_by(bench, s) for s in SOURCES]
    for name in (n for n in model if not n.endswith("num_batches_tracked")):
        mean = np.mean([site[name] for site in sites], axis=0)
        same = np.allclose(model[name], mean, rtol=1e-5, atol=1e-6)
        assert same != ("running_" in name), name


def test_the_first_round_is_fedavgs(domains: list[Node]) -> None:
    bench, plain = Bench(domains, "fedbn"), Bench(domains, "fedavg")
    bench.round()
    plain.round()
    for name in SOURCES:
        ours, theirs = sent_by(bench, name), sent_by(plain, name)
        assert all(ours[n].tobytes() == theirs[n].tobytes() for n in theirs)


def test_the_page_that_builds_it_from_nothing_computes_the_same(
    domains: list[Node], install: Install
) -> None:
    """The text's own code, installed as a package, against fedda's, in two rounds."""
    blocks = re.findall(
        r"```python\n# fedda_norms/(\w+)\.py\n(.*?)```", PAGE.read_text(), re.DOTALL
    )
    code = dict(blocks)
    assert set(code) == {"algorithm", "strategy", "client"}
    lines = [line for text in code.values() for line in text.splitlines() if line.strip()]
    assert len(lines) <= 90
    install("fedda_norms", {"methods": "norms = fedda_norms"}, {"__init__": "", **code})
    page, own = Bench(domains, "norms", **CNN), Bench(domains, "fedbn", **CNN)
    for server_round in (1, 2):
        (found, told), (wanted, said) = page.round(server_round), own.round(server_round)
        assert {n: a.tobytes() for n, a in found.items()} == {
            n: a.tobytes() for n, a in wanted.items()
        }
        assert told == said
