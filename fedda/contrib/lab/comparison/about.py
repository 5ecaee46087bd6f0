"""The text above a comparison's tables: command, data, settings, versions, dates."""

import json
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedda.results.escaping import markdown
from fedda.results.progress import clock
from fedda.results.read import counted
from fedda.settings import defaults, lasting

from .plan import Plan
from .variants import Variant

MOST = 5  # unfinished trainings that are named


def header(plan: Plan, heading: str, command: str) -> str:
    """The text above the tables: what was compared, and the command that repeats it.

    Dates and versions are those of the trainings, not of the moment at which this is called.
    """
    lines = [f"## {heading}", "", f"    {command}", "", *about(plan)]
    return "\n".join(lines) + "\n\n"


def about(plan: Plan) -> list[str]:
    """The facts as lines of Markdown, as the finished trainings recorded them if they did."""
    cells = plan.cells()
    results = {c: result for c in cells if (result := plan.results(c)) is not None}
    noted = [plan.noted(c) for c in results]
    threads = _joined({n["threads"] for n in noted if "threads" in n} or {plan.threads})
    engines = _joined({n["engine"] for n in noted if "engine" in n} or {plan.engine})
    times = sorted(t for c in results if (t := _ended(plan.folder(c) / "journal.jsonl")))
    seconds = sum(result["seconds"] for result in results.values())
    facts = [
        f"data: `{plan.data.resolve().name}`, {counted(len(plan.targets), 'target')}",
        f"seeds: {', '.join(map(str, plan.seeds))}",
        f"rounds: {_rounds(plan)}",
        f"settings that differ from the defaults: {_settings(plan) or 'none'}",
        f"trained: {_days(times)}, {clock(seconds)} of training in all",
        f"with: {_versions(results.values())}; engine {engines}, "
        f"{threads} thread{'s' * (threads != '1')} each",
    ]
    if plan.poison:
        facts.append(f"wrong labels: {_poison(plan.poison)}")
    unfinished = [c.name for c in cells if c not in results]
    if unfinished:
        more = f" and {len(unfinished) - MOST} more" if len(unfinished) > MOST else ""
        named = ", ".join(unfinished[:MOST])
        facts.append(
            f"**not finished: {len(unfinished)} of {len(cells)} trainings** ({named}{more})"
        )
    lines = [f"- {fact}" for fact in facts]
    lines += ["", *_variants(plan.variants), ""]
    return lines + _domains(results.values())


def _rounds(plan: Plan) -> str:
    rounds = {plan.config(c).rounds for c in plan.cells()}
    return _joined(rounds)


def _settings(plan: Plan) -> str:
    usual = defaults()
    trained = [v.method for v in plan.variants]
    own = {k: v for k, v in lasting(plan.settings, trained).items() if not k.startswith("run.")}
    return ", ".join(f"`{k}={_value(v)}`" for k, v in own.items() if v != usual.get(k))


def _value(value: Any) -> str:
    return without_folders(str(value).lower() if isinstance(value, bool) else str(value))


def without_folders(text: str) -> str:
    """A value, or settings KEY=VALUE,..., with each path cut to its last name.

    A text to share names no folders of this machine. `F/female` is no path, unless it is there.
    """
    parts = re.split("([=,])", text)
    paths = [p for p in parts if "/" in p and (p[:1] in "/~" or Path(p).exists())]
    return "".join(Path(p).name if p in paths else p for p in parts)


def _variants(variants: Sequence[Variant]) -> list[str]:
    rows = []
    for v in variants:
        own = [f"{k.removeprefix(f'{v.method}.')}={_value(x)}" for k, x in v.settings.items()]
        own += [f"wrong labels: {_poison(v.poison)}"] if v.poison else []
        own += [f"without {', '.join(v.without)}"] if v.without else []
        own += ["trained on the target's labels"] if v.oracle else []
        rows.append([v.name, v.method, v.preset or "none", ", ".join(own) or "none"])
    return markdown(["variant", "method", "preset", "own settings"], rows, numbers=False)


def _poison(poison: Any) -> str:
    return ", ".join(f"{percent:g} % at {site}" for site, percent in poison.items())


def _domains(results: Iterable[dict[str, Any]]) -> list[str]:
    """Each domain's numbers of images and tests: the most that its site reported, in any role."""
    images: dict[str, int] = {}
    tests: dict[str, int] = {}
    for result in results:
        for site in result["sites"]:
            name = site["name"]
            images[name] = max(images.get(name, 0), site["examples"])
            tests[name] = max(tests.get(name, 0), site["tested"])
    if not images:
        return []
    rows = [[name, f"{images[name]:,}", f"{tests[name]:,}"] for name in sorted(images)]
    return markdown(["domain", "training examples", "labelled tests"], rows)


def _ended(journal: Path) -> float:
    """When a run ended, in seconds since 1970; 0 if its journal does not say."""
    try:
        *_, last = journal.read_text().splitlines()
        return float(json.loads(last)["time"])
    except (OSError, ValueError, KeyError, TypeError):
        return 0.0


def _days(times: Sequence[float]) -> str:
    if not times:
        return "not yet"
    first, last = (f"{datetime.fromtimestamp(t, UTC):%Y-%m-%d}" for t in (times[0], times[-1]))
    return f"{first} (UTC)" if first == last else f"{first} to {last} (UTC)"


def _versions(results: Iterable[dict[str, Any]]) -> str:
    versions: dict[str, set[str]] = {}
    for result in results:
        for package, version in result["versions"].items():
            versions.setdefault(package, set()).add(version)
    return ", ".join(f"{p} {_joined(v)}" for p, v in versions.items()) or "nothing yet"


def _joined(values: Iterable[Any]) -> str:
    """All different values, sorted, as a text: `1`, or `1 and 2`."""
    *others, last = sorted(set(values))
    return f"{', '.join(map(str, others))} and {last}" if others else str(last)
