"""What a site keeps on its own disk between rounds, so that a restart loses nothing.

It keeps the optimizer's momentum with `train.carry-momentum`, and what a method keeps at its sites,
such as an encoder that never leaves or a copy of a discriminator. Everything else comes from the
site's data or from the server. The files are safetensors in the site's state directory. Flower's
context is not used, because a busy node loses it silently.
"""

import glob
import json
import logging
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn, optim

from fedda.errors import BudgetError
from fedda.files import keep_newest, keeping
from fedda.models.saved import apart
from fedda.settings import Task

logger = logging.getLogger("fedda.site")

FILES = 32  # per kind: the last two rounds of 16 trainings, as a server may begin any number
MODELS = 32  # adapted and refined models that stay here
ROOM = 16_000.0  # megabytes of all that trainings leave here
NETWORKS = 4  # files of networks that come once; each has the size of a model
ADAPTED = ".model.safetensors"  # how the names of adapted models end
REFINED = ".refined.safetensors"  # and those of refined ones
TRAINING = "*.*-*"  # how names of trainings look, RUN.METHOD-SEED; other files are somebody else's
# What trainings leave, and how its names end: states and models, heads, and notes.
LEFT = {
    "{}.*.safetensors": "",
    "models/{}/*.safetensors": "",
    "notes/{}/*": (".npz", ".json", ".png"),
}
OPTIMIZER, METHOD = "optimizer", "method"  # kinds of files; methods name further kinds


class Place(Protocol):
    """The members of a site that its files need: its name, and its state directory, if any."""

    @property
    def name(self) -> str: ...

    @property
    def state_dir(self) -> Path | None: ...


@dataclass
class SiteState:
    """A state to keep: tensors by name, and other values that JSON can hold, by name."""

    tensors: dict[str, Tensor] = field(default_factory=dict)
    about: dict[str, Any] = field(default_factory=dict)

    def put(self, part: str, tensors: dict[str, Tensor]) -> None:
        """Add copies of tensors under `part/NAME`, on the CPU."""
        self.tensors |= {f"{part}/{n}": t.detach().cpu().clone() for n, t in tensors.items()}

    def get(self, part: str) -> dict[str, Tensor]:
        """Return the tensors that were put under a part, by NAME."""
        tensors = {n: t for n, t in self.tensors.items() if n.startswith(f"{part}/")}
        return {n.removeprefix(f"{part}/"): t for n, t in tensors.items()}

    def put_optimizer(self, part: str, optimizer: optim.Optimizer) -> None:
        """Add an optimizer's state."""
        state = optimizer.state_dict()
        tensors, plain = {}, {}
        for index, entries in state["state"].items():
            for key, value in entries.items():
                held = tensors if isinstance(value, Tensor) else plain
                held[f"{index}/{key}"] = value
        self.put(part, tensors)
        self.about[part] = {"plain": plain, "groups": state["param_groups"]}

    def get_optimizer(self, part: str) -> dict[str, Any]:
        """Return an optimizer's state as `load_state_dict` takes it."""
        state: dict[int, dict[str, Any]] = {}
        for name, value in {**self.get(part), **self.about[part]["plain"]}.items():
            index, key = name.split("/")
            # A copy: a step of the optimizer would change the kept tensor.
            held = value.clone() if isinstance(value, Tensor) else value
            state.setdefault(int(index), {})[key] = held
        return {"state": state, "param_groups": self.about[part]["groups"]}


def save(site: Place, task: Task, server_round: int, what: str, kept: SiteState) -> None:
    """Write the state after a round, whole or not at all, if the site has a state directory."""
    if site.state_dir is None:
        return
    path = _path(site, task, server_round, what)
    tensors = {name: tensor.contiguous() for name, tensor in kept.tensors.items()}
    with keeping(path) as part:
        save_file(tensors, part, metadata={"fedda": json.dumps(kept.about)})
    rounds = _rounds(site, task, what)
    # The state before stays, for a round that is repeated; some rounds may lie in between, if the
    # site missed them.
    last = max((r for r in rounds if r < server_round), default=server_round)
    for old in rounds:
        if old not in (last, server_round):
            _path(site, task, old, what).unlink(missing_ok=True)
    keep_newest(path.parent.glob(f"{TRAINING}.*.{what}.safetensors"), FILES)


def load(site: Place, task: Task, server_round: int, what: str) -> SiteState | None:
    """Read the state after that round; None if there is none."""
    path = _path(site, task, server_round, what)
    if site.state_dir is None or not path.is_file():
        return None
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})["fedda"])
            return SiteState({name: file.get_tensor(name) for name in file.keys()}, about)  # noqa: SIM118
    except (OSError, SafetensorError, KeyError, ValueError, RecursionError):
        logger.warning("the state in %s cannot be read", path)
        return None


def load_last(
    site: Place, task: Task, first: int, server_round: int, what: str
) -> SiteState | None:
    """Read the latest state of the rounds from `first` to `server_round`; None if there is none."""
    if site.state_dir is None:
        return None
    rounds = [r for r in _rounds(site, task, what) if first <= r <= server_round]
    return load(site, task, max(rounds), what) if rounds else None


def save_once(site: Place, task: Task, what: str, module: nn.Module) -> None:
    """Write a network that the server sends only once in a training."""
    if site.state_dir is None:
        return
    path = _path(site, task, "once", what)
    tensors = {name: t.detach().cpu().contiguous() for name, t in module.state_dict().items()}
    with keeping(path) as part:
        save_file(apart(tensors), part)
    keep_newest(path.parent.glob(f"{TRAINING}.once.{what}.safetensors"), NETWORKS)


def load_once(site: Place, task: Task, what: str, module: nn.Module) -> bool:
    """Read what `save_once` wrote into a network -> whether it was there and could be read."""
    path = _path(site, task, "once", what)
    if site.state_dir is None or not path.is_file():
        return False
    try:
        module.load_state_dict(load_file(path))
    except (OSError, SafetensorError, RuntimeError):
        logger.warning("the %s at %s cannot be read", what, path)
        return False
    return True


def model_path(site: Place, training: str, ending: str) -> Path | None:
    """The file of a training's model that stays at its site; None without state directory.

    Args:
        site: the site.
        training: its name.
        ending: ADAPTED or REFINED.
    """
    return site.state_dir and site.state_dir / site.name / f"{training}{ending}"


def make_room(site: Place, task: Task, megabytes: float | None = None) -> None:
    """Delete the oldest files of other trainings beyond the bounds, and never one of this training.

    Counted are states, adapted models and notes; nothing else in the folder is ever deleted.

    Args:
        site: the site.
        task: the training that goes on.
        megabytes: the most that all these files may take; None: 16 GB.

    Raises:
        BudgetError: this training's files alone take more.
    """
    if site.state_dir is None:
        return
    folder, own = site.state_dir / site.name, task.training
    left, mine = [], 0
    found = (
        each
        for pattern, ends in LEFT.items()
        for each in glob.iglob(pattern.format(TRAINING), root_dir=folder, include_hidden=True)
        if each.endswith(ends)
    )
    for path in map(folder.joinpath, found):
        beside = path.parent == folder
        if not (path.name.startswith(f"{own}.") if beside else path.parent.name == own):
            left.append(path)
            continue
        with suppress(FileNotFoundError):  # another process of this site has deleted it
            mine += path.stat().st_size
    room = 1e6 * (ROOM if megabytes is None else megabytes) - mine
    if room < 0:
        raise BudgetError(
            f"What the training {own} keeps at this site takes {mine / 1e6:.1f} MB, more than the "
            "policy's keep.megabytes; allow more, or end that run."
        )
    keep_newest(left, room=room)
    keep_newest((p for p in left if p.name.endswith((ADAPTED, REFINED))), MODELS - 1)


def _rounds(site: Place, task: Task, what: str) -> list[int]:
    """Return the rounds of this training after which a state of this kind was kept."""
    path = _path(site, task, "*", what)
    before, after = path.name.split("*")
    names = [
        p.name.removeprefix(before).removesuffix(after)
        for p in path.parent.glob(f"{glob.escape(before)}*{after}")
    ]
    return [int(name) for name in names if name.isdigit()]  # others belong to another run's name


def _path(site: Place, task: Task, server_round: int | str, what: str) -> Path:
    base = site.state_dir or Path()
    return base / site.name / f"{task.training}.{server_round}.{what}.safetensors"
