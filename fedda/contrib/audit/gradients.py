"""What exchanged gradients reveal: the closed-form attack, on a trained model's features.

For a unit u of a discriminator's first layer, with v_i the slope of the loss at u for example i,

    weight gradient  sum_i v_i z_i
    bias gradient    sum_i v_i
    candidate        the first over the second, a weighted mean of the features z_i

Where ReLU lets only one example through to u, the candidate is that example's feature. The attack
needs the gradient alone, so the server, which sees what a site sends, could do it.

    z     (N, d)    features of the site's own training examples
    n     int       examples of a window, over its p steps
    G     (P,)      sum of the window's p gradients
    g     (P,)      one gradient
    gamma float     weight of a critic's penalty; it enters the weights' gradients, not the biases'
    c     (H, d)    candidates, one per unit that has a bias gradient

An example counts as recovered if a candidate's cosine with its feature is above a threshold.
Features of a trained encoder resemble each other, so cosines are high without any attack. For
comparison each feature meets as many guesses as the attack has: H other features of the same data,
and their mean. The threshold is the best cosine with a guess that one example in a
hundred exceeds, and at least .999.

This is a lower bound of what leaks. Attacks that optimise, combine windows, or take a critic's
penalty out of its gradients, find more.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn import functional as F

from fedda import plugins
from fedda.adversarial.discriminators import (
    HALVES,
    Discriminator,
    DiscriminatorConfig,
    Half,
    Loss,
    count,
    discriminator_loss,
    flat_gradient,
    layout,
    make_optimizer,
    set_gradient,
)
from fedda.adversarial.lazy import protect
from fedda.config import TrainConfig, steps_per_window
from fedda.config.sections import unflatten, validate
from fedda.errors import ConfigError, DataError
from fedda.methods import Extent, Method
from fedda.models import Model, as_inputs, evaluating
from fedda.train import generator, seed_for

from .finding import Audit, Finding

WINDOWS = tuple(2**k for k in range(10))  # examples: 1 to 512
COSINE = 0.999
CHANCE = 0.01  # share of the examples that guesses may recover
FORMS = ("bare", "fixed", "moving", "sent")
MOST = 4096  # features that an audit looks at, drawn at random


@dataclass(frozen=True)
class SumSettings:
    """A run's discriminator, and what the run does to its gradient before it leaves a site."""

    method: str
    p: int = 4  # in a run's settings 0 means: as few steps as min_examples needs
    min_examples: int = 256
    clip: float = 10.0
    noise: float = 0.0
    loss: Loss = "adda"
    penalty: float = 0.0  # gamma
    network: DiscriminatorConfig = field(default_factory=DiscriminatorConfig)

    def override(self, changes: Mapping[str, Any], sizes: str | None = None) -> "SumSettings":
        """The same with some changes; `sizes` are the discriminator's hidden layers."""
        network = self.network
        if sizes is not None:
            values = network.model_dump() | {"sizes": sizes}
            network = validate(DiscriminatorConfig, values, "the discriminator")
        settings = replace(self, **changes, network=network)
        if settings.noise and not settings.clip:
            raise ConfigError(
                "exchange.noise is measured in units of exchange.clip, which is 0; give a clip."
            )
        return settings

    def to_json(self) -> dict[str, Any]:
        """As plain JSON types, under the names that a run gives them."""
        plain = {k.replace("_", "-"): v for k, v in vars(self).items()}
        return plain | {"network": self.network.flat()}

    @classmethod
    def of(cls, flat: Mapping[str, Any], method: str = "") -> "SumSettings":
        """The settings in a run's config.json, with defaults for those it does not have.

        Args:
            flat: the run's settings.
            method: the one whose discriminator is audited; by default the run's.

        Raises:
            ConfigError: the method has no discriminator.
        """
        method = method or str(flat.get("method", ""))
        if method not in (known := attackable()):
            problem = f"A run of {method} has no discriminator"
            if not method:
                problem = "There is no config.json that says which discriminator the run has"
            raise ConfigError(
                f"{problem}, and nothing else can be audited here; {', '.join(known)} have one: "
                "give one of them as --method to see what such a run would reveal."
            )
        names = ("p", "min_examples", "clip", "noise")
        exchange = {name: flat.get(f"exchange.{name.replace('_', '-')}") for name in names}
        given = {name: value for name, value in exchange.items() if value is not None}
        min_examples = given.get("min_examples", cls.min_examples)
        batch = flat.get("train.batch-size", TrainConfig().batch_size)
        given["p"] = given.get("p") or steps_per_window(min_examples, batch)
        tree = unflatten({k: v for k, v in flat.items() if k.startswith(f"{method}.")})
        options: Any = validate(known[method].config, tree.get(method, {}), method)
        loss = cast(Callable[[Any], Loss], known[method].loss)(options)
        gamma = options.penalty if HALVES[loss, "target"].critic else 0.0
        return cls(method, **given, loss=loss, penalty=gamma, network=options.discriminator)


def audit(
    z: Tensor, settings: SumSettings, *, trials: int = 5, seed: int = 0, what_if: bool = False
) -> Audit:
    """Attack windows of every size that there are enough features for, in four forms.

    bare     from the gradient of one batch, without a critic's penalty, as if an attacker had
             taken it out
    fixed    from the sum of p gradients, while the discriminator stands still. If p divides n and
             there is no penalty, that is p times the gradient of `bare`, and reveals as much
    moving   from the sum of p gradients, while the discriminator moves as in a run
    sent     as `moving`, clipped and with noise as in the run, or `what-if` no run has sent this;
             not of windows that a site refuses to send
    norm     mean length of G / p in `moving`, to compare with the clip

    Raises:
        DataError: there are fewer than two features.
    """
    if len(z) < 2:
        raise DataError("There is one feature or none; give data with two examples or more.")
    guesses = min((*settings.network.hidden, 1)[0], len(z) // 2)
    cosines = torch.cat([_others(z, guesses, generator(seed, "others", t)) for t in range(trials)])
    threshold = max(COSINE, float(cosines.quantile(1 - CHANCE)))
    guess = _leak(cosines, COSINE)
    found = []
    for n in (n for n in WINDOWS if n <= len(z)):
        attacks = [_attack(z, n, settings, (seed, n, t)) for t in range(trials)]
        recovered = {"norm": sum(norm for norm, _ in attacks) / trials}
        for form in FORMS if n >= settings.min_examples else FORMS[:-1]:
            leak = _leak(torch.cat([best[form] for _, best in attacks]), threshold)
            name = "what-if" if form == "sent" and what_if else form
            recovered |= {name: leak["features"], f"{name}-cosine": leak["cosine"]}
        found.append(Finding("gradients", "window", n, recovered, guess))
    about = settings.to_json() | {
        "features": len(z),
        "width": z.shape[1],
        "parameters": count(z.shape[1], settings.network.hidden),
        "trials": trials,
        "guesses": guesses,
        "threshold": threshold,
        "what-if": what_if,
    }
    return Audit("gradients", about, tuple(found))


def attackable() -> dict[str, Method]:
    """The methods whose sites sum gradients of a discriminator, by name."""
    methods = {name: plugins.method(name) for name in plugins.methods()}
    return {name: about for name, about in methods.items() if about.loss is not None}


def planned(config: dict[str, Any], results: dict[str, Any], p: int) -> int:
    """Return the most windows that a site sends in one training, if no round is repeated.

    Args:
        config: the run's settings, flat, with its method.
        results: the content of results.json; empty if there is none.
        p: steps of a window.
    """
    sites, about = results.get("sites", []), plugins.method(config["method"])
    most = max((site.get("examples", 0) for site in sites), default=0)
    train = validate(TrainConfig, unflatten(config).get("train", {}), "train")
    steps, rounds = train.steps_of(most), int(config.get("rounds", 1))
    options: Any = validate(about.config, unflatten(config).get(about.name, {}), about.name)
    stages = about.schedule(options, rounds, bool(config.get("run.start-from")))
    summing = {s.phase.name: s.last - s.first + 1 for s in stages if s.phase.gradients}
    sources = sum(site.get("role") == "source" for site in sites)
    return about.windows(options, Extent(p, steps, summing, sources, len(sites)))


@torch.no_grad()
def features(model: Model, x: Tensor, *, seed: int = 0, batch: int = 256) -> Tensor:
    """The encoder's features of at most MOST examples, in evaluation mode, on the CPU -> (N, d)."""
    device = next(model.parameters()).device
    chosen = torch.randperm(len(x), generator=generator(seed, "features"))[:MOST]
    parts = []
    with evaluating(model):
        for some in chosen.split(batch):
            parts.append(model.features(as_inputs(x[some], device)).flatten(1).cpu())
    return torch.cat(parts)


def candidates(g: Tensor, d: int, sizes: Sequence[int]) -> Tensor:
    """The first layer's weight gradient divided by its bias gradient, unit by unit -> c (H, d)."""
    weight, bias = layout(d, sizes).entries[:2]
    w = g[: weight.size].view(weight.shape)  # (units, d)
    b = g[weight.size : weight.size + bias.size]  # (units,)
    return w[b != 0] / b[b != 0, None]


def best_cosines(z: Tensor, c: Tensor) -> Tensor:
    """Each feature's largest cosine with a candidate -> (N,)."""
    if len(c) == 0:
        return z.new_zeros(len(z))
    return (F.normalize(z, dim=1) @ F.normalize(c, dim=1).T).amax(dim=1)


def window_gradient(
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
        DI: the discriminator; it moves after each step unless `moves` is None.
        half: of the loss.
        steps: features (n / p, d) of each step.
        moves: what moves the discriminator; None: it stands still.
        penalty: gamma of a critic.
        draws: of the points of the penalty.
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
    """What moves a discriminator during a window: the synchronised gradient of the one before."""

    g_sync: Tensor  # (P,)
    optimizer: torch.optim.Optimizer


def _attack(
    z: Tensor, n: int, settings: SumSettings, seed: tuple[int, int, int]
) -> tuple[float, dict[str, Tensor]]:
    """Attack one window -> the norm of its G / p, and its examples' best cosines (n,) by form."""
    draws, start = generator("audit", *seed), seed_for("audit", "discriminator", *seed)
    sizes, d, p = settings.network.hidden, z.shape[1], min(settings.p, n)
    target, source = (HALVES[settings.loss, role] for role in ("target", "source"))

    def new() -> Discriminator:
        return Discriminator(d, sizes, seed=start)

    penalised = partial(window_gradient, penalty=settings.penalty, draws=draws)

    def drawn() -> Tensor:
        return z[torch.randperm(len(z), generator=draws)[:n]]

    window = drawn()  # (n, d)
    steps = window.tensor_split(p)
    DI = new()
    # In the window before, the other site's half is of the same data: no others are here.
    before = [penalised(DI, half, drawn().tensor_split(p)) for half in (target, source)]
    moves = Moves((before[0] + before[1]) / (2 * p), make_optimizer(DI, settings.network))
    mean = penalised(DI, target, steps, moves) / p
    forms = {
        "bare": window_gradient(new(), target, [window]),
        "fixed": penalised(new(), target, steps),
        "moving": mean,
        "sent": protect(mean, settings.clip, settings.noise, draws),
    }
    cosines = {form: best_cosines(window, candidates(g, d, sizes)) for form, g in forms.items()}
    return float(mean.norm()), cosines


def _others(z: Tensor, guesses: int, draws: torch.Generator) -> Tensor:
    """The best cosines of up to 512 features with H others and their mean -> (n,)."""
    order = torch.randperm(len(z), generator=draws)
    n = min(WINDOWS[-1], len(z) - guesses)
    others = z[order[n : n + guesses]]  # (H, d)
    return best_cosines(z[order[:n]], torch.cat([others, others.mean(dim=0, keepdim=True)]))


def _leak(cosines: Tensor, threshold: float) -> dict[str, float]:
    recovered = float((cosines > threshold).float().mean())
    return {"features": recovered, "cosine": float(cosines.mean())}
