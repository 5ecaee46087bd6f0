"""Whether shares of a target's classes help what has no use of them: an estimate, and a choice.

    python examples/benchmarks/uneven.py --data DATA

DATA holds the sets of vectors of choose.py. Each domain of a set is the target once and, for each
seed, as uneven as in shares.py. Vectors are scaled by their own site, models are linear heads
(alignments.py), and no federation is needed: this says what shares are worth before anybody builds
them in. Shares q are the mean answer of a head (`fedda.maths.class_shares`), those of expectation
maximisation, and the true ones (`-mean`, `-em`, `-true`). Sources count as even, but where they
weigh their own examples.

The estimate is that of `fedda.maths.estimates`, of one head for all sources. A fifth of each
source's vectors, which the head has not seen, calibrates it. Its parts are ATC and DoC, and the
answers that the last step changes are taken off.

- `as-is`: without shares.
- `answers-*`: the target corrects by q how sure the head is of each answer that it gives, which
  stays as it is; nothing more crosses.
- `sources-*`: sources weigh their examples by q, which they would have to be told.

The choice is FRUDA's, among one head for each source: the least error + 2 theta W1, with the W1 of
as many vectors of each site, solved exactly. Beside it the least W1 alone.

- `bound`, `w1`: without shares.
- `bound-*`, `w1-*`: the target's vectors weigh as much as if its classes were even by q.
- `random`: the mean over all sources.

The last line is one JSON object, by set, all in points:

    estimate    by way: mean absolute error of the estimated accuracy, and mean error
    choice      by way: how often the best source was chosen in percent, and how many points the
                chosen one is below the best, mean and most
"""

import argparse
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accuracy
import alignments
import label_shift
import numpy as np
import ot
import shares
import torch
from choose import VECTORS
from torch import Tensor

from fedda.comparison.tables import markdown
from fedda.data import Reading
from fedda.data.own_columns import OwnColumns
from fedda.maths import class_shares, estimates, ocs, refine
from fedda.maths.estimates import Calibration
from fedda.train import generator

STEM = "uneven"
HELD = 5  # one of so many vectors of a source calibrates
MOST = 500  # vectors of each site between which W1 is solved
LEAST = 1e-3  # a smaller share of a class counts as this one

Domain = alignments.Domain
Found = dict[str, float]


@dataclass(frozen=True)
class Case:
    """One target and seed: its vectors, those of the sources by name, and the name of the draw."""

    target: Domain
    sources: Mapping[str, Domain]
    name: str


def cases(place: Path, name: str, seeds: Sequence[int]) -> Iterator[Case]:
    """The targets of a set, each with its draws of rare classes."""
    paths = {path.stem: path for path in accuracy.domains(place)}
    raw = {}
    for site, path in paths.items():
        with np.load(path) as file:
            raw[site] = np.nan_to_num(file["x"].astype(np.float32)), file["y"]
    whole = {site: scaled(x, y, paths[site]) for site, (x, y) in raw.items()}
    for seed in seeds:
        for target, (x, y) in raw.items():
            draw = f"{name} {target} {seed}"
            every = slice(None)
            rows = every if name in shares.UNEVEN else shares.rare(y, int(y.max()) + 1, draw)
            others = {site: own for site, own in whole.items() if site != target}
            yield Case(scaled(x[rows], y[rows], paths[target]), others, draw)


def scaled(x: np.ndarray, y: np.ndarray, path: Path) -> Domain:
    """A site's vectors in its own scale, and their labels."""
    own = torch.from_numpy(x)
    return OwnColumns(own, path, Reading(window="own"))(own).double(), torch.from_numpy(y).long()


@dataclass(frozen=True)
class Head:
    """A linear head: its probabilities, also of classes that it has never seen."""

    model: Any
    classes: int

    @property
    def W(self) -> Tensor:
        """(C, d), of two classes those of either sign; a class without examples has zeros."""
        coef = torch.from_numpy(self.model.coef_)
        if len(coef) == 1:
            coef = torch.cat([-coef, coef]) / 2
        W = coef.new_zeros(self.classes, coef.shape[1])
        W[torch.from_numpy(self.model.classes_)] = coef
        return W

    def __call__(self, x: Tensor) -> Tensor:
        p = torch.from_numpy(self.model.predict_proba(x.numpy()))
        return p.new_zeros(len(p), self.classes).index_copy_(
            1, torch.from_numpy(self.model.classes_), p
        )


def guesses(p: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Shares q (C,) of a target by its answers p (N, C), and by its labels."""
    C = p.shape[1]
    even = torch.full((C,), 1 / C, dtype=torch.float64)
    found = {"mean": class_shares.estimated(p), "em": label_shift.em(p, even)}
    return {n: q.clamp_min(LEAST) for n, q in (found | {"true": shares.shares(y, C)}).items()}


# ---- the estimate of accuracy --------------------------------------------------------------------


def estimated(case: Case) -> Found:
    """Estimated minus true accuracy in points, by way."""
    x, y = case.target
    C = int(max(y.max(), *(own.max() for _, own in case.sources.values()))) + 1
    draws = generator(case.name, "held")
    known, held = [], []
    for z, own in case.sources.values():
        order = torch.randperm(len(z), generator=draws)
        few = max(1, len(z) // HELD)
        known.append((z[order[few:]], own[order[few:]]))
        held.append((z[order[:few]], own[order[:few]], len(z)))
    head = Head(alignments.head(known), C)
    p, told = head(x), [(head(z), own, n) for z, own, n in held]
    label = p.argmax(dim=1)
    after, _ = refine.refine(p, refine.Space.of(x)(x))
    changed = float((after.argmax(dim=1) != label).double().mean())
    ways = {"as-is": estimate(told, p, label, changed)}
    for name, q in guesses(p, y).items():
        new = class_shares.corrected(p, q)
        ways[f"answers-{name}"] = estimate(told, new, label, changed)
        ways[f"sources-{name}"] = estimate(told, p, label, changed, q)
    true = shares.right(p, y)
    return {name: 100 * value - true for name, value in ways.items()}


def estimate(
    told: Sequence[tuple[Tensor, Tensor, int]],
    p: Tensor,
    label: Tensor,
    changed: float,
    q: Tensor | None = None,
) -> float:
    """The estimate of `fedda.maths.estimates`, of sources that weigh their examples by shares.

    Args:
        told: of each source (n, C) answers, (n,) labels, and how much it counts.
        p: (N, C) how likely each class is at the target.
        label: (N,) its answers, whose accuracy is sought.
        changed: the share of them that the last step changes.
        q: (C,) shares by which sources weigh; without them all examples weigh the same.
    """
    sure = float(p.gather(1, label[:, None]).mean())
    here, sites = estimates.scores(p), []
    for p_s, y_s, count in told:
        of = shares.shares(y_s, p_s.shape[1]).clamp_min(LEAST)
        w = (of if q is None else q).div(of)[y_s]
        w /= w.sum()
        best, given = p_s.max(dim=1)
        right = float(w @ (given == y_s).double())
        above = {
            f"atc-{kind}": estimates.above(here[kind], threshold(score, w, 1 - right))
            for kind, score in estimates.scores(p_s).items()
        }
        sites.append(Calibration(count, right, float(w @ best), above))
    return estimates.estimate(sites, sure, len(p), changed).accuracy


def threshold(score: Tensor, w: Tensor, wrong: float) -> float:
    """ATC's t for weighed scores (n,): their weight below it is that of the wrong answers."""
    order = score.argsort()
    ordered, below = score[order], w[order].cumsum(dim=0)
    k = int((below <= wrong + 1e-6).sum())
    ends = torch.cat([ordered[:1] - 2, ordered, ordered[-1:] + 2])  # as in `estimates.threshold`
    return float(ends[k] + ends[k + 1]) / 2


# ---- the choice of a source ----------------------------------------------------------------------


def chosen(case: Case) -> dict[str, tuple[float, float]]:
    """By way: how often the best source was chosen, and how many points it is below the best."""
    x, y = case.target
    C = int(max(y.max(), *(own.max() for _, own in case.sources.values()))) + 1
    size = min(MOST, len(x), *(len(z) for z, _ in case.sources.values()))
    draws = generator(case.name, "w1")
    rows = torch.randperm(len(x), generator=draws)[:size]
    alike = np.full(size, 1 / size)
    right: Found = {}
    bounds: dict[str, Found] = {}
    for name, (z, own) in case.sources.items():
        head = Head(alignments.head([(z, own)]), C)
        p = head(x)
        right[name] = shares.right(p, y)
        eps, theta = ocs.l1_error(head(z), own), ocs.theta_of(head.W)
        cost = ot.dist(
            z[torch.randperm(len(z), generator=draws)[:size]].numpy(),
            x[rows].numpy(),
            metric="euclidean",
        )
        weights = {"": torch.ones(size, dtype=torch.float64)}
        for kind, q in guesses(p, y).items():
            known = torch.eye(C, dtype=torch.float64)[y]
            likely = known if kind == "true" else class_shares.corrected(p, q)
            weights[f"-{kind}"] = (likely @ (1 / (C * q)))[rows]
        for kind, w in weights.items():
            W1 = float(ot.emd2(alike, (w / w.sum()).numpy(), cost))  # type: ignore[arg-type]
            bounds.setdefault(f"bound{kind}", {})[name] = ocs.bound(eps, theta, W1)
            bounds.setdefault(f"w1{kind}", {})[name] = W1
    best = max(right.values())
    found: dict[str, tuple[float, float]] = {}
    for kind, of in bounds.items():
        taken = right[min(of, key=lambda name: of[name])]
        found[kind] = float(taken == best), best - taken
    every = [*right.values()]
    often = sum(r == best for r in every) / len(every)
    return found | {"random": (often, best - statistics.fmean(every))}


# ---- tables --------------------------------------------------------------------------------------


def figures(every: Sequence[tuple[Found, Mapping[str, tuple[float, float]]]]) -> dict[str, Any]:
    """All that the last line says of one set."""
    errors, choices = zip(*every, strict=True)
    return {
        "estimate": {
            way: [
                round(statistics.fmean(abs(found[way]) for found in errors), 1),
                round(statistics.fmean(found[way] for found in errors), 1),
            ]
            for way in errors[0]
        },
        "choice": {
            way: [
                round(100 * statistics.fmean(found[way][0] for found in choices)),
                round(statistics.fmean(found[way][1] for found in choices), 1),
                round(max(found[way][1] for found in choices), 1),
            ]
            for way in choices[0]
        },
    }


def report(found: Mapping[str, Any], sizes: Mapping[str, int], command: str) -> list[str]:
    """The text: both questions, by set."""
    heads = ["", *(f"{name} ({sizes[name]})" for name in found)]
    first = next(iter(found.values()))
    lines = [f"## {STEM}", "", f"    {command}", ""]
    lines += ["Error of the estimated accuracy in points: mean absolute error; mean error.", ""]
    rows = [
        [way, *("{:.1f}; {:+.1f}".format(*f["estimate"][way]) for f in found.values())]
        for way in first["estimate"]
    ]
    lines += [*markdown(heads, rows), ""]
    lines += [
        "FRUDA's choice of a source: how often it is the best one; points below the best, "
        "mean / most.",
        "",
    ]
    rows = [
        [way, *("{} %; {:.1f} / {:.1f}".format(*f["choice"][way]) for f in found.values())]
        for way in first["choice"]
    ]
    return [*lines, *markdown(heads, rows)]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of the sets")
    parser.add_argument("--set", choices=VECTORS, action="append", help="default: all")
    parser.add_argument("--seeds", type=accuracy.seeds, default=[0, 1, 2], help="default: 0,1,2")
    parser.add_argument("--results", type=Path, help="folder in which the tables are written, too")
    args = parser.parse_args(arguments)
    found, sizes = {}, {}
    for name in args.set or VECTORS:
        every = []
        for case in cases(args.data / VECTORS[name], name, args.seeds):
            every.append((estimated(case), chosen(case)))
            print(f"{case.name}: done", flush=True)
        found[name], sizes[name] = figures(every), len(every)
    command = f"python examples/benchmarks/{STEM}.py --data DATA"
    command += accuracy.typed(parser, args, "set", "seeds")
    text = "\n".join(report(found, sizes, command)) + "\n"
    if args.results:
        args.results.mkdir(parents=True, exist_ok=True)
        (args.results / f"{STEM}.md").write_text(text)
    print(text)
    print(json.dumps(found))


if __name__ == "__main__":
    with accuracy.plainly():
        main()
