"""Bounds on what a request may make a site build: a few bytes could name a model of gigabytes.

They hold with or without a policy, which can only lower them. They are checked on a model without
values, so that nothing large is made first.
"""

from fedda import models, plugins
from fedda.config import NETWORKS
from fedda.errors import PolicyError
from fedda.settings import Task
from fedda.wire.packing import Entry, Kind, Manifest

from ..site.request import Request

BYTES = 8  # of a value, at most


def check_parameters(request: Request, most: int) -> int:
    """Bound the values of the run's network, and of all else that the method lays out beside it.

    A network that another package adds is not built here: only the site itself can install one.

    Returns:
        The most bytes that the arrays of such a request have.

    Raises:
        PolicyError: there are more.
        ModelError: the settings fit no network.
    """
    task, enters = request.task, request.contract.enters
    times = {p: max(task.sites, 1) if "*" in p else 1 for p in (*enters.arrays, *enters.optional)}
    if task.model.name not in NETWORKS and not models.has_weights(task.model.name):
        return BYTES * most * sum(times.values())
    own = task.method in plugins.own_methods()
    extension = models.Extension.of(task.about, task.options) if own else None
    model = models.blank(task.model, task.dims, task.classes, extension, "meta")
    entries = (
        Entry(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in model.state_dict().items()
    )
    outline = Manifest(Kind.MODEL, "float32", tuple(entries))
    layouts = request.layouts(outline)
    again = (Kind.MASKED, Kind.SEALED)  # the model once more, which is not built again
    built = (layout for layout in (outline, *layouts.values()) if layout.kind not in again)
    values = sum(entry.size for layout in built for entry in layout.entries)
    values += _frozen_values(task)
    if values > most:
        raise PolicyError(
            f"The request asks for {task.model.name} with {task.classes} classes, {values:,} "
            f"values with all that {task.method} adds; this site takes {most:,} at most."
        )
    if not own:  # what it adds is its own package's code to lay out
        return BYTES * most * sum(times.values())
    return sum(n * layouts.get(p.split("/")[0], outline).nbytes for p, n in times.items())


def check_frozen(task: Task, most: int) -> None:
    """Bound the values of the frozen part alone.

    Raises:
        PolicyError: there are more.
        ModelError: the settings fit no network.
    """
    if (values := _frozen_values(task)) > most:
        raise PolicyError(
            f"The frozen part of {task.model.name} has {values:,} values; this site takes {most:,} "
            "at most."
        )


def _frozen_values(task: Task) -> int:
    if not task.model.freezes:
        return 0
    part = models.backbone(task.model, task.dims, weights=False, device="meta")
    return sum(tensor.numel() for tensor in part.state_dict().values())
