"""Domain discriminators and their losses, each loss split into the halves that two sites compute.

Gan et al., FRUDA, https://arxiv.org/abs/2112.13381, appendix D.0.1 of the manuscript of 2020: ADDA
(eqs. 6 to 12), gradient reversal (13), Wasserstein (14 to 16) and CADA. Ganin et al., JMLR 2016,
https://arxiv.org/abs/1505.07818, for the schedule; Shen et al., AAAI 2018,
https://arxiv.org/abs/1707.01217, for the gradient penalty.

    d, sizes  ints      features that enter, units of the hidden layers
    z         (N, d)    features of a batch, z = E(x)
    v         (N,)      output of the network: logits, DI(z) = sigmoid(v) = probability of the
                        source; or, for Wasserstein, a critic's values
    g         (P,)      gradient of a half in all parameters of DI, flat, in state_dict order
    gamma     float     weight of the gradient penalty
    q         float     share of the training that is over, 0 to 1

The gradient of a whole loss is the sum of its halves' gradients, so no features need to leave.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

import torch
from pydantic import Field
from torch import Tensor, nn, optim
from torch.func import functional_call
from torch.nn import functional as F

from fedda.config.sections import Section
from fedda.maths.schedule import Growth, growth
from fedda.maths.spectral import spectral_norm
from fedda.train import generator
from fedda.wire import Number, Role
from fedda.wire.packing import Entry, Kind, Manifest

Loss = Literal["adda", "grl", "wassda", "cada"]
Deception = Literal["inverted", "reversal"]

# Adam's betas where two sides train against each other, as in Radford et al., DCGAN, ICLR 2016,
# section 4: an average over many gradients pushes on after the other side has answered.
BETA1, BETA2 = 0.5, 0.999

# What a site tells of its discriminators: the share of gradients that were clipped, and these.
CLIPPED = Number("clipped", 0.001)
NUMBERS = frozenset(
    {CLIPPED, *(Number(f"discriminator-{what}", 0.001) for what in ("loss", "accuracy"))}
)

SIZES = r"^([1-9]\d{0,4}(,[1-9]\d{0,4})*)?$"


class DiscriminatorConfig(Section):
    """A discriminator and how it learns; all its copies in a run stay equal."""

    sizes: str = Field(default="100", pattern=SIZES)
    """hidden layers of the discriminator, such as 100,50; empty: it is linear"""
    optimizer: Literal["adam", "sgd", "adadelta"] = "adam"
    """optimizer of the discriminator"""
    lr: float = Field(default=0.001, gt=0, le=1)
    """learning rate of the discriminator"""
    momentum: float = Field(default=0.9, ge=0, lt=1)
    """momentum of sgd"""
    beta1: float = Field(default=BETA1, ge=0, lt=1)
    """adam's average of gradients; .9 breaks adversaries"""
    beta2: float = Field(default=BETA2, ge=0, lt=1)
    """adam's average of their squares"""

    @property
    def hidden(self) -> tuple[int, ...]:
        return tuple(int(size) for size in self.sizes.split(",") if size)


class Critic(Section):
    """How a critic of Wasserstein distances is kept from growing without end, and how it is fed."""

    spectral: bool = True
    """after each step of the critic no layer's spectral norm is above 1; its gradients are then
    bounded by the features' length"""
    penalty: float = Field(default=0.0, ge=0, le=1000)
    """gamma, the critic's gradient penalty on each side; 0: none"""
    critic_steps: int = Field(default=1, ge=0, le=1000)
    """fresh sums of the critic's gradients before each step of the encoders, each over exchange.p
    batches of its own; 0: one step by the latest sum, however old it is"""


class Reversal(Section):
    """How strongly encoders learn to deceive the discriminator."""

    strength: float = Field(default=0.1, ge=0, le=100)
    """weight of the domain loss; cross entropy weighs 1"""
    schedule: Growth = "ganin"
    """ganin: the weight grows from 0; constant: it does not"""

    def at(self, q: float) -> float:
        """The weight when a share q of the training is over -> float."""
        return self.strength * growth(q, self.schedule)


class Deceived(Reversal):
    """What encoders minimise to deceive a discriminator that gives probabilities."""

    loss: Deception = "inverted"
    """inverted: the discriminator's loss on exchanged labels, bounded below; reversal: minus its
    loss, without bound once it is deceived"""


# ---- the network -------------------------------------------------------------------------------


class Discriminator(nn.Module):
    """Linear layers with ReLU between them -> (N,).

    Its weights depend on the seed alone, so sites that get the same seed begin with equal copies.
    torch's global random numbers stay untouched.
    """

    def __init__(self, d: int, sizes: Sequence[int], seed: int = 0) -> None:
        super().__init__()
        draws = generator(seed, "discriminator")
        layers: list[nn.Module] = []
        for before, after in pairwise((d, *sizes, 1)):
            linear = nn.utils.skip_init(nn.Linear, before, after)
            for parameter in linear.parameters():  # what nn.Linear starts from, but drawn here
                values = torch.rand(parameter.shape, generator=draws)
                parameter.data = (2 * values - 1) / math.sqrt(before)
            layers += [linear, nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])

    def forward(self, z: Tensor) -> Tensor:
        return self.layers(z).squeeze(1)


def layout(d: int, sizes: Sequence[int]) -> Manifest:
    """The layout of a discriminator's packed weights, from its sizes alone."""
    entries = []
    for i, (before, after) in enumerate(pairwise((d, *sizes, 1))):
        entries.append(Entry(f"layers.{2 * i}.weight", "float32", (after, before)))
        entries.append(Entry(f"layers.{2 * i}.bias", "float32", (after,)))
    return Manifest(Kind.MODEL, "float32", tuple(entries))


def count(d: int, sizes: Sequence[int]) -> int:
    """How many parameters a discriminator has, the length of its gradient -> P."""
    return sum(entry.size for entry in layout(d, sizes).entries)


def width(model: Manifest) -> int:
    """How many features enter the head of a model, from its layout alone -> d."""
    return next(entry.shape[1] for entry in model.entries if entry.name == "head.weight")


def make_optimizer(DI: nn.Module, config: DiscriminatorConfig) -> optim.Optimizer:
    """The configured optimizer; equal gradients keep equal copies equal."""
    if config.optimizer == "adam":
        return optim.Adam(DI.parameters(), lr=config.lr, betas=(config.beta1, config.beta2))
    if config.optimizer == "adadelta":
        return optim.Adadelta(DI.parameters(), lr=config.lr)
    return optim.SGD(DI.parameters(), lr=config.lr, momentum=config.momentum)


@torch.no_grad()
def bound(DI: nn.Module) -> None:
    """Divide the weights of each linear layer by their spectral norm, if it is above 1.

    With ReLU between them, DI is then 1-Lipschitz everywhere, also between the domains, where no
    site could compute a gradient penalty. Miyato et al., ICLR 2018, divide by the norm always; to
    divide only where it is too large is the projection of Gouk et al., Machine Learning, 2021.
    """
    for layer in DI.modules():
        if isinstance(layer, nn.Linear):
            layer.weight /= spectral_norm(layer.weight).clamp(min=1)


def flat_gradient(loss: Tensor, DI: nn.Module) -> Tensor:
    """Eqs. 11 and 12: the gradient of a half in all parameters of DI -> g (P,)."""
    return torch.cat([g.reshape(-1) for g in torch.autograd.grad(loss, list(DI.parameters()))])


def set_gradient(DI: nn.Module, g: Tensor) -> None:
    """Set the gradients of DI's parameters, for its optimizer, from a flat one (P,)."""
    parameters = list(DI.parameters())
    parts = g.to(parameters[0]).split([parameter.numel() for parameter in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.grad = part.view_as(parameter).clone()


# ---- the losses --------------------------------------------------------------------------------


def called_source(v: Tensor) -> Tensor:
    """Eq. 8, -E log sigmoid(v): small where DI takes z for the source's -> scalar."""
    return F.softplus(-v).mean()


def called_target(v: Tensor) -> Tensor:
    """Eq. 9, -E log(1 - sigmoid(v)): small where DI takes z for the target's -> scalar."""
    return F.softplus(v).mean()


def low(v: Tensor) -> Tensor:
    """A critic's mean value, the target's half of eq. 14 -> scalar."""
    return v.mean()


def high(v: Tensor) -> Tensor:
    """Minus a critic's mean value, the source's half of eq. 14 -> scalar."""
    return -v.mean()


class Half(NamedTuple):
    """One site's half of the losses, as functions of the values v (N,) of its own samples."""

    discriminator: Callable[[Tensor], Tensor]
    mapping: Callable[[Tensor], Tensor] | None  # None: this encoder does not move
    critic: bool = False  # v are not logits, and the discriminator's loss has a gradient penalty


# CADA moves both encoders until DI cannot tell them apart; the discriminator's loss is ADDA's. In
# Zou et al., AAAI 2019, the source's classifier is then trained again on the moved features. Here
# the collaborator trains its classifier in every step instead, on its current features and without
# moving the encoder, and the target takes the classifier over. A collaborator without labels, which
# is an adapted target itself, cannot do so: its classifier stays.
HALVES: dict[tuple[Loss, Role], Half] = {
    ("adda", "source"): Half(called_source, None),
    ("adda", "target"): Half(called_target, called_source),
    ("grl", "source"): Half(called_source, None),
    ("grl", "target"): Half(called_target, lambda v: -called_target(v)),
    ("wassda", "source"): Half(high, None, critic=True),
    ("wassda", "target"): Half(low, high, critic=True),
    ("cada", "source"): Half(called_source, called_target),
    ("cada", "target"): Half(called_target, called_source),
}


def discriminator_loss(
    half: Half,
    DI: nn.Module,
    z: Tensor,
    gamma: float = 0.0,
    draws: torch.Generator | None = None,
) -> Tensor:
    """Eqs. 8, 9 or this side of 15, as a function of DI alone -> scalar.

    L_grad of eq. 15 is the mean of both sides' penalties, so each half weighs its own by gamma / 2.
    """
    z = z.detach()
    loss = half.discriminator(DI(z))
    if half.critic and gamma:
        loss = loss + gamma / 2 * gradient_penalty(DI, z, draws)
    return loss


def mapping_loss(half: Half, DI: nn.Module, z: Tensor) -> Tensor:
    """Eqs. 10, 13 or 16, as a function of the encoder alone: DI gets no gradient -> scalar."""
    assert half.mapping is not None
    return half.mapping(_fixed(DI, z))


def reversed_loss(half: Half, DI: nn.Module, z: Tensor) -> Tensor:
    """Ganin et al.'s reversal layer: minus this side's half, for its encoder -> scalar.

    For a critic this is the encoder's side of Shen et al.'s minimax, which has no penalty.
    """
    return -half.discriminator(_fixed(DI, z))


def inverted_loss(side: Role, DI: nn.Module, z: Tensor) -> Tensor:
    """This side's half of DI's loss on inverted labels, for its encoder -> scalar.

    Goodfellow et al., NeurIPS 2014, section 3, and CADA's mapping losses. Its gradient in v is
    sigmoid(v) at a source and sigmoid(v) - 1 at the target. It vanishes once DI is deceived. The
    gradient of the reversed loss is then the largest, and never stops.
    """
    return HALVES["cada", side].mapping(_fixed(DI, z))  # type: ignore[misc]


def _fixed(DI: nn.Module, z: Tensor) -> Tensor:
    return functional_call(DI, {n: w.detach() for n, w in DI.named_parameters()}, (z,))


def gradient_penalty(DI: nn.Module, z: Tensor, draws: torch.Generator | None = None) -> Tensor:
    """Shen et al.: mean of (|grad DI(u)| - 1)^2 over points u between z's own pairs -> scalar.

    Their u are a source's samples, a target's, and points between the two. Here no site has both
    sides' features, so each site takes u = e z_i + (1 - e) z_j, with random partners j of its own
    and e uniform. That keeps DI's slope near 1 within each domain, but not in a gap between the
    domains: there the distance of eq. 14 can come out larger than with their u.
    """
    partner = torch.randperm(len(z), generator=draws).to(z.device)
    e = torch.rand(len(z), 1, generator=draws).to(z)
    u = (e * z + (1 - e) * z[partner]).detach().requires_grad_()
    (slope,) = torch.autograd.grad(DI(u).sum(), u, create_graph=True)  # (N, d)
    return ((slope.norm(dim=1) - 1) ** 2).mean()


def accuracy(v: Tensor, role: Role) -> float:
    """Share of a side's logits on its own side of 0; 1/2 on both sides is the goal -> float."""
    return float(((v > 0) == (role == "source")).float().mean())
