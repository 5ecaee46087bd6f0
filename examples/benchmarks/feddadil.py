"""One step of a FedDaDiL client against DaDiL transcribed with POT, on one processor core.

    python examples/benchmarks/feddadil.py --batch 100 --batch 500
    python examples/benchmarks/feddadil.py --batch 100 --atoms 3 --atoms 8 --atoms 16

A step computes a barycenter of K atoms, the transport between it and a mini-batch, and the
gradients for points, labels and coordinates. The transcription is the tests' naive twin. It
computes every cost anew with `ot.dist`, every plan with `ot.emd`, and gradients with autograd. Both
begin at the same support and stop when no plan changes, so they solve the same problems and find
the same gradients.

The atoms differ from one another as much as those of a trained dictionary. They are of two kinds:
`aligned`, where points of one index belong together, as after training, or `shuffled`, where each
atom has its points in another order, which takes more rounds of plans.

The last line is one JSON object:

    speedup                  twin_ms / ours_ms, the least over all problems
    max_abs_difference       the largest difference between the two results
    steps                    one object for each problem, with these keys
    K                        the number of atoms
    batch                    the batch size
    atoms                    the kind of atoms
    ours_ms                  processor milliseconds of fedda, the least of --repeats
    twin_ms                  the same of the transcription
    plans                    the number of plans that were made
    ms                       parts of fedda's time: inner products, plans, and the rest
    ours_with_pots_plans_ms  ours_ms with POT's network simplex instead of the assignment solver
"""

import argparse
import json
import sys
import time
from collections.abc import Callable
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))  # the twin is not in the wheel

from fedda.maths import optimal_transport
from tests.reference import transport as twin

T = TypeVar("T")
Problem = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def problem(n: int, d: int, C: int, K: int, shuffled: bool, seed: int) -> Problem:
    """Draw atoms z (K, n, d) with labels and coordinates, and a mini-batch x (n, d) with labels.

    Each class has a centre, each domain shifts and stretches the centres, and each atom is a
    domain. The mean |z|^2 is about 1, because sites scale their features so.
    """
    g = torch.Generator().manual_seed(seed)
    label = torch.arange(n) % C
    centre, within = torch.randn(C, d, generator=g), torch.randn(n, d, generator=g)
    z = torch.stack(
        [
            (1 + 0.2 * torch.randn(d, generator=g)) * centre[label]
            + 0.8 * within
            + 0.6 * torch.randn(n, d, generator=g)
            + 0.3 * torch.randn(d, generator=g)
            for _ in range(K)
        ]
    )
    y = (0.9 * torch.eye(C)[label] + 0.1 / C).repeat(K, 1, 1)
    if shuffled:
        orders = [torch.randperm(n, generator=g) for _ in range(K)]
        z, y = (torch.stack([a[p] for a, p in zip(x, orders, strict=True)]) for x in (z, y))
    x = centre[label] + torch.randn(n, d, generator=g) + 0.3 * torch.randn(d, generator=g)
    order = torch.randperm(n, generator=g)
    alpha = torch.rand(K, generator=g) + 0.2
    size = (2 * d) ** 0.5
    return z / size, y, alpha / alpha.sum(), x[order] / size, torch.eye(C)[label[order]]


def timed(work: Callable[[], T], repeats: int) -> tuple[float, T]:
    """Do the work several times -> the least processor seconds of one time, the result."""
    best, result = float("inf"), work()
    for _ in range(repeats):
        start = time.process_time()
        result = work()
        best = min(best, time.process_time() - start)
    return best, result


@contextmanager
def watched(*names: str) -> Any:
    """Processor seconds spent in the named functions of `optimal_transport`, by name."""
    spent = dict.fromkeys(names, 0.0)
    originals = {name: getattr(optimal_transport, name) for name in names}

    def watch(name: str) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            start = time.process_time()
            try:
                return originals[name](*args, **more)
            finally:
                spent[name] += time.process_time() - start

        return call

    for name in names:
        setattr(optimal_transport, name, watch(name))
    try:
        yield spent
    finally:
        for name, function in originals.items():
            setattr(optimal_transport, name, function)


SOLVE = optimal_transport.solve


def with_pot(simplex: bool) -> None:
    """Make plans with POT's network simplex, as the twin does, or with fedda's own solver."""

    def solve(cost: Tensor, entropy: float = 0.0) -> Tensor:
        return twin.plan(cost).argmax(dim=1)

    optimal_transport.solve = solve if simplex else SOLVE


def measure(K: int, n: int, args: argparse.Namespace, shuffled: bool) -> dict[str, Any]:
    """Run fedda and the twin on the same problem -> one object of `steps`."""
    z, y, alpha, x, labels = problem(n, args.width, args.classes, K, shuffled, args.seed)
    ours, (step, b, _) = timed(
        lambda: optimal_transport.reconstruction(z, y, alpha, x, labels), args.repeats
    )
    # The twin gets beta as an input: it would compute it from distances between all points of all
    # atoms.
    beta = twin.label_weight(z)
    theirs, (loss, *gradients) = timed(
        lambda: twin.reconstruction(z, y, alpha, x, labels, beta=beta), max(args.repeats // 2, 1)
    )
    apart = [abs(step.loss - loss)]
    # Gradients per mass of a point, as steps use them.
    scaled = (step.z * n, step.y * n, step.alpha)
    for a, b_, scale in zip(scaled, gradients, (n, n, 1), strict=True):
        apart.append(float((a - b_ * scale).abs().max()))
    least, spent = float("inf"), {}
    for _ in range(args.repeats):
        with watched("solve", "_inner") as each:
            start = time.process_time()
            optimal_transport.reconstruction(z, y, alpha, x, labels)
            seconds = time.process_time() - start
        if seconds < least:
            least, spent = seconds, each
    with_pot(True)
    simplex, _ = timed(
        lambda: optimal_transport.reconstruction(z, y, alpha, x, labels), args.repeats
    )
    with_pot(False)
    return {
        "K": K,
        "batch": n,
        "atoms": "shuffled" if shuffled else "aligned",
        "ours_ms": round(1e3 * ours, 2),
        "twin_ms": round(1e3 * theirs, 2),
        "speedup": round(theirs / ours, 2),
        "plans": b.solved + 1,
        "max_abs_difference": max(apart),
        "ours_with_pots_plans_ms": round(1e3 * simplex, 2),
        "ms": {
            "inner products": round(1e3 * spent["_inner"], 2),
            "plans": round(1e3 * spent["solve"], 2),
            "rest": round(1e3 * (least - sum(spent.values())), 2),
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batch", type=int, action="append", help="n_b; default: 100 to 500")
    parser.add_argument("--width", type=int, default=1024, help="d")
    parser.add_argument("--classes", type=int, default=10, help="C")
    parser.add_argument("--atoms", type=int, action="append", help="K; default: 3")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.set_num_threads(1)
    rows = []
    batches = args.batch or (100, 200, 300, 400, 500)
    for K, n, shuffled in product(args.atoms or (3,), batches, (False, True)):
        rows.append(measure(K, n, args, shuffled))
        print(json.dumps(rows[-1]), flush=True)
    figures = {
        "speedup": min(row["speedup"] for row in rows),
        "max_abs_difference": max(row["max_abs_difference"] for row in rows),
        "steps": rows,
    }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
