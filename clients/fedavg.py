"""FedAvg's clients: a source trains on its labels, the target takes no part in training.

McMahan et al., AISTATS 2017, https://arxiv.org/abs/1602.05629, algorithm 1, ClientUpdate.
"""

import time

import torch
from torch import Tensor
from torch.nn import functional as F

from fedda import data, models
from fedda.data import Labelled
from fedda.errors import PolicyError
from fedda.train import balanced

from .base import Client
from .site import appraisal, noised
from .site.request import Numbers, Request


class Source(Client):
    """Cross entropy on the site's own images."""

    data: Labelled

    def train(self) -> Numbers:
        """Lines 2 to 4; with `privacy.noise` by DP-SGD."""
        if self.task.privacy.noise:
            return noised.train(self)
        return self.minimise(self.loss_of)

    def loss_of(self, indices: Tensor) -> Tensor:
        """The loss of a mini-batch's images."""
        loss = F.cross_entropy(self.model(self.inputs(indices)), self.labels(indices))
        return loss + self.penalty()

    def labels(self, indices: Tensor) -> Tensor:
        """The labels of images, on the site's device -> (N,)."""
        return models.to_device(self.data.y[indices], self.device)

    def sampled(self, shares: list[Tensor]) -> list[Tensor]:
        """With `train.sampler=balanced`, images of rare classes come several times."""
        if self.task.train.sampler == "shuffle":
            return shares
        draws = self.generator("balance")
        return [balanced(share, self.data.y, draws) for share in shares]

    @torch.no_grad()
    def calibrate(self, request: Request) -> Numbers:
        """Say how good and how sure the last round's model is where this site has labels.

        It tests on the site's labelled test files. If there are none, or too few to hide an image,
        it tests on the images that it holds out of training. A small site holds none out, and tests
        on the training images: then all numbers are better than on new images.

        Raises:
            PolicyError: these are the training images, of which noise is to hide each.
        """
        start = time.perf_counter()
        self.begin(request)
        tests, least = self.site.tested_on(self.task), self.site.min_images
        few = tests is None or (len(tests) < least and not self.site.reproducible)
        apart = self.site.held_out(self.task) if tests is None or few else None
        images = apart or self.data if tests is None or few else tests
        hides = bool(self.task.privacy.noise) or self.site.gate.policy.privacy.demanded
        # By the files: how a run asks for images to be converted could make any two alike.
        if hides and (images is not tests or data.shared(self.site.path, self.site.reading)):
            raise PolicyError(
                "The training or the policy hides single examples, so the model is not tested on "
                "them, and this site has too few other labelled images; add test images."
            )
        p = self.checked(self.predict(images.x))
        new = images is not self.data and not appraisal.same(images.x, self.data.x)
        numbers = appraisal.calibrated(self, p, images.y, hides or new)
        return numbers | {"seconds": time.perf_counter() - start}

    def penalty(self) -> Tensor | float:
        """What a method adds to the loss; nothing in FedAvg."""
        return 0.0


class Target(Client):
    """Tests the model; has nothing to train on."""
