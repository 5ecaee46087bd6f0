"""How many examples of each class a site has, from the change of a model's last layer.

The gradient of the head's bias is, for one step of training (Zhao et al., iDLG,
https://arxiv.org/abs/2001.02610),

    mean_i (p_ic - [y_i = c])  =  the model's mean prediction of class c - the class's share

Over a round of many steps that formula overshoots. So the attacker, a server with labelled examples
of its own of the same kind, trains the model that it sent for sites of its own with many different
shares, and fits their shares by their changes (property inference, Ganju et al., CCS 2018).

    u    (3C,)   change of the head in a round: of its bias, and of the mean of each row of weights;
                 and what the changed model says of the attacker's examples, mean log p_c
    s    (C,)    shares: ridge regression on u, negative ones set to 0, scaled to sum to 1

Half of the examples are the attacker's, of the other half the attacked sites are made. A site's
share of a class is a property of all its examples, so neither blocks of images nor noise that hides
single examples hide it. Only a sum over several sites does, and that is attacked as well.

The error is half the sum of |s - true shares|: 0 if they are known, 1 if they are entirely wrong.
It is compared with the guess of one who knows the average shares alone.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedda.errors import DataError
from fedda.models import Model, evaluating
from fedda.train import generator, seed_for

from .finding import Audit, Finding
from .subject import Subject, copy_of

SKEW = 0.5  # of the Dirichlet distribution that draws a site's shares
OWN = 60  # sites that the attacker makes
GROUP = 3  # sites of a sum
RIDGE = 0.001
SHOWN = 256  # of the attacker's examples, at which a changed model is asked


def error(s: Tensor, true: Tensor) -> Tensor:
    """Half the sum of the differences of shares (..., C) -> (...)."""
    return (s - true).abs().sum(dim=-1) / 2


def fit(u: Tensor, s: Tensor) -> Callable[[Tensor], Tensor]:
    """Ridge regression of shares on changes -> a function that gives shares for changes.

    Args:
        u: (R, D) changes of the attacker's own sites.
        s: (R, C) their shares.
    """
    u, s = u.double(), s.double()
    mean, spread, middle = u.mean(dim=0), u.std(dim=0).clamp(min=1e-12), s.mean(dim=0)
    x = (u - mean) / spread
    eye = torch.eye(x.shape[1], dtype=x.dtype)
    w = torch.linalg.solve(x.T @ x + RIDGE * len(x) * eye, x.T @ (s - middle))

    def predict(change: Tensor) -> Tensor:
        found = (((change.double() - mean) / spread) @ w + middle).clamp(min=0)
        return found / found.sum(dim=-1, keepdim=True).clamp(min=1e-12)

    return predict


def error_of_means(predict: Callable[[Tensor], Tensor], u: Tensor, true: Tensor) -> float:
    """Mean error for each of GROUP sites of which only the mean change is known.

    Args:
        predict: gives shares for changes.
        u: (R, D) changes of the attacked sites.
        true: (R, C) their shares.
    """
    whole = len(u) // GROUP * GROUP
    groups = u[:whole].view(-1, GROUP, u.shape[1]).mean(dim=1)
    of_mean = predict(groups).repeat_interleave(GROUP, dim=0)
    return float(error(of_mean, true[:whole]).mean())


def leaked(subject: Subject, *, sites: int = 30, seed: int = 0) -> Audit:
    """Attack made sites whose classes are uneven -> mean errors of their shares.

    step     from a new model that took a single step over all examples
    first    from a new model that took a round's steps
    last     from the run's last model that took a round's steps; named is the share of the sites
             whose largest class is named, by guesses always as the commonest one
    mean     as `last`, for each of three sites, of which only the mean change is known

    Raises:
        DataError: there are too few examples or classes.
    """
    check_enough(subject, 8, "class shares")
    n = len(subject.y) // 8
    order = torch.randperm(len(subject.y), generator=generator(seed, "shares"))
    half = len(order) // 2
    shown = order[:half][:SHOWN]
    own, known = made_sites(subject, order[:half], OWN, n, seed, "own")
    others, true = made_sites(subject, order[half:], sites, n, seed, "site")
    new, batch = subject.fresh(seed_for(seed, "shares")), subject.train.batch_size
    found: dict[str, dict[str, float]] = {}
    for what, start, size in (
        ("step", new, n),
        ("first", new, batch),
        ("last", subject.model, batch),
    ):
        changes = [change(subject, start, chosen, shown, size) for chosen in own]
        seen = torch.stack([change(subject, start, chosen, shown, size) for chosen in others])
        predict = fit(torch.stack(changes), known)
        s = predict(seen)
        found[what] = {"error": float(error(s, true).mean())}
    found["last"]["named"] = float((s.argmax(dim=1) == true.argmax(dim=1)).float().mean())
    found["mean"] = {"error": error_of_means(predict, seen, true)}
    common = int(known.argmax(dim=1).bincount(minlength=subject.classes).argmax())
    guess = {"error": float(error(known.mean(dim=0), true).mean())}
    named = guess | {"named": float((true.argmax(dim=1) == common).float().mean())}
    rows = [
        Finding("shares", on, n, recovered, named if "named" in recovered else guess)
        for on, recovered in found.items()
    ]
    return Audit("shares", {"sites": sites}, tuple(rows))


def change(
    subject: Subject, start: Model, chosen: Tensor, shown: Tensor, batch_size: int
) -> Tensor:
    """Train a copy of a model for one epoch -> u (3C,)."""
    model = copy_of(start).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=subject.train.lr)
    for batch in chosen.split(batch_size):
        if len(batch) < 2:
            continue  # BatchNorm needs two
        loss = F.cross_entropy(model(subject.x[batch]), subject.y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    bias, rows = (model.head.bias - start.head.bias), (model.head.weight - start.head.weight)
    with evaluating(model), torch.no_grad():
        says = F.log_softmax(model(subject.x[shown]), dim=1).mean(dim=0)
    return torch.cat([bias, rows.mean(dim=1), says]).detach().cpu()


def check_enough(subject: Subject, per_class: int, what: str) -> None:
    """Check that sites can be made of the examples.

    Raises:
        DataError: there are too few examples or classes.
    """
    present, least = len(subject.y.unique()), per_class * subject.classes
    if len(subject.y) < least or present < 2:
        raise DataError(
            f"There are {len(subject.y)} examples of {present} classes; the attack on {what} needs "
            f"two classes and {least} examples."
        )


def made_sites(
    subject: Subject, pool: Tensor, count: int, n: int, seed: int, what: str
) -> tuple[list[Tensor], Tensor]:
    """Make sites of n examples -> the indices of each, and their shares (count, C)."""
    made = [skewed(subject, pool, n, generator(seed, what, i)) for i in range(count)]
    return [chosen for chosen, _ in made], torch.stack([shares for _, shares in made])


def skewed(subject: Subject, pool: Tensor, n: int, draws: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw a site's examples by uneven shares -> indices (n,), and the shares (C,) of them.

    Args:
        subject: whose examples.
        pool: indices of the examples to draw from.
        n: how many.
        draws: of shares and examples.
    """
    y = subject.y.cpu()[pool]
    counts = y.bincount(minlength=subject.classes)
    drawn = np.random.default_rng(draws.initial_seed()).dirichlet([SKEW] * subject.classes)
    power = torch.from_numpy(drawn).float()
    weights = (power * (counts > 0) / counts.clamp(min=1))[y]
    chosen = torch.multinomial(weights + 1e-12, n, generator=draws)
    chosen = chosen[torch.randperm(n, generator=draws)]  # rare classes were drawn last
    return pool[chosen], y[chosen].bincount(minlength=subject.classes) / n
