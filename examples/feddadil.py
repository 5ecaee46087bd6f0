"""FedDaDiL in under a minute: four domains of digits, one of them without labels.

    python examples/feddadil.py [--out FOLDER] [--rounds N]

Draws the domains out of what is installed, lets FedAvg train an encoder and the sites learn three
atoms, all in this process, and prints what the target's heads are worth beside the FedAvg head.
FOLDER is runs/feddadil-example in the current folder unless given. It then holds the domains in
digits/, and in feddadil/ results, the page, whose path is printed, and the target's own models for
`fedda predict`. An earlier run is replaced in the default folder, and in no other.
"""

import argparse
import shutil
from pathlib import Path

from fedda import page
from fedda.config import Flat
from fedda.data import digits
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
        "--out", type=Path, default=OUT, help=f"where everything is kept; default: {OUT}"
    )
    parser.add_argument(
        "--rounds",
        type=int,
        default=SETTINGS["rounds"],
        help=f"of the encoder and the atoms together; default: {SETTINGS['rounds']}",
    )
    args = parser.parse_args()
    out = args.out.absolute()
    run = out / "feddadil"
    if begun(run):
        if args.out != OUT:
            parser.error(f"{run} holds a run already; give another --out, or remove it")
        shutil.rmtree(run)
    digits.build(out / "digits", seed=0)
    own = {"rounds": args.rounds, "run.name": run.name, "run.dir": str(out)}
    config = RunConfig.parse({**SETTINGS, **own})
    local, journal = load("server", "simulation"), load("server", "journal")
    sites = local.folders(out / "digits", TARGET, {})
    results = local.simulate(config, sites, journal.Journal(), "process")
    shown = page.write(results, run / "report.html", run)
    last = results["trainings"]["feddadil"][0]["rounds"][-1]
    found = {k.removeprefix("accuracy-"): v for k, v in last.items() if k[:9] == "accuracy-"}
    for head, accuracy in found.items():
        print(f"{head:15} {100 * accuracy:5.1f} % of {last['tested']} tests at {TARGET}")
    model = next((run / "sites" / TARGET / "models").rglob("reconstruction.safetensors"))
    print(f"predict: fedda predict {model} DIR")
    print(f"page: {shown}")


if __name__ == "__main__":
    main()
