"""Ask a site's own code as a server would, without a server: any training, any hop."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from clients import fedavg, fedprox
from clients.base import Client
from clients.site.memory import Site
from clients.site.request import Request
from fedda import models
from fedda.settings import RunConfig, Task
from fedda.wire import packing
from fedda.wire.packing import Kind

SOURCES: dict[str, type[Client]] = {"fedavg": fedavg.Source, "fedprox": fedprox.Source}
CLASSES = ("0", "1", "2")


def make_source(folder: Path, images: int, side: int = 8, **node: Any) -> Site:
    """A site with a state directory, as `fedda-client` makes one; the last class has one image."""
    folder.mkdir(parents=True, exist_ok=True)
    rng, y = np.random.default_rng(0), np.arange(images) % 2
    x = rng.integers(0, 60, (images, side, side))
    for image, label in zip(x, y, strict=True):
        begin = side // 2 * int(label)
        image[:, begin : begin + side // 2] += rng.integers(60, 190)
    y[-1] = 2
    np.savez(folder / "anna.npz", x_train=x.astype(np.uint8), y_train=y)
    about = {"role": "source", "name": "anna", "data": str(folder / "anna.npz"), "device": "cpu"}
    return Site(about | {"state-dir": str(folder / "state")} | node)


def task_of(site: Site, settings: Mapping[str, Any], seed: int = 0) -> Task:
    """The description of a training that a server would send.

    Raises:
        ConfigError: fedda's own server would not begin such a run.
    """
    config = RunConfig.parse({"rounds": 1, "run.evaluate": False, **settings})
    shape = tuple(site.offer()["shape"])
    return config.task(config.method, seed, shape, CLASSES, sites=2)


def blank(task: Task, seed: int = 0) -> models.Model:
    return models.build(task.model, task.dims, task.classes, seed)


def trained(
    site: Site, task: Task, model: models.Model, server_round: int = 1
) -> dict[str, Tensor]:
    """The model that the site sends back for one that a server sends -> its values by name.

    Raises:
        FeddaError: the site refuses.
    """
    request = request_of(site, task, model, server_round)
    arrays, _ = SOURCES[task.method](site).serve(request)
    return {n: torch.from_numpy(a.copy()) for n, a in arrays["model"].unpack().items()}


def request_of(
    site: Site, task: Task, model: models.Model | None = None, server_round: int = 1
) -> Request:
    """A request to train a model, which the site's policy has admitted; by default a new one."""
    sent = {"model": packing.pack(models.to_arrays(model or blank(task)), Kind.MODEL)}
    heading = {"phase": task.stage(server_round).phase.name, "hop": "train", "part": "source"}
    request = Request.make(task.flat(), {"round": server_round, **heading}, sent)
    site.gate.admit(request)
    return request


def closest(rows: Tensor, images: Tensor) -> float:
    """The largest cosine between a row (n, d) and an image (N, d), but for its sign."""
    rows = rows[rows.norm(dim=1) > 1e-12].double()
    if not len(rows):
        return 0.0
    rows, x = rows / rows.norm(dim=1, keepdim=True), images.double()
    return float((rows @ (x / x.norm(dim=1, keepdim=True)).T).abs().max())
