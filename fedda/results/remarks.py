"""What there is to say of a finished run besides its numbers, in sentences."""

import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from .read import REFINED, Results, counted, percent, printable, seed_of, target, title

# With fewer images, 60 rounds in place of 12 gained 3.8 and 7.5 points, more than any method did.
FEW, FEW_EACH, LONG = 200, 20, 60
NAMED = 3  # of such sites, by name


def remarks_on(results: Results) -> list[str]:
    """All that is to be said below a run's numbers, a sentence each, without its full stop."""
    found = small_sites(results) + missing_tests(results) + ended_early(results)
    return found + adapted_elsewhere(results) + refined_at(results)


def doubted(results: Results) -> list[tuple[str, int, str]]:
    """The reasons to doubt trainings: the training in words, the round, and what was seen there.

    What several trainings of a method show is said once, of the first.
    """
    seen: dict[tuple[str, str], list[tuple[str, dict[str, Any]]]] = {}
    for method, trainings in results["trainings"].items():
        for training in trainings:
            for doubt in training.get("doubts", ()):
                who = f"{title(results, method)}, seed {seed_of(results, training)}"
                seen.setdefault((method, doubt.get("what", doubt["text"])), []).append((who, doubt))
    rows = []
    for (who, doubt), *others in seen.values():
        also = f" (as in {counted(len(others), 'other training')})" if others else ""
        rows.append((who, doubt["round"], printable(doubt["text"]) + also))
    return rows


def _at_targets(results: Results, what: str) -> Iterator[tuple[str, str, list[Results]]]:
    """Yield method, target and trainings, of those trainings that have this entry."""
    for method, trainings in results.get("trainings", {}).items():
        found: dict[str, list[Results]] = {}
        for training in (t for t in trainings if t.get(what)):
            name = training.get("target") or target(results)
            found.setdefault(printable(name), []).append(training)
        yield from ((method, site, every) for site, every in found.items())


def adapted_elsewhere(results: Results) -> list[str]:
    """Say where adapted models are that stayed at a target; a sentence per method and target."""
    lines = []
    for method, site, trainings in _at_targets(results, "adapted"):
        files = ", ".join(printable(t["adapted"]["file"]) for t in trainings)
        lines.append(
            f"{title(results, method)}'s adapted model is at {site} alone, below its --state-dir "
            f"(of a simulation: sites in the run's folder): {files}; the run's own "
            f"model.safetensors has not adapted{_shared_by(results, method)}"
        )
    return lines


def refined_at(results: Results) -> list[str]:
    """Say what targets' last steps changed, and where the models are; per method and target."""
    lines = []
    for method, site, trainings in _at_targets(results, REFINED):
        told = [t[REFINED] for t in trainings]
        share = {k: percent(statistics.fmean(t[k] for t in told)) for k in ("changed", "agreed")}
        lines.append(
            f"refined: {site}'s last step changed {share['changed']} of {title(results, method)}'s "
            f"answers there; the averaged models agree on {share['agreed']}; the refined model is "
            f"at {site} alone, below its --state-dir: {refined_file(results, trainings[0])}"
        )
    return lines


def refined_file(results: Results, training: Mapping[str, Any]) -> str:
    """Where a training's target keeps its refined model, below its --state-dir."""
    name = f"{results['name']}.{Path(training['model']).parent.name}.{REFINED}.safetensors"
    return printable(f"{training.get('target') or target(results)}/{name}")


def _shared_by(results: Results, method: str) -> str:
    """How to have a method's adapted model sent, in brackets; empty if it cannot be."""
    key = f"{method}.share"  # a run holds all settings of the methods that it trains
    return f" ({key}=true would send it)" if key in (results.get("config") or {}) else ""


def small_sites(results: Results) -> list[str]:
    """Warn of sites with so few examples that longer training gains more than any method; or []."""
    least = max(FEW, FEW_EACH * len(results.get("classes") or ()))
    what = "image" if len(results.get("shape") or ()) == 3 else "example"
    small = [
        f"{printable(s['name'])} ({counted(s['examples'], what)})"
        for s in results["sites"]
        if s.get("examples", least) < least
    ]
    rounds = max(len(t["rounds"]) for each in results["trainings"].values() for t in each)
    if not small or rounds >= LONG:
        return []
    more = f" and {len(small) - NAMED} more" if len(small) > NAMED else ""
    return [
        f"warning: {', '.join(small[:NAMED])}{more}: with fewer than {least} {what}s (200, or 20 a "
        f"class) longer training gains more than any method; give {LONG} rounds or more"
    ]


def missing_tests(results: Results) -> list[str]:
    """Say of which trainings the last round was not tested, so that a mean covers fewer; or []."""
    missing = [
        f"{title(results, t['method'])}, seed {t['seed']}, at {printable(t['target'])}"
        for t in results.get("untested", ())
    ]
    return missing and [
        f"No test of the last round came back for {'; '.join(missing)}: the means cover the other "
        "trainings only; `fedda run --resume` makes up for it once the site is connected"
    ]


def ended_early(results: Results) -> list[str]:
    """Say which trainings ended before their last planned round, and why; or []."""
    return [
        f"{title(results, method)}, {printable(seed_of(results, training))}: {training['stopped']}"
        for method, trainings in results["trainings"].items()
        for training in trainings
        if training.get("stopped")
    ]
