"""Spectral norms of layers, and the projection that keeps them below a bound.

Gouk et al., Machine Learning, 2021, https://arxiv.org/abs/1804.04368: after each step of the
optimizer every layer is projected to operators of a norm of at most lambda.

    W         the weights of a linear layer or a convolution, as a linear operator on its inputs
    |W|       float   its spectral norm, the largest |W x| over inputs with |x| = 1
    v         one input of the layer, |v| = 1; power iteration turns it to where W is largest
    gamma, s  (C,)    BatchNorm's scale and running standard deviation, sqrt(var + eps); as an
                      operator it multiplies by gamma / s, so its norm is max |gamma / s|
    lambda    float   the bound

The constant of a network is at most the product over its layers, if what lies between them (ReLU,
max pooling, dropout in evaluation) has a constant of at most 1. Where branches are added, as in a
residual block, their constants add.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

FIRST = 50  # iterations from a new random vector; from a kept one, one or two suffice

Bounded = nn.Linear | nn.Conv2d | nn.modules.batchnorm._BatchNorm


def bounded_layers(network: nn.Module) -> Iterator[tuple[str, Bounded]]:
    """Layers that have a norm here, by name."""
    for name, layer in network.named_modules():
        affine = isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.affine
        if isinstance(layer, nn.Linear | nn.Conv2d) or affine:
            yield name, layer  # type: ignore[misc]


def spectral_norm(W: Tensor) -> Tensor:
    """The largest singular value of W (m, n), from its smaller Gram matrix -> scalar.

    In float64: once many singular values are at the bound, LAPACK may fail to tell them apart in
    float32.
    """
    V = W.double()
    gram = V @ V.T if len(V) <= V.shape[1] else V.T @ V
    return torch.linalg.eigvalsh(gram)[-1].clamp(min=0).sqrt().to(W.dtype)


class Spectra:
    """The spectral norms of a network's layers, by power iteration with kept vectors.

    Two iterations from a random vector give too small a norm. With the vector of the step before,
    which the weights have hardly left since, one iteration follows the norm.

    Args:
        network: its layers are read, and changed by `project`.
        draws: of the first vectors.
    """

    def __init__(self, network: nn.Module, draws: torch.Generator) -> None:
        self.network = network
        self._draws = draws
        self._shapes: dict[str, tuple[int, ...]] = {}  # of one input (c, h, w), by convolution
        self._v: dict[str, Tensor] = {}
        self._watching = [
            layer.register_forward_pre_hook(self._watch(name))
            for name, layer in bounded_layers(network)
            if isinstance(layer, nn.Conv2d)
        ]

    def close(self) -> None:
        """Watch the network's inputs no longer."""
        for handle in self._watching:
            handle.remove()

    def _watch(self, name: str) -> Any:
        def note(layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
            self._shapes[name] = tuple(inputs[0].shape[1:])

        return note

    @torch.no_grad()
    def project(self, most: float, iterations: int = 1) -> None:
        """Gouk et al., algorithm 1: W <- W / max(1, |W| / lambda), and gamma likewise."""
        for _, layer, norm in self._each(iterations):
            layer.weight.div_((norm / most).clamp(min=1))

    def _each(self, iterations: int) -> Iterator[tuple[str, Bounded, Tensor]]:
        for name, layer in bounded_layers(self.network):
            if isinstance(layer, nn.modules.batchnorm._BatchNorm):
                yield name, layer, _batchnorm(layer)
            elif isinstance(layer, nn.Linear) or name in self._shapes:
                shape = self._shapes.get(name, layer.weight.shape[1:])
                yield name, layer, self._power(name, layer, tuple(shape), iterations)

    def _power(
        self, name: str, layer: nn.Linear | nn.Conv2d, shape: tuple[int, ...], iterations: int
    ) -> Tensor:
        v = self._v.get(name)
        if v is None or v.shape[1:] != shape:
            v = torch.randn(1, *shape, generator=self._draws).to(layer.weight)
            iterations = max(iterations, FIRST)
        for _ in range(iterations):
            v = _back(layer, _ahead(layer, v), v)
            v = v / v.norm().clamp(min=1e-12)
        self._v[name] = v
        return _ahead(layer, v).norm()


def _batchnorm(layer: nn.modules.batchnorm._BatchNorm) -> Tensor:
    """Max |gamma / sqrt(var + eps)| -> scalar; without running statistics, of var = 1."""
    var = layer.running_var
    s = math.sqrt(1 + layer.eps) if var is None else (var + layer.eps).sqrt()
    return (layer.weight / s).abs().max()


def _ahead(layer: nn.Linear | nn.Conv2d, v: Tensor) -> Tensor:
    """W v, without the bias."""
    if isinstance(layer, nn.Linear):
        return F.linear(v, layer.weight)
    # The layer's own forward knows its padding; without its bias it is the linear operator.
    return layer._conv_forward(v, layer.weight, None)


def _back(layer: nn.Linear | nn.Conv2d, u: Tensor, like: Tensor) -> Tensor:
    """W' u, the transposed operator: the gradient of <u, W x> in x, whatever x is."""
    if isinstance(layer, nn.Linear):
        return u @ layer.weight
    with torch.enable_grad():
        x = torch.zeros_like(like, requires_grad=True)
        (found,) = torch.autograd.grad(_ahead(layer, x), x, u)
    return found
