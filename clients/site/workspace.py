"""What stays at a site of one training from request to request: its model, networks, states.

And the model of a test, until the next request trains with it, so that it is sent only once.
"""

import hashlib
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import torch
from torch import nn, optim

from fedda import models
from fedda.config.site_config import SiteConfig
from fedda.errors import ForgottenError, WireError
from fedda.settings import Task
from fedda.train import make_optimizer
from fedda.wire import packing
from fedda.wire.packing import Packed, shown

from . import state
from .frozen import Frozen

logger = logging.getLogger("fedda.site")

T = TypeVar("T")


class Stateful(Protocol):
    """An object whose state can stay at a site from round to round."""

    def state_dict(self) -> state.SiteState:
        """Return the state from which the next round continues."""
        ...

    def load_state_dict(self, kept: state.SiteState, device: torch.device) -> None:
        """Continue from a state that `state_dict` returned."""
        ...


class Network:
    """A network with its own optimizer, or without an optimizer."""

    def __init__(self, module: nn.Module, optimizer: optim.Optimizer | None = None) -> None:
        self.module = module
        self.optimizer = optimizer

    def state_dict(self) -> state.SiteState:
        """Return weights, buffers and the optimizer's state."""
        saved = state.SiteState()
        saved.put("module", self.module.state_dict())
        if self.optimizer:
            saved.put_optimizer("optimizer", self.optimizer)
        return saved

    def load_state_dict(self, kept: state.SiteState, device: torch.device) -> None:
        """Continue from that state, but at the learning rate that the optimizer has now."""
        self.module.load_state_dict(kept.get("module"))
        if self.optimizer:
            load_at_its_rates(self.optimizer, kept.get_optimizer("optimizer"))


class Home(state.Place, Protocol):
    """The members of a site that a training's objects need."""

    @property
    def device(self) -> torch.device: ...

    @property
    def config(self) -> SiteConfig: ...

    @property
    def frozen(self) -> Frozen: ...


class Workspace:
    """The objects of one training at a site.

    Attributes:
        model: the run's model on the site's device.
        schema: its layout on the wire.
        held: other objects that stay in this process's memory, by name.
    """

    def __init__(self, site: Home, task: Task) -> None:
        self._site = site
        self._task = task
        self.held: dict[str, Any] = {}
        self._kept: dict[tuple[str, int], state.SiteState] = {}
        self.model = self.blank()
        self.schema = packing.layout(
            models.to_arrays(self.model), packing.Kind.MODEL, task.wire.dtype
        )

    def blank(self, extension: models.Extension | None = None) -> models.Model:
        """Make the run's network on the site's device; its weights are loaded later.

        Args:
            extension: layers to add, if they are others than the method adds to the run's model.
        """
        task = self._task
        extension = extension or models.Extension.of(task.about, task.options)
        made = models.blank(task.model, task.dims, task.classes, extension)
        made.attach(self._site.frozen.part(task)).to(self._site.device)
        train, compiled = task.train, self._site.config.compile
        on_cpu = self._site.device.type == "cpu"
        pixels = train.batch_size * math.prod(task.dims[1:]) if on_cpu else 0
        layout = models.layout_of(task.model, train.layout, pixels)
        made.compute(models.Arithmetic(train.precision, layout, compiled))
        return made

    def hold(self, name: str, make: Callable[[], T]) -> T:
        """Return an object that stays in this process's memory; the first call makes it."""
        if name not in self.held:
            self.held[name] = make()
        return self.held[name]

    def optimizer(self, task: Task, rate: float, last: int) -> optim.Optimizer:
        """The model's optimizer; with `train.carry-momentum` it goes on, at a new rate.

        Args:
            task: the training.
            rate: learning rate.
            last: it goes on from the latest round up to this one in which this site trained.
        """
        optimizer = make_optimizer(self.model.groups(rate), task.train, rate)
        if task.train.carry_momentum and last > 0:
            saved = self.latest(task, 1, last, state.OPTIMIZER)
            if saved is None:
                why = "this site trained in none before, or kept nothing"
                logger.warning("round %d begins with a new optimizer: %s", last + 1, why)
            else:
                load_at_its_rates(optimizer, saved.get_optimizer("optimizer"))
        return optimizer

    def carry(self, optimizer: optim.Optimizer, task: Task, server_round: int) -> None:
        """Remember the model's optimizer for the next round, with `train.carry-momentum`."""
        if task.train.carry_momentum:
            saved = state.SiteState()
            saved.put_optimizer("optimizer", optimizer)
            self.remember(task, server_round, state.OPTIMIZER, saved)

    def leave(self, task: Task, server_round: int, things: Mapping[str, Stateful]) -> None:
        """Keep the state of everything that stays at this site when a round is over."""
        saved = state.SiteState()
        for name, thing in things.items():
            part = thing.state_dict()
            saved.tensors |= {f"{name}/{n}": tensor for n, tensor in part.tensors.items()}
            saved.about[name] = part.about
        self.remember(task, server_round, state.METHOD, saved)

    def left(self, task: Task, name: str, first: int, last: int) -> state.SiteState | None:
        """Return one thing's state after the latest of the rounds `first` to `last`, or None."""
        saved = self.latest(task, first, last, state.METHOD)
        if saved is None or name not in saved.about:
            return None
        return state.SiteState(saved.get(name), saved.about[name])

    def remember(self, task: Task, server_round: int, what: str, kept: state.SiteState) -> None:
        """Keep a state for the next round, also on disk if the site has a state directory.

        The state before it stays, too, as the server may repeat a round.
        """
        before = [r for name, r in self._kept if name == what and r < server_round]
        for old in sorted(before)[:-1]:
            del self._kept[what, old]
        self._kept[what, server_round] = kept
        state.save(self._site, task, server_round, what, kept)

    def latest(self, task: Task, first: int, last: int, what: str) -> state.SiteState | None:
        """Return the state that was kept after the latest of the rounds first to last, or None.

        Another process of this site may have served a round in between, and left it on the disk.
        """
        every = self._kept.items()
        kept = {r: held for (name, r), held in every if name == what and first <= r <= last}
        own = max(kept, default=first - 1)
        newer = state.load_last(self._site, task, own + 1, last, what) if own < last else None
        return newer or kept.get(own)

    def recall(self, task: Task, server_round: int, what: str) -> state.SiteState | None:
        """Return the state that was kept after a round, or None."""
        saved = self._kept.get((what, server_round))
        return saved or state.load(self._site, task, server_round, what)


def load_at_its_rates(optimizer: optim.Optimizer, former: dict[str, Any]) -> None:
    """Give an optimizer the state of a former one, but leave it its own learning rates."""
    rates = [group["lr"] for group in optimizer.param_groups]
    optimizer.load_state_dict(former)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate


class ModelCache:
    """What a site keeps of one request for the next; only in memory, and never more than that.

    The server asks for it with a request's table `kept`: the SHA-256 of an array's bytes, by the
    array's name. If the array comes with the request, the site keeps it. If it does not, the site
    uses the one that it kept, which passes the same checks as an array that was sent.
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[str, Packed]] = {}  # by name: the hash, and the array

    def put(self, arrays: Mapping[str, Packed], table: Mapping[str, Any]) -> None:
        """Keep arrays of a request, and nothing that was kept before.

        Raises:
            WireError: an array is not there, or has another hash.
        """
        self._kept = {}
        for name, digest in table.items():
            if name not in arrays or hashlib.sha256(arrays[name].buffer).hexdigest() != digest:
                raise WireError(f"The array '{shown(name)}' to keep is not the one that came.")
            self._kept[name] = (str(digest), arrays[name])

    def take(self, arrays: Mapping[str, Packed], table: Mapping[str, Any]) -> dict[str, Packed]:
        """Return a request's arrays with those that it only names, which are kept no longer.

        A request that has no arrays, as for a key, changes nothing.

        Raises:
            WireError: an array comes with the request although it is named as kept.
            ForgottenError: an array is not kept here.
        """
        if not arrays and not table:
            return {}
        kept, self._kept = self._kept, {}
        found = dict(arrays)
        for name, digest in table.items():
            if name in arrays:
                raise WireError(f"The request names '{shown(name)}' as kept, but brings it.")
            if name not in kept or kept[name][0] != digest:
                raise ForgottenError(
                    f"This site no longer has the '{shown(name)}' that the request names, as after "
                    "a restart; the server sends it again."
                )
            found[name] = kept[name][1]
        return found
