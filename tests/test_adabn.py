"""AdaBN: the parameters are FedAvg's, bit for bit; the BatchNorm statistics are the target's."""

from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from torch import Tensor, nn

from fedda import data, models
from fedda.errors import ConfigError, QuorumError
from fedda.maths.moments import merge, moments
from fedda.results.read import title
from fedda.train import batches, generator
from fedda.wire.packing import Arrays
from tests.local_grid import Bench, Node, changed, never, reshaped, run
from tests.reference import adabn as twin

pytestmark = pytest.mark.usefixtures("fresh_sites")


def statistics(model: Arrays) -> Arrays:
    return {n: a for n, a in model.items() if "running_" in n}


def parameters(model: Arrays) -> dict[str, bytes]:
    return {n: a.tobytes() for n, a in model.items() if n.endswith(("weight", "bias"))}


# ---- the formula -------------------------------------------------------------------------------


def test_merged_moments_by_hand() -> None:
    """Batches 0, 2 and 4, 6, 8 have variances 2 and 4, but all five values together have 10."""
    first = moments(torch.tensor([[0.0], [2.0]]))
    second = moments(torch.tensor([[4.0], [6.0], [8.0]]))
    assert (first.n, first.mean.item(), first.variance.item()) == (2, 1.0, 2.0)
    both = merge(first, second)
    assert both.n == 5
    assert (both.mean.item(), both.variance.item()) == pytest.approx((4.0, 10.0))
    assert both.mean.dtype == both.spread.dtype == torch.float64


@pytest.mark.parametrize("shape", [(7, 3), (7, 3, 2, 4)])
@pytest.mark.parametrize("size", [2, 3, 7])
def test_merged_moments_are_those_of_all_values(shape: tuple[int, ...], size: int) -> None:
    x = torch.randn(shape, generator=generator("moments")) * 3 + 100
    found, *others = [moments(part) for part in x.split(size)]
    for other in others:
        found = merge(found, other)
    for channel in range(3):
        mean, variance = twin.moments(x[:, channel].flatten().tolist())
        assert found.mean[channel].item() == pytest.approx(mean, rel=1e-6)
        assert found.variance[channel].item() == pytest.approx(variance, rel=1e-5)


def test_one_batch_gives_the_same_as_pytorchs_cumulative_average() -> None:
    layer, x = nn.BatchNorm1d(4, momentum=None), torch.randn(9, 4, generator=generator("one"))
    layer(x)
    found = moments(x)
    assert layer.running_mean is not None and layer.running_var is not None
    torch.testing.assert_close(found.mean.float(), layer.running_mean)
    torch.testing.assert_close(found.variance.float(), layer.running_var)


# ---- the round ---------------------------------------------------------------------------------


def order_of(bench: Bench, server_round: int, n: int) -> list[Tensor]:
    """Return the target's batches, which its seed determines."""
    draws = generator(bench.task.seed, "town", server_round, "statistics")
    return list(batches([torch.randperm(n, generator=draws)], bench.task.train.batch_size))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"train__batch_size": 47},  # of 48 images: the last one joins the batch before it
        {"train__rounds_per_epoch": 0.5},
        {"train__rounds_per_epoch": 2.5},
        {"model__name": "digit-cnn", "model__hidden": ""},
    ],
    ids=str,
)
def test_statistics_match_the_reference_and_parameters_match_fedavg(
    domains: list[Node], settings: dict[str, Any]
) -> None:
    bench, plain = Bench(domains, "adabn", **settings), Bench(domains, "fedavg", **settings)
    x = data.load_target(domains[-1]["data"]).x.float() / 255
    for server_round in (1,) if "model__name" in settings else (1, 2):
        model, numbers = bench.round(server_round)
        mean, wanted = plain.round(server_round)
        assert bench.notices == []
        assert list(model) == list(mean)
        assert parameters(model) == parameters(mean)
        assert (numbers, bench.strategy.weights) == (wanted, plain.strategy.weights)

        network = models.blank(bench.task.model, bench.task.dims, bench.task.classes)
        models.load_arrays(network, mean)
        parts = order_of(bench, server_round, len(x))
        assert sorted(torch.cat(parts).tolist()) == list(range(48))  # each image once
        expected = twin.statistics(network, [x[part] for part in parts])
        assert statistics(model).keys() == expected.keys()
        for name, array in expected.items():
            np.testing.assert_allclose(model[name], array.numpy(), rtol=2e-5, atol=1e-6)
            assert not np.allclose(model[name], mean[name], rtol=0.05)
        counters = [n for n in model if n.endswith("num_batches_tracked")]
        assert counters and all(model[n] == mean[n] for n in counters)


def test_parameters_match_fedavg_with_half_precision_on_the_wire(domains: list[Node]) -> None:
    found = Bench(domains, "adabn", wire__dtype="float16").round()[0]
    wanted = Bench(domains, "fedavg", wire__dtype="float16").round()[0]
    assert parameters(found) == parameters(wanted)
    assert any(np.any(a != a.astype(np.float16)) for a in wanted.values() if a.dtype.kind == "f")


def test_parameters_that_the_target_changes_are_ignored(domains: list[Node]) -> None:
    def shift(model: Arrays) -> Arrays:
        return model | {n: a + 0.1 for n, a in model.items() if n.endswith(("weight", "bias"))}

    bench = Bench(domains, "adabn", {"town": reshaped(shift)})
    found = bench.round()[0]
    assert bench.notices == []  # within guard.max-change; only the strategy ignores the change
    wanted = Bench(domains, "adabn").round()[0]
    assert {n: a.tobytes() for n, a in found.items()} == {n: a.tobytes() for n, a in wanted.items()}


def test_a_whole_run_with_fedavg_as_baseline(domains: list[Node], runs: dict[str, str]) -> None:
    results, _ = run(domains, runs | {"method": "adabn", "run.baseline": "fedavg"})
    assert results["events"] == []
    (found,), (plain,) = results["trainings"]["adabn"], results["trainings"]["fedavg"]
    for ours, theirs in zip(found["rounds"], plain["rounds"], strict=True):
        assert ours["loss"] == theirs["loss"]  # the sources learn from the same parameters
        assert ours["infomax"] != theirs["infomax"]  # the target tests another model
    assert title(results, "adabn") == "AdaBN"


# ---- what goes wrong ---------------------------------------------------------------------------


def test_a_model_without_batchnorm_is_refused_before_anything_is_sent(domains: list[Node]) -> None:
    settings = {"input__size": 16, "model__name": "lenet", "model__hidden": ""}
    bench = Bench(domains, "adabn", **settings)
    with pytest.raises(ConfigError, match=r"lenet, which has no BatchNorm layer.*digit-cnn"):
        bench.begin()
    assert not any(c.kind == "train" for c in bench.grid.crossed)


def test_the_target_refuses_a_model_without_batchnorm_too(domains: list[Node]) -> None:
    settings = {"input__size": 16, "model__name": "lenet", "model__hidden": ""}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("strategies.adabn.adabn.check_batchnorm", lambda entries, model: None)
        bench = Bench(domains, "adabn", **settings)
        request = bench.begin()[0]
    sent = {"model": bench.strategy.model}
    asked = bench.strategy.request(bench.roster.target, sent, hop="estimate")
    reply = bench.grid.call(asked)
    assert request and reply.has_error()
    assert "settings" in str(reply.error.reason)


def test_statistics_over_fewer_images_than_the_site_allows_are_not_sent(
    domains: list[Node],
) -> None:
    nodes = [n | {"min-images": 49} if n["name"] == "town" else n for n in domains]
    bench = Bench(nodes, "adabn")
    with pytest.raises(QuorumError, match="town"):
        bench.round()
    assert [n[:2] for n in bench.notices] == [("failed", "town")]


def test_a_round_whose_reply_is_refused_fails(domains: list[Node]) -> None:
    def spoil(model: Arrays) -> Arrays:
        name = next(n for n in model if n.endswith("running_var"))
        model[name][0] = -1
        return model

    def boast(request: Message, reply: Message) -> list[Message]:
        return [changed(request, reply, numbers={"kept": 1.0})]

    for script, text in ((reshaped(spoil), "negative variance"), (boast, "no number 'kept'")):
        bench = Bench(domains, "adabn", {"town": script})
        with pytest.raises(QuorumError):
            bench.round()
        assert text in {n[1]: n[2] for n in bench.notices}["town"]


def test_a_round_with_too_few_sources_fails(domains: list[Node]) -> None:
    quorum = {"wait__min_sources": 3, "wait__train": 0.3}
    bench = Bench(domains, "adabn", {"anna": never}, **quorum)
    with pytest.raises(QuorumError, match="min-sources"):
        bench.round()
    asked = [c for c in bench.grid.crossed if (c.way, c.role, c.kind) == ("to", "target", "train")]
    assert asked == []  # without a mean, the target gets no request
