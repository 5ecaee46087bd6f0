"""Read a run's results.json and compute means and standard deviations over the seeds.

Two rounds of each method are reported: the last one, and the one with the highest infomax, which
needs no labels. The round with the best test is never reported, as it cannot be chosen without
labels.
"""

import json
import statistics
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fedda.errors import ModelError, RunError, reason, typed

RESULTS, MODEL, JOURNAL = "results.json", "model.safetensors", "journal.jsonl"
ANSWERED = "answers"  # what its last test said of the answers to each class
REFINED = "refined"  # a training's entry of what the target said of its last step
ABOUT = "about.json"  # titles of the methods and defaults of the settings, for who shows the run
CROSSED = "crossed.jsonl"  # the hashes of what crossed, as the server saw it
LOOKED = "look.json"  # what `fedda look` saw
TENS = 10  # to whose multiples real sites round counts of tests down

Results = dict[str, Any]
Event = dict[str, Any]


def load(path: Path) -> Results:
    """Read the results in a run's folder, or in the file itself.

    Raises:
        RunError: the folder holds no results, or they cannot be read.
    """
    file = path if path.is_file() else path / RESULTS
    try:
        results = json.loads(file.read_text())
    except FileNotFoundError:
        raise RunError(f"{path} holds no {RESULTS}: {_instead(path)}") from None
    except (OSError, ValueError) as error:
        why = reason(error) if isinstance(error, OSError) else f"it is no {RESULTS}"
        raise RunError(
            f"{file} cannot be read ({why}): give the folder of a finished run."
        ) from error
    needed = {"name", "method", "seeds", "sites", "trainings", "events"}
    missing = sorted(needed - set(results)) if isinstance(results, dict) else ["trainings"]
    if missing:
        raise RunError(
            f"{file} has no '{missing[0]}', so it is not from a run, or from another version; "
            "give the folder of a run of this version."
        )
    return results


def event_in(line: bytes | str) -> Event | None:
    """Read an event from a line of a journal; None if a crash cut the line short."""
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and isinstance(event.get("event"), str) else None


def noted(file: Path) -> dict[str, Any]:
    """Read a JSON object that a run or server writes; empty if there is none yet."""
    try:
        found = json.loads(file.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def begun(folder: Path) -> bool:
    """Whether a run's folder holds a finished round, not just a run that waited for sites."""
    return (folder / RESULTS).is_file() or any(folder.glob("*/checkpoint.json"))


def model_file(path: Path, advice: str = "give the folder of one training") -> Path:
    """Return the path of a model, given a run's folder, a training's folder or the file itself.

    Args:
        path: the folder or the file.
        advice: what to do if the run has several models; their folders follow.

    Raises:
        ModelError: the folder holds no model of its own.
    """
    if not path.is_dir():
        return path
    if (path / MODEL).is_file():
        return path / MODEL
    if trainings := sorted(str(file.parent) for file in path.glob(f"*/{MODEL}")):
        raise ModelError(
            f"{path} holds no {MODEL} of its own, as it has several targets or has not finished; "
            f"{advice}: {', '.join(trainings)}."
        )
    raise ModelError(
        f"{path} holds no {MODEL}, which a run writes when it has finished; give the folder of a "
        "finished run, or the file of a model."
    )


def _instead(path: Path) -> str:
    if not path.exists():
        return "there is no such folder; give the folder of a finished run."
    # Of a folder of runs, or of a comparison's.
    below = [*path.glob(f"*/{RESULTS}"), *path.glob(f"cells/*/{RESULTS}")]
    if runs := sorted(file.parent for file in below):
        return f"give the folder of one run, such as {runs[0]}."
    if (path / "config.json").exists():
        resume = typed("fedda", "run", "--resume", path)
        return f"the run has not finished; go on with it: {resume}"
    return "give the folder of a finished run."


def title(results: Results, method: str) -> str:
    """A method's title, from the run's results or from their summary."""
    return (results.get("titles") or {}).get(method, method.upper())


def short_title(results: Results, method: str) -> str:
    """A method's title without the remark in brackets."""
    return title(results, method).partition(" (")[0]


def label(method: str, seed: int | str, target: str = "") -> str:
    """Name a training within its run, for folders and files."""
    return f"{method}-{seed}" + (f"-{target}" if target else "")


def label_of(results: Results, training: Mapping[str, Any], method: str) -> str:
    """The label of a training in a run's results."""
    choice = sum(site["role"] == "target" for site in results["sites"]) > 1
    return label(method, training["seed"], training["target"] if choice else "")


def seed_of(results: Results, training: Mapping[str, Any]) -> str:
    """A training's seed, with its target if the run has several: `0`, or `0 on north`."""
    several = len(targets(results)) > 1
    return f"{training['seed']} on {training['target']}" if several else str(training["seed"])


def event_of(results: Results, event: Mapping[str, Any]) -> str:
    """The training that an event belongs to, in words; empty if it belongs to none."""
    if "seed" not in event:
        return ""
    where = f" on {event['target']}" if "target" in event else ""
    return f"{title(results, event['method'])}, seed {event['seed']}{where}"


def printable(text: str) -> str:
    """Put a text from a site on one line and remove control codes that a terminal would obey."""
    return "".join(c if c.isprintable() else " " for c in text)


def human(count: float) -> str:
    """Bytes in decimal units, to three digits: 1.32 MB is about 1,320,000 bytes."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.0f} B" if unit == "B" else f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:,.3g} TB" if count < 999.5 else f"{count:,.0f} TB"


def duration(seconds: float) -> str:
    """Write a time in hours, minutes and seconds: 9.8 s, 58 s, 1 min 38 s, 2 h 5 min."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def counted(count: int, what: str) -> str:
    """Put a count before a noun: 1 round, 2 rounds."""
    return f"{count:,} {what}{'s' * (count != 1)}"


def percent(share: float | None) -> str:
    """A share of 1 as percent, or a dash."""
    return "–" if share is None else f"{100 * share:.1f} %"


def measure(results: Results) -> str:
    """What to report: accuracy if the target tested any round, else infomax, else training loss."""
    rounds = [r for runs in results["trainings"].values() for t in runs for r in t["rounds"]]
    return next((m for m in ("accuracy", "infomax") if any(m in r for r in rounds)), "loss")


def targets(results: Results) -> list[str]:
    """The targets that the run adapted to, in the order of its trainings."""
    trainings = [t for of_method in results["trainings"].values() for t in of_method]
    adapted = dict.fromkeys(str(t["target"]) for t in trainings if "target" in t)
    first = (s["name"] for s in results["sites"] if s["role"] == "target")
    return list(adapted) or [next(first, "the target")]


def target(results: Results) -> str:
    """The target's name; of several targets all names, joined by commas and `and`."""
    *others, last = targets(results)
    return f"{', '.join(others)} and {last}" if others else last


def others(results: Results, training: Mapping[str, Any]) -> set[str]:
    """The targets that take no part in a training because it adapts to another target."""
    own, chosen_from = training.get("target"), training.get("selection", {}).get("candidates", ())
    taking_part = {own, *(row["name"] for row in chosen_from)}
    return {s["name"] for s in results["sites"] if s["role"] == "target" and own} - taking_part


def summary(results: Results) -> dict[str, Any]:
    """The numbers of the report, each as a mean and a standard deviation over the seeds.

    `values` holds one value per seed, in order; None if the round was not tested. With several
    targets it is the mean over the tested ones. `weights` are those of the last round; a site that
    was left out has 0.
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
            "rounds": sum(len(t["rounds"]) for t in trainings),
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
    weights: Sequence[Mapping[str, float]], without: Sequence[Collection[str]] = ()
) -> dict[str, float]:
    """Average the weight of each site over trainings; a site that a training left out has 0 there.

    Args:
        weights: the weights by site, of each training.
        without: of each training, the sites that take no part in it. Their mean is over the other
            trainings.
    """
    sites = dict.fromkeys(site for of_training in weights for site in of_training)
    pairs = list(zip(weights, without or [()] * len(weights), strict=True))
    return {
        site: statistics.fmean(w.get(site, 0.0) for w, absent in pairs if site not in absent)
        for site in sites
    }


def answers(results: Results, method: str, which: str, target: str = "") -> dict[str, Any]:
    """The tables of answers by class of a method's trainings, by seed.

    Returns:
        Per seed its table: "counts" (C, C) and "tests" (C,), and "tested", their number before a
        site rounded each of these.
    """
    return {
        seed_of(results, t): t[ANSWERED][which] | {"tested": t["rounds"][-1].get("tested")}
        for t in results["trainings"][method]
        if which in (t.get(ANSWERED) or {}) and target in ("", t.get("target", target))
    }


def kinds(results: Results) -> dict[tuple[str, ...], list[dict[str, Any]]]:
    """A run's troubles, those that are one and the same in several rounds together.

    Returns:
        By training, site and text all events.
    """
    found: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for event in results["events"]:
        key = event_of(results, event), event.get("site", ""), event.get("text", "")
        found.setdefault(key, []).append(event)
    return found


def in_tens(tables: Iterable[Mapping[str, Any]]) -> bool:
    """Whether a site has rounded counts of tables of answers down: then tests are missing."""
    return any(sum(map(sum, table["counts"])) != table["tested"] for table in tables)


def by_class(results: Results, method: str, which: str) -> list[tuple[float, float] | None]:
    """Between what the accuracy of each class lies, over all trainings of a method.

    Real sites round each count down to tens, of right answers and of tests. Simulated ones do not,
    so that both bounds are equal. None: no ten tests.
    """
    tables = answers(results, method, which).values()
    lost = (TENS - 1) * len(tables) * in_tens(tables)
    sums = [
        (sum(t["counts"][c][c] for t in tables), sum(t["tests"][c] for t in tables))
        for c in range(len(results["classes"]) if tables else 0)
    ]
    return [(r / (n + lost), min(1.0, (r + lost) / n)) if n else None for r, n in sums]


def spans(numbers: Iterable[int]) -> str:
    """Write numbers in order and join neighbours: 1, 2, 3, 7 -> 1-3, 7."""
    parts: list[list[int]] = []
    for n in sorted(set(numbers)):
        if parts and n == parts[-1][-1] + 1:
            parts[-1][1:] = [n]
        else:
            parts.append([n])
    return ", ".join("-".join(map(str, part)) for part in parts)


def _scores(results: Results, trainings: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The scores of a method's trainings, for one target or for several."""
    shown = measure(results)
    chosen = [t.get("selected_round") for t in trainings]
    last = [t["rounds"][-1].get(shown) for t in trainings]
    selected = [
        next((r.get(shown) for r in t["rounds"] if r["round"] == number), None)
        for t, number in zip(trainings, chosen, strict=True)
    ]
    refined = [(t.get(REFINED) or {}).get(shown) for t in trainings]
    return {
        "last": _over_seeds(_by_seed(trainings, last)),
        "refined": _over_seeds(_by_seed(trainings, refined)),
        "selected": _over_seeds(_by_seed(trainings, selected)),
        "selected_rounds": chosen,
        "seconds": [t["seconds"] for t in trainings],
    }


def _by_seed(
    trainings: Sequence[Mapping[str, Any]], values: Sequence[float | None]
) -> list[float | None]:
    """One value per seed: the mean over the targets that have a value, else None."""
    known: dict[int, list[float]] = {}
    for training, value in zip(trainings, values, strict=True):
        known.setdefault(training["seed"], []).extend([] if value is None else [value])
    return [statistics.fmean(of_seed) if of_seed else None for of_seed in known.values()]


def _over_seeds(values: list[float | None]) -> dict[str, Any]:
    known = [v for v in values if v is not None]
    return {
        "mean": statistics.fmean(known) if known else None,
        "std": statistics.stdev(known) if len(known) > 1 else None,
        "values": values,
    }
