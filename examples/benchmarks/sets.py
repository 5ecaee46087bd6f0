"""The sets of data of several benchmarks: where they lie, their settings, and their options.

Each domain of a set is a target once. Vectors and Office-Caltech10 have no split: a target is
tested on the images that it adapts to. `rotated` needs no data.
"""

import argparse
import os
from collections.abc import Sequence
from pathlib import Path

import accuracy
import photos
import torch
from adversarial import mnist, pens

from fedda import data, plugins
from fedda.config.sections import Flat
from fedda.contrib.lab.comparison import Plan, Variant
from fedda.errors import ConfigError
from fedda.halves import REFERENCE
from fedda.settings import presets

SETS = ("surf", "googlenet", "amazon", "office", "digits", "rotated")
# Sets that are used where they are named; the last one has all images at the papers' size.
MORE = ("photos", "rotated-mnist", "amazon400", "heart", "digits-full")
FULL = "-full"
VECTORS = {
    "surf": "office_caltech10_surf800",
    "googlenet": "office_caltech10_googlenet1024",
    "amazon400": "amazon_review_400",
    "heart": "heart_disease",
}
TABLES = ("heart",)  # of VECTORS, those with gaps: the preset `table` as it is
ROUNDS = 20  # with vectors; a third of the preset's, so that a set takes minutes per seed
IMAGES = 300  # of a domain of rotated
# Steps enough for the methods, and layers that can adapt: KD3A's schedule with the rate of
# digit_five.py --small, which was chosen on digits.
LONG: Flat = {
    "model.hidden": "512,256",
    "model.bottleneck": 0,
    "model.dropout": 0.5,
    "rounds": 40,
    "train.steps": 36,
    "train.batch-size": 64,
    "train.carry-momentum": True,
    "train.momentum": 0.9,
    "train.weight-decay": 0.0005,
    "train.lr": 0.02,
    "train.lr-end": 0.0005,
}
PENS: Flat = {"model.name": "mlp", "model.hidden": "100", "train.batch-size": 32, "rounds": 12}


def plan(args: argparse.Namespace, name: str) -> Plan:
    """The data and settings of one set; all its domains are targets."""
    out, variants = args.out / name, [Variant(REFERENCE)]
    if name in VECTORS:
        photos.prepare(args.data / VECTORS[name], out / "data")
        chosen = presets.for_all("table" if name in TABLES else "vectors", plugins.methods())
        settings: Flat = {key: given.value for key, given in chosen.items()}
        if name not in TABLES:
            settings |= {"rounds": ROUNDS, "train.batch-size": photos.BATCH}
        place = out / "data"
    elif name == "photos":
        photos.prepare(args.data / "office_caltech10_photos", out / "data")
        chosen = presets.for_all("photos", plugins.methods())
        settings = {key: given.value for key, given in chosen.items()}
        settings["train.batch-size"] = photos.BATCH
        place = out / "data"
    elif name == "rotated":
        place, settings = pens(out, args.images or IMAGES), {**PENS}
    elif name == "rotated-mnist":
        place = mnist(args.data / "digits", out, args.images or 2 * IMAGES)
        settings = {"rounds": accuracy.BENCHMARKS["digits"].epochs}
        settings |= accuracy.BENCHMARKS["digits"].settings
    else:
        b = accuracy.BENCHMARKS[name.removesuffix(FULL)]
        images, tests = (0, 0) if name.endswith(FULL) else (args.images or b.images, b.tests)
        accuracy.prepare(args.data / b.folder, out / "data", images, tests)
        place, settings = out / "data", {"rounds": b.epochs, **b.settings, **b.kd3a}
        settings |= b.full if name.endswith(FULL) else {}
    settings |= LONG if args.long else {}
    settings |= {"rounds": args.rounds} if args.rounds else {}
    domains = [*data.domains(place)]
    if odd := set(args.target or ()) - set(domains):
        raise ConfigError(f"{name} has no domain {min(odd)}; it has {', '.join(domains)}.")
    return Plan(place, out, variants, args.target or domains, args.seeds, settings)


def add_options(parser: argparse.ArgumentParser, usual: Sequence[str], out: Path) -> None:
    """Add the options of a benchmark over the targets of several sets.

    Args:
        parser: to add them to.
        usual: the sets that it takes without --set.
        out: where it keeps its trainings without --out.
    """
    parser.add_argument("--data", type=Path, default=Path(), help="folder of the data sets")
    sets = f"default: {', '.join(usual)}"
    parser.add_argument("--set", choices=SETS + MORE, action="append", help=sets)
    parser.add_argument("--target", action="append", help="default: all domains")
    parser.add_argument("--rounds", type=int, default=0, help="default: the set's")
    text = "two hidden layers, and forty rounds of 36 steps or more"
    parser.add_argument("--long", action="store_true", help=text)
    parser.add_argument("--images", type=int, default=0, help="per domain; default: the set's")
    parser.add_argument("--seeds", type=accuracy.seeds, default=[0, 1, 2], help="default: 0,1,2")
    parser.add_argument("--out", type=Path, default=out, help=f"for all trainings; default: {out}")
    parser.add_argument("--results", type=Path, help="also write what is found here")
    jobs = 1 if torch.cuda.is_available() else os.cpu_count() or 1
    parser.add_argument("--jobs", type=int, default=jobs, help="trainings at the same time")
