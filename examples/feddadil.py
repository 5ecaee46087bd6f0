"""FedDaDiL in under a minute: four domains of digits, one of them without labels.

    python examples/feddadil.py [--out FOLDER]

Draws the domains out of what is installed, lets FedAvg train an encoder and the sites learn three
atoms, all in this process, and prints what the target's heads are worth beside the FedAvg head. The
folder then holds results, page, and the target's own models for `fedda predict`.
"""

import argparse
import json
import tempfile
from pathlib import Path

from fedda import page
from fedda.config import Flat, RunConfig
from fedda.data import digits
from fedda.folders import load

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
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--out", type=Path, help="keep everything here")
    parser.add_argument("--rounds", type=int, default=SETTINGS["rounds"])
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        out = (args.out or Path(scratch)).absolute()
        digits.build(out / "digits", seed=0)
        own = {"rounds": args.rounds, "run.name": "feddadil", "run.dir": str(out)}
        config = RunConfig.parse({**SETTINGS, **own})
        local, journal = load("server", "local"), load("server", "journal")
        sites = local.folders(out / "digits", TARGET, {})
        results = local.simulate(config, sites, journal.Journal(), "process")
        page.write(results, out / "feddadil" / "report.html", out / "feddadil")
        last = results["trainings"]["feddadil"][0]["rounds"][-1]
        found = {k.removeprefix("accuracy-"): v for k, v in last.items() if k[:9] == "accuracy-"}
        for head, accuracy in found.items():
            print(f"{head:15} {100 * accuracy:5.1f} % of {last['tested']} tests at {TARGET}")
        if args.out:
            models = out / "feddadil" / "sites" / TARGET / "models"
            print(f"page: {out / 'feddadil' / 'report.html'}")
            print("predict: fedda predict", next(models.rglob("reconstruction.safetensors")), "DIR")
        print(json.dumps({head: round(accuracy, 4) for head, accuracy in found.items()}))


if __name__ == "__main__":
    main()
