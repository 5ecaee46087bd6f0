"""The wire contract: what may enter and leave a process.

    Number     a number that may leave a site, and how much it may tell
    Rule       the arrays and numbers that one direction may carry; all others are refused
    Part       what a site does in one hop of a round: the rules for its request and its reply

How arrays are laid out in bytes, and the kinds of them, is `fedda.wire.packing`.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, Literal

from fedda.config import is_site_name
from fedda.errors import WireError

from .packing import Kind, Manifest, Packed, shown

Role = Literal["source", "target"]

WHOLE = 1.0  # the step of a whole number
EXACT = math.inf  # that of a number that follows from the settings, and from no image
DIGITS = 0.0  # no step: a server's weights decide how large the number is
Bound = float | Callable[[int, int], float]  # for C classes and K sites


class Number(str):
    """A number that may leave a site: its name, as a pattern, and how much it may tell.

    All numbers are rounded, so that none says exactly what single images make of it.

    Attributes:
        step: what it is rounded to, or WHOLE, EXACT or DIGITS.
        is_share: whether it is a share of images, which says nothing of few: then it is none or
            all.
        is_accuracy: whether it is over the labelled tests; if these are so few that one of them
            changes it by a step, it is not rounded.
    """

    step: float
    is_share: bool
    is_accuracy: bool
    _low: Bound
    _high: Bound

    def __new__(
        cls,
        name: str,
        step: float = DIGITS,
        *,
        low: Bound = 0.0,
        high: Bound = 1.0,
        is_share: bool = False,
        is_accuracy: bool = False,
    ) -> "Number":
        """Declare it.

        Args:
            name: its name; with a `*` one for each site.
            step: as above.
            low: the smallest value that a model made for the purpose can give it; only
                `Client.privatise` keeps a number within these two.
            high: the largest one.
            is_share: as above.
            is_accuracy: as above.
        """
        made = super().__new__(cls, name)
        made.step, made._low, made._high = step, low, high
        made.is_share, made.is_accuracy = is_share, is_accuracy
        return made

    def called(self, name: str) -> "Number":
        """The same of one number that its pattern fits."""
        made = Number(name)
        vars(made).update(vars(self))
        return made

    def bounds(self, classes: int, sites: int) -> tuple[float, float]:
        """The smallest and the largest value."""
        low, high = (b(classes, sites) if callable(b) else b for b in (self._low, self._high))
        return low, high


@dataclass(frozen=True)
class Rule:
    """The arrays and numbers that a message may carry; names are patterns such as `teacher/*`.

    An array or number whose pattern has a `*` may come once per site of the run, and not more
    often. So numbers per image are refused.
    """

    arrays: Mapping[str, Kind] = field(default_factory=dict)
    numbers: frozenset[str] = frozenset()  # what leaves a site is a `Number` each
    optional: Mapping[str, Kind] = field(default_factory=dict)  # arrays that may be left out
    counts: frozenset[str] = frozenset()  # tables of answers by class, which may be left out

    def number(self, name: str) -> Number:
        """The declaration of a number that leaves, under its own name where a pattern has it.

        Raises:
            WireError: there is none.
        """
        found = next((p for p in self.numbers if _fits(name, p)), None)
        if not isinstance(found, Number):
            raise WireError(
                f"The method does not say how much the number '{shown(name)}' may tell; declare it "
                "in its contract as a fedda.wire.Number."
            )
        return found.called(name)

    def check(
        self,
        arrays: Mapping[str, Packed],
        numbers: Mapping[str, Any],
        *,
        model: Manifest,
        sites: int,
        where: str,
        layouts: Mapping[str, Manifest] | None = None,
        classes: int = 0,
    ) -> None:
        """Refuse every array and number that is not listed or has another layout.

        Args:
            arrays: packed arrays by record name.
            numbers: scalars by name.
            model: layout of the run's model. Every array of kind model must have exactly its
                entries, unless `layouts` names it.
            sites: how many sites take part; a pattern with `*` may match at most so many names.
            where: who sends or receives, for the error message.
            layouts: layouts of other arrays, by name; `NAME/SITE` has the layout of `NAME`.
            classes: of the run, which say how long a table of answers by class is.

        Raises:
            WireError: an array or number is not in the rule, or has another form; the error names
                it.
        """
        layouts, listed = layouts or {}, {**self.arrays, **self.optional}
        for name, packed in arrays.items():
            kind = next((k for p, k in listed.items() if _fits(name, p)), None)
            if kind is None:
                raise WireError(f"{where}: the contract has no array '{shown(name)}'.")
            if packed.manifest.kind != kind:
                raise WireError(
                    f"{where}: '{name}' is of kind {packed.manifest.kind}, the contract has {kind}."
                )
            layout = layouts.get(name.split("/")[0], model if kind is Kind.MODEL else None)
            if layout is None:
                raise WireError(f"{where}: the contract has no layout for '{name}'.")
            _same_entries(packed.manifest, layout, f"{where}: '{name}'")
        for name, value in numbers.items():
            if name in self.counts:
                _check_counts(value, classes, f"{where}: '{name}'")
                continue
            if not any(_fits(name, p) for p in self.numbers):
                raise WireError(f"{where}: the contract has no number '{shown(name)}'.")
            if type(value) not in (int, float):
                raise WireError(
                    f"{where}: '{name}' must be a single number, but is a {type(value).__name__}; "
                    "give float(...) or int(...) of it."
                )
        for pattern in (*listed, *self.numbers):
            matches = sum(_fits(n, pattern) for n in (*arrays, *numbers))
            if "*" in pattern and matches > sites:
                raise WireError(
                    f"{where}: {matches} times '{pattern}', but the run has {sites} sites."
                )


def _check_counts(value: Any, classes: int, where: str) -> None:
    """Refuse what is no table of answers by class: per class its answers, and how many it has."""
    long = classes * (classes + 1) if classes <= MOST_TOLD else 0
    whole = isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)
    if not whole or not 0 < len(value) == long:
        raise WireError(
            f"{where} must be {classes} x {classes + 1} whole numbers, of {MOST_TOLD} classes at "
            "most."
        )


def _fits(name: str, pattern: str) -> bool:
    """Whether a name is a rule's, which may have the name of a site in place of `*`."""
    before, star, _ = pattern.partition("*")
    if not star:
        return name == pattern
    return name.startswith(before) and is_site_name(name.removeprefix(before))


def _same_entries(given: Manifest, needed: Manifest, where: str) -> None:
    if given.entries == needed.entries:
        return
    have, want = ({e.name: f"{e.dtype} {e.shape}" for e in m.entries} for m in (given, needed))
    odd = [
        f"{shown(name)} ({have.get(name, 'none')}, not {want.get(name, 'none')})"
        for name in sorted({name for name, _ in have.items() ^ want.items()})
    ]
    what = f"differs at {', '.join(odd[:3])}" if odd else "has its entries in another order"
    raise WireError(f"{where} is not this run's {needed.kind}: it {what}.")


@dataclass(frozen=True)
class Part:
    """What a site does in one hop of a round: what it may be sent, and what it may send back.

    In addition every request names its round, phase, hop and part, and whether the round is the
    last though more were planned.

    Attributes:
        enters: arrays and numbers of the request.
        leaves: arrays and numbers of the reply.
        gradients: patterns of the groups of the exchange in which the site may sum gradients.
        labels: whether the part needs a site that has labels.
        private: whether the part trains by DP-SGD, and on nothing else, where the run asks for it.
        needed: what the server needs of a source's model: each one, their mean alone, or nothing,
            as it relays them to the target. Then they can be hidden (`fedda.secure.hiding`).
        judges: whether the reply's numbers say how good each received model is. Each model counts
            as a test then, in the site's policy and budget.
    """

    enters: Rule = field(default_factory=Rule)
    leaves: Rule = field(default_factory=Rule)
    gradients: frozenset[str] = frozenset()
    labels: bool = False
    judges: bool = False
    private: bool = False
    needed: Literal["each", "mean", "relay"] = "each"

    @property
    def signs(self) -> bool:
        """Whether the site only makes a key, for a later hop."""
        return set(self.leaves.arrays.values()) == {Kind.KEY}

    def check_groups(self, groups: Mapping[str, int], layouts: Mapping[str, Manifest]) -> None:
        """Refuse gradients that may not leave this part, or that have another size.

        Args:
            groups: how many values the site is asked for, by name of the group.
            layouts: layouts of the parameters that the gradients belong to, by name. A group is
                named after its layout, or `LAYOUT/SITE` if several groups have the same layout.

        Raises:
            WireError: a group is not in the part, or has another number of values; the error names
                it.
        """
        for name, size in groups.items():
            if not any(fnmatchcase(name, p) for p in self.gradients):
                raise WireError(f"The contract has no gradient '{name}' that leaves this part.")
            wanted = sum(entry.size for entry in layouts[name.split("/")[0]].entries)
            if size != wanted:
                raise WireError(f"'{name}' has {wanted} values, but {size} are asked for.")


MODEL = {"model": Kind.MODEL}

STEPS = Number("steps", WHOLE)
SECONDS = Number("seconds", 0.01)
REFUSED = Number("refused/*", WHOLE)
LOSS_MOST = 10.0  # nats
LOSS = Number("loss", 0.01, high=LOSS_MOST)
EPSILON = Number("epsilon", EXACT)
ACCURACY = Number("accuracy", 0.001, is_accuracy=True)
INFOMAX = Number("infomax", 0.01, high=lambda classes, sites: math.log(classes))
PREDICTED = Number("predicted", WHOLE, high=lambda classes, sites: classes)
CHANGED = Number("changed", 0.01, is_share=True)
AGREED = Number("agreed", 0.01, is_share=True)


def accuracy_of(what: str) -> Number:
    """The accuracy of another predictor."""
    return Number(f"{ACCURACY}-{what}", ACCURACY.step, is_accuracy=True)


# What the target says of its own last step (`fedda.refining`), which sends nothing else.
REFINED = frozenset({accuracy_of("refined"), CHANGED, AGREED})

# How the last model, and the refined one, answer the tests of each class, in tens.
ANSWERS = frozenset({"answers", "answers-refined"})
MOST_TOLD = 100  # classes of such a table

# The usual test: the target alone tests the model and reports these numbers.
TEST = Part(
    enters=Rule(MODEL),
    leaves=Rule(
        numbers=REFINED | {ACCURACY, LOSS, Number("tested", WHOLE), INFOMAX, PREDICTED, SECONDS},
        counts=ANSWERS,
    ),
)

# What a site tells of its data before any training (`fedda look`); small ones tell no array.
LOOK = Part(leaves=Rule(optional={"look": Kind.STATISTICS}))
# Beside it:
LOOK_TABLE = ("role", "name", "kind", "shape", "columns", "examples", "classes", "counts")
