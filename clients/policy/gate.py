"""The decision about each request, before any work: what the policy and the fixed bounds allow.

check_time   whether the site answers now
admit        whether the request is allowed
book         take it from the budgets, before the work
release      whether a reply may leave; take its bytes from the budget
"""

import datetime as dt
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedda.config import LEAST_NOISE
from fedda.errors import PolicyError
from fedda.exchange import Invitation
from fedda.secure.accountant import Steps
from fedda.settings import Task
from fedda.wire import LOOK, Part, Rule
from fedda.wire.packing import Kind, Packed

from ..site.crafted import GROWING
from ..site.request import Request
from . import sizes
from .budget import Spent
from .rules import MOST_CLASSES, SPARE, Names, Policy, named

WORDS = {Kind.MODEL: "models", Kind.ATOMS: "atoms", Kind.GRADIENT: "gradients"}
WORDS |= {Kind.STATISTICS: "statistics"}
WORDS |= {Kind.MASKED: "models", Kind.SEALED: "models"}  # keys may always leave

MOST_NAMES = 2**20  # characters of all class names together
MOST_VALUES = 2**24  # in one input

NOTHING = Part()
MODELS = {Kind.MODEL, Kind.MASKED}
LABELLING = {Kind.ATOMS, Kind.STATISTICS}  # by which a part without labels can label its examples


class Gate:
    """Decides about the requests to one site.

    Args:
        policy: the site's.
        state: the folder in which the budgets are booked; None: nothing is booked.
    """

    def __init__(self, policy: Policy, state: Path | None = None) -> None:
        self.policy = policy
        self._spent = None if state is None else Spent(state, policy.budget)
        # The training whose model was measured last, and the most bytes of its requests' arrays.
        self._measured: tuple[tuple[Any, ...], int] = (), 0

    def check_time(self, now: dt.datetime | None = None) -> None:
        """Check that the site answers now, or at another local time.

        Raises:
            PolicyError: it does not.
        """
        hours = self.policy.times
        if not hours.hold(now or dt.datetime.now()):
            raise PolicyError(
                f"The policy answers only at these hours: {', '.join(hours.hours)}; the request "
                "came at another time."
            )

    def admit(self, request: Request) -> int:
        """Check a request against the policy and the fixed bounds, before anything is built.

        Returns:
            The most bytes that its arrays have.

        Raises:
            PolicyError: it is not allowed; the error says what is missing in the policy.
            ModelError: its settings fit no network.
        """
        task, phase = request.task, request.stage.phase.name
        self._check_named("phase", phase, self.policy.allow.phases)
        self._check_task(task)
        self._check_kinds(request)
        self._check_taught(request)
        self._check_noise(request)
        if request.exchange is not None:
            self._check_exchange(request.exchange.invitation)
        limits = self.policy.limits
        # Atoms and discriminators may be larger in one phase than in another.
        key = (task.model, task.dims, task.classes, task.options, phase, request.hop, request.part)
        if key != self._measured[0]:
            self._measured = key, sizes.check_parameters(request, limits.parameters)
        return self._measured[1]

    def check_spare(self, task: Task, own: int) -> None:
        """Check that a run does not name many classes that nobody has.

        Each is a row of the head, which can be made to hold what one image gives.

        Args:
            task: the training.
            own: how many classes this site has itself; 0 at a target, which does not know.

        Raises:
            PolicyError: it does.
        """
        if self.policy.limits.classes is None and task.classes > own + SPARE:
            raise PolicyError(
                f"The run names {task.classes} classes, and this site has {own} of its own; it "
                f"takes {SPARE} more than these. If the run's sites together have so many, allow "
                f"them by --policy: classes = {task.classes} under [limits]."
            )

    def admit_frozen(self, task: Task) -> None:
        """Check that the frozen part of a training's network may be read here.

        Raises:
            PolicyError: it may not; the error says what is missing in the policy.
            ModelError: the settings fit no network.
        """
        self._check_task(task)
        sizes.check_frozen(task, self.policy.limits.parameters)

    def _check_task(self, task: Task) -> None:
        allow, limits = self.policy.allow, self.policy.limits
        self.check_method(task.method)
        self._check_named("network", task.model.name, allow.networks)
        self._check_named("norm", task.model.norm, allow.norms)
        classes, letters = limits.classes or MOST_CLASSES, len(task.class_names)
        if task.class_names.count("\n") >= classes or letters > MOST_NAMES:
            raise PolicyError(
                f"The request names {task.class_names.count(chr(10)) + 1} classes in {letters} "
                f"characters; this site takes {classes} classes and {MOST_NAMES} characters at "
                "most."
            )
        side = limits.image_side
        large = len(task.dims) == 3 and max(task.dims[1:]) > side
        if large or math.prod(task.dims) > MOST_VALUES:
            raise PolicyError(
                f"The request asks for inputs of shape {task.shape}; this site takes images of "
                f"{side} pixels a side and {MOST_VALUES} values at most."
            )
        ahead = task.model.freezes and task.train.augment != "none"  # others' are not kept
        if ahead and task.train.views > limits.views:
            raise PolicyError(
                f"The request asks for {task.train.views} augmented views of each image; this site "
                f"computes {limits.views} at most (limits.views)."
            )
        widest = max(task.model.bottleneck, *task.model.widths, 0)
        if widest > limits.hidden:
            raise PolicyError(
                f"The request asks for a layer of {widest} units between network and head; the "
                f"policy allows {limits.hidden} at most (limits.hidden)."
            )

    def check_method(self, name: str) -> None:
        """Check that a method may run here, before its code is loaded.

        Raises:
            PolicyError: it may not.
        """
        self._check_named("method", name, self.policy.allow.methods)

    def _check_named(self, what: str, name: str, patterns: Names) -> None:
        if not named(name, patterns):
            raise PolicyError(
                f"The policy does not allow the {what} '{name}': it allows "
                f"{', '.join(patterns) or 'none'} (allow.{what}s)."
            )

    def book(self, request: Request) -> None:
        """Take a request from the budgets.

        Raises:
            BudgetError: a budget is spent.
        """
        if self._spent is not None:
            groups = request.exchange.invitation.groups if request.exchange else ()
            size = sum(4 * group.size * group.syncs for group in groups)
            rounds = int(not request.is_test)
            tests = max(len(request.arrays), 1) if request.contract.judges else 1 - rounds
            self._spent.request(request.task.digest, rounds, tests, size)

    def admit_look(self, labels: bool) -> None:
        """Check that this site tells what its data look like, and book that as a training.

        Raises:
            PolicyError: it does not; without a policy's word no site does.
            BudgetError: a budget is spent.
        """
        if not self.policy.leaving.look:
            raise PolicyError(
                "The policy lets no account of this site's data leave (leaving.look); to answer "
                "`fedda look`, set look = true under [leaving] in the file of --policy."
            )
        if labels and self.policy.privacy.demanded:
            raise PolicyError(
                "The policy lets labelled examples be used by DP-SGD only (privacy), which an "
                "account of the data is not."
            )
        if self._spent is not None:
            self._spent.request("look", rounds=1, looks=1)

    def check_classes(self) -> None:
        """Check that a test may tell how each class is answered.

        Raises:
            PolicyError: it may not.
        """
        if not self.policy.leaving.classes:
            raise PolicyError("The policy lets no answers by class leave (leaving.classes).")

    @property
    def books(self) -> bool:
        """Whether what a server uses is booked, over all runs."""
        return self._spent is not None

    def spend(self, steps: Steps) -> float:
        """Book steps of private training, before they are taken -> epsilon so far.

        Raises:
            BudgetError: it is more than the policy allows; nothing was booked.
        """
        assert self._spent is not None
        return self._spent.steps(steps, self.policy.privacy)

    def release(self, arrays: Mapping[str, Packed], size: int, contract: Part = NOTHING) -> None:
        """Let a reply leave.

        Raises:
            PolicyError: a kind of array may not leave.
            BudgetError: so many bytes are not left in the budget.
        """
        for packed in arrays.values():
            self._check_kind(packed.manifest.kind, contract)
        if self._spent is not None:
            self._spent.leaving(size)

    def _check_kinds(self, request: Request) -> None:
        for kind in request.contract.leaves.arrays.values():
            self._check_kind(kind, request.contract)
        if request.contract.gradients or request.exchange is not None:
            self._check_kind(Kind.GRADIENT, request.contract)
            plain = request.exchange is not None and not request.exchange.lazy.masked
            if plain and self.policy.secure.demand:
                raise PolicyError(
                    "The policy lets gradients leave under masks only (secure.demand); the run "
                    "needs exchange.masked=true."
                )
        told = request.is_test or request.contract.judges
        if told and not self.policy.leaving.tests:
            raise PolicyError(
                f"The policy lets no numbers of tests leave (leaving.tests), but "
                f"'{request.hop[:40]}' of {request.task.method} says how good models are."
            )

    def _check_taught(self, request: Request) -> None:
        """No model leaves of a part that is taught in the open, in this hop or another one."""
        task, leaves = request.task, request.contract.leaves
        if self.policy.leaving.taught or not MODELS & _kinds(leaves):
            return
        parts = (s.phase.part(hop, request.part) for s in task.stages for hop in s.phase.hops)
        if names := [name for part in parts if part for name in teaching(part)]:
            way = "Start every site with --key and --peers, so that they come sealed (which "
            way += "kd3a.heads=local has not)"
            if not hasattr(task.options, "relay"):
                way = f"{task.method} has no seal for them: take another method"
            raise PolicyError(
                "The policy lets no model leave that learnt from what the server sent in the open, "
                f"here '{names[0]}' (leaving.taught): a server that makes it up reads single "
                f"images. {way}, or set taught = true."
            )

    def _check_noise(self, request: Request) -> None:
        """Under a policy of noise a source does nothing but DP-SGD; its tests are checked there."""
        privacy, part = self.policy.privacy, request.contract
        if not privacy.demanded or request.part == "target" or part.signs or request.is_test:
            return
        if not part.private or request.exchange is not None:
            raise PolicyError(
                f"The policy lets labelled examples be used by DP-SGD only (privacy), which "
                f"'{request.hop[:40]}' of {request.task.method} is not; choose fedavg, fedprox or "
                "kd3a, with privacy.noise."
            )
        if (given := request.task.privacy.noise) < max(privacy.noise, LEAST_NOISE):
            needed = f"{privacy.noise:g} or more" if privacy.noise else "more than 0"
            raise PolicyError(
                f"The run trains with noise of {given:g} on each step, but the policy asks for "
                f"{needed} (privacy)."
            )
        if privacy.epsilon is not None and not self.books:
            raise PolicyError(
                "The policy bounds epsilon over all runs (privacy.epsilon), but this site keeps no "
                "books; give --state-dir."
            )

    def _check_kind(self, kind: Kind, contract: Part) -> None:
        word = "look" if contract is LOOK else WORDS.get(kind)
        if word and not getattr(self.policy.leaving, word):
            raise PolicyError(f"The policy lets no {word} leave (leaving.{word}).")
        # A target that opens sealed models sends back their mean.
        mean = Kind.SEALED in contract.enters.arrays.values()
        if kind is Kind.MODEL and self.policy.secure.demand and not mean:
            raise PolicyError(
                "The policy lets models leave in secure sums or sealed only (secure.demand); the "
                "run needs secure=sum or kd3a.relay=sealed, and a method that has it."
            )

    def _check_exchange(self, invitation: Invitation) -> None:
        values, most = sum(g.size for g in invitation.groups), self.policy.limits.parameters
        if values > most:
            raise PolicyError(
                f"The request asks for {len(invitation.groups)} groups of gradients with "
                f"{values:,} values together; this site takes {most:,} at most."
            )


def teaching(part: Part) -> list[str]:
    """What enters a part, in the open, that can say what the part's examples are.

    By the contract, whatever it is called: each model but the run's own, and atoms and means where
    the part has no labels. Not discriminators whose gradients are summed, as sites keep their own
    copies, nor models that the part only judges. And not gradients such as f-DAN's witness, the sum
    of the window before: who makes it up can make up the next window's as well, and the exchange's
    bounds and `leaving.gradients` hold for both.
    """
    if part.judges and not _kinds(part.leaves):
        return []
    kinds = {Kind.MODEL} if part.labels else {Kind.MODEL, *LABELLING}
    enters = {**part.enters.arrays, **part.enters.optional}
    own = [n for n in enters if n == "model" or (part.gradients and n.startswith(GROWING))]
    return [name for name, kind in enters.items() if kind in kinds and name not in own]


def _kinds(rule: Rule) -> set[Kind]:
    """The kinds of arrays of a rule."""
    return {*rule.arrays.values(), *rule.optional.values()}
