"""The local last step of a training, at the target: its models' mean, refined by its own images.

    members      the run's source-only model, the same with the target's BatchNorm statistics, and
                 the method's model: what the target has anyway
    consensus    the mean of their predictions
    refined      `fedda.maths.refine` of that, as one model (`fedda.models.refined`)

Statistics of a target whose classes are uneven mislead: they make rare classes look as frequent as
at the sources. But a shift alone can make the source-only model give too many images one class,
which these statistics mend. So that member counts the less, and the shares of the answers the more,
the more evidence for uneven classes there is, as far as both models see the same ones.

It reads no label, and nothing that it computes is sent.
"""

import copy
import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedda import models
from fedda.config import ModelConfig
from fedda.errors import RefineError
from fedda.maths import refine
from fedda.maths.refine import FEWEST, Shares, Space, Strength
from fedda.models import Model, refined
from fedda.train import batches, generator

BATCH = 256
STATISTICS = 64  # images of which BatchNorm's statistics are taken at once
RIDGE = 1e-4  # of a distilled head's distance from the one that it begins as, by the features
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Refined:
    """What the step has made."""

    model: Model  # the refined model, on the CPU
    points: Tensor  # (N, d) in which the Gaussians are
    before: Tensor  # (N, C) what the last member predicts by itself
    after: Tensor  # (N, C) what the refined model predicts
    agreed: float  # share of the images on which all members agree

    @property
    def changed(self) -> float:
        """Share of the images whose class is another one than the last member's."""
        return float((self.before.argmax(dim=1) != self.after.argmax(dim=1)).double().mean())


@torch.no_grad()
def inputs(model: Model, x: Tensor) -> Tensor:
    """What a model takes for images: what its frozen part makes of them, if it has one."""
    part = model.backbone
    if part is None or tuple(x.shape[1:]) != part.shape:
        return x
    return torch.cat([part(models.as_inputs(few, CPU)) for few in x.split(BATCH)])


def refined_model(
    source_only: Model | None,
    adapted: Model,
    x: Tensor,
    config: ModelConfig,
    shape: tuple[int, ...],
    strength: Strength = "careful",
    shares: Shares = "auto",
    taught: Tensor | None = None,
) -> Refined:
    """Refine the mean prediction of models by a target's inputs.

    Args:
        source_only: the run's, if it has trained one besides.
        adapted: the method's; the Gaussians are of its features, unless inputs are features.
        x: the target's inputs, of the model or of its frozen part.
        config: the network.
        shape: of one input, as the run has it.
        strength: how much the Gaussians may say.
        shares: whether estimated shares of the classes count.
        taught: (N, C) what a teacher of the target's own says of these inputs. It counts as one
            more member while the Gaussians are fitted, and the model stands without it.

    Raises:
        RefineError: with these examples or models nothing would be learnt.
    """
    if len(x) < FEWEST:
        raise RefineError(
            f"The target has {len(x)} examples, and the last step needs {FEWEST} or more to tell "
            "classes apart; the model stays as it is."
        )
    members = [m for m in (source_only, adapted) if m is not None]
    p = [models.predict(m, x).double() for m in members]
    weights = [1.0] * len(p)
    beta = None
    if models.batchnorms(members[0]):
        own = with_own_statistics(members[0], x)
        q = models.predict(own, x).double()
        beta = refine.shown(p[0], q)
        if (even := 1 - refine.shown(p[0], q, refine.FULL_DOUBT * math.log(q.shape[1]))) > 0:
            members.insert(0, own)
            p.insert(0, q)
            weights.insert(0, even)
    w = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    consensus = torch.einsum("k,knc->nc", w, torch.stack(p))
    if taught is not None:
        consensus = (sum(weights) * consensus + taught.double()) / (sum(weights) + 1)
    if not consensus.isfinite().all():
        raise RefineError(
            "The models give no probabilities, as their training diverged; the model stays as it "
            "is. Lower train.lr."
        )
    if len(consensus.argmax(dim=1).unique()) == 1:
        raise RefineError(
            "The models give all examples of the target the same class, so there is nothing to "
            "refine; the model stays as it is."
        )
    of: refined.Of = "inputs" if len(shape) == 1 or config.train == "bottleneck" else "features"
    features = models.as_inputs(x, CPU).flatten(1) if of == "inputs" else features_of(adapted, x)
    try:
        space = Space.of(features)
        z = space(features.double())
        q, found = refine.refine(consensus, z, strength, shares, beta)
    except (ValueError, torch.linalg.LinAlgError) as error:  # type: ignore[attr-defined]
        raise RefineError(
            f"The target's features cannot be told apart ({error}); the model stays as it is."
        ) from error
    made = refined.join(members, w, config, shape, of, space, found)
    if taught is not None:
        q = models.predict(made, x).double()
    labels = torch.stack(p).argmax(dim=2)
    agreed = float((labels == labels[0]).all(dim=0).double().mean())
    return Refined(made, z, p[-1], q, agreed)


def with_own_statistics(model: Model, x: Tensor) -> Model:
    """A copy of a model with BatchNorm's statistics of these inputs."""
    copied, device = copy.deepcopy(model), next(model.parameters()).device
    order = torch.randperm(len(x), generator=generator("last step"))
    parts = batches([order], STATISTICS, STATISTICS)
    models.own_statistics(copied, (models.as_inputs(x[indices], device) for indices in parts))
    return copied.attach(model.backbone)


@torch.no_grad()
def features_of(model: Model, x: Tensor) -> Tensor:
    """A model's features of inputs, in evaluation mode, on the CPU -> (N, d)."""
    device = next(model.parameters()).device
    with models.evaluating(model):
        parts = [model.features(models.as_inputs(part, device)).cpu() for part in x.split(BATCH)]
    return torch.cat(parts)


def distilled(made: Refined, x: Tensor) -> Model:
    """The last member with a linear head that learns the refined answers, as a smaller model.

    Args:
        made: the refined model.
        x: the inputs that it was made with.

    Raises:
        RefineError: the last member's head is not one linear layer.
    """
    student = copy.deepcopy(refined.members_of(made.model)[-1]).attach(made.model.backbone)
    if not isinstance(student.head, torch.nn.Linear) or student.extension is not None:
        raise RefineError("The method's head is no linear layer, so none can learn its answers.")
    z, head = features_of(student, x), student.head
    rate = RIDGE * float(z.square().sum(dim=1).mean())
    steps = torch.optim.LBFGS(head.parameters(), max_iter=200, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        steps.zero_grad()
        learnt = F.cross_entropy(head(z), made.after.float())
        total = learnt + rate * (head.weight - begin).square().sum()
        total.backward()
        return total

    begin = head.weight.detach().clone()
    steps.step(loss)
    return student.eval()
