"""FRUDA in under two minutes: one domain of digits has labels, three more are turned, step by step.

    python examples/fruda.py [--out FOLDER] [--images N]

The targets arrive one after another, at 20, 40 and 60 degrees. Each chooses whom to learn from by
the bound of its error, and adapts by DILS, all in this process. Prints who learned from whom, with
the accuracies of the labelled domain's own model and of the adapted one. FOLDER is
runs/fruda-example unless given; only there an earlier run is replaced.
"""

import argparse
import shutil
import sys
from pathlib import Path
from typing import Any

import fedda
from fedda.contrib.report import page
from fedda.data import digits, rotate
from fedda.errors import FeddaError
from fedda.results.read import percent

OUT = Path("runs/fruda-example")
HOME, TURNED = 0, (20, 40, 60)  # degrees
IMAGES, TESTS = 1200, 400
PRETRAINING, ADAPTING = 6, 6  # rounds
SETTINGS: dict[str, Any] = {
    "model_name": "lenet",
    "input_size": 20,
    "train_batch_size": 64,
    "train_lr": 0.05,
    "train_schedule": "constant",
    "train_rounds_per_epoch": 0.3,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=OUT, help=f"for all files; default: {OUT}")
    parser.add_argument("--images", type=int, default=IMAGES, help=f"a domain; default: {IMAGES}")
    args = parser.parse_args()
    out = args.out.absolute()
    if args.out != OUT and out.exists() and any(out.iterdir()):
        parser.error(f"{out} holds something already; give another --out, or remove it")
    shutil.rmtree(out, ignore_errors=True)
    drawn = {name: 10 for name in digits.DOMAINS} | {"handwritten": args.images}
    digits.build(out / "drawn", seed=0, train=drawn, test=TESTS)
    angles, domains = (HOME, *TURNED), out / "domains"
    rotate.build(out / "drawn" / "handwritten", domains, angles, seed=0, everywhere=True)

    targets = [str(angle) for angle in TURNED]
    labelled = fedda.simulate(domains, targets, "fedavg", rounds=PRETRAINING, **SETTINGS)
    run = fedda.simulate(
        domains,
        targets,
        "fruda",
        dir=out / "fruda",
        baseline="none",
        rounds=PRETRAINING + 1 + ADAPTING,
        fruda_pretrain=PRETRAINING,
        fruda_epochs=4,  # an adapting round is as long as so many rounds of pretraining
        fruda_sequence=",".join(targets),
        exchange_p=4,
        **SETTINGS,
    )
    before = {training.target: training.accuracy for training in labelled.results.trainings}
    for training in run.results.raw["trainings"]["fruda"]:
        target, teacher = training["target"], training["selection"]["collaborator"]
        print(
            f"{target} degrees learned from {teacher}: {percent(before[target])} by the labelled "
            f"domain's model, {percent(training['final_accuracy'])} after"
        )
    print(f"page: {page.write(run.results.raw, run.folder / 'report.html', run.folder)}")


if __name__ == "__main__":
    try:
        main()
    except FeddaError as error:
        sys.exit(f"error: {error}")
