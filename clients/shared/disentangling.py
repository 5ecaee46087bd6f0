"""A site's part in FADA's model III: networks of its own, which never leave it.

Peng et al., ICLR 2020, https://arxiv.org/abs/1911.02054, section 4 and algorithm 1, lines 7 to 12.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn, optim
from torch.nn import functional as F

from fedda import models
from fedda.adversarial.disentangle import (
    Estimator,
    Layers,
    branch,
    class_identifier,
    information,
    negative_entropy,
    reconstruction,
)
from fedda.data import Labelled
from fedda.models import evaluating
from fedda.train import learning_rate, make_optimizer, seed_for

from ..base import Client
from ..site.workspace import Network

NEW_LAYERS = 10  # learning rate of new layers in units of that of pretrained ones, as in FADA
INVARIANT = "disentangler-invariant"  # name under which a site keeps the branch of f_di


class Disentangling:
    """D, M and R of one site, and CI if it has labels.

    Args:
        client: the site's part in this round; it keeps the networks from round to round.
    """

    def __init__(self, client: Client) -> None:
        self.client, self.options = client, client.options
        labels = isinstance(client.data, Labelled)
        layers, C = client.options.layers, client.task.classes
        d, m = features_width(client), layers.widths[-1]
        self.shuffles = client.generator("marginal")
        self.kept: list[Network] = []
        if client.options.keeps:
            # The classifier stands on the target's, which must not silently begin anew.
            self.invariant = self._keep(INVARIANT, lambda: make_branch(d, layers), not labels)
        else:
            D = client.model.encoder.get_submodule("disentangler")
            self.invariant = Network(D, self._optimizer(D))
        self.specific = self._keep("disentangler-specific", lambda: make_branch(d, layers))
        self.M = self._keep("estimator", lambda: Estimator(m, m, layers.estimator))
        self.R = self._keep("reconstructor", lambda: nn.Linear(2 * m, d))
        self.CI: Network | None = None
        if labels:
            norm = layers.class_norm
            self.CI = self._keep("class-identifier", lambda: class_identifier(m, C, norm))

    def _keep(self, name: str, make: Callable[[], nn.Module], strict: bool = False) -> Network:
        module = seeded(self.client.task.seed, name, make).to(self.client.device)
        network = Network(module, self._optimizer(module))
        self.client.register_state(name, network, strict)
        self.kept.append(network)
        return network

    def _optimizer(self, module: nn.Module) -> optim.Optimizer:
        """The run's optimizer, at the rate of the model's new layers times `fada.pace`."""
        client = self.client
        train, pretrained = client.task.train, client.model.pretrained
        rate = learning_rate(train, client.request.round, client.task.rounds)
        rate *= self.options.pace * (NEW_LAYERS if pretrained else 1)
        return client.paced(make_optimizer(module.parameters(), train, rate))

    def split(self, features: Callable[[], Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Take the model's features of a batch apart -> z (N, d), f_di (N, m), f_ds (N, m)."""
        if self.options.keeps:
            z = features()
            return z, self.invariant.module(z), self.specific.module(z)
        seen: list[Tensor] = []  # what enters D, which is a part of the encoder here
        hook = self.invariant.module.register_forward_pre_hook(lambda _, x: seen.append(x[0]))
        try:
            f_di = features()
        finally:
            hook.remove()
        return seen[0], f_di, self.specific.module(seen[0])

    def classify(self, f_ds: Tensor, y: Tensor) -> Tensor:
        """Eq. 6, second term: cross entropy of CI on the domain-specific part -> scalar."""
        assert self.CI is not None
        return F.cross_entropy(self.CI.module(f_ds), y)

    def zero_grad(self) -> None:
        """Forget the gradients of all networks here."""
        for network in (*self.kept, self.invariant):
            optimizer_of(network).zero_grad()

    def follow(self) -> None:
        """Move D and CI by the gradients of the model's own step, eqs. 5 and 6."""
        # If D's branch of f_di is a part of the model, the model's optimizer moves it.
        own = (self.invariant if self.options.keeps else None, self.specific, self.CI)
        for network in own:
            if network is not None:
                optimizer_of(network).step()

    def step(self, z: Tensor) -> dict[str, Tensor]:
        """Eqs. 7 and 8 and the reconstruction, for features (N, d) -> how far apart the parts are.

        They move D and R. Before, M raises its estimate.

        Returns:
            `information` in nats, which should fall; `reconstruction`, the share of the features'
            variance that R does not rebuild, which should be near 0; and `confusion`, the entropy
            of CI's prediction in nats, which should be near ln C.
        """
        weights, z = self.options.weights, z.detach()
        shuffle = torch.randperm(len(z), generator=self.shuffles).to(z.device)
        M, R = self.M.module, self.R.module
        f_di, f_ds = self.invariant.module(z), self.specific.module(z)
        self.zero_grad()
        (-information(M, f_di.detach(), f_ds.detach(), shuffle)).backward()
        optimizer_of(self.M).step()
        self.zero_grad()
        info = information(M, f_di, f_ds, shuffle)
        rebuilt = reconstruction(R, f_di, f_ds, z)
        loss = weights.information * info + weights.reconstruction * rebuilt
        variance = z.var(dim=0, correction=0).mean().clamp_min(torch.finfo(z.dtype).tiny)
        numbers = {"information": info.detach(), "reconstruction": rebuilt.detach() / variance}
        if self.CI is not None:
            logits = self.CI.module(f_ds)
            loss = loss + weights.confusion * negative_entropy(logits)
            numbers["confusion"] = -negative_entropy(logits.detach())
        loss.backward()
        for network in (self.invariant, self.specific, self.R):
            optimizer_of(network).step()
        return numbers


def make_branch(d: int, layers: Layers) -> nn.Sequential:
    """One branch of a disentangler, as settings describe it."""
    return branch(d, layers.widths, layers.dropout, layers.dropout_first)


def optimizer_of(network: Network) -> optim.Optimizer:
    """The optimizer that moves a network."""
    assert network.optimizer is not None
    return network.optimizer


def seeded(seed: int, name: str, make: Callable[[], nn.Module]) -> nn.Module:
    """Make a network whose first weights depend on the run's seed and its name alone."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed_for(seed, "fada", name))
        return make()


def features_width(client: Client) -> int:
    """The number of features that enter D; of the model that is sent, the head takes f_di -> d."""
    task = client.task
    return models.blank(task.model, task.dims, task.classes, device="meta").width


@torch.no_grad()
def predicted(model: models.Model, D: nn.Module, x: Tensor, batch: int = 256) -> Tensor:
    """Class probabilities C(D(G(x))) in evaluation mode, on the CPU -> (N, C)."""
    device, parts = next(model.parameters()).device, []
    with evaluating(model), evaluating(D):
        for part in x.split(batch):
            f_di = D(model.features(models.as_inputs(part, device)))
            parts.append(model.head.classified(f_di).softmax(dim=1).cpu())  # type: ignore[operator]
    return torch.cat(parts)
