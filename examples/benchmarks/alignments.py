"""Closed-form alignments of features, with a linear head on what they make of pooled sources.

    python examples/benchmarks/alignments.py --data DATA --set googlenet --set surf

DATA holds the sets of vectors of sets.py. No federation could pool its sources: this says what an
alignment is worth before anybody builds it into one. All vectors are scaled by their own site
(`input.window=own`), which aligns means and deviations already; a head weighs its sources equally
and has a regularisation of .01. Covariances are shrunk as Ledoit and Wolf estimate, or by a fixed
share of it towards a multiple of the identity. Tested are the target's own vectors.

    none        as they are
    coral       x C_S^-1/2 C_T^1/2 (Sun, Feng and Saenko, AAAI 2016)
    linot       the map of optimal transport between Gaussians (POT's `bures_wasserstein_mapping`)
    coral_N     the same with N % of the identity
    linot_N     likewise
    centring    fedda's: each class is moved onto the surest half of those predicted by `none`
    own-means   the target's class means by its labels, which nobody has: the most that centring can

The last line is one JSON object: set -> alignment -> mean accuracy of its targets in percent.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import accuracy
import numpy as np
import torch
from ot.gaussian import bures_wasserstein_mapping
from sets import VECTORS
from sklearn.covariance import ledoit_wolf
from sklearn.linear_model import LogisticRegression
from torch import Tensor

from fedda.contrib.methods.centring import algorithm as centring
from fedda.data import Reading
from fedda.data.own_columns import OwnColumns
from fedda.results.escaping import markdown

STEM = "alignments"
REGULARISATION = 0.01  # of the mean loss
SHARES = (0.5, 0.9)  # of the identity

Domain = tuple[Tensor, Tensor]  # (N, d) scaled, (N,)
Shrunk = Callable[[np.ndarray], np.ndarray]
Map = Callable[[np.ndarray, np.ndarray], np.ndarray]  # of two covariances -> (d, d)


def by_estimate(x: np.ndarray) -> np.ndarray:
    """The covariance, shrunk as Ledoit and Wolf estimate -> (d, d)."""
    return ledoit_wolf(x)[0]


def by_share(x: np.ndarray, share: float) -> np.ndarray:
    """(1 - share) C + share tr(C) / d I -> (d, d)."""
    C = np.cov(x.T, bias=True)
    return (1 - share) * C + share * np.trace(C) / len(C) * np.eye(len(C))


def power(C: np.ndarray, p: float) -> np.ndarray:
    """C^p of a positive matrix -> (d, d)."""
    values, vectors = np.linalg.eigh(C)
    return (vectors * values.clip(1e-10) ** p) @ vectors.T


def coral(C_S: np.ndarray, C_T: np.ndarray) -> np.ndarray:
    """C_S^-1/2 C_T^1/2 -> (d, d)."""
    return power(C_S, -0.5) @ power(C_T, 0.5)


def linot(C_S: np.ndarray, C_T: np.ndarray) -> np.ndarray:
    """C_S^-1/2 (C_S^1/2 C_T C_S^1/2)^1/2 C_S^-1/2 -> (d, d)."""
    zero = np.zeros(len(C_S))
    return bures_wasserstein_mapping(zero, zero, C_S, C_T)[0]


WHOLE: dict[str, tuple[Map, Shrunk]] = {
    "coral": (coral, by_estimate),
    "linot": (linot, by_estimate),
}
WHOLE |= {
    f"{name}_{100 * share:.0f}": (of, partial(by_share, share=share))
    for share in SHARES
    for name, of in (("coral", coral), ("linot", linot))
}


def head(sources: Sequence[Domain]) -> LogisticRegression:
    """A linear head on pooled sources, each of which weighs the same."""
    x, y = (torch.cat(parts).numpy() for parts in zip(*sources, strict=True))
    weights = np.concatenate(
        [np.full(len(s[1]), len(y) / len(sources) / len(s[1])) for s in sources]
    )
    made = LogisticRegression(C=1 / REGULARISATION / len(y), max_iter=200, tol=1e-3)
    return made.fit(x, y, sample_weight=weights)


def moved(sources: Sequence[Domain], x: Tensor, p: Tensor, share: float) -> list[Domain]:
    """The sources, with each class where the target's is: the surest `share` of those of p."""
    kept = centring.surest(p, share)
    mu, known = centring.class_means(x[kept], p[kept].argmax(dim=1), p.shape[1])
    return [(s + centring.shift(s, y, mu, known)[y], y) for s, y in sources]


def accuracies(sources: Sequence[Domain], target: Domain) -> dict[str, float]:
    """Percent right at a target, by alignment."""
    x, y = target

    def right(aligned: Sequence[Domain]) -> float:
        return 100 * head(aligned).score(x.numpy(), y.numpy())

    plain = head(sources)
    p = torch.from_numpy(plain.predict_proba(x.numpy()))
    found = {"none": 100 * float(plain.score(x.numpy(), y.numpy()))}
    for name, (of, shrunk) in WHOLE.items():
        C_T = shrunk(x.numpy())
        maps = [torch.from_numpy(of(shrunk(s.numpy()), C_T)) for s, _ in sources]
        found[name] = right([(s @ A, c) for (s, c), A in zip(sources, maps, strict=True)])
    found["centring"] = right(moved(sources, x, p, 0.5))
    found["own-means"] = right(moved(sources, x, torch.eye(p.shape[1])[y].double(), 1.0))
    return found


def domains(folder: Path) -> dict[str, Domain]:
    """The domains of a set, each scaled by itself."""
    found = {}
    for path in accuracy.domains(folder):
        with np.load(path) as file:
            x = torch.from_numpy(np.nan_to_num(file["x"].astype(np.float32)))
            z = OwnColumns(x, path, Reading(window="own"))(x)
            found[path.stem] = (z.double(), torch.from_numpy(file["y"]).long())
    return found


def table(name: str, by_target: Mapping[str, Mapping[str, float]]) -> list[str]:
    """One row per alignment: accuracies, and the mean gain."""
    first = next(iter(by_target.values()))
    rows = []
    for kind in first:
        gains = [found[kind] - found["none"] for found in by_target.values()]
        cells = [f"{found[kind]:.1f}" for found in by_target.values()]
        rows.append([kind, *cells, f"{np.mean(gains):+.1f}"])
    return [f"### {name}", "", *markdown(["", *by_target, "mean gain"], rows), ""]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of the sets")
    parser.add_argument("--set", choices=VECTORS, action="append", help="default: all")
    parser.add_argument("--results", type=Path, help="folder in which the table is written, too")
    args = parser.parse_args(arguments)
    command = f"python examples/benchmarks/{STEM}.py --data DATA"
    command += accuracy.typed(parser, args, "set")
    lines, means = [f"## {STEM}", "", f"    {command}", ""], {}
    for name in args.set or VECTORS:
        sites = domains(args.data / VECTORS[name])
        by_target = {
            target: accuracies([s for n, s in sites.items() if n != target], sites[target])
            for target in sites
        }
        kinds = next(iter(by_target.values()))
        means[name] = {
            k: round(float(np.mean([f[k] for f in by_target.values()])), 1) for k in kinds
        }
        lines += table(name, by_target)
    text = "\n".join(lines).rstrip() + "\n"
    if args.results:
        args.results.mkdir(parents=True, exist_ok=True)
        (args.results / f"{STEM}.md").write_text(text)
    print(text)
    print(json.dumps(means))


if __name__ == "__main__":
    with accuracy.plainly():
        main()
