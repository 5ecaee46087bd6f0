"""Spectral norms of layers against full decompositions, and training below a bound."""

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F

from fedda import models
from fedda.maths.spectral import Spectra, bounded_layers
from fedda.train import batches, generator, round_images, seed_for
from tests.adversarial_runs import images
from tests.local_grid import SIDE, Bench, Node, sent_by
from tests.reference import windows

pytestmark = pytest.mark.usefixtures("fresh_sites")


def dense(layer: nn.Module, shape: tuple[int, ...]) -> Tensor:
    """The matrix of a layer without its bias, one column for each input of length 1."""
    size = torch.Size(shape).numel()
    at_zero = layer(torch.zeros(1, *shape))
    columns = [(layer(e.view(1, *shape)) - at_zero).flatten() for e in torch.eye(size)]
    return torch.stack(columns, dim=1).detach()


@torch.no_grad()
def norms_of(spectra: Spectra, iterations: int = 1) -> dict[str, float]:
    """The norm of each layer, by name."""
    return {n: float(norm) for n, _, norm in spectra._each(iterations)}


LAYERS = {
    "linear": (nn.Linear(7, 5), (7,)),
    "convolution": (nn.Conv2d(2, 3, 3, padding=1), (2, 6, 6)),
    "strides": (nn.Conv2d(2, 4, 3, stride=2), (2, 7, 7)),
    "dilated, in groups": (nn.Conv2d(4, 4, 3, dilation=2, groups=2, padding=2), (4, 5, 5)),
    "reflected edges": (nn.Conv2d(1, 2, 3, padding=1, padding_mode="reflect"), (1, 5, 5)),
}


@pytest.mark.parametrize("name", LAYERS)
def test_norms_are_those_of_a_full_decomposition(name: str) -> None:
    layer, shape = LAYERS[name]
    torch.manual_seed(0)  # iteration is slow where the two largest values are nearly equal
    layer.reset_parameters()
    network = nn.Sequential(layer)
    spectra = Spectra(network, generator("v"))
    network(torch.randn(2, *shape))
    (norm,) = norms_of(spectra, 300).values()
    assert norm == pytest.approx(float(torch.linalg.svdvals(dense(layer, shape))[0]), rel=1e-3)


def test_a_batchnorm_layer_multiplies_by_gamma_over_s() -> None:
    """By hand: 3 / sqrt(4) = 1.5, |-2| / sqrt(1) = 2, and no other channel is above that."""
    layer = nn.BatchNorm1d(3, eps=0.0).eval()
    layer.weight.data = torch.tensor([3.0, -2.0, 1.0])
    layer.running_var = torch.tensor([4.0, 1.0, 1.0])
    network = nn.Sequential(layer)
    spectra = Spectra(network, generator("v"))
    assert norms_of(spectra) == {"0": 2.0}
    assert float(torch.linalg.svdvals(dense(layer, (3,)))[0]) == pytest.approx(2.0)
    spectra.project(0.5)
    torch.testing.assert_close(layer.weight.data, torch.tensor([0.75, -0.5, 0.25]))


def test_a_projection_shortens_long_layers_and_leaves_short_ones() -> None:
    """Diagonal matrices: norms 4 and 0.5 become 1 and 0.5, and biases stay."""
    network = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    first, second = network[0], network[1]
    assert isinstance(first, nn.Linear) and isinstance(second, nn.Linear)
    first.weight.data = torch.diag(torch.tensor([4.0, 2.0]))
    second.weight.data = torch.diag(torch.tensor([0.5, 0.1]))
    before = first.bias.clone()
    Spectra(network, generator("v")).project(1.0)
    torch.testing.assert_close(first.weight.data, torch.diag(torch.tensor([1.0, 0.5])))
    torch.testing.assert_close(second.weight.data, torch.diag(torch.tensor([0.5, 0.1])))
    assert torch.equal(first.bias, before)


def test_one_iteration_with_a_kept_vector_follows_weights_that_change() -> None:
    """Two iterations from a new vector give less; that would let layers grow above the bound."""
    layer = nn.Linear(60, 60)
    spectra = Spectra(nn.Sequential(layer), generator("v"))
    norms_of(spectra, 500)
    draws, kept, fresh = generator("steps"), [], []
    for _ in range(20):
        layer.weight.data += 1e-3 * torch.randn(60, 60, generator=draws)
        exact = float(torch.linalg.svdvals(layer.weight.detach())[0])
        kept.append(norms_of(spectra, 1)["0"] / exact)
        v = torch.randn(60, generator=draws)
        for _ in range(2):
            v = F.normalize(layer.weight.detach().T @ (layer.weight.detach() @ v), dim=0)
        fresh.append(float((layer.weight.detach() @ v).norm()) / exact)
    assert min(kept) > 0.995 and max(kept) < 1.0001
    assert sum(fresh) / 20 < 0.97


def test_every_layer_of_a_network_stays_below_the_bound(domains: list[Node]) -> None:
    """digit-cnn has convolutions, BatchNorm in one and two dimensions, and linear layers."""
    bench = Bench(
        domains,
        "fedavg",
        model__name="digit-cnn",
        model__hidden="",
        train__lipschitz=0.8,
        wait__train=300.0,
    )
    for server_round in (1, 2):
        bench.round(server_round)
    network = models.build(bench.task.model, (1, SIDE, SIDE), bench.task.classes, seed=0)
    network.load_state_dict({n: torch.tensor(a) for n, a in sent_by(bench, "anna").items()})
    spectra = Spectra(network.eval(), generator("v"))
    network(torch.rand(2, 1, SIDE, SIDE))
    norms = norms_of(spectra, 200)
    assert len(norms) == len([*bounded_layers(network)]) == 7
    assert max(norms.values()) < 0.8 * 1.02
    assert sum(norm > 0.79 for norm in norms.values()) > 3  # it binds


def test_a_site_trains_as_a_plain_loop_that_projects_by_full_decompositions(
    domains: list[Node],
) -> None:
    bench = Bench(domains, "fedavg", train__lipschitz=0.5, train__lr=0.05, wait__train=300.0)
    network = models.build(bench.task.model, (1, SIDE, SIDE), bench.task.classes, seed=0)
    bench.round()
    x, y = images(domains[0])
    assert y is not None
    blocks = [torch.tensor(b) for b in windows.blocks(len(x), "anna", 2)]
    optimizer = optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
    for part in batches(round_images(blocks, 1, 1.0, seed_for(0, "anna")), 16):
        loss = F.cross_entropy(network.train()(x[part]), y[part])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for layer in network.modules():
            if isinstance(layer, nn.Linear):
                longest = torch.linalg.svdvals(layer.weight.detach())[0]
                layer.weight.data /= (longest / 0.5).clamp(min=1)
            elif isinstance(layer, nn.BatchNorm1d):
                assert layer.running_var is not None
                slope = layer.weight.detach() / (layer.running_var + layer.eps).sqrt()
                layer.weight.data /= (slope.abs().max() / 0.5).clamp(min=1)
    found = sent_by(bench, "anna")
    for name, value in network.state_dict().items():
        torch.testing.assert_close(torch.tensor(found[name]), value, rtol=0.05, atol=5e-3)
    assert float(torch.linalg.svdvals(network.head.weight.detach())[0]) < 0.501
