"""What a run's results.json says, and its numbers over the seeds.

Each method is known by its last round and by the round that its highest infomax chose, which takes
no label. The best test round is never reported: nobody without labels could have picked it.
"""

import json
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedda.errors import RunError

RESULTS = "results.json"

Results = dict[str, Any]


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


def title(results: Results, method: str) -> str:
    """What people call a method, as the run's results or their summary say."""
    return (results.get("titles") or {}).get(method, method.upper())


def short_title(results: Results, method: str) -> str:
    """The same without remarks."""
    return title(results, method).partition(" (")[0]


def label(method: str, seed: int | str, target: str = "") -> str:
    """What a training is called within its run, in names of folders and files.

    Args:
        method: its name.
        seed: the training's.
        target: the one that adapts, if the run had several to choose from.
    """
    return f"{method}-{seed}" + (f"-{target}" if target else "")


def label_of(results: Results, training: Mapping[str, Any], method: str) -> str:
    """The same of a training in a run's results."""
    choice = sum(site["role"] == "target" for site in results["sites"]) > 1
    return label(method, training["seed"], training["target"] if choice else "")


def seed_of(results: Results, training: Mapping[str, Any]) -> str:
    """A training's seed, and the target where there are several: `0`, or `0 on north`."""
    several = len(targets(results)) > 1
    return f"{training['seed']} on {training['target']}" if several else str(training["seed"])


def event_of(results: Results, event: Mapping[str, Any]) -> str:
    """The training that an event is about, in words; empty if it is about none."""
    if "seed" not in event:
        return ""
    where = f" on {event['target']}" if "target" in event else ""
    return f"{title(results, event['method'])}, seed {event['seed']}{where}"


def adapted_elsewhere(results: Results) -> list[str]:
    """Where the adapted models are, if they stayed at a target; one sentence per method and it."""
    lines = []
    for method, trainings in results.get("trainings", {}).items():
        by_site: dict[str, list[str]] = {}
        for kept in (t["adapted"] for t in trainings if "adapted" in t):
            by_site.setdefault(printable(kept["site"]), []).append(printable(kept["file"]))
        for site, found in by_site.items():
            files, name = ", ".join(found), title(results, method)
            lines.append(
                f"{name}'s adapted model is at {site} alone, below its --state-dir (of a "
                f"simulation: sites in the run's folder): {files}; the run's own "
                f"model.safetensors has not adapted ({method}.share=true would send it)"
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


def targets(results: Results) -> list[str]:
    """The targets that the run adapted to, in their order."""
    trainings = [t for of_method in results["trainings"].values() for t in of_method]
    found = dict.fromkeys(str(t["target"]) for t in trainings if "target" in t)
    first = (s["name"] for s in results["sites"] if s["role"] == "target")
    return list(found) or [next(first, "the target")]


def target(results: Results) -> str:
    """The target's name, or those of several."""
    *others, last = targets(results)
    return f"{', '.join(others)} and {last}" if others else last


def others(results: Results, training: Mapping[str, Any]) -> set[str]:
    """The targets that have no part in a training, as it adapts to another one."""
    own = training.get("target")
    return {s["name"] for s in results["sites"] if s["role"] == "target" and own} - {own}


def summary(results: Results) -> dict[str, Any]:
    """The numbers of the report; a mean and a standard deviation over the seeds each.

    `values` are in the order of the seeds, and None where a round was not tested; of several
    targets they are means over those that were tested. `weights` are those of the last round, where
    a site that was left out has 0.
    """
    methods = {}
    for method, trainings in results["trainings"].items():
        total: Counter[str] = Counter()
        for training in trainings:
            total.update(training["bytes"])
        methods[method] = {
            **_scores(results, trainings),
            "targets": {
                name: _scores(results, [t for t in trainings if t["target"] == name])
                for name in (targets(results) if len(targets(results)) > 1 else ())
            },
            "weights": mean_weights(
                [t["rounds"][-1].get("weights", {}) for t in trainings],
                [others(results, t) for t in trainings],
            ),
            "bytes": dict(sorted(total.items())),
        }
    return {
        "name": results["name"],
        "method": results["method"],
        "titles": {method: title(results, method) for method in methods},
        "target": target(results),
        "targets": targets(results),
        "seeds": results["seeds"],
        "rounds": max(len(t["rounds"]) for r in results["trainings"].values() for t in r),
        "measure": measure(results),
        "methods": methods,
        "events": results["events"],
    }


def mean_weights(
    found: Sequence[Mapping[str, float]], without: Sequence[Collection[str]] = ()
) -> dict[str, float]:
    """Weights by site, averaged over trainings; a site that one leaves out has 0 in it.

    Args:
        found: the weights of each training.
        without: sites that have no part in it, so that it does not count for them.
    """
    sites = dict.fromkeys(site for weights in found for site in weights)
    pairs = list(zip(found, without or [()] * len(found), strict=True))
    return {
        site: statistics.fmean(w.get(site, 0.0) for w, absent in pairs if site not in absent)
        for site in sites
    }


def spans(numbers: Iterable[int]) -> str:
    """Numbers in order, neighbours joined: 1, 2, 3, 7 -> 1-3, 7."""
    parts: list[list[int]] = []
    for n in sorted(set(numbers)):
        if parts and n == parts[-1][-1] + 1:
            parts[-1][1:] = [n]
        else:
            parts.append([n])
    return ", ".join("-".join(map(str, part)) for part in parts)


def _at(training: Mapping[str, Any], number: int | None, key: str) -> float | None:
    return next((r.get(key) for r in training["rounds"] if r["round"] == number), None)


def _scores(results: Results, trainings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What trainings of a method came to, of one target or of several."""
    shown = measure(results)
    chosen = [t.get("selected_round") for t in trainings]
    last = [t["rounds"][-1].get(shown) for t in trainings]
    selected = [_at(t, number, shown) for t, number in zip(trainings, chosen, strict=True)]
    return {
        "last": _over_seeds(_by_seed(trainings, last)),
        "selected": _over_seeds(_by_seed(trainings, selected)),
        "selected_rounds": chosen,
        "seconds": [t["seconds"] for t in trainings],
    }


def _by_seed(
    trainings: Sequence[Mapping[str, Any]], values: Sequence[float | None]
) -> list[float | None]:
    """A value per seed: the mean over its targets, of those that have one."""
    found: dict[int, list[float]] = {}
    for training, value in zip(trainings, values, strict=True):
        found.setdefault(training["seed"], []).extend([] if value is None else [value])
    return [statistics.fmean(of_seed) if of_seed else None for of_seed in found.values()]


def _over_seeds(values: list[float | None]) -> dict[str, Any]:
    known = [v for v in values if v is not None]
    return {
        "mean": statistics.fmean(known) if known else None,
        "std": statistics.stdev(known) if len(known) > 1 else None,
        "values": values,
    }
