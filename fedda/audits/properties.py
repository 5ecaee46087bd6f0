"""A site's class shares from what crosses besides weights: moments, vote numbers, coordinates.

Property inference as in `fedda.audits.shares` (Ganju et al., CCS 2018): the attacker makes sites of
its own with many different class shares, sees what they would send, and fits their shares by it.
None of this needs labels at the site, so an unlabelled target says it too.

    moments      mean and mean square of each BatchNorm layer's inputs; every model with such layers
                 has them, and AdaBN's target sends little else. A mean over examples is the sum
                 over classes of share x class mean, so it is linear in the shares
    vote         KD3A's numbers: what each source added to the vote, and the share of kept images
    coordinates  FedDaDiL's alpha (K,); no message holds it, but how far a site moves each atom
                 nearly tells it

    u    (D,)    one of these, of one site
    s    (C,)    shares: ridge regression on u, negative ones set to 0, scaled to sum to 1

The vote needs sources: a third of the examples trains three models on uneven classes. Another third
is the attacker's own, from the last third the attacked sites are made.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from fedda.algorithms import feddadil, kd3a
from fedda.errors import DataError
from fedda.maths import optimal_transport
from fedda.models import batchnorms, evaluating, inputs_of
from fedda.train import generator, seed_for

from .finding import Audit, Finding
from .shares import OWN, check_enough, error, error_of_means, fit, made_sites, skewed
from .subject import Subject

TEACHERS = 3
STEPS = 30  # of the coordinates, at points that stay where they are
POINTS = 60  # of each atom and of the site, in such a step
Signature = Callable[[Tensor], Tensor]  # indices of a site's examples -> u (D,)


def leaked(
    subject: Subject,
    *,
    options: kd3a.Config | None = None,
    atoms: tuple[Tensor, Tensor, feddadil.Config] | None = None,
    epochs: int = 5,
    sites: int = 30,
    seed: int = 0,
) -> Audit:
    """Attack made sites whose classes are uneven -> mean errors of their shares.

    moments_mean is the error for each of three sites, of which only the mean moments are known.

    Args:
        subject: what is attacked.
        options: KD3A's settings, if the vote is to be attacked.
        atoms: z (K, n, d), y (K, n, C) and FedDaDiL's settings, if there are atoms.
        epochs: that KD3A's sources train.
        sites: to attack.
        seed: of every draw.

    Raises:
        DataError: there are too few examples, or the run sends nothing that is attacked here.
    """
    parts = thirds(subject, seed)
    n = len(subject.y) // 12
    own, known = made_sites(subject, parts[1], OWN, n, seed, "own")
    others, true = made_sites(subject, parts[2], sites, n, seed, "site")

    def told(u: Signature) -> tuple[float, float]:
        predict = fit(torch.stack([u(chosen) for chosen in own]), known)
        seen = torch.stack([u(chosen) for chosen in others])
        return float(error(predict(seen), true).mean()), error_of_means(predict, seen, true)

    found: dict[str, float] = {}
    if batchnorms(subject.model):
        found["moments"], found["moments_mean"] = told(lambda chosen: moments(subject, chosen))
    if options is not None:
        teachers = _teachers(subject, parts[0], epochs, seed)
        found["vote"], _ = told(lambda chosen: vote(teachers[chosen], options))
    if atoms is not None:
        z, y, settings = atoms
        points = _points(subject, settings)
        draws = generator(seed, "coordinates")
        u = lambda chosen: coordinates(points[chosen], z, y, settings, draws)  # noqa: E731
        found["coordinates"], _ = told(u)
    if not found:
        raise DataError(
            "This run's models have no BatchNorm, and its method sends no vote and no atoms, so "
            "there is nothing for this attack; `fedda audit shares` attacks its weights."
        )
    guess = {"error": float(error(known.mean(dim=0), true).mean())}
    rows = [Finding("properties", on, n, {"error": e}, guess) for on, e in found.items()]
    return Audit("properties", {"sites": sites}, tuple(rows))


@torch.no_grad()
def moments(subject: Subject, chosen: Tensor) -> Tensor:
    """Mean and mean square of the inputs of every BatchNorm layer, per channel -> (D,)."""
    layers = list(batchnorms(subject.model).values())
    with evaluating(subject.model), inputs_of(layers) as seen:
        subject.model(subject.x[chosen])
        of_layers = [seen[layer].transpose(0, 1).flatten(1) for layer in layers]
    return torch.cat([m for x in of_layers for m in (x.mean(dim=1), (x**2).mean(dim=1))]).cpu()


def vote(p: Tensor, options: kd3a.Config) -> Tensor:
    """KD3A's numbers with the gate of the last round -> (K + 1,): focus per image, share of kept.

    Args:
        p: (N, K, C) the teachers' probabilities of the site's images.
        options: the settings.
    """
    gate = options.gate.high
    focus = kd3a.consensus_focus(p, gate, options.vote, options.focus) / len(p)
    kept = kd3a.knowledge_vote(p, gate, options.vote).kept.double().mean()
    return torch.cat([focus, kept[None]])


@torch.no_grad()
def coordinates(
    x: Tensor, z: Tensor, y: Tensor, options: feddadil.Config, draws: torch.Generator
) -> Tensor:
    """Alpha that an unlabelled site reaches from the middle, with the atoms held fixed -> (K,).

    Args:
        x: (N, d) the site's points.
        z: (K, n, d) the atoms' points.
        y: (K, n, C) their labels.
        options: the settings.
        draws: of the mini-batches.
    """
    alpha = x.new_full((len(z),), 1 / len(z))
    spread = x.var(dim=0, correction=0).sum().clamp(min=1e-12)
    for _ in range(STEPS):
        i = torch.randperm(z.shape[1], generator=draws)[:POINTS]
        j = torch.randperm(len(x), generator=draws)[:POINTS]
        gradients, _, _ = optimal_transport.reconstruction(
            z[:, i], y[:, i], alpha, x[j], None, options.fixed_points, options.entropy
        )
        step = options.lr_coordinates * gradients.alpha / spread
        alpha = optimal_transport.project_simplex(alpha - step).to(x)
    return alpha.cpu()


def thirds(subject: Subject, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Divide the examples: for KD3A's sources, for the attacker's sites, for the attacked ones.

    Raises:
        DataError: there are too few examples or classes.
    """
    check_enough(subject, 12, "properties")
    order = torch.randperm(len(subject.y), generator=generator(seed, "properties"))
    third = len(order) // 3
    return order[:third], order[third : 2 * third], order[2 * third :]


def _teachers(subject: Subject, pool: Tensor, epochs: int, seed: int) -> Tensor:
    """Train KD3A's sources, each on half of a pool, unevenly drawn -> p (N, K, C) of all examples.

    The server has their models, and can ask them itself.
    """
    p = []
    for k in range(TEACHERS):
        chosen, _ = skewed(subject, pool, len(pool) // 2, generator(seed, "teacher", k))
        model = subject.fresh(seed_for(seed, "properties"))
        subject.train_on(model, chosen, epochs, seed_for(seed, "teacher", k))
        with torch.no_grad():
            p.append(torch.cat([model(x).softmax(dim=1) for x in subject.x.split(512)]).cpu())
    return torch.stack(p, dim=1)


@torch.no_grad()
def _points(subject: Subject, options: feddadil.Config) -> Tensor:
    """The examples' features, scaled as a site scales its own -> (N, d)."""
    with evaluating(subject.model):
        parts = [subject.model.features(x).flatten(1).float() for x in subject.x.split(512)]
    features = torch.cat(parts).cpu()
    return feddadil.scaling(features, options.scaling)(features)
