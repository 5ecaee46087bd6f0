"""Fingerprints: for each method, a hash of the model and the numbers that it must compute.

    python -m tests.fingerprints           records all cases anew, in fingerprints.json
    python -m tests.fingerprints NAME...   records only these cases anew

A change of the code around the methods must not change a single bit of what they compute. If you
change what a method computes, record its fingerprints anew and say why in the commit.

Bits also depend on torch's version and on the processor, so each record names both. On another
machine the tests compare the numbers instead, with a tolerance for the rounding of a few steps.
"""

import hashlib
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedda import models
from tests.local_grid import make_domains, run

RECORDS = Path(__file__).with_suffix(".json")
SEEDS = "0,1"

# BatchNorm in two dimensions, and dropout.
IMAGES = {"model.name": "digit-cnn", "model.hidden": "", "train.lr": 0.01}

OFFICIAL = {"kd3a.gate.low": 0.4, "kd3a.gate.reach": False, "kd3a.vote": "hard"}
OFFICIAL |= {"kd3a.focus": "shapley", "kd3a.focus-by-examples": False}
OFFICIAL |= {"kd3a.target-weight": "kept", "kd3a.smoothing": 0.9, "kd3a.heads": "local"}
OFFICIAL |= {"kd3a.batchnorm": "linear", "kd3a.teacher-batchnorm": "updated"}
OFFICIAL |= {"kd3a.mixup": 2.0, "kd3a.mixup-weights": False}

# name -> method and settings; each case takes another path through the method's code.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "fedavg": ("fedavg", {}),
    "fedavg images": ("fedavg", IMAGES | {"train.carry-momentum": True, "rounds": 3}),
    "fedprox": ("fedprox", {"fedprox.mu": 0.5}),
    "adabn": ("adabn", IMAGES),
    "fedbn": ("fedbn", IMAGES | {"rounds": 3}),
    "autodial": ("autodial", {"rounds": 3}),
    "centring": ("centring", {"centring.plain-share": 0.5, "rounds": 3}),
    "kd3a": ("kd3a", {"kd3a.gate.low": 0.4, "kd3a.gate.high": 0.5}),
    "kd3a official": ("kd3a", OFFICIAL),
    "fact": ("fact", {}),
    "shot": ("shot", {"shot.epochs": 2, "rounds": 3}),
    "decision": ("decision", {"decision.epochs": 2, "rounds": 3}),
    "comda": ("comda", {"comda.epochs": 8, "rounds": 9}),
    "fdann": ("fdann", {}),
    "fada": ("fada", {"fada.weighting": "attention"}),
    "fwdgrl": ("fwdgrl", {"fwdgrl.critic-steps": 2}),
    "fdan": ("fdan", {"fdan.frequencies": 16}),
    "dils": ("dils", {"dils.lr": 0.001}),
    "fruda": ("fruda", {"fruda.lr": 2e-4, "rounds": 2}),
    "feddadil": ("feddadil", {}),
}

TIMES = {"event", "time", "seconds", "phases", "site_seconds", "seed", "method"}


def machine() -> str:
    """Name the software and the processor that the bits may depend on."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    capability = torch.backends.cpu.get_cpu_capability()
    return f"{torch.__version__}, numpy {np.__version__}, {capability}, {(names or [''])[0]}"


def numbers_of(rounds: list[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a training's numbers, without times and without byte counts of scalars."""
    rows = []
    for entry in rounds:
        plain = {k: v for k, v in entry.items() if k not in TIMES and k != "bytes"}
        sent = {k: v for k, v in flat(entry["bytes"]).items() if not k.endswith("scalars")}
        rows.append(flat(plain) | {f"bytes/{k}": v for k, v in sent.items()})
    return rows


def flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Turn nested tables into one flat table."""
    out: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, Mapping):
            out |= flat(value, f"{prefix}{key}/")
        else:
            out[f"{prefix}{key}"] = value
    return out


def take(case: str, root: Path) -> dict[str, Any]:
    """Run a case with both seeds -> the machine; by seed, a hash of everything and the numbers."""
    method, settings = CASES[case]
    root.mkdir(parents=True, exist_ok=True)
    patient = {"wait.sites": 60.0, "wait.train": 300.0, "wait.evaluate": 300.0}
    chosen = {"method": method, "run.seeds": SEEDS, "run.dir": str(root)} | patient | settings
    results, _ = run(make_domains(root), chosen)
    assert not results["events"], results["events"]
    by_seed = {}
    for training in results["trainings"][method]:
        model, _ = models.load(training["model"])
        numbers = numbers_of(training["rounds"])
        digest = hashlib.sha256(json.dumps(numbers, sort_keys=True).encode())
        for name, array in models.to_arrays(model).items():
            digest.update(name.encode() + np.ascontiguousarray(array).tobytes())
        by_seed[str(training["seed"])] = {"hash": digest.hexdigest(), "last": numbers[-1]}
    return {"machine": machine(), "seeds": by_seed}


def main(chosen: Sequence[str]) -> None:
    torch.set_num_threads(1)
    known = json.loads(RECORDS.read_text()) if chosen else {}
    with tempfile.TemporaryDirectory() as folder:
        taken = {case: take(case, Path(folder, str(i))) for i, case in enumerate(chosen or CASES)}
    updated = {case: (known | taken)[case] for case in CASES}
    RECORDS.write_text(json.dumps(updated, indent=1) + "\n")
    print(f"{', '.join(taken)} recorded in {RECORDS}", file=sys.stderr)


if __name__ == "__main__":
    main(sys.argv[1:])
