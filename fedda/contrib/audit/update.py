"""Images from the change that training makes to a model: gradient inversion.

Geiping et al., NeurIPS 2020, https://arxiv.org/abs/2003.14053, eq. 4; KD3A's figure 5 and FRUDA's
appendix E.2 show attacks of this kind (Zhu et al., Deep Leakage from Gradients, NeurIPS 2019).

    theta_0, theta_1  (P,)          the model that the server sent, and the one that came back
    u                 (P,)          (theta_0 - theta_1) / (lr T): with one step, the gradient
    x'                (n, *shape)   what the attack makes of noise
    minimise  1 - cos(u, grad L(theta_0; x', y)) + tv TV(x')

The attacker is a server that knows the labels, as an attack on them comes first. It chooses the
model that it sends: two are tried, the run's last one, and a new one after one epoch, as after a
first round. Gradients of a model that does not know its images yet say more of them. Each image
that is recovered is matched with the closest original. For comparison each original meets as many
guesses: other images of the same data, and their mean. An image counts as recovered if its PSNR is
above what one in a hundred reaches by guesses, and at least 15 dB.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from scipy.optimize import linear_sum_assignment
from torch import Tensor
from torch.nn import functional as F

from fedda.errors import DataError
from fedda.files import replacing
from fedda.models import Model
from fedda.train import generator, seed_for

from .finding import Audit, Finding
from .subject import Subject, copy_of, flat, parameters_of

SIZES = (1, 2, 4, 8, 16, 64)  # examples in one update
LEAST = 15.0  # dB
CHANCE = 0.01
SMOOTH = 1e-4  # tv
SIDE, GAP = 96, 8  # pixels of a picture
BASE = 8  # examples whose part of a step costs as much as what a step of any size does

Pair = tuple[Tensor, Tensor]  # an image, and what was made of noise


def invert(
    subject: Subject,
    *,
    trials: int = 2,
    iterations: int = 300,
    seed: int = 0,
    note: Callable[[float], None] = lambda done: None,
) -> tuple[Audit, list[Pair]]:
    """Attack updates of one step over few examples -> what was recovered, and the best pictures.

    `note` is told which share of the work is done.

    Raises:
        DataError: there are too few examples to compare with.
    """
    N = len(subject.x)
    if 2 * SIZES[0] + 2 > N:
        raise DataError(f"There are {N} examples; the attack on updates needs 4 or more.")
    sizes = [n for n in SIZES if 2 * n <= N]
    guesses = [_guess(subject, n, seed) for n in sizes]
    every = torch.cat(guesses)
    threshold = max(LEAST, float(every.quantile(1 - CHANCE)))
    guess = {"images": CHANCE, "psnr": float(every.mean())}
    found, pictures = [], []
    tries = [(on, made, n) for on, made in _models(subject, seed) for n in sizes]
    work = [BASE + n for *_, n in tries]
    for k, (on, attacked, n) in enumerate(tries):
        quality, picture = _tried(attacked, n, trials, iterations, seed)
        recovered = {
            "images": float((quality > threshold).float().mean()),
            "psnr": float(quality.mean()),
            "best": float(quality.max()),
        }
        found.append(Finding("update", on, n, recovered, guess))
        if subject.are_images:
            pictures.append(picture)
        note(sum(work[: k + 1]) / sum(work))
    settings = {"threshold": threshold, "iterations": iterations, "trials": trials}
    return Audit("update", settings, tuple(found)), pictures


def _models(subject: Subject, seed: int) -> list[tuple[str, Subject]]:
    """The models that a server could send: one after a first epoch, if it can be made; the last."""
    if subject.about.extension is not None:
        return [("last", subject)]
    new = subject.fresh(seed_for(seed, "update"))
    subject.train_on(new, torch.arange(len(subject.x)), 1, seed_for(seed, "early"))
    return [("early", replace(subject, model=new)), ("last", subject)]


def _tried(
    subject: Subject, n: int, trials: int, iterations: int, seed: int
) -> tuple[Tensor, Pair]:
    """Attack updates over n examples -> PSNR (trials n,), and the best original and its copy."""
    each, best, picture = [], -math.inf, None
    for trial in range(trials):
        draws = generator(seed, "update", n, trial)
        chosen = torch.randperm(len(subject.x), generator=draws)[:n]
        u = update(subject, chosen)
        x, y = subject.x[chosen], subject.y[chosen]
        made = reconstruct(subject, u, y, iterations, draws)
        quality, order = matched(x, made)
        each.append(quality)
        k = int(quality.argmax())
        if picture is None or float(quality[k]) > best:
            best, picture = float(quality[k]), (x[k].cpu(), made[order[k]].cpu())
    assert picture is not None
    return torch.cat(each), picture


def update(subject: Subject, chosen: Tensor) -> Tensor:
    """What a site's model tells after one step of gradient descent on some examples -> u (P,).

    The step is taken as a site takes it, in training mode: with dropout, and with BatchNorm's
    statistics of the batch where it has two examples or more.
    """
    model = copy_of(subject.model)
    before = flat([p.detach().clone() for p in parameters_of(model)])
    optimizer = torch.optim.SGD(parameters_of(model), lr=subject.train.lr)
    _mode(model, len(chosen))
    F.cross_entropy(model(subject.x[chosen]), subject.y[chosen]).backward()
    optimizer.step()
    return (before - flat([p.detach() for p in parameters_of(model)])) / subject.train.lr


def reconstruct(
    subject: Subject, u: Tensor, y: Tensor, iterations: int, draws: torch.Generator
) -> Tensor:
    """Make examples whose gradient points where an update does -> x' (n, *shape).

    Args:
        subject: what is attacked; only its model and the range of its examples are used.
        u: (P,) the update.
        y: (n,) the labels.
        iterations: steps of Adam on the signs of the gradient, as in Geiping's code.
        draws: of the first x'.
    """
    model = copy_of(subject.model)
    _mode(model, len(y), dropout=False)
    low, high = float(subject.x.min()), float(subject.x.max())
    shape = (len(y), *subject.x.shape[1:])
    made = torch.rand(shape, generator=draws).to(u.device) * (high - low) + low
    made.requires_grad_()
    optimizer = torch.optim.Adam([made], lr=0.1 * (high - low))
    pace = torch.optim.lr_scheduler.MultiStepLR(
        optimizer, [iterations * k // 8 for k in (3, 5, 7)], gamma=0.1
    )
    own = parameters_of(model)
    for _ in range(iterations):
        loss = F.cross_entropy(model(made), y)
        g = torch.autograd.grad(loss, own, create_graph=True)
        cost = 1 - F.cosine_similarity(flat(list(g)), u, dim=0) + SMOOTH * variation(made)
        optimizer.zero_grad()
        (slope,) = torch.autograd.grad(cost, made)
        made.grad = slope.sign()
        optimizer.step()
        pace.step()
        with torch.no_grad():
            made.clamp_(low, high)
    return made.detach()


def variation(x: Tensor) -> Tensor:
    """Total variation: the mean difference of neighbouring pixels -> scalar; 0 for vectors."""
    if x.dim() < 4:
        return x.new_zeros(())
    down = (x[..., 1:, :] - x[..., :-1, :]).abs().mean()
    return down + (x[..., 1:] - x[..., :-1]).abs().mean()


def psnr(a: Tensor, b: Tensor, span: float) -> Tensor:
    """Peak signal-to-noise ratio of all pairs, in dB -> (n, m).

    Args:
        a: (n, ...)
        b: (m, ...)
        span: the range of values.
    """
    error = torch.cdist(a.flatten(1).double(), b.flatten(1).double()) ** 2 / a[0].numel()
    return 10 * torch.log10(span**2 / error.clamp(min=1e-12))


def matched(x: Tensor, made: Tensor) -> tuple[Tensor, list[int]]:
    """Match originals with what was made, each with another -> PSNR (n,), and whose it is."""
    span = float(x.max() - x.min()) or 1.0
    quality = psnr(x, made, span).cpu()
    rows, columns = linear_sum_assignment(-quality.numpy())
    return quality[rows, columns], columns.tolist()


def _guess(subject: Subject, n: int, seed: int) -> Tensor:
    """Best PSNR of up to 256 examples with n others and their mean -> (m,)."""
    order = torch.randperm(len(subject.x), generator=generator(seed, "guess", n))
    others, own = subject.x[order[:n]], subject.x[order[n : n + 256]]
    guesses = torch.cat([others, others.mean(dim=0, keepdim=True)])
    span = float(subject.x.max() - subject.x.min()) or 1.0
    return psnr(own, guesses, span).amax(dim=1).cpu()


def _mode(model: Model, n: int, dropout: bool = True) -> None:
    """Put a model into training mode, as far as a batch of n examples permits."""
    model.train()
    for module in model.modules():
        norm = isinstance(module, torch.nn.modules.batchnorm._BatchNorm)
        drop = isinstance(module, torch.nn.modules.dropout._DropoutNd)
        if (norm and n < 2) or (drop and not dropout):
            module.eval()


def draw(pictures: Sequence[Pair], path: Path) -> None:
    """Draw originals above reconstructions, a column per size of the update; for the site alone."""
    width, height = (len(pictures) * (SIDE + GAP) + GAP, 2 * (SIDE + GAP) + GAP)
    sheet = Image.new("RGB", (width, height), "white")
    for column, pair in enumerate(pictures):
        for row, image in enumerate(pair):
            place = GAP + column * (SIDE + GAP), GAP + row * (SIDE + GAP)
            sheet.paste(_drawn(image), place)
    with replacing(path) as part:
        sheet.save(part, format="PNG")


def _drawn(image: Tensor) -> Image.Image:
    pixels = (image.clamp(0, 1) * 255).round().to("cpu").numpy().astype(np.uint8)
    flat = pixels[0] if len(pixels) == 1 else pixels.transpose(1, 2, 0)
    return Image.fromarray(flat).convert("RGB").resize((SIDE, SIDE), Image.Resampling.NEAREST)
