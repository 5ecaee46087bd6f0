"""What a run's results.json says, and its numbers over the seeds.

Each method is known by its last round and by the round that its highest infomax chose, which takes
no label. The best test round is never reported: nobody without labels could have picked it.
"""

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from fedda.errors import RunError

RESULTS = "results.json"

Results = dict[str, Any]

_TITLES = {
    "adabn": "AdaBN",
    "fedavg": "FedAvg (source-only)",
    "fedprox": "FedProx (source-only)",
    "fdan": "f-DAN",
    "fdann": "f-DANN",
    "feddadil": "FedDaDiL",
    "fwdgrl": "f-WDGRL",
}


def load(path: Path) -> Results:
    """The results in a run's folder, or in the file itself.

    Raises:
        RunError: there are none, or they cannot be read.
    """
    file = path if path.is_file() else path / RESULTS
    try:
        results = json.loads(file.read_text())
    except FileNotFoundError:
        raise RunError(f"{path} holds no {RESULTS}: {_instead(path)}") from None
    except (OSError, ValueError) as error:
        raise RunError(
            f"{file} cannot be read ({error}): give the folder of a finished run."
        ) from error
    needed = {"name", "method", "seeds", "sites", "trainings", "events"}
    missing = sorted(needed - set(results)) if isinstance(results, dict) else ["trainings"]
    if missing:
        raise RunError(
            f"{file} has no '{missing[0]}', so it is no run's, or another version's; "
            "give the folder of a run of this version."
        )
    return results


def begun(folder: Path) -> bool:
    """Whether a run's folder holds a finished round; one that only waited for sites does not."""
    return (folder / RESULTS).is_file() or any(folder.glob("*/checkpoint.json"))


def _instead(path: Path) -> str:
    if not path.exists():
        return "there is no such folder; give the folder of a finished run."
    if runs := sorted(file.parent for file in _below(path)):
        return f"give the folder of one run, such as {runs[0]}."
    if (path / "config.json").exists():
        return f"the run has not finished; go on with it by fedda run --resume {path}"
    return "give the folder of a finished run."


def _below(path: Path) -> list[Path]:
    """Results in the folders of a folder of runs, or of a comparison."""
    return [*path.glob(f"*/{RESULTS}"), *path.glob(f"cells/*/{RESULTS}")]


def title(method: str) -> str:
    """What people call a method."""
    return _TITLES.get(method, method.upper())


def adapted_elsewhere(results: Results) -> list[str]:
    """Where the adapted models are, if they stayed at the target; one sentence per method."""
    lines = []
    for method, trainings in results.get("trainings", {}).items():
        kept = [t["adapted"] for t in trainings if "adapted" in t]
        if kept:
            files = ", ".join(printable(k["file"]) for k in kept)
            lines.append(
                f"{title(method)}'s adapted model is at {printable(kept[0]['site'])} alone, below "
                f"its --state-dir (of a simulation: sites in the run's folder): {files}; the run's "
                f"own model.safetensors has not adapted ({method}.share=true would send it)"
            )
    return lines


def printable(text: str) -> str:
    """A text that came from a site, on one line and without codes that a terminal would obey."""
    return "".join(c if c.isprintable() else " " for c in text)


def human(count: float) -> str:
    """Bytes in decimal units, to three digits: 1.32 MB is 1,320,000 bytes and a little."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB" if count < 999.5 else f"{count:,.0f} TB"


def counted(count: int, what: str) -> str:
    """1 round, 2 rounds."""
    return f"{count:,} {what}{'s' * (count != 1)}"


def measure(results: Results) -> str:
    """Accuracy if the target tested any round, else infomax, else the training loss."""
    rounds = [r for runs in results["trainings"].values() for t in runs for r in t["rounds"]]
    return next((m for m in ("accuracy", "infomax") if any(m in r for r in rounds)), "loss")


def target(results: Results) -> str:
    """The target's name."""
    return next((s["name"] for s in results["sites"] if s["role"] == "target"), "the target")


def summary(results: Results) -> dict[str, Any]:
    """The numbers of the report; a mean and a standard deviation over the seeds each.

    `values` are in the order of the seeds, and None where a round was not tested. `weights` are
    those of the last round, where a site that was left out has 0.
    """
    shown = measure(results)
    methods = {}
    for method, trainings in results["trainings"].items():
        chosen = [t.get("selected_round") for t in trainings]
        total: Counter[str] = Counter()
        for training in trainings:
            total.update(training["bytes"])
        methods[method] = {
            "last": _over_seeds([t["rounds"][-1].get(shown) for t in trainings]),
            "selected": _over_seeds(
                [_at(t, number, shown) for t, number in zip(trainings, chosen, strict=True)]
            ),
            "selected_rounds": chosen,
            "seconds": [t["seconds"] for t in trainings],
            "weights": mean_weights([t["rounds"][-1].get("weights", {}) for t in trainings]),
            "bytes": dict(sorted(total.items())),
        }
    return {
        "name": results["name"],
        "method": results["method"],
        "target": target(results),
        "seeds": results["seeds"],
        "rounds": max(len(t["rounds"]) for r in results["trainings"].values() for t in r),
        "measure": shown,
        "methods": methods,
        "events": results["events"],
    }


def mean_weights(found: Sequence[dict[str, float]]) -> dict[str, float]:
    """Weights by site, averaged over trainings; a site that one leaves out has 0 in it."""
    sites = dict.fromkeys(site for weights in found for site in weights)
    return {site: statistics.fmean(w.get(site, 0.0) for w in found) for site in sites}


def spans(numbers: Iterable[int]) -> str:
    """Numbers in order, neighbours joined: 1, 2, 3, 7 -> 1-3, 7."""
    parts: list[list[int]] = []
    for n in sorted(set(numbers)):
        if parts and n == parts[-1][-1] + 1:
            parts[-1][1:] = [n]
        else:
            parts.append([n])
    return ", ".join("-".join(map(str, part)) for part in parts)


def _at(training: dict[str, Any], number: int | None, key: str) -> float | None:
    return next((r.get(key) for r in training["rounds"] if r["round"] == number), None)


def _over_seeds(values: list[float | None]) -> dict[str, Any]:
    known = [v for v in values if v is not None]
    return {
        "mean": statistics.fmean(known) if known else None,
        "std": statistics.stdev(known) if len(known) > 1 else None,
        "values": values,
    }
