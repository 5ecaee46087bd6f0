"""What exchanged gradients give away: the closed-form attack, on a trained model's features.

For a unit u of a discriminator's first layer, with v_i the slope of the loss at u for example i,

    weight gradient  sum_i v_i z_i
    bias gradient    sum_i v_i
    candidate        the first over the second, a weighted mean of the features z_i

Where ReLU lets one example through to u, the candidate is that example's feature. Nothing but the
gradient is needed, so whoever sees what a site sends can do this: the server.

    z     (N, d)    features, of the site's own training examples
    n     int       examples of a window, over its p steps
    G     (P,)      sum of the window's p gradients
    g     (P,)      one gradient
    gamma float     weight of a critic's penalty; it is in the weights' gradients, not the biases'
    c     (H, d)    candidates, one per unit that has a bias gradient

An example counts as recovered if some candidate's cosine with its feature is above a threshold.
Features of a trained encoder resemble each other, so a cosine may be high without any attack: the
yardstick is the best cosine with H other features of the same data, as many guesses as the attack
has, and with the mean of these. The threshold is .999 or, if that is higher, what one example in a
hundred reaches so.

This is a lower bound of what leaks. Attacks that optimise, put windows together, or take a critic's
penalty out of its gradients, find more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedda.adversary import (
    HALVES,
    Discriminator,
    Half,
    Loss,
    Network,
    count,
    discriminator_loss,
    flat_gradient,
    layout,
    make_optimizer,
    set_gradient,
)
from fedda.config import TrainConfig, method_module, steps_per_window, unflatten, validate
from fedda.errors import ConfigError, DataError
from fedda.lazy import protect
from fedda.models import Model, evaluating
from fedda.train import generator, seed_for

WINDOWS = tuple(2**k for k in range(10))  # examples: 1 to 512
COSINE = 0.999
CHANCE = 0.01  # share of the examples that other features may reach the threshold for
MOST = 4096  # features that are looked at, drawn at random

# The methods that sum a discriminator's gradients, and its loss; None: as their settings say.
LOSSES: dict[str, Loss | None] = {"dils": None, "fdann": "grl", "fwdgrl": "wassda"}


@dataclass(frozen=True)
class Settings:
    """What a run does to a gradient before it leaves, and the discriminator it is of."""

    method: str = "dils"
    p: int = 6  # 0 in a run: as few as min_examples takes
    min_examples: int = 256
    clip: float = 10.0
    noise: float = 0.0
    loss: Loss = "adda"
    penalty: float = 0.0  # gamma
    network: Network = field(default_factory=Network)

    def told(self, given: Mapping[str, Any], sizes: str | None = None) -> "Settings":
        """The same with some of them given; `sizes` are the discriminator's hidden layers."""
        network = self.network
        if sizes is not None:
            told = network.model_dump() | {"sizes": sizes}
            network = validate(Network, told, "the discriminator")
        settings = replace(self, **given, network=network)
        if settings.noise and not settings.clip:
            raise ConfigError(
                "exchange.noise is measured in units of exchange.clip, which is 0; give a clip."
            )
        return settings

    @classmethod
    def of(cls, flat: Mapping[str, Any], method: str = "") -> "Settings":
        """Those of a run's config.json; what it does not say is the default.

        Args:
            flat: the run's settings.
            method: whose discriminator; by default the run's.

        Raises:
            ConfigError: the method has no discriminator.
        """
        method = method or str(flat.get("method", ""))
        if method not in LOSSES:
            found = f"A run of {method} has no discriminator"
            if not method:
                found = "No config.json of a run says which discriminator it has"
            raise ConfigError(
                f"{found}, and nothing else can be audited here; {', '.join(LOSSES)} have one: "
                "give one of them as --method to see what would be lost in such a run."
            )
        names = ("p", "min_examples", "clip", "noise")
        own = {name: flat.get(f"exchange.{name.replace('_', '-')}") for name in names}
        found = {k: v for k, v in own.items() if v is not None}
        least = found.get("min_examples", cls.min_examples)
        batch = flat.get("train.batch-size", TrainConfig().batch_size)
        found["p"] = found.get("p") or steps_per_window(least, batch)
        tree = unflatten({k: v for k, v in flat.items() if k.startswith(f"{method}.")})
        options = validate(method_module(method).Config, tree.get(method, {}), method)
        loss = LOSSES[method] or options.loss
        gamma = options.penalty if HALVES[loss, "target"].critic else 0.0
        return cls(method, **found, loss=loss, penalty=gamma, network=options.discriminator)


@dataclass(frozen=True)
class Leak:
    """What one attack got: share of the examples, and how near it came to each on average."""

    recovered: float
    cosine: float


@dataclass(frozen=True)
class Window:
    """A window of so many examples, attacked in four forms.

    Attributes:
        examples: n.
        norm: of G / p on average, what the clip is held against; of `moving`.
        bare: the gradient of one batch of n, without a critic's penalty: as if taken out.
        fixed: the sum of p gradients, the discriminator standing still; where p divides n and there
            is no penalty, that is p times the former, and as safe or unsafe.
        moving: the sum of p gradients, the discriminator moving as in a run.
        sent: as `moving`, clipped and with noise as in the run; None: the site refuses to send it.
    """

    examples: int
    norm: float
    bare: Leak
    fixed: Leak
    moving: Leak
    sent: Leak | None


@dataclass(frozen=True)
class Audit:
    """All windows, and what to hold them against.

    Attributes:
        settings: of the run.
        features: how many features there were to draw from.
        width: d.
        parameters: P.
        trials: windows of each size.
        seed: of every draw.
        guesses: H, how many other features each was held against.
        other: the best of H other features and their mean, in place of an attack's H candidates;
            its `recovered` is the share above .999.
        threshold: cosine above which an example counts as recovered.
        windows: from one example on.
    """

    settings: Settings
    features: int
    width: int
    parameters: int
    trials: int
    seed: int
    guesses: int
    other: Leak
    threshold: float
    windows: tuple[Window, ...]

    def to_json(self) -> dict[str, Any]:
        """The same as plain JSON types, settings under the names they have in a run."""
        settings = {k.replace("_", "-"): v for k, v in asdict(self.settings).items()}
        settings["network"] = self.settings.network.flat()
        return asdict(self) | {"settings": settings}


def audit(z: Tensor, settings: Settings, *, trials: int = 5, seed: int = 0) -> Audit:
    """Attack windows of every size that the features suffice for.

    Args:
        z: (N, d) features, as `features` makes them.
        settings: of the run.
        trials: windows per size, each with a new discriminator.
        seed: of every draw.

    Raises:
        DataError: there are fewer than two features.
    """
    if len(z) < 2:
        raise DataError("There is one feature or none, and none to compare it with; two are needed")
    guesses = min((*settings.network.hidden, 1)[0], len(z) // 2)
    cosines = torch.cat([_others(z, guesses, generator(seed, "others", t)) for t in range(trials)])
    threshold = max(COSINE, float(cosines.quantile(1 - CHANCE)))
    sizes = [n for n in WINDOWS if n <= len(z)]
    return Audit(
        settings=settings,
        features=len(z),
        width=z.shape[1],
        parameters=count(z.shape[1], settings.network.hidden),
        trials=trials,
        seed=seed,
        guesses=guesses,
        other=_leak(cosines, COSINE),
        threshold=threshold,
        windows=tuple(_window(z, n, settings, threshold, trials, seed) for n in sizes),
    )


@torch.no_grad()
def features(model: Model, x: Tensor, *, seed: int = 0, batch: int = 256) -> Tensor:
    """What the encoder makes of at most MOST examples, in evaluation mode, on the CPU -> (N, d)."""
    device = next(model.parameters()).device
    chosen = torch.randperm(len(x), generator=generator(seed, "features"))[:MOST]
    parts = []
    with evaluating(model):
        for some in chosen.split(batch):
            part = x[some].to(device)
            part = part.float() / 255 if part.dtype == torch.uint8 else part.float()
            parts.append(model.features(part).flatten(1).cpu())
    return torch.cat(parts)


def candidates(g: Tensor, d: int, sizes: Sequence[int]) -> Tensor:
    """Weight gradient over bias gradient of the first layer, unit by unit -> c (H, d)."""
    weight, bias = layout(d, sizes).entries[:2]
    w = g[: weight.size].view(weight.shape)  # (units, d)
    b = g[weight.size : weight.size + bias.size]  # (units,)
    return w[b != 0] / b[b != 0, None]


def best_cosines(z: Tensor, c: Tensor) -> Tensor:
    """How near the nearest candidate comes to each feature -> (N,)."""
    if len(c) == 0:
        return z.new_zeros(len(z))
    return (F.normalize(z, dim=1) @ F.normalize(c, dim=1).T).amax(dim=1)


def gathered(
    DI: Discriminator,
    half: Half,
    steps: Sequence[Tensor],
    moves: "Moves | None" = None,
    *,
    penalty: float = 0.0,
    draws: torch.Generator | None = None,
) -> Tensor:
    """Algorithm 1, line 5: the sum of the gradients of a window's steps -> G (P,).

    Args:
        DI: moved after each step if there is something to move it by.
        half: of the loss.
        steps: features (n / p, d) of each step.
        moves: how the discriminator moves; None: it stands still.
        penalty: gamma of a critic.
        draws: of the penalty's points.
    """
    G = torch.zeros(sum(w.numel() for w in DI.parameters()))
    for z in steps:
        G += flat_gradient(discriminator_loss(half, DI, z, penalty, draws), DI)
        if moves is not None:
            set_gradient(DI, moves.g_sync)
            moves.optimizer.step()
    return G


@dataclass(frozen=True)
class Moves:
    """What moves a discriminator during a window: the sum that the window before it gave."""

    g_sync: Tensor  # (P,)
    optimizer: torch.optim.Optimizer


def _window(
    z: Tensor, n: int, settings: Settings, threshold: float, trials: int, seed: int
) -> Window:
    attacks = [_attack(z, n, settings, (seed, n, t)) for t in range(trials)]

    def leak(form: str) -> Leak:
        return _leak(torch.cat([cosines[form] for _, cosines in attacks]), threshold)

    return Window(
        examples=n,
        norm=sum(norm for norm, _ in attacks) / trials,
        bare=leak("bare"),
        fixed=leak("fixed"),
        moving=leak("moving"),
        sent=leak("sent") if n >= settings.min_examples else None,
    )


def _attack(
    z: Tensor, n: int, settings: Settings, seed: tuple[int, int, int]
) -> tuple[float, dict[str, Tensor]]:
    """The norm of G / p of one window, and its examples' best cosines (n,) by form."""
    draws, start = generator("audit", *seed), seed_for("audit", "discriminator", *seed)
    sizes, d, p = settings.network.hidden, z.shape[1], min(settings.p, n)
    target, source = (HALVES[settings.loss, role] for role in ("target", "source"))

    def new() -> Discriminator:
        return Discriminator(d, sizes, seed=start)

    summed = partial(gathered, penalty=settings.penalty, draws=draws)

    def drawn() -> Tensor:
        return z[torch.randperm(len(z), generator=draws)[:n]]

    mine = drawn()  # (n, d)
    steps = mine.tensor_split(p)
    DI = new()
    # One site's data are at hand, so they stand in for the other site's in the window before.
    before = [summed(DI, half, drawn().tensor_split(p)) for half in (target, source)]
    moves = Moves((before[0] + before[1]) / (2 * p), make_optimizer(DI, settings.network))
    mean = summed(DI, target, steps, moves) / p
    forms = {
        "bare": gathered(new(), target, [mine]),
        "fixed": summed(new(), target, steps),
        "moving": mean,
        "sent": protect(mean, settings.clip, settings.noise, draws),
    }
    cosines = {form: best_cosines(mine, candidates(g, d, sizes)) for form, g in forms.items()}
    return float(mean.norm()), cosines


def _others(z: Tensor, guesses: int, draws: torch.Generator) -> Tensor:
    """The best cosine of up to 512 features with the same so many others, or their mean -> (n,)."""
    order = torch.randperm(len(z), generator=draws)
    n = min(WINDOWS[-1], len(z) - guesses)
    others = z[order[n : n + guesses]]  # (H, d)
    return best_cosines(z[order[:n]], torch.cat([others, others.mean(dim=0, keepdim=True)]))


def _leak(cosines: Tensor, threshold: float) -> Leak:
    return Leak(float((cosines > threshold).float().mean()), float(cosines.mean()))
