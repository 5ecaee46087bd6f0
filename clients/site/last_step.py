"""The last step of a training, at the target alone: `fedda.refining`, and what a test says of it.

The source-only model of the same run and seed is found in the file of its own last step. Where
each training is a run of its own, as in a comparison, the site is told which file that is.
"""

import logging
from collections.abc import Callable

from fedda import models, refining
from fedda.errors import FeddaError
from fedda.halves import REFERENCE
from fedda.models import Model, refined
from fedda.refining import Refined
from fedda.wire import AGREED, CHANGED

from . import state
from .request import Numbers
from .teacher import unrelated
from .trainer import Trainer

logger = logging.getLogger("fedda.site")


def take(client: Trainer, adapted: Callable[[], Model]) -> Refined | None:
    """Refine the last round's model and keep the result here; None if the run asks for none.

    Where nothing can be refined, this site's log says why, and the run goes on.

    Args:
        client: the target's.
        adapted: returns the predictor under test.
    """
    task, site = client.request.task, client.site
    if task.refine == "none":
        return None
    x = client.data.x
    try:
        members = _source_only(client), adapted()
        about = task.model, task.dims, task.refine, task.shares
        taught = site.taught(task)
        made = refining.refined_model(*members, x, *about, taught)
        if taught is not None and (odd := unrelated(taught, made.before)):
            logger.warning("%s", odd)
        if (path := state.model_path(site, task.training, state.REFINED)) is not None:
            models.save(path, made.model, config=task.model, inputs=task.inputs, classes=task.names)
            logger.info("the refined model stays here, in %s", path)
    except FeddaError as error:
        logger.warning("no last step: %s", error)
        return None
    except Exception:  # a full disk, a layer of another package: the run is worth more
        logger.warning("no last step", exc_info=True)
        return None
    return made


def reported(client: Trainer, made: Refined | None, images: int) -> Numbers:
    """What a test says without labels of a refined model, over so many images.

    If none was made, nothing; but through noise, as of a model that stays as it is: that there is
    none can tell of the one image with another class than all others.
    """
    if made is not None:
        shares = {CHANGED: made.changed, AGREED: made.agreed}
    else:
        hidden = client.site.test_noise and client.request.task.refine != "none"
        shares = {CHANGED: 0.0, AGREED: 1.0} if hidden else {}
    return {n: client.privatise(n, v, images) for n, v in shares.items()}


def _source_only(client: Trainer) -> Model | None:
    """The source-only model, from its last step; None if it had none here, or of other inputs."""
    task, site = client.request.task, client.site
    if task.method == REFERENCE:
        return None
    reference = task.model_copy(update={"method": REFERENCE}).training
    path = site.config.source_only or state.model_path(site, reference, state.REFINED)
    if path is None or not path.is_file():
        return None
    loaded, meta = models.load(path)
    alike = (meta.config, meta.classes, meta.inputs) == (task.model, task.names, task.inputs)
    return refined.members_of(loaded)[-1].to(site.device) if alike else None
