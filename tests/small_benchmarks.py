"""The benchmarks' programs on small data: their arguments."""

import ast
import re
import shlex
from functools import cache
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parents[1] / "examples" / "benchmarks"

# Arguments of each benchmark's short run; HERE stands for a temporary folder of this file.
SMALL = {
    "accuracy": (
        "--data HERE/data --out HERE/accuracy --jobs 1 --set digits --table control "
        "--images 100 --epochs 1 --target usps --seeds 0,1 --results HERE/made"
    ),
    "adversarial": (
        "--table rotations --target 30 --seeds 0 --images 300 -c rounds=2 -c dils.pretrain=1 "
        "--out HERE --results HERE/made"
    ),
    "alignments": "--data HERE/data --set googlenet --results HERE/made",
    "breakdown": "--images 60 --rounds 1 --no-live",
    "cache": "--images 60 --size 32",
    "candidates": (
        "--data HERE/data/digits --images 100 --seeds 0 --repeats 1 -c model.name=mlp "
        "-c model.hidden=16 -c rounds=3 --jobs 2 -c pretrain=1 -c epochs=1 -c measure.steps=2 "
        "-c exchange.min-examples=32 -c exchange.expose-features=true --out HERE/candidates "
        "--results HERE/made"
    ),
    "central": (
        "--data HERE/data/digits --target usps --seeds 0 -c rounds=2 -c model.name=mlp "
        "-c model.hidden=16 -c train.batch-size=32 -c exchange.min-examples=16 "
        "-c exchange.expose-features=true -c fdan.scale=1 -c dils.pretrain=1"
    ),
    "chain": (
        "--table pens --images 256 --seeds 0 --jobs 2 --out HERE/chain -c model.name=mlp "
        "-c model.hidden=16 -c rounds=3 -c pretrain=1 -c epochs=1 -c measure.steps=2 "
        "--results HERE/made"
    ),
    "teacher": (
        "--data HERE/data --set digits --target usps --images 100 --rounds 1 --seeds 0 "
        "--out HERE/teacher --results HERE/made --method fedavg --method kd3a"
    ),
    "dictionary": (
        "--data HERE/data --out HERE/dictionary --set googlenet --target webcam --seeds 0 "
        "--results HERE/made -c samples=64 -c batch-size=64"
    ),
    "digit_five": (
        "--data HERE/data --out HERE/five --results HERE/made --small --images 40 --rounds 1 "
        "--method fedavg --target usps --seeds 0"
    ),
    "exchange": "--syncs 200 --large-syncs 20 --repeats 1 --memory-syncs 2000",
    "feddadil": "--batch 60 --width 64 --repeats 2 --atoms 3 --atoms 8",
    "fewer": (
        "--data HERE/data/digits --target usps --seeds 0 --images 160 -c model.name=mlp "
        "-c model.hidden=16 -c rounds=2 -c fruda.pretrain=1 -c fruda.measure.steps=2 "
        "--out HERE/fewer -c exchange.min-examples=32 -c exchange.expose-features=true "
        "--results HERE/made"
    ),
    "fuzz_inputs": "--cases 60",
    "grand": (
        "--data HERE/data --set googlenet --target webcam --rounds 2 --method fedavg "
        "--method adabn --method kd3a --method fdann --seeds 0 --jobs 1 --out HERE/grand "
        "--results HERE/made"
    ),
    "harmonise": "--data HERE/data --target va --seeds 0 --out HERE/harmonise --results HERE/made",
    "lazy": "--table lazy --images 1024 --repeats 1 -c rounds=2 -c dils.pretrain=1 --out HERE",
    "methods": (
        "--table methods --repeats 1 --rounds 2 --images 256 --shape 64 --network mlp "
        "--sources 2 -c model.hidden=16"
    ),
    "photos": (
        "--data HERE/data --table googlenet --out HERE/photos --jobs 1 --target webcam "
        "--rounds 2 --seeds 0 --results HERE/made"
    ),
    "memory": "--mb 45 --sources '' --kd3a 2 --rounds 1",
    "overhead": "--images 400 --rounds 2 --repeats 3",
    "peers": "--peer fedda --peer flower --clients 2 --rounds 3 --mb 0.01",
    "peers_simulation": "--peer fedda --peer flower --sources 2 --rounds 2 --images 64 --repeats 1",
    "privacy": (
        "--images 60 --rounds 1 --epsilon 8 --seeds 0 --jobs 1 --out HERE/privacy "
        "--results HERE/made"
    ),
    "refine": (
        "--data HERE/data --set googlenet --target webcam --rounds 2 --seeds 0 --jobs 1 "
        "--out HERE/refine --results HERE/made"
    ),
    "robust": (
        "--images 700 --seeds 0 --row FedAvg --row median --jobs 1 --lie flipped --lie scaled "
        "-c rounds=2 -c model.hidden=16 --out HERE/robust --results HERE/made"
    ),
    "rounds": "--sources 1 --rounds 2 --mb 1 --mb-rounds 1 --frozen-rounds 1",
    "scale": "--sites 3 --mb 0.01 --rounds 2",
    "shares": (
        "--data HERE/data --set googlenet --target webcam --rounds 2 --method shot --seeds 0 "
        "--jobs 1 --out HERE/shares --results HERE/made"
    ),
    "secure": "--sources 3 --rounds 1 --mb 1",
    "soak": "--minutes 0 --sites 2 --rounds 2 --warm-up 0 --mb 0.01 --every 0.5",
    "sources": (
        "--sources 1 5 --images 64 --rounds 1 --seeds 0 --method FedAvg --method KD3A "
        "--out HERE/sources --results HERE/made"
    ),
    "training": (
        "--network lenet --size 16 --images 96 --repeats 1 --frozen-size 32 --frozen-images 40 "
        "--frozen-epochs 1"
    ),
    "turned": "--data HERE/data/digits --images 200 --epochs 1 --seeds 0 --results HERE/made",
    "vote": "--images 500 --teachers 3 --classes 7 --many 4",
}
# A table that is tested by itself -> the program that makes it.
PROGRAM_OF = {"lazy": "adversarial", "methods": "exchange"}


def make_data(folder: Path) -> None:
    """Make four tiny domains of noise, and small ones of vectors and tables."""
    digits = folder / "data" / "digits"
    digits.mkdir(parents=True)
    draw = np.random.default_rng(0)
    for name in ("mnist", "mnistm", "svhn", "usps"):
        found = {
            "x_train": draw.integers(0, 256, (200, 8, 8), dtype=np.uint8),
            "y_train": np.arange(200) % 10,
            "x_test": draw.integers(0, 256, (20, 8, 8), dtype=np.uint8),
            "y_test": np.arange(20) % 10,
        }
        np.savez(digits / f"{name}.npz", **found)
    vectors = folder / "data" / "office_caltech10_googlenet1024"
    vectors.mkdir()
    draw = np.random.default_rng(0)
    centre = draw.normal(size=(10, 12))
    for name in ("amazon", "dslr", "webcam"):
        y = np.arange(80) % 10
        x = centre[y] + 0.5 * draw.normal(size=(80, 12)) + 0.3 * draw.normal(size=12)
        np.savez(vectors / f"{name}.npz", x=x.astype(np.float16), y=y)
    hospitals = folder / "data" / "heart_disease"
    hospitals.mkdir()
    for name in ("cleveland", "va", "zurich"):
        y = np.arange(80) % 2
        x = y[:, None] + draw.normal(size=(80, 13)) + 5
        for i, kinds in {2: (1, 2, 3, 4), 6: (0, 1, 2), 10: (1, 2, 3), 12: (3, 6, 7)}.items():
            x[:, i] = draw.choice(kinds, 80)
        x[:9, 4] = np.nan
        np.savez(hospitals / f"{name}.npz", x=x.astype(np.float32), y=y)


def words(name: str, here: Path) -> list[str]:
    """The arguments of a benchmark's short run in a folder."""
    return [word.replace("HERE", str(here)) for word in shlex.split(SMALL[name])]


def files(program: str) -> set[str]:
    """A program and the modules of its folder that it imports or names, also by another."""
    found, todo = set[str](), {program}
    while todo:
        found.add(name := todo.pop())
        used = {*re.findall(r"\w+", (FOLDER / f"{name}.py").read_text())}
        todo |= {m for m in imported(name) | (used & STARTED) if m not in found}
    return {f"examples/benchmarks/{name}.py" for name in found}


# Which others start as programs of their own.
STARTED = {"light", "measured", "peers_engine", "peers_flower"}


@cache
def imported(name: str) -> set[str]:
    """The modules of the folder that one of them imports."""
    names = set[str]()
    for node in ast.walk(ast.parse((FOLDER / f"{name}.py").read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(str(node.module))
    return {m for m in names if (FOLDER / f"{m}.py").exists()}
