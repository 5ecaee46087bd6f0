"""What the last round's model is worth, in numbers: at the target without labels, and at sources.

The target says validators, how sure the model is, and for each source's thresholds the share of
its images above them; a source says its accuracy, how sure the model is there, and thresholds.
They are numbers of a test, and leave as coarse as those.
"""

from typing import Protocol

import torch
from torch import Tensor

from fedda.data import Labelled, Unlabelled
from fedda.maths import estimates, validators
from fedda.models import Model, as_inputs, evaluating
from fedda.train import generator, seed_for

from . import tested
from .memory import Site
from .request import Numbers, Request

SAME = 32  # first images that are compared to tell whether tests are the training images
BATCH = 256


class Appraised(Protocol):
    """The members of a method's client that are used here."""

    @property
    def site(self) -> Site: ...

    @property
    def request(self) -> Request: ...

    @property
    def data(self) -> Labelled | Unlabelled: ...

    @property
    def model(self) -> Model: ...

    def released(self, name: str, value: float, images: int, least: float = 0.0) -> float:
        """A number of a test over so many images, as it leaves this site."""
        ...


def appraised(client: Appraised, p: Tensor) -> Numbers:
    """What the target says without labels of predictions (N, C) of its training images.

    Only the neighbourhoods and the clusters are of a subset, as their costs grow faster than the
    number of images: at most 1,000, the same in every training with the seed.
    """
    task, name = client.request.task, client.site.name
    chosen = validators.subset(len(p), generator(task.seed, name, "validators"))
    clusters = seed_for(task.seed, name, "validators") % 2**32
    values = {
        "bnm": validators.bnm(p),
        "snd": validators.snd(p[chosen]),
        "ami": validators.ami(features(client, chosen), p[chosen], clusters),
        "largest": validators.largest(p),
        "confidence": estimates.confidence(p),
    }
    score = estimates.scores(p)
    for entry, t in client.request.numbers.items():
        kind, _, source = entry.removeprefix("threshold-").partition("/")
        if entry.startswith("threshold-") and source:
            values[f"above-{kind}/{source}"] = estimates.above(score[kind], float(t))
    known = client.request.contract.leaves.numbers  # a method's own test may report fewer
    said = {n: v for n, v in values.items() if {n, n.split("/")[0] + "/*"} & known}
    return {n: client.released(n, v, len(p)) for n, v in said.items()}


def checked(client: Appraised, p: Tensor, y: Tensor) -> Numbers:
    """Calibration error of predictions (N, C) of the test images, if a test reports it."""
    if "ece" not in client.request.contract.leaves.numbers:
        return {}
    return {"ece": client.released("ece", estimates.ece(p, y), len(y))}


def calibrated(client: Appraised, p: Tensor, y: Tensor, new: bool) -> Numbers:
    """What a source says of predictions (N, C) of images whose labels (N,) it has.

    Args:
        client: the source's client.
        p: the predictions.
        y: the labels.
        new: whether no training sees these images.
    """
    right, N = tested.right(p, y), len(y)
    numbers: Numbers = {"tested": N, "held": int(new)}
    numbers["accuracy"] = client.released("accuracy", right, N)
    numbers["confidence"] = client.released("confidence", estimates.confidence(p), N)
    numbers["ece"] = client.released("ece", estimates.ece(p, y), N)
    for kind, score in estimates.scores(p).items():
        name, t = f"threshold-{kind}", estimates.threshold(score, 1 - right, client.site.few)
        numbers[name] = client.released(name, t, N, least=-estimates.MOST)
    return numbers


def features(client: Appraised, chosen: Tensor) -> Tensor:
    """The model's features of chosen training images, on the CPU -> (n, d)."""
    x, device = client.data.x, client.site.device
    with evaluating(client.model):
        parts = [client.model.features(as_inputs(x[i], device)) for i in chosen.split(BATCH)]
    return torch.cat(parts).float().cpu()


def same(tests: Tensor, training: Tensor) -> bool:
    """Whether images to test are those to train on, as where a benchmark is imported so.

    The first ones are compared; both are in the order of their files.
    """
    few = len(tests) < len(training)
    return not few and torch.equal(tests[:SAME], training[:SAME])
