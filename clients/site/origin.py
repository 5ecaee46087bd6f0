"""Where a model comes from: a site trains none that honest rounds cannot have made of the first.

A server that may send any weights sends some that sort a step's images, and reads them from what
comes back. So nothing here is trained because a server sent it:

- The first model of a training is the one that this site draws itself, from the run's seed and the
  network's description, on this machine's copy of pretrained weights; or a file that the site's own
  operator named (`fedda-client --start-from`).
- A later one is no farther from the first than training goes, row for row (`FAR`, `SHIFT`).
- At a site that trains on labels it is also no farther from the last one that came than some times
  this site's own longest round (`TIMES`), tensor for tensor: the mean of updates is no longer than
  the longest, and the longest of honest ones is not many times as long as another.
- What a model holds besides weights is what the first one has, always; BatchNorm's statistics may
  move by so much as data moves them (`MOST`).
- Of a discriminator all members have equal copies, so a site goes on with its own
  (`clients.fdann`); after a round away it takes one that is as near to the drawn one as a model,
  and begins its optimizer anew.

Within these bounds a patient server can still move a model step by step; SECURITY.md says what was
measured of that. Only noise bounds every made model.

Requests that are answered by numbers alone are not checked here, but by `output_privacy`.
"""

import math
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np
import torch

from fedda import models
from fedda.errors import ModelError, OriginError
from fedda.maths.bounds import SMALL, is_weight, norm
from fedda.settings import Task
from fedda.wire import Part
from fedda.wire.packing import Arrays, Kind

from . import state
from .crafted import GROWING
from .frozen import Frozen
from .request import Request

# How far a row of weights, or one shift or scale, may be from the first model's. A row's unit is
# its length there, or that of weights of `SMALL`, but 1 at least; a shift's its size there, or 1.
# In 1,000 steps at a rate of .05 rows of two networks that begin at random went 2.2 at most, and
# shifts .73; a head alone on 5,000 counts of words went 8.2 in 600 steps at .1, which is .6 units.
FAR, SHIFT = 3.0, 2.0
MOST = 1e6  # how far a statistic may be, in units of its layer's largest at first, or 1
SAME = 1e-3  # a drawn model may differ so much, in the same units, from one of another processor
ROUNDED = 0.02  # and after it travelled in less than full precision
TIMES = 6.0  # honest means went 1.6 times as far as a source's own longest round, in every tensor
AWAY = 8  # rounds that lie between two requests count, no more
SHARE = 0.1  # of its even share of the whole: what a tensor that hardly moves counts as, at least
ORIGIN = "origin"  # a kind of file that stays here
# Names of models that are not checked here: discriminators are by `check_discriminator`. Teachers
# are only asked, and `output_privacy` sees their answers; else one source could stop the target.
ELSEWHERE = (GROWING, "teacher/")


class Origin:
    """What a site knows of the models of its trainings.

    Args:
        place: where it keeps what it saw last.
        frozen: knows this site's copy of pretrained weights.
        start: a model file that this site's operator named; None: no run starts from another.
    """

    def __init__(self, place: state.Place, frozen: Frozen, start: Path | None) -> None:
        self._place, self._frozen, self._start = place, frozen, start
        self._firsts: tuple[tuple[object, ...], tuple[Arrays, ...]] = (), ()
        self._learnt: frozenset[str] = frozenset()  # names of parameters
        # What else is in a model: of each statistic the names of all those of its layer; of what
        # nothing changes, none.
        self._buffers: dict[str, list[str]] = {}

    def check(self, request: Request) -> None:
        """Check the models of a request, before anything is trained.

        Raises:
            OriginError: one cannot come from the training's first model.
            ModelError: this site cannot make the first model itself.
        """
        stays = {"atoms", "model"} <= {*request.arrays}  # FedDaDiL's encoder, also from a test
        if not stays and (request.is_test or not shows(request.contract)):
            return
        sent = {
            name: packed.unpack()
            for name, packed in request.arrays.items()
            if packed.manifest.kind is Kind.MODEL and not name.startswith(ELSEWHERE)
        }
        firsts, begun = self.firsts(request.task) if sent else (), not begins(request)
        for name, values in sent.items():
            near = not begun and name == "model"
            rounding = SAME if request.task.wire.dtype == "float32" else ROUNDED
            reach = partial(self._beyond, values, rounding=rounding, near=near)
            beyond, entry = min(reach(first) for first in firsts)
            if beyond > 1:
                raise OriginError(_unknown() if near else _far(name, entry, beyond))
        if request.contract.labels and "model" in sent and begun:
            self._check_step(request, self._weights(sent["model"]))

    def firsts(self, task: Task) -> tuple[Arrays, ...]:
        """The models that the training may begin with: the drawn one, and the operator's file.

        Raises:
            ModelError: the file cannot be read, or pretrained weights are not on this machine.
        """
        key = (task.model, task.dims, task.names, task.seed, task.method, task.options)
        if key != self._firsts[0]:
            extension = models.Extension.of(task.about, task.options)
            config = self._frozen.own(task.model)
            drawn = models.build(config, task.dims, task.classes, task.seed, extension, fetch=False)
            found = [models.to_arrays(drawn)]
            if self._start is not None:
                found.append(_of_file(self._start, found[0]))
            self._firsts = key, tuple(found)
            self._learnt = frozenset(n for n, _ in drawn.named_parameters(remove_duplicate=False))
            self._buffers = {name: [] for name in found[0].keys() - self._learnt}
            for layer, module in models.batchnorms(drawn).items():
                known = dict(module.named_buffers(layer)).items()
                names = [name for name, buffer in known if buffer.is_floating_point()]
                self._buffers |= dict.fromkeys(names, names)
                self._buffers.pop(f"{layer}.num_batches_tracked", None)  # nothing here reads it
        return self._firsts[1]

    def follow(self, request: Request, after: models.Model) -> None:
        """Keep the model that came, and how far this site's training went from it.

        Args:
            request: the one that was served.
            after: the model as it is after it.
        """
        if not request.contract.labels or "model" not in request.arrays:
            return
        came, task = request.arrays["model"].unpack(), request.task
        # Not `_weights`: where a request is answered by numbers alone, no first model was drawn.
        learnt, own = dict(after.named_parameters(remove_duplicate=False)), models.to_arrays(after)
        went = distances({name: a for name, a in own.items() if name in learnt}, came)
        before = self._last(request)
        longest = before.about["longest"] if before else {}
        longest = {name: max(length, longest.get(name, 0.0)) for name, length in went.items()}
        about = {"longest": longest, "round": request.round, "settings": task.digest}
        last = {f"last/{name}": torch.tensor(came[name]) for name in went}
        state.save(self._place, task, request.round, ORIGIN, state.SiteState(last, about))

    def _last(self, request: Request) -> state.SiteState | None:
        """What was kept of the newest round of this training here; None if there was none.

        Also where the request is of an earlier one: else a server that counts backwards could send
        models each of which is far from the one before.
        """
        last = state.load_last(self._place, request.task, 1, sys.maxsize, ORIGIN)
        same = last is not None and last.about["settings"] == request.task.digest
        return last if same else None

    def _weights(self, values: Arrays) -> Arrays:
        """The arrays of a model that are trained."""
        return {name: a for name, a in values.items() if name in self._learnt}

    def _beyond(
        self, values: Arrays, first: Arrays, rounding: float, near: bool
    ) -> tuple[float, str]:
        """How far a model is from a first one, in units of what may be, and where.

        Args:
            values: the model.
            first: the first one.
            rounding: how far what does not change may be.
            near: whether this is to be the first one.
        """
        most, where = farthest(self._weights(values), first, rounding if near else 1.0)
        for name, layer in self._buffers.items():
            if name in values:
                unit = max(1.0, *(float(np.abs(first[n]).max(initial=0)) for n in layer or (name,)))
                bound = MOST if layer and not near else rounding
                moved = np.abs(values[name] - first[name].astype(np.float64)).max(initial=0)
                if not (beyond := float(moved) / (bound * unit)) <= most:
                    most, where = beyond, name
        return most, where

    def _check_step(self, request: Request, values: Arrays) -> None:
        """Check how far a model's weights are from the last one that came."""
        last = self._last(request)
        if last is None:
            return
        longest = last.about["longest"]
        whole = math.hypot(*longest.values())
        size = sum(values[name].size for name in longest)
        rounds = min(max(abs(request.round - last.about["round"]), 1), AWAY)
        before = {name: tensor.numpy() for name, tensor in last.get("last").items()}
        for name, went in distances(values, before).items():
            least = SHARE * whole * math.sqrt(values[name].size / size)
            allowed = TIMES * rounds * max(longest[name], least)
            if went > allowed:
                raise OriginError(_far("model", name, went / allowed))


def shows(contract: Part) -> bool:
    """Whether what leaves is more than numbers, so that it can show what a model was made to."""
    return bool(contract.leaves.arrays or contract.leaves.optional or contract.gradients)


def begins(request: Request) -> bool:
    """Whether nobody has trained before in this training, so that its model is the first one."""
    hops = request.stage.phase.hops
    works = (hop for hop, parts in hops.items() if not all(part.signs for part in parts.values()))
    return request.round == 1 and request.hop == next(works, "")


def check_discriminator(name: str, came: Arrays, drawn: Arrays) -> None:
    """Check a discriminator that came to a site that has no copy of the round before.

    Args:
        name: what to call it.
        came: it; the state of its optimizer that comes with it is not looked at, nor used.
        drawn: the one that all members began with.

    Raises:
        OriginError: it is farther from that than training goes.
    """
    beyond, entry = farthest(came, drawn)
    if beyond > 1:
        raise OriginError(_far(name, entry, beyond))


def farthest(values: Arrays, first: Arrays, near: float = 1.0) -> tuple[float, str]:
    """How far a model's farthest row is from another's, in units of the bounds, and where.

    Args:
        values: weights by name; those that `first` has are of its shapes.
        first: the other model.
        near: the part of the bounds that may be reached.
    """
    most, where = 0.0, ""
    for name, came in values.items():
        if not is_weight(name, came) or name not in first:  # a network beside the run's model
            continue
        rows = first[name].reshape(first[name].shape[0] if first[name].ndim else 1, -1)
        moved = came.reshape(rows.shape) - rows
        bound = near * (SHIFT if first[name].ndim < 2 else FAR)
        least = max(1.0, SMALL * math.sqrt(rows.shape[1]))
        lengths, gone = (np.sqrt(np.einsum("ij,ij->i", part, part)) for part in (rows, moved))
        beyond = float((gone / (bound * np.maximum(lengths, least))).max(initial=0.0))
        if not beyond <= most:
            most, where = beyond, name
    return most, where


def distances(values: Arrays, others: Mapping[str, np.ndarray]) -> dict[str, float]:
    """The Euclidean distance of two models, by tensor."""
    return {n: norm({n: a}, {n: others[n]}) for n, a in values.items() if is_weight(n, a)}


def _of_file(path: Path, like: Arrays) -> Arrays:
    """The values of a model file, if it is of the run's network.

    Raises:
        ModelError: it cannot be read, or is of another network.
    """
    found = models.to_arrays(models.load(path)[0])
    if {n: a.shape for n, a in found.items()} != {n: a.shape for n, a in like.items()}:
        raise ModelError(
            f"The file of --start-from, {path}, holds another network than the run's; name the "
            "file that the run starts from, or leave the option out."
        )
    return found


def _unknown() -> str:
    return (
        "The first model of the run is none that this site knows: it is not what the run's own "
        "seed and network give here. If the run starts from a finished model, get its file, look "
        "at where it is from, and start this site with --start-from FILE; if it starts from "
        "pretrained weights, both machines need the same."
    )


def _far(name: str, entry: str, beyond: float) -> str:
    return (
        f"In '{name}' of the server {entry} is {beyond:.3g} times as far away as training can have "
        "moved it. Such a model can be made to read single images; ask the server's operator "
        "where it is from."
    )
