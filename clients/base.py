"""What all clients share: they answer requests, train by a method's hops, and test.

A method has one client class per part (`Source`, `Target`, `Collaborator`), with one function per
hop that reads like the paper's lines for it. A client object serves only one request,
`self.request`: every engine calls its `answer`, Flower's NumPyClient too (`numpy_client`).
"""

import math
import time
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from fedda import models
from fedda.errors import FewImagesError, NotFiniteError, WireError
from fedda.maths.spectral import Spectra
from fedda.maths.validators import infomax
from fedda.wire import ACCURACY, ANSWERS, CHANGED, INFOMAX, LOSS, PREDICTED
from fedda.wire.packing import Packed

from .site import boundary, last_step, notes, output_privacy, state
from .site.boundary import SiteReply
from .site.request import Numbers, Request
from .site.trainer import Trainer


class Client(Trainer):
    """One part of one method at one site: what a method writes, and how requests are answered.

    What a method uses besides is in `Trainer`.
    """

    # ---- what a method writes, besides a function per hop -----------------------------------

    def outgoing(self) -> dict[str, Packed]:
        """Return the reply's arrays: the trained model, unless a method sends something else."""
        return {"model": self.packed_model()}

    def predict(self, x: Tensor) -> Tensor:
        """Class probabilities of the predictor under test, here the model -> (N, C), on the CPU."""
        return models.predict(self.model, x)

    def adapted(self) -> models.Model:
        """The predictor under test as a model that can be kept, here the model."""
        return self.model

    def save_adapted(self) -> None:
        """Write `adapted` for `fedda predict`, if this site keeps anything on its disk."""
        task = self.task
        if (path := state.model_path(self.site, task.training, state.ADAPTED)) is not None:
            models.save(path, self.adapted(), task.model, task.inputs, task.names)

    def others(self, x: Tensor) -> dict[str, Tensor]:
        """Further predictors to test, by name -> (N, C) each."""
        return {}

    def keepsakes(self) -> dict[str, np.ndarray]:
        """Arrays that a method adds to the notes of the last round; they stay at this site."""
        return {}

    # ---- serving ----------------------------------------------------------------------------

    def answer(self, request: Request, test: bool) -> SiteReply:
        """Serve a request whose content may come in -> what may leave.

        Args:
            request: the request.
            test: whether it came where a model is tested, and not trained.

        Raises:
            FeddaError: the site cannot or may not serve it, or the reply may not leave.
        """
        boundary.admit(self.site, request, test)
        if not test:
            return boundary.release(self.site, request, *self.serve(request))
        told = getattr(self, request.hop, None)
        if told is None:
            raise WireError(f"{request.task.method} has no {request.part} that can {request.hop}.")
        return boundary.release(self.site, request, {}, self._numbers(request, told(request)))

    def serve(self, request: Request) -> tuple[dict[str, Packed], Numbers]:
        """Answer a training request -> the arrays and numbers that go back.

        Raises:
            FeddaError: it cannot be answered; only this site's log gets the reason.
        """
        assert request.contract and not request.is_test
        if request.contract.signs:
            return boundary.signed(self.site, request)
        leave = boundary.leaving(self.site, request)
        start = time.perf_counter()
        self.site.check_batch(request.task)
        self.begin(request)
        start += notes.received(self)  # the time for notes is not training time
        self.model.train()
        if self.task.train.lipschitz:
            self._spectra = Spectra(self.model, self.generator("spectra"))
        numbers = self._numbers(request, getattr(self, request.hop)())
        self.settle()
        self.model.zero_grad()  # after steps that a method takes by itself, too
        if self._spectra is not None:
            self._spectra.close()
        if self._carried is not None:
            self.workspace.carry(self._carried, self.task, request.round)
        if self._stateful:
            self.workspace.leave(self.task, request.round, self._stateful)
        if self.site.origin is not None:
            self.site.origin.follow(request, self.model)
        if "epsilon" not in numbers:  # else single examples count, and one can make a step slower
            numbers["seconds"] = time.perf_counter() - start
        if any(isinstance(n, float) and not math.isfinite(n) for n in numbers.values()):
            cause = f" {self.task.suspect}." if self.task.suspect else ""
            raise NotFiniteError(f"The training's numbers are not finite; lower train.lr.{cause}")
        return leave(self.model, self.outgoing(), numbers)

    def _numbers(self, request: Request, returned: Any) -> Numbers:
        """What the function of a hop returned, if it is what it must be."""
        if not isinstance(returned, dict):
            raise WireError(
                f"{request.hop} of {type(self).__module__}.{type(self).__qualname__} returned "
                f"a {type(returned).__name__}; it must return a dict of numbers, as minimise does."
            )
        return returned

    @torch.no_grad()
    def test(self, request: Request) -> Numbers:
        """Answer an evaluation request; the only code that reads a target's labelled test files."""
        start = time.perf_counter()
        self.begin(request)
        p = self.checked(self.predict(self.data.x))
        numbers: Numbers = {"infomax": self.privatise(INFOMAX, infomax(p), len(p))}
        least = 1 if self.site.reproducible else max(self.site.min_images, self.site.few)
        if (classes := output_privacy.predicted(p, least)) is not None:
            numbers["predicted"] = self.privatise(PREDICTED, classes, len(p))
        refined = None
        if request.is_last:
            if (refined := last_step.take(self, self.adapted)) is not None:
                notes.refined(self, refined)
            numbers |= last_step.reported(self, refined, len(p))
        held, p = self.site.tested_on(self.task), None
        if held is not None:
            p, numbers["tested"] = self.predict(held.x), len(held)
            with suppress(FewImagesError):  # a loss that would be about few of the tests stays
                loss = float(F.nll_loss(self.checked(p).clamp_min(1e-12).log(), held.y))
                numbers["loss"] = self.privatise(LOSS, loss, len(held))
            others = {f"accuracy-{name}": q for name, q in self.others(held.x).items()}
            if refined is not None:
                others["accuracy-refined"] = models.predict(refined.model, held.x)
            elif CHANGED in numbers:
                others["accuracy-refined"] = p
            for name, q in {"accuracy": p, **others}.items():
                right = output_privacy.right(q, held.y)
                numbers[name] = self.privatise(ACCURACY, right, len(held))
                told = name.replace("accuracy", "answers")
                if request.is_last and told in ANSWERS and self.site.tells_classes(self.task):
                    numbers[told] = output_privacy.answers(q, held.y, self.site.few)
        numbers["seconds"] = time.perf_counter() - start
        notes.tested(self, held, p, self.keepsakes)
        return numbers
