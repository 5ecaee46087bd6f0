"""What a method's part trains with at its site: the data, the model, optimizers and what stays.

A trainer serves one request. A method's clients derive from `clients.base.Client`, which answers
it; this is what they use.
"""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn, optim

from fedda import models
from fedda.data.augment import augmentation
from fedda.errors import ConfigError, FewImagesError, LostError, WireError
from fedda.maths.spectral import Spectra
from fedda.settings import Task
from fedda.train import (
    Paced,
    batches,
    generator,
    learning_rate,
    make_optimizer,
    paced,
    round_images,
    seed_for,
    seed_torch,
)
from fedda.wire import Number, Role, packing
from fedda.wire.packing import Kind, Packed

from . import output_privacy, state
from .memory import Site
from .request import Numbers, Request
from .workspace import Stateful


class Trainer:
    """One part of one method at one site, as far as it trains.

    Attributes:
        site: the site's data, its device and the state that it keeps.
        request: the request that this object serves.
        task: the training that the request belongs to.
        options: the method's settings.
        data: the training images; a target's have no labels.
        model: the run's model on the site's device, as the server sent it or as the site kept it.
    """

    request: Request

    def __init__(self, site: Site) -> None:
        self.site = site

    def begin(self, request: Request) -> None:
        """Prepare for a request: load data and model, and seed the random numbers."""
        self.request = request
        self._stateful: dict[str, Stateful] = {}
        self._paced: list[Paced] = []
        self._spectra: Spectra | None = None
        self._carried: optim.Optimizer | None = None
        self._views, self._augment, names = None, None, self.task.train.augment
        if names != "none" and self.task.model.freezes:
            self._views = self.site.views(self.task)
        elif names != "none":
            self._augment = augmentation(names)
        self._draws = self.generator("augment")
        self.data = self.site.learnt_from(self.task)
        self.workspace = self.site.workspace(self.task)
        self.model = self.workspace.model
        if "model" in request.arrays:
            models.load_arrays(self.model, request.arrays["model"].unpack())
        else:
            self.recall()
        # Dropout draws from the global generator, whose state must be the same in every engine.
        seed_torch(seed_for(*self.site.chance(self.task), *request.draw), self.site.device)

    def recall(self) -> None:
        """Load the model that stays at this site, when the server sent none.

        Raises:
            WireError: the method has no model that stays here.
        """
        raise WireError("The request came without a model.")

    @property
    def task(self) -> Task:
        return self.request.task

    @property
    def options(self) -> Any:
        return self.request.task.options

    @property
    def trains(self) -> bool:
        """Whether this training asks targets for more than tests."""
        return any("target" in stage.phase.parts for stage in self.task.stages)

    @property
    def side(self) -> Role:
        """Which side of a domain loss this part is on; a collaborator is on the sources' side."""
        return "target" if self.request.part == "target" else "source"

    @property
    def device(self) -> torch.device:
        return self.site.device

    def optimizer(
        self,
        parameters: Iterable[nn.Parameter] | None = None,
        carried: bool = True,
        again: bool = False,
    ) -> optim.Optimizer:
        """The run's optimizer at this round's learning rate.

        Args:
            parameters: the parameters that it trains; by default all of the model's.
            carried: whether the model's optimizer, with `train.carry-momentum`, continues from the
                last round in which this site trained, and keeps its state for the next one.
            again: whether it continues from this round's, as the round trains a second time.
        """
        rate = learning_rate(self.task.train, self.request.round, self.task.rounds)
        if parameters is not None:
            return self.paced(make_optimizer(parameters, self.task.train, rate))
        if not carried:
            return self.paced(make_optimizer(self.model.groups(rate), self.task.train, rate))
        self._carried = self.workspace.optimizer(self.task, rate, self.request.round - (not again))
        return self.paced(self._carried)

    def paced(self, optimizer: optim.Optimizer) -> optim.Optimizer:
        """An optimizer with the run's `train.accumulate`, `train.clip` and `train.lipschitz`."""
        if (spectra := self._spectra) is not None:
            most = self.task.train.lipschitz
            optimizer.register_step_post_hook(lambda *_: spectra.project(most))
        made = paced(optimizer, self.task.train)
        if isinstance(made, Paced):
            self._paced.append(made)
        return made

    def settle(self) -> None:
        """Move by the gradients that `train.accumulate` still holds; the round's end does it."""
        for optimizer in self._paced:
            optimizer.settle()

    def register_state(self, name: str, thing: Stateful, strict: bool = False) -> None:
        """Restore an object's state from an earlier round, and keep its state after this one.

        Args:
            name: its name among the objects that this part keeps.
            thing: the object: its `load_state_dict` gets what an earlier `state_dict` returned.
            strict: whether the state must be of the round right before this one. Otherwise it is of
                the last round of this phase in which the site took part; if there is no such
                state, the object is left as it is.

        Raises:
            LostError: `strict`, and the state of the round before is missing.
        """
        last, first = self.request.round - 1, self.request.stage.first
        if last >= first:
            found = self.workspace.left(self.task, name, last if strict else first, last)
            if found is not None:
                thing.load_state_dict(found, self.device)
            elif strict:
                raise lost(last)
        self._stateful[name] = thing

    def kept(self, name: str, first: int, last: int) -> state.SiteState:
        """A state that was registered under a name, after the latest of the rounds first to last.

        Raises:
            LostError: this site no longer has it.
        """
        if (found := self.workspace.left(self.task, name, first, last)) is None:
            raise lost(last)
        return found

    def batches(self) -> Iterator[Tensor]:
        """This round's mini-batches of indices, of as many images as the site asks for."""
        yield from self.split(self.sampled(self.shares()))

    def minimise(
        self,
        loss_of: Callable[[Tensor], Tensor],
        optimizer: optim.Optimizer | None = None,
        batches: Iterable[Tensor] | None = None,
        times: float = 1.0,
    ) -> Numbers:
        """Take one step per mini-batch -> `loss`, the mean over the steps, and `steps`.

        Args:
            loss_of: a function of a mini-batch's indices; it returns the loss, a scalar.
            optimizer: by default the run's, of all the model's parameters.
            batches: the mini-batches; by default this round's.
            times: what the loss is multiplied by for the gradient; it is told without.
        """
        optimizer = optimizer or self.optimizer()
        total, steps = 0.0, 0
        for indices in self.batches() if batches is None else batches:
            loss = loss_of(indices)
            optimizer.zero_grad()
            (times * loss).backward()
            optimizer.step()
            total, steps = total + loss.detach(), steps + 1  # summed on the device: no wait
        optimizer.zero_grad()  # so that no gradient takes memory until the next step
        return {"loss": float(total) / max(steps, 1), "steps": steps}

    def split(self, shares: Iterable[Tensor]) -> Iterator[Tensor]:
        """Mini-batches of these indices; none has fewer images than the site lets a step have."""
        return batches(shares, self.task.train.batch_size, self.site.least_batch)

    def sampled(self, shares: list[Tensor]) -> list[Tensor]:
        """How often each image of a round's shares comes; a source may balance its classes."""
        return shares

    def shares(self) -> list[Tensor]:
        """Return the indices of this round's images, one tensor per epoch that the round touches.

        They are whole blocks of this site's (`site.blocks`), whatever the server asks for.

        Raises:
            ConfigError: a round would have less than a block.
        """
        rounds = self.task.train.rounds_per_epoch_of(len(self.data))
        blocks = self.site.blocks.blocks
        if len(blocks) < rounds:
            raise ConfigError(
                f"train.rounds-per-epoch is {rounds:g}, which leaves fewer than "
                f"{self.site.min_images} of this site's {len(self.data)} images for a round; lower "
                f"it to {len(blocks)} or less."
            )
        seed = seed_for(*self.site.chance(self.task), *self.request.draw[1:])
        return round_images(blocks, self.request.round, rounds, seed)

    def inputs(self, indices: Tensor) -> Tensor:
        """Images as the model takes them, on the site's device: float in [0, 1] (N, C, H, W).

        They are augmented by `train.augment` where a gradient is taken. Under `torch.no_grad`, as
        for votes and statistics, they are as they are. If a part of the network is frozen, they
        are that part's outputs.
        """
        return self._view(indices, augmented=torch.is_grad_enabled())

    def views(self, indices: Tensor) -> tuple[Tensor, Tensor]:
        """Two views of images, each augmented by itself; the same twice with `train.augment=none`.

        Unlike `inputs`, they are augmented under `torch.no_grad`, too.
        """
        return self._view(indices, augmented=True), self._view(indices, augmented=True)

    def _view(self, indices: Tensor, augmented: bool) -> Tensor:
        if augmented and self._views is not None:
            view = torch.randint(len(self._views), (len(indices),), generator=self._draws)
            return models.as_inputs(self._views[view, indices], self.device)
        x = models.as_inputs(self.data.x[indices], self.device)
        return self._augment(x, self._draws) if augmented and self._augment else x

    def features(self, indices: Tensor) -> Tensor:
        """The model's features of images -> (N, d)."""
        return self.model.features(self.inputs(indices))

    def generator(self, purpose: str) -> torch.Generator:
        """Return a generator of this site's own draws for one purpose in this round."""
        return generator(*self.site.chance(self.task), *self.request.draw, purpose)

    def packed_model(self) -> Packed:
        """Pack the model in the precision in which it is sent."""
        return self.packed(models.to_arrays(self.model))

    def packed(self, arrays: packing.Arrays, floats: str = "") -> Packed:
        """Pack a model, or a part of it, to be sent; as int8 the change of the one that came.

        Args:
            arrays: the model.
            floats: the precision in place of `wire.dtype`, where that is not int8.
        """
        dtype, sent = self.task.wire.dtype, self.request.arrays.get("model")
        if dtype in packing.ROWS and sent is not None:
            return packing.change(arrays, sent)
        return packing.pack(arrays, Kind.MODEL, floats or dtype)

    def checked(self, p: Tensor, noise: float | None = None, teaches: bool = False) -> Tensor:
        """Return the answers (N, C) of a predictor, if they are those of a trained network.

        Through noise on what is told of them a refusal would tell of single images: none is then.

        Args:
            p: the answers.
            noise: on what is told of them; by default that of tests.
            teaches: whether a model that leaves learns them; in place of a refusal, all are unsure.
        """
        if hidden := self.site.test_noise if noise is None else noise:
            p = torch.where(p.isfinite().all(dim=1, keepdim=True), p, 1 / p.shape[1])
        try:
            if not self.site.reproducible:  # in an experiment, a training that failed is a result
                output_privacy.check_answers(p, self.site.min_images)
        except FewImagesError:
            if not hidden:
                raise
            return torch.full_like(p, 1 / p.shape[1]) if teaches else p
        return p

    def spread(self, z: Tensor, summed: bool = False) -> Tensor:
        """Return the features (N, d) of images, if no few images have most of their variance.

        Through noise on what is told of them a refusal would tell of single images: none is then.

        Args:
            z: the features.
            summed: whether a sum of gradients is computed from them.
        """
        if self.site.test_noise and not summed:
            return z.nan_to_num(0.0, 0.0, 0.0)
        if not self.site.reproducible:
            check = output_privacy.check_window if summed else output_privacy.check_spread
            check(z, self.site.min_images)
        return z

    def privatise(self, number: Number, value: float, images: int) -> float:
        """A number about a model's answers for so many images, as it leaves this site."""
        if number.is_share:
            value = output_privacy.ends(value, images, self.site.few)
        bounds = number.bounds(self.task.classes, self.task.sites)
        return output_privacy.privatise(number, value, images, bounds, self.site.test_noise)


def lost(server_round: int) -> LostError:
    """Make the error for state that only this site had, and that is missing now."""
    return LostError(
        f"This site has lost its state of round {server_round}, and no other copy exists; restart "
        "its client with the same --state-dir as before, or begin a new run."
    )
