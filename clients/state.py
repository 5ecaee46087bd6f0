"""What a site keeps on its own disk between rounds, so that a restart loses nothing.

The optimizer's momentum, with `train.carry-momentum`, and FedDaDiL's coordinates and encoder:
everything else a site needs is its data and what the server sends. Kept as safetensors, in the
site's state directory, never in Flower's context, which a busy node loses silently.
"""

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import optim

from fedda.config import Task

if TYPE_CHECKING:
    from .site import Site

logger = logging.getLogger("fedda.site")

KEPT_ENCODERS = 4  # files; a model each
KEPT = 32  # files: the last two rounds of 16 trainings, for a server may begin any number


def save_optimizer(site: "Site", task: Task, server_round: int, optimizer: optim.Optimizer) -> None:
    """Write the optimizer's state after a round, whole or not at all."""
    if site.state_dir is None:
        return
    kept = optimizer.state_dict()
    tensors, plain = {}, {}
    for index, entries in kept["state"].items():
        for key, value in entries.items():
            name = f"{index}/{key}"
            if isinstance(value, torch.Tensor):
                tensors[name] = value.detach().cpu().contiguous()
            else:
                plain[name] = value
    about = {"plain": plain, "groups": kept["param_groups"]}
    _write(site, task, server_round, "optimizer", tensors, about)


def load_optimizer(site: "Site", task: Task, server_round: int) -> dict[str, Any] | None:
    """The optimizer's state as it was after that round, or None where there is none."""
    path = _path(site, task, server_round)
    if site.state_dir is None or not path.is_file():
        logger.warning("no optimizer's state of round %d is left; starting afresh", server_round)
        return None
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})["fedda"])
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, ValueError):
        logger.warning("the optimizer's state at %s cannot be read; starting afresh", path)
        return None
    state: dict[int, dict[str, Any]] = {}
    for name, value in {**tensors, **about["plain"]}.items():
        index, key = name.split("/")
        state.setdefault(int(index), {})[key] = value
    return {"state": state, "param_groups": about["groups"]}


def save_coordinates(site: "Site", task: Task, server_round: int, alpha: torch.Tensor) -> None:
    """Write the barycentric coordinates after a round, whole or not at all; they stay here."""
    if site.state_dir is not None:
        kept = {"alpha": alpha.detach().cpu().contiguous()}
        _write(site, task, server_round, "coordinates", kept, {})


def load_coordinates(site: "Site", task: Task, server_round: int) -> torch.Tensor | None:
    """The coordinates as they were after that round, or None where there are none."""
    path = _path(site, task, server_round, "coordinates")
    if site.state_dir is None or not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            return file.get_tensor("alpha")
    except (OSError, SafetensorError):
        logger.warning("the coordinates at %s cannot be read", path)
        return None


def save_encoder(site: "Site", task: Task, model: torch.nn.Module) -> None:
    """Write the model that came before atoms, which then come alone."""
    if site.state_dir is None:
        return
    path = _path(site, task, "once", "encoder")
    part = path.with_suffix(".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    tensors = {name: t.detach().cpu().contiguous() for name, t in model.state_dict().items()}
    save_file(tensors, part)
    part.replace(path)
    every = sorted(path.parent.glob("*.encoder.safetensors"), key=_age)
    for old in every[KEPT_ENCODERS:]:
        old.unlink(missing_ok=True)


def load_encoder(site: "Site", task: Task, model: torch.nn.Module) -> bool:
    """Read it back into a model -> whether there was one."""
    path = _path(site, task, "once", "encoder")
    if site.state_dir is None or not path.is_file():
        return False
    try:
        model.load_state_dict(load_file(path))
    except (OSError, SafetensorError, RuntimeError):
        logger.warning("the encoder at %s cannot be read", path)
        return False
    return True


def _write(
    site: "Site",
    task: Task,
    server_round: int,
    what: str,
    tensors: dict[str, torch.Tensor],
    about: dict[str, Any],
) -> None:
    path = _path(site, task, server_round, what)
    part = path.with_suffix(".part")
    path.parent.mkdir(parents=True, exist_ok=True)
    save_file(tensors, part, metadata={"fedda": json.dumps(about)})
    part.replace(path)
    recent = {path, _path(site, task, server_round - 1, what)}
    before, after = _path(site, task, "*", what).name.split("*")
    for old in set(path.parent.glob(f"{before}*{after}")) - recent:
        if old.name.removeprefix(before).removesuffix(after).isdigit():  # not another run's name
            old.unlink(missing_ok=True)
    every = sorted(path.parent.glob(f"*.{what}.safetensors"), key=_age)
    for old in every[KEPT:]:
        old.unlink(missing_ok=True)


def _age(path: Path) -> float:
    try:
        return -path.stat().st_mtime
    except FileNotFoundError:  # another process of this site has taken it away
        return 0.0


def _path(site: "Site", task: Task, server_round: int | str, what: str = "optimizer") -> Path:
    base = site.state_dir or Path()
    training = f"{task.run}.{task.method}-{task.seed}"  # a site may serve several runs at once
    return base / site.name / f"{training}.{server_round}.{what}.safetensors"
