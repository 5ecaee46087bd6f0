"""How long KD3A's vote, consensus focus and weights take on one processor core.

    python examples/benchmarks/vote.py --images 100000 --teachers 5 --classes 345

The last line is one JSON object:

    seconds            vote, focus and weights together, with --teachers teachers
    vote_seconds       the vote alone
    focus_seconds      the focus alone, by marginal values
    shapley_seconds    the focus by Shapley values
    official_seconds   vote and focus as in the authors' code
    kept               share of the images of which at least one teacher is sure
    alpha              the weights
    focus_N_seconds    the focus again, with N (--many) teachers
    shapley_N_seconds  the same by Shapley values
    probabilities_mb   memory of the probabilities of N teachers
    peak_mb            peak memory of this process
"""

import argparse
import json
import resource
import time
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from fedda.algorithms import kd3a

CHUNK = 5_000  # images in one vote: bounds the memory used in addition to the probabilities
T = TypeVar("T")


def probabilities(
    images: int, teachers: int, classes: int, generator: torch.Generator, skill: float = 14.0
) -> Tensor:
    """Draw the teachers' class probabilities -> (N, K, C).

    Softmax of a true class, of similar classes that are the same for all teachers, and of each
    teacher's own noise. Teachers tend to be sure, and to agree, on the same images.
    """
    p = torch.empty(images, teachers, classes)
    for part in p.split(CHUNK):
        n = len(part)
        truth = torch.randint(classes, (n, 1), generator=generator)
        other = torch.randint(classes, (n, teachers), generator=generator)
        mistaken = torch.rand(n, teachers, generator=generator) < 0.05
        seen = torch.rand(n, 1, generator=generator)
        seen = seen + 0.4 * torch.rand(n, teachers, generator=generator)
        part.normal_(generator=generator)
        part += 1.5 * torch.randn(n, 1, classes, generator=generator)
        label = torch.where(mistaken, other, truth)
        part.scatter_add_(2, label[:, :, None], skill * seen[:, :, None])
        part.copy_(part.softmax(dim=2))
    return p


def vote(p: Tensor, gate: float, form: kd3a.Form = "soft") -> float:
    """Vote chunk by chunk, as a target does while it trains -> share of images kept."""
    return sum(int(kd3a.knowledge_vote(x, gate, form).kept.sum()) for x in p.split(CHUNK)) / len(p)


def timed(work: Callable[[], T]) -> tuple[float, T]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--images", type=int, default=100_000)
    parser.add_argument("--teachers", type=int, default=5)
    parser.add_argument("--classes", type=int, default=345)
    parser.add_argument("--many", type=int, default=12, help="teachers of the second part; 0: skip")
    parser.add_argument("--gate", type=float, default=0.9)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.set_num_threads(1)
    generator = torch.Generator().manual_seed(args.seed)
    N, K, C, gate = args.images, args.teachers, args.classes, args.gate
    vote(probabilities(100, K, C, generator), gate)  # first calls set up thread pools and kernels

    p = probabilities(N, K, C, generator)
    vote_seconds, kept = timed(lambda: vote(p, gate))
    focus_seconds, cf = timed(lambda: kd3a.consensus_focus(p, gate, "soft", "marginal"))
    weight_seconds, alpha = timed(
        lambda: kd3a.domain_weights(cf, torch.full((K,), N), target_examples=N)
    )
    figures: dict[str, object] = {
        "seconds": vote_seconds + focus_seconds + weight_seconds,
        "vote_seconds": vote_seconds,
        "focus_seconds": focus_seconds,
        "shapley_seconds": timed(lambda: kd3a.consensus_focus(p, gate, "soft", "shapley"))[0],
        "official_seconds": timed(lambda: vote(p, gate, "hard"))[0]
        + timed(lambda: kd3a.consensus_focus(p, gate, "hard", "shapley"))[0],
        "kept": kept,
        "alpha": [round(a, 4) for a in alpha.tolist()],
    }
    del p
    if args.many:
        p = probabilities(N, args.many, C, generator)
        kinds: list[tuple[str, kd3a.Value]] = [("focus", "marginal"), ("shapley", "shapley")]
        for name, value in kinds:
            figures[f"{name}_{args.many}_seconds"] = timed(
                lambda v=value: kd3a.consensus_focus(p, gate, "soft", v)
            )[0]
        figures["probabilities_mb"] = p.nbytes // 10**6
    figures["peak_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1000
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
