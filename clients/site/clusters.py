"""How tightly a target's features cluster under a model: FADA's eq. 3 at a site."""

import torch
from torch import Tensor

from fedda.maths import gap
from fedda.models import Model, evaluating
from fedda.train import seed_for

from ..base import Client
from .tested import check_spread


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
    if not client.site.reproducible:  # in an experiment, a training that failed is a result
        check_spread(z, client.site.min_images)
    seed = seed_for(*client.site.chance(task), client.request.round, "clusters") % 2**32
    statistic = gap.gap_statistic(z, gap.clusters(z, task.classes, seed))
    return float(statistic), float(gap.scatter(z))
