"""A site's class shares from what crosses besides weights: moments, vote numbers, coordinates.

Property inference as in `shares` (Ganju et al., CCS 2018): the attacker makes sites of
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

from typing import Any

import torch
from torch import Tensor

from fedda.errors import DataError
from fedda.methods import Method, Signature
from fedda.models import batchnorms, evaluating, inputs_of
from fedda.train import generator, seed_for

from .finding import Audit, Finding
from .shares import OWN, check_enough, error, error_of_means, fit, made_sites, skewed
from .subject import Subject

TEACHERS = 3


def leaked(
    subject: Subject,
    *,
    method: Method | None = None,
    options: Any = None,
    atoms: tuple[Tensor, Tensor] | None = None,
    epochs: int = 5,
    sites: int = 30,
    seed: int = 0,
) -> Audit:
    """Attack made sites whose classes are uneven -> mean errors of their shares.

    moments_mean is the error for each of three sites, of which only the mean moments are known.

    Args:
        subject: what is attacked.
        method: of the run, which says what its sites tell; None if it is not known.
        options: the method's settings.
        atoms: z (K, n, d) and y (K, n, C), if there are atoms.
        epochs: that the sources train which a vote is about.
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
    if method is not None and (vote := method.vote) is not None:
        teachers = _teachers(subject, parts[0], epochs, seed)
        found["vote"], _ = told(lambda chosen: vote(options, teachers[chosen]))
    if method is not None and method.coordinates is not None and atoms is not None:
        draws = generator(seed, "coordinates")
        u = method.coordinates(options, _features(subject), *atoms, draws)
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
def _features(subject: Subject) -> Tensor:
    """The examples' features -> (N, d)."""
    with evaluating(subject.model):
        parts = [subject.model.features(x).flatten(1).float() for x in subject.x.split(512)]
    return torch.cat(parts).cpu()
