"""How tightly a target's features cluster under a model: FADA's eq. 3 at a site."""

import torch
from torch import Tensor

from fedda.maths import gap
from fedda.models import Model, evaluating
from fedda.train import seed_for
from fedda.wire import Number

from ..base import Client

GAIN = Number("gain", 0.001, low=-10.0)  # relative to the gap statistic before


class Gains:
    """How much tighter a target's features cluster under other models than under one, eq. 3.

    Call both functions under `torch.no_grad`. A server may choose the models, so a gain leaves in
    steps of a thousandth.

    Args:
        client: the target's client; its model is the one that others are compared with.
        images: indices of the images that are compared.
        unit: what a gain is measured in, see `gap.Unit`.
    """

    def __init__(self, client: Client, images: Tensor, unit: gap.Unit) -> None:
        self.client, self.images, self.unit = client, images, unit
        self.before, self.scatter = gap_of(client, client.model, images)

    def of(self, model: Model) -> float:
        """The gain of a model, as it leaves this site.

        Raises:
            WireError: a few images alone have most of the features' variance.
        """
        after, around = gap_of(self.client, model, self.images)
        if self.unit == "share":
            gain = gap.gap_gain(gap.share(self.before, self.scatter), gap.share(after, around))
        else:
            gain = gap.gap_gain(self.before, after) / (self.before or 1.0)
        told = self.client.privatise(GAIN, gain, len(self.images))
        whole = float(f"{self.before:.2e}")  # what exact gains are multiples of, as it may leave
        return told * whole if self.unit == "sum" else told


def gap_of(client: Client, model: Model, images: Tensor) -> tuple[float, float]:
    """Gap statistic and scatter of images' features under a model -> I, T; the seed is fixed.

    Call it under `torch.no_grad`: the images are not augmented then.

    Raises:
        WireError: a few images alone have most of the features' variance.
    """
    task = client.task
    with evaluating(model):
        z = torch.cat([model.features(client.inputs(part)) for part in images.split(256)])
    z = client.spread(z)
    seed = seed_for(*client.site.chance(task), client.request.round, "clusters") % 2**32
    statistic = gap.gap_statistic(z, gap.clusters(z, task.classes, seed))
    return float(statistic), float(gap.scatter(z))
