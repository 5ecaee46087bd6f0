"""What people bring, drawn by chance: is each input read right, or refused in one sentence?

    python examples/benchmarks/fuzz_inputs.py --cases 2000 --seed 0

A case is a site's data (folders, tables of files, tables that hold images, lists, arrays) or an
address. Its files are written byte by byte, so what is right is known without a reader. It is right
if every pixel and label comes out as it was written, at a source and a target, in training, tests
and predictions; refused if one sentence says why; else wrong, also if the check takes what a run
would refuse. Each wrong case is printed with its number, and --only NUMBER repeats it. The last
line is a JSON object:

    cases     how many were drawn
    right     how many were read right, or refused where nothing can be right
    refused   how many were refused that could have been read
    wrong     how many were neither: the goal is 0
    seconds   for all of them
"""

import argparse
import json
import logging
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from fuzzed_addresses import addresses
from fuzzed_sites import Case, arrays, held, lists, sites, tables

from fedda import data
from fedda.errors import FeddaError

ADDRESSES = "addresses"
KINDS = {"sites": sites, "tables": tables, "held": held, "lists": lists, "arrays": arrays}
RIGHT, REFUSED, WRONG = "right", "refused", "wrong"
SHARE = 0.15  # of the cases that are addresses; the other kinds share the rest


def judged(case: Case) -> tuple[str, str]:
    """Right, refused or wrong -> this, and what was seen."""
    try:
        if data.verify(case.path, case.role, reading=case.reading).needs_window:
            return (RIGHT if case.right is None else WRONG), "it needs a window"
    except FeddaError as error:
        return _judged_refusal(str(error), case.right)
    except Exception as error:
        return WRONG, f"check: {type(error).__name__}: {error}"
    try:
        fault = _fault(case)
    except Exception as error:
        return WRONG, f"check passes, then {type(error).__name__}: {error}"
    if case.right is None and not fault:
        return WRONG, "read, though nothing can be right"
    return (WRONG, fault) if fault else (RIGHT, "")


def _judged_refusal(text: str, right: object) -> tuple[str, str]:
    first, *each = text.split("\n")  # of several broken images each has its own sentence
    several = first.endswith("images cannot be read:") and all(e.startswith("  ") for e in each)
    odd = not text or (each and not several) or "Traceback" in text or len(text) > 1500
    if odd:
        return WRONG, f"no sentence: {text[:300]!r}"
    return (RIGHT if right is None else REFUSED), text


def _fault(case: Case) -> str:
    """How what is read differs from what was written; empty if it does not."""
    load = data.load_source if case.role == "source" else data.load_target
    train = load(case.path, reading=case.reading)
    tests = data.load_evaluation(case.path, reading=case.reading)
    if case.right is None:
        return ""
    for what, found, right in (("training", train, case.right), ("tests", tests, case.tests)):
        labelled = case.role == "source" or what == "tests"
        if (found is None) != (not right):
            return f"{what}: {found!r} for {len(right)} examples"
        if found is not None and (odd := _difference(found, right, labelled, case.tolerance)):
            return f"{what}: {odd}"
    return _predictions(case, train.shape)


def _difference(
    found: data.Examples, right: Sequence[tuple[str, np.ndarray]], labelled: bool, tolerance: float
) -> str:
    if len(found) != len(right):
        return f"{len(found)} examples, {len(right)} were written"
    y = [found.classes[i] for i in found.y] if isinstance(found, data.Labelled) else None
    if (y is None) == labelled:
        return "labels where there are none to be, or none where there are"
    left = list(range(len(right)))
    for i, x in enumerate(found.x.numpy()):
        near = [k for k in left if _same(x, right[k][1], tolerance)]
        if not near:
            return f"example {i} is none that was written"
        alike = next((k for k in near if y is None or right[k][0] == y[i]), None)
        if alike is None:
            return f"example {i} has the label {y and y[i]!r}, {right[near[0]][0]!r} was written"
        left.remove(alike)
    return ""


def _same(x: np.ndarray, right: np.ndarray, tolerance: float) -> bool:
    """Whether an example (C, H, W) or (d,) is what was written: (H, W[, 3]) or (d,)."""
    if x.ndim == 3:
        x = x.transpose(1, 2, 0)
        right = right[..., None] if right.ndim == 2 else right
        if x.shape[:2] != right.shape[:2] or x.shape[2] < right.shape[2]:
            return False
    elif x.shape != right.shape:
        return False
    return bool(np.abs(x.astype(float) - right).max() <= tolerance)


def _predictions(case: Case, shape: tuple[int, ...]) -> str:
    """Rows for predictions are all examples, in their order where the data have one."""
    if len(shape) == 3 and not shape[1]:
        return ""
    parts = [x.x for _, x, _ in data.batches(case.path, shape, 2, reading=case.reading)]
    found = [x for part in parts for x in part.numpy()]
    if len(found) != len(case.rows):
        return f"predictions of {len(found)} of {len(case.rows)} examples"
    colours = shape[0] if len(shape) == 3 else 1  # a model of gray images takes others as gray
    pairs = enumerate(zip(found, case.rows, strict=True))
    fit = [(i, x, right) for i, (x, right) in pairs if right.ndim < 3 or colours == 3]
    odd = [i for i, x, right in fit if not _same(x, right, case.tolerance)]
    return f"prediction {odd[0]} is of another example" if odd else ""


def drawn(number: int, seed: int, folder: Path) -> tuple[str, str, str]:
    """One case -> its kind with what it is, the verdict, and what was seen."""
    rng = np.random.default_rng((seed, number))
    if rng.random() < SHARE:
        text, verdict, seen = addresses(rng)
        return f"{ADDRESSES}: {text!r}", verdict, seen
    kind = str(rng.choice(list(KINDS)))
    case = KINDS[kind](rng, folder / str(number))
    return f"{kind}: {case.about}", *judged(case)


def counted(numbers: Sequence[int], seed: int = 0) -> tuple[Counter[str], list[str]]:
    """Judge some cases -> how many of each verdict, and a line for each wrong one."""
    verdicts, lines = Counter[str](), []
    logging.getLogger("fedda.data").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="fedda-fuzz-") as place:
        for number in numbers:
            what, verdict, seen = drawn(number, seed, Path(place))
            verdicts[verdict] += 1
            if verdict == WRONG or len(numbers) == 1:
                lines.append(f"case {number}, {verdict}: {what}: {seen}")
    return verdicts, lines


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cases", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, default=None, help="the number of one case")
    args = parser.parse_args()
    numbers = range(args.cases) if args.only is None else [args.only]
    start = time.perf_counter()
    verdicts, lines = counted(list(numbers), args.seed)
    print(*lines, sep="\n")
    counts = {verdict: verdicts[verdict] for verdict in (RIGHT, REFUSED, WRONG)}
    seconds = round(time.perf_counter() - start, 1)
    print(json.dumps({"cases": len(numbers), **counts, "seconds": seconds}))


if __name__ == "__main__":
    main()
