"""FedDaDiL in under a minute: four domains of digits, one of them without labels.

    python examples/feddadil.py [--out FOLDER] [--rounds N]

Draws the domains from installed packages. Then FedAvg trains an encoder and the sites learn three
atoms, all in this process. Prints the accuracies of the target's heads and of the FedAvg head.
FOLDER is runs/feddadil-example in the current folder unless given. Afterwards FOLDER/digits holds
the domains, and FOLDER/feddadil the results, the page, whose path is printed, and the target's own
models for `fedda predict`. Only in the default folder an earlier run is replaced.
"""

import argparse
import shutil
import sys
from pathlib import Path

from fedda.config.sections import Flat
from fedda.contrib.report import page
from fedda.data import digits
from fedda.errors import FeddaError
from fedda.halves import load
from fedda.results.read import begun
from fedda.settings import RunConfig

OUT = Path("runs/feddadil-example")
TARGET = "fonts"
SETTINGS: Flat = {
    "method": "feddadil",
    "rounds": 24,
    "model.name": "digit-cnn",
    "input.channels": 1,
    "input.size": 16,
    "train.lr": 0.01,
    "train.lr-end": 0.0005,
    "feddadil.samples": 100,
    "feddadil.distil": 5,
    "wait.settle": 0.0,
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=OUT, help=f"folder for all files; default: {OUT}"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=SETTINGS["rounds"],
        help=f"for the encoder and the atoms together; default: {SETTINGS['rounds']}",
    )
    args = parser.parse_args()
    out = args.out.absolute()
    run = out / "feddadil"
    if begun(run):
        if args.out != OUT:
            parser.error(f"{run} already holds a run; give another --out, or remove it")
        shutil.rmtree(run)
    digits.build(out / "digits", seed=0)
    own = {"rounds": args.rounds, "run.name": run.name, "run.dir": str(out)}
    config = RunConfig.parse({**SETTINGS, **own})
    local, journal = load("server", "simulation"), load("server", "journal")
    sites = local.folders(out / "digits", TARGET, {})
    results = local.simulate(config, sites, journal.Journal(), "process")
    report = page.write(results, run / "report.html", run)
    last = results["trainings"]["feddadil"][0]["rounds"][-1]
    heads = {k.removeprefix("accuracy-"): v for k, v in last.items() if k[:9] == "accuracy-"}
    for head, accuracy in heads.items():
        print(f"{head:15} {100 * accuracy:5.1f} % of {last['tested']} tests at {TARGET}")
    model = next((run / "sites" / TARGET / "models").rglob("reconstruction.safetensors"))
    print(f"predict: fedda predict {model} DIR")
    print(f"page: {report}")


if __name__ == "__main__":
    try:
        main()
    except FeddaError as error:
        sys.exit(f"error: {error}")
