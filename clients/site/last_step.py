"""The last step of a training, at the target alone: `fedda.refining`, and what a test says of it.

The source-only model of the same run and seed is found in the file of its own last step.
"""

import logging
from typing import Protocol

import torch
from torch import Tensor

from fedda import models, refining
from fedda.errors import FeddaError
from fedda.halves import REFERENCE
from fedda.maths.validators import subset
from fedda.models import Model, refined
from fedda.refining import Refined
from fedda.train import generator

from . import state
from .appraisal import Appraised
from .request import Numbers
from .teacher import unrelated

logger = logging.getLogger("fedda.site")


class Refining(Appraised, Protocol):
    """The members of a method's client that are used here."""

    def adapted(self) -> Model:
        """The predictor under test as a model that can be kept."""
        ...

    def checked(self, p: Tensor) -> Tensor:
        """The answers of a predictor, if they are those of a trained network."""
        ...


def take(client: Refining) -> Refined | None:
    """Refine the last round's model and keep the result here; None if the run asks for none.

    Where nothing can be refined, this site's log says why, and the run goes on.
    """
    task, site = client.request.task, client.site
    if task.refine == "none":
        return None
    x = client.data.x
    try:
        members = _source_only(client), client.adapted()
        about = task.model, task.dims, task.refine, task.shares
        taught = site.taught(task)
        made = refining.refined_model(*members, x, *about, taught)
        if taught is not None and (odd := unrelated(taught, made.before)):
            logger.warning("%s", odd)
        client.checked(made.after.float())
        if (path := state.refined_path(site, task.training)) is not None:
            models.save(path, made.model, classes=task.names, **task.about_model)
            logger.info("the refined model stays here, in %s", path)
    except FeddaError as error:
        logger.warning("no last step: %s", error)
        return None
    except Exception:  # a full disk, a layer of another package: the run is worth more
        logger.warning("no last step", exc_info=True)
        return None
    return made


def reported(client: Refining, made: Refined) -> Numbers:
    """What a test says of a refined model without labels."""
    shares = {"changed": made.changed, "agreed": made.agreed}
    return {n: client.released(n, v, len(made.after)) for n, v in shares.items()}


def beside(client: Refining, p: Tensor) -> Numbers:
    """How far earlier trainings' models, and the one that predicts p (N, C), agree with their mean.

    Those are the last members of the models that the trainings' last steps have left here. One
    that is not here, or is of another network, has no number and no part in the mean. A teacher of
    the site's own has a part in it, and no number.
    """
    task, x = client.request.task, client.data.x
    chosen = subset(len(x), generator("agreement"))
    known: dict[int, Tensor] = {}
    for i, training in enumerate(task.others):
        try:
            model = _kept(client, training) if training != task.training else None
        except FeddaError as error:  # a damaged file of another training
            logger.warning("%s is not compared: %s", training, error)
            continue
        if model is not None:
            known[i] = models.predict(model, x[chosen])
    if not known:
        return {}
    known[len(task.others)] = p[chosen]
    trainings = [*task.others, task.training]
    methods = [trainings[i].rpartition(".")[2].rpartition("-")[0] for i in known]
    taught = client.site.taught(task)
    aside = None if taught is None else taught[chosen].to(p)
    shares = refining.agreed(torch.stack([*known.values()]), methods, aside)
    named = {f"agreed-{i}": share for i, share in zip(known, shares, strict=True)}
    return {n: client.released(n, v, len(chosen)) for n, v in named.items()}


def _source_only(client: Refining) -> Model | None:
    """The model of this run's source-only training, from its last step; None if it had none."""
    task = client.request.task
    if task.method == REFERENCE:
        return None
    return _kept(client, task.model_copy(update={"method": REFERENCE}).training)


def _kept(client: Refining, training: str) -> Model | None:
    """The model that a training's last step refined; None if it is not here, or of other inputs."""
    task, path = client.request.task, state.refined_path(client.site, training)
    if path is None or not path.is_file():
        return None
    loaded, meta = models.load(path)
    alike = (meta.config, meta.classes, meta.inputs) == (task.model, task.names, task.inputs)
    return refined.members_of(loaded)[-1].to(client.site.device) if alike else None
