"""Whether an example was trained on: from a model's confidence, and from the nearest atom.

Carlini et al., Membership Inference Attacks From First Principles, IEEE S&P 2022,
https://arxiv.org/abs/2112.03570, section IV: LiRA, online, with one variance for all examples
where there are few shadow models.

    phi     (S, N)  log p_y / (1 - p_y) of example i in shadow model s
    inside  (S, N)  whether model s was trained on example i; every second model was
    score   (S, N)  log N(phi; mu_in, sigma_in) - log N(phi; mu_out, sigma_out), where the normal
                    distributions are those of the other models

Each shadow model stands once for the model that leaves a site, and the others for the attacker's
own. The attacker knows all of the site's examples and how it trains, and asks of each whether it
was among those of this model: more than a server knows, so a bound of what it finds.

    auc       chance that a member has a higher score than another example; .5 for guesses
    tpr@s     share of the members that are found, if a share s of the others is taken for members
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from fedda.errors import DataError
from fedda.models import Model, evaluating
from fedda.train import generator, seed_for

from .finding import Audit, Finding
from .subject import Subject

FALSE = (0.001, 0.01, 0.1)  # shares of others taken for members
FEW = 64  # shadow models; with fewer, one variance for all examples
SPARE = 1e-7
Note = Callable[[float], None]
GUESS = {"auc": 0.5} | {f"tpr@{share:g}": share for share in FALSE}


def audit(
    subject: Subject,
    *,
    count: int = 16,
    epochs: int = 1,
    atoms: Tensor | None = None,
    seed: int = 0,
    note: Note = lambda done: None,
) -> Audit:
    """Tell members by models trained on halves, and by the nearest atom if there are any.

    Args:
        subject: what is attacked.
        count: shadow models, an even number.
        epochs: that each trains.
        atoms: (K, d) all points; they are attacked if the site has other examples to compare with.
        seed: of every draw.
        note: is told which share of the models has been trained.
    """
    phi, inside = shadows(subject, count, epochs, seed, note)
    found = {"model": told(scores(phi, inside), inside), "confidence": told(phi, inside)}
    rows = [Finding("membership", on, phi.shape[1], r, GUESS) for on, r in found.items()]
    settings = {"shadows": count, "epochs": epochs, "noise": subject.privacy.noise}
    if atoms is not None and subject.held is not None:
        with torch.no_grad():
            inputs = subject.x, subject.held[0]
            z, held = (subject.model.eval().features(x).flatten(1).cpu() for x in inputs)
        if z.shape[1] == atoms.shape[1]:
            settings |= {"atoms": len(atoms), "held": len(held)}
            rows.append(Finding("membership", "atoms", len(z), near(z, held, atoms), GUESS))
    return Audit("membership", settings, tuple(rows))


def confidences(model: Model, x: Tensor, y: Tensor) -> Tensor:
    """Phi = log p_y / (1 - p_y) -> (N,) float64."""
    with evaluating(model), torch.no_grad():
        logits = torch.cat([model(some) for some in x.split(512)]).double()
    log_p = F.log_softmax(logits, dim=1)
    own = log_p[torch.arange(len(y)), y]
    rest = torch.logsumexp(log_p.scatter(1, y[:, None], -torch.inf), dim=1)
    return (own - rest).cpu()


def halves(S: int, N: int, draws: torch.Generator) -> Tensor:
    """Which models train on which examples: each on half of them, each example half the times.

    Args:
        S: models, an even number.
        N: examples.
        draws: of the choice.
    """
    ranks = torch.rand(S, N, generator=draws).argsort(dim=0)
    return ranks < S // 2


def scores(phi: Tensor, inside: Tensor) -> Tensor:
    """Each model's log likelihood ratio by the other models -> (S, N).

    Args:
        phi: (S, N)
        inside: (S, N)
    """
    fits = []
    for of in (inside, ~inside):
        w = of.double()
        count = (w.sum(dim=0) - w).clamp(min=1)  # of the other models
        mean = ((w * phi).sum(dim=0) - w * phi) / count
        square = ((w * phi**2).sum(dim=0) - w * phi**2) / count
        var = (square - mean**2).clamp(min=0)
        if len(phi) < FEW:
            var = var.mean(dim=1, keepdim=True).expand_as(var)
        fits.append((mean, var + SPARE))
    (mu, var), (mu_out, var_out) = fits
    likely = -((phi - mu) ** 2) / (2 * var) - var.log() / 2
    return likely + (phi - mu_out) ** 2 / (2 * var_out) + var_out.log() / 2


def told(score: Tensor, inside: Tensor, false: Sequence[float] = FALSE) -> dict[str, float]:
    """How well a score tells members from others; ties count half.

    Args:
        score: any shape.
        inside: the same shape.
        false: shares of others taken for members.

    Raises:
        DataError: there are no members, or no others.
    """
    members, others = score[inside].double(), score[~inside].double()
    if not len(members) or not len(others):
        raise DataError("Membership can be told only where some examples are members and some not.")
    order = others.sort().values
    below = torch.searchsorted(order, members, right=False)
    up_to = torch.searchsorted(order, members, right=True)
    found = {"auc": float((below + up_to).double().mean() / 2 / len(others))}
    for share in false:
        allowed = int(share * len(others))
        limit = order[len(order) - 1 - allowed] if allowed < len(order) else -torch.inf
        found[f"tpr@{share:g}"] = float((members > limit).double().mean())
    return found


def shadows(
    subject: Subject, count: int, epochs: int, seed: int, note: Note = lambda done: None
) -> tuple[Tensor, Tensor]:
    """Train models on halves of a site's examples -> phi (S, N), inside (S, N)."""
    inside = halves(count, len(subject.x), generator(seed, "shadows"))
    phi = []
    for s in range(count):
        model = subject.fresh(seed_for(seed, "shadow", s))
        chosen = inside[s].nonzero().flatten()
        subject.train_on(model, chosen, epochs, seed_for(seed, s))
        phi.append(confidences(model, subject.x, subject.y))
        note((s + 1) / count)
    return torch.stack(phi), inside


def near(z: Tensor, held: Tensor, atoms: Tensor) -> dict[str, float]:
    """Whether atoms lie closer to a site's training features than to others.

    Args:
        z: (N, d) features of what the site trained on.
        held: (M, d) of the site's other examples.
        atoms: (K, d) all points.
    """
    distance = torch.cat([torch.cdist(part, atoms).amin(dim=1) for part in (z, held)])
    inside = torch.arange(len(distance)) < len(z)
    return told(-distance, inside)
