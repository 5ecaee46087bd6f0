"""How tightly a target's features cluster under a model: FADA's eq. 3 at a site."""

import torch
from torch import Tensor

from fedda.maths import gap
from fedda.models import Model, evaluating
from fedda.train import seed_for

from ..base import Client

LEAST_GAIN = -10.0  # relative to the gap statistic before; a smaller one leaves as this


def coarse_gap(before: float) -> float:
    """The gap that gains are multiples of, as it may leave this site."""
    return float(f"{before:.2e}")


def gap_of(client: Client, model: Model, images: Tensor) -> tuple[float, float]:
    """Gap statistic and scatter of images' features under a model -> I, T; the seed is fixed.

    Call it under `torch.no_grad`: the images are not augmented then.

    Args:
        client: the target's client.
        model: the model.
        images: indices of images.

    Raises:
        WireError: a few images alone have most of the features' variance.
    """
    task = client.task
    with evaluating(model):
        z = torch.cat([model.features(client.inputs(part)) for part in images.split(256)])
    client.spread(z)
    seed = seed_for(*client.site.chance(task), client.request.round, "clusters") % 2**32
    statistic = gap.gap_statistic(z, gap.clusters(z, task.classes, seed))
    return float(statistic), float(gap.scatter(z))
