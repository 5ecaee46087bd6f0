"""The rule that takes one of several candidates, without labels of the target.

    1   A candidate is out if most of its seeds look worse than FedAvg's model of the same seed
        (negative transfer or one class for all, `fedda.results.transfer`), or predict apart from
        the mean of all models (`fedda.maths.choice.apart`); or if fewer than two witnesses
        know it: what remains is then most often what its own training makes high, as pseudo-labels
        of clusters do with ClassAMI.
    2   The others are ranked by their mean standing over the seeds: how many other models they are
        ahead of, by four witnesses with one vote each (`fedda.maths.choice`).
    3   Of those that the leader is not clearly ahead of, the simplest is taken: FedAvg before all,
        then the one that sends fewer bytes, then the one with fewer settings of its own. Clearly
        means by more than the standard error over the seeds; with one seed, by one vote of four.

    4   Where somebody has labelled a few of the target's images, the one that is right most often
        is taken instead, if labels tell the two apart: by McNemar's test with p below TELLS.

Step 1 is there because the votes of step 2 can be won by a model that has failed in a way which
looks sure. Step 3 is there because evidence without labels is weak: what costs more, or is farther
from training on the sources alone, has to be worth it. What the rule cannot see: a shift that makes
all methods wrong in the same way; two or more methods that fail alike, where they outnumber the
rest; and, with fewer than three methods, a model that is sure of permuted classes.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fedda import plugins
from fedda.comparison.variants import Variant
from fedda.halves import REFERENCE
from fedda.maths import choice
from fedda.results import transfer
from fedda.results.worth import VALIDATORS

from .labelled import differ

# With one seed, the net share of the votes that makes a candidate clearly ahead. Set on SURF
# features with seed 10: with a half, FedAvg would be taken in five of ten rungs, and in the four of
# these that have another leader, that one is better by the labels.
ALONE = 0.25
HALF = 0.5
# Between the labels' best and the evidence's choice. Over six targets, with all methods and 50
# labels, .5 has a regret of 1.3 points, at worst 10; the labels' best alone 1.2 and 13; no labels
# 1.9 and 8. With the usual methods it is .4 and 2, .5 and 7, .3 and 1.
TELLS = 0.5
LEAST = 2  # witnesses that must know a candidate
KINDS = ("estimate", *VALIDATORS, "agreement")
# Of a method that makes its predictions sharp at the target all else is high by its training. Over
# nine targets with all methods, evidence that counted took such a model's for FedAvg's, and lost
# 23 points (examples/benchmarks/grand.py).
HONEST = "agreement"


@dataclass(frozen=True)
class Trained:
    """What one training says without labels.

    Attributes:
        worth: `validators` and `estimate`, as in results.json.
        bytes: that crossed.
        agreement: with the other methods' models of the seed; None if not known.
        apart: whether the model stands apart from what the others agree on.
        right: which of a few labelled images the refined model gives their class; None if nobody
            has labelled any.
    """

    worth: Mapping[str, Any]
    bytes: int
    agreement: float | None = None
    apart: bool = False
    right: tuple[bool, ...] | None = None

    @property
    def values(self) -> dict[str, float | None]:
        """The value of each kind of evidence; a rough estimate is none."""
        estimate, validators = self.worth.get("estimate"), self.worth.get("validators") or {}
        good = estimate if estimate and estimate["same_model"] else {}
        own: dict[str, float | None] = {"estimate": good.get("accuracy")}
        return own | {n: validators.get(n) for n in VALIDATORS} | {"agreement": self.agreement}


@dataclass(frozen=True)
class Candidate:
    """A variant, and its trainings by seed; all candidates have the same seeds."""

    variant: Variant
    trained: Mapping[int, Trained]

    @property
    def reference(self) -> bool:
        return self.variant.method == REFERENCE and not self.variant.settings

    def values(self, seed: int) -> dict[str, float | None]:
        """The value of each kind of evidence with a seed; one that is trained for is none."""
        trained_for = plugins.method(self.variant.method).sharpens
        made = [kind for kind in KINDS if trained_for and kind != HONEST]
        return self.trained[seed].values | dict.fromkeys(made)

    def mean(self, kind: str) -> float | None:
        """Mean over the seeds of one kind of evidence."""
        values = [v for seed in self.trained if (v := self.values(seed)[kind]) is not None]
        return statistics.fmean(values) if values else None

    @property
    def right(self) -> list[bool] | None:
        """Which labelled images most of its seeds' models have right; None if there are none."""
        every = [t.right for t in self.trained.values()]
        if any(each is None for each in every):
            return None
        return [sum(image) > HALF * len(image) for image in zip(*every, strict=True)]  # type: ignore[arg-type]


@dataclass(frozen=True)
class Decision:
    """What the rule took, and what for.

    Attributes:
        chosen: the variant to take.
        leader: the variant that stands highest; another one if the chosen is as good and simpler.
        standing: mean over the seeds, by variant.
        by_seed: the same for each seed.
        out: why a variant is out, by variant.
        alike: variants that the leader is not clearly ahead of.
        seeds: in how many seeds the chosen stands highest of those that are not out, and of how
            many.
        pieces: how many pieces of evidence, over the seeds, are above FedAvg's, below, and all.
        alone: what each kind of evidence by itself would have taken.
        labels: of how many labelled images each variant has so many right; empty without any.
        unlabelled: what the rule would have taken without them.
    """

    chosen: Variant
    leader: Variant
    standing: Mapping[Variant, float]
    by_seed: Mapping[Variant, Mapping[int, float]]
    out: Mapping[Variant, str]
    alike: Sequence[Variant]
    seeds: tuple[int, int]
    pieces: tuple[int, int, int]
    alone: Mapping[str, Variant] = field(default_factory=dict)
    labels: Mapping[Variant, tuple[int, int]] = field(default_factory=dict)
    unlabelled: Variant | None = None


def decide(candidates: Sequence[Candidate]) -> Decision:
    """Take one of the candidates; the reference is among them."""
    seeds = [*candidates[0].trained]
    base = next(i for i, c in enumerate(candidates) if c.reference)
    evidence = {s: _evidence(candidates, s) for s in seeds}
    by_seed = {s: choice.standing(evidence[s], len(candidates)) for s in seeds}
    standing = [statistics.fmean(by_seed[s][i] for s in seeds) for i in range(len(candidates))]
    out = {
        i: why for i, c in enumerate(candidates) if i != base and (why := _out(c, candidates[base]))
    }
    able = [i for i in range(len(candidates)) if i not in out]
    leader = max(able, key=lambda i: (standing[i], *(-n for n in _cost(candidates[i]))))

    def clearly_behind(i: int) -> bool:
        return clear([choice.duel(evidence[s], leader, i) for s in seeds])

    alike = [i for i in able if i != leader and not clearly_behind(i)]
    chosen = unlabelled = min([leader, *alike], key=lambda i: _cost(candidates[i]))
    labels = {i: right for i, c in enumerate(candidates) if (right := c.right) is not None}
    if chosen in labels:
        best = max(labels, key=lambda i: (sum(labels[i]), i == chosen, standing[i]))
        if differ(labels[best], labels[chosen]) < TELLS:
            chosen = best
    wins = sum(by_seed[s][chosen] >= max(by_seed[s][i] for i in able) for s in seeds)
    variants = [c.variant for c in candidates]
    return Decision(
        chosen=variants[chosen],
        leader=variants[leader],
        standing=dict(zip(variants, standing, strict=True)),
        by_seed={v: {s: by_seed[s][i] for s in seeds} for i, v in enumerate(variants)},
        out={variants[i]: why for i, why in out.items()},
        alike=[variants[i] for i in alike],
        seeds=(wins, len(seeds)),
        pieces=_pieces(candidates[chosen], candidates[base]),
        alone=_alone(candidates),
        labels={variants[i]: (sum(right), len(right)) for i, right in labels.items()},
        unlabelled=variants[unlabelled],
    )


def clear(duels: Sequence[float]) -> bool:
    """Whether one candidate is clearly ahead of another, from their duel with each seed."""
    mean = statistics.fmean(duels)
    if len(duels) == 1:
        return mean >= ALONE
    return mean > statistics.stdev(duels) / math.sqrt(len(duels))


def _evidence(candidates: Sequence[Candidate], seed: int) -> dict[str, list[float | None]]:
    values = [c.values(seed) for c in candidates]
    return {kind: [v[kind] for v in values] for kind in KINDS}


def _out(candidate: Candidate, base: Candidate) -> str:
    """Why a candidate is out; empty if it is not."""
    seeds = candidate.trained
    worse = sum(transfer.negative(t.worth, base.trained[s].worth) for s, t in seeds.items())
    if worse > HALF * len(seeds):
        return f"looks worse than FedAvg without labels in {worse} of {len(seeds)} seeds"
    heard = [w for w, kinds in choice.WITNESSES.items() if _known(candidate, base, kinds)]
    if len(heard) < LEAST:
        told = f"only one of four witnesses ({heard[0]})" if heard else "no witness"
        return f"{told} can tell it from FedAvg without labels, and a choice needs two"
    odd = sum(t.apart for t in seeds.values())
    if odd > HALF * len(seeds):
        return f"predicts apart from what the other methods agree on in {odd} of {len(seeds)} seeds"
    return ""


def _known(candidate: Candidate, base: Candidate, kinds: Sequence[str]) -> bool:
    """Whether a witness has something to say of a candidate and of the reference."""
    return any(candidate.mean(k) is not None and base.mean(k) is not None for k in kinds)


def _cost(candidate: Candidate) -> tuple[bool, float, int]:
    """Simpler candidates have smaller ones."""
    crossed = statistics.fmean(t.bytes for t in candidate.trained.values())
    return not candidate.reference, crossed, len(candidate.variant.settings)


def _pieces(chosen: Candidate, base: Candidate) -> tuple[int, int, int]:
    """Pieces of evidence that are above the reference's, below, and all; SND is none."""
    leads = []
    for seed in chosen.trained:
        ours, theirs = chosen.values(seed), base.values(seed)
        kinds = [k for each in choice.WITNESSES.values() for k in each]
        leads += [x for k in kinds if (x := choice.lead(ours[k], theirs[k])) is not None]
    return sum(x > 0 for x in leads), sum(x < 0 for x in leads), len(leads)


def _alone(candidates: Sequence[Candidate]) -> dict[str, Variant]:
    """The candidate with the highest mean of each kind of evidence, also if it is out."""
    found = {}
    for kind in KINDS:
        known = {c.variant: v for c in candidates if (v := c.mean(kind)) is not None}
        if known:
            found[kind] = max(known, key=lambda variant: known[variant])
    return found
