"""What stands above a comparison's tables: what was trained, on what, with what, and when."""

import json
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from fedda.config import defaults, lasting, methods
from fedda.progress import clock
from fedda.results import counted

from .cells import Plan
from .tables import markdown
from .variants import Variant

MOST = 5  # unfinished trainings named one by one


def about(plan: Plan) -> list[str]:
    """Lines of Markdown; facts come from the finished trainings where these hold them."""
    cells = plan.cells()
    results = {c: found for c in cells if (found := plan.results(c)) is not None}
    noted = [plan.noted(c) for c in results]
    threads = _among({n["threads"] for n in noted if "threads" in n} or {plan.threads})
    engines = _among({n["engine"] for n in noted if "engine" in n} or {plan.engine})
    times = sorted(t for c in results if (t := _ended(plan.folder(c) / "journal.jsonl")))
    seconds = sum(found["seconds"] for found in results.values())
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
    left = [c.name for c in cells if c not in results]
    if left:
        more = f" and {len(left) - MOST} more" if len(left) > MOST else ""
        named = ", ".join(left[:MOST])
        facts.append(f"**not finished: {len(left)} of {len(cells)} trainings** ({named}{more})")
    lines = [f"- {fact}" for fact in facts]
    lines += ["", *_variants(plan.variants), ""]
    return lines + _domains(results.values())


def _rounds(plan: Plan) -> str:
    rounds = {plan.config(c).rounds for c in plan.cells()}
    return _among(rounds)


def _settings(plan: Plan) -> str:
    usual = defaults()
    own = {k: v for k, v in lasting(plan.settings, methods()).items() if not k.startswith("run.")}
    return ", ".join(f"`{k}={_value(v)}`" for k, v in own.items() if v != usual.get(k))


def _value(value: Any) -> str:
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return Path(text).name if "/" in text else text  # folders of a machine are nobody's business


def _variants(variants: Sequence[Variant]) -> list[str]:
    rows = []
    for v in variants:
        own = [f"{k.removeprefix(f'{v.method}.')}={_value(x)}" for k, x in v.settings.items()]
        own += [f"wrong labels: {_poison(v.poison)}"] if v.poison else []
        own += [f"without {', '.join(v.without)}"] if v.without else []
        rows.append([v.name, v.method, v.preset or "none", ", ".join(own) or "none"])
    return markdown(["variant", "method", "preset", "own settings"], rows, numbers=False)


def _poison(poison: Any) -> str:
    return ", ".join(f"{percent:g} % at {site}" for site, percent in poison.items())


def _domains(results: Iterable[dict[str, Any]]) -> list[str]:
    """Images and tests of each domain; the sites say them, and count them as a target's too."""
    images: dict[str, int] = {}
    tests: dict[str, int] = {}
    for found in results:
        for site in found["sites"]:
            name = site["name"]
            images[name] = max(images.get(name, 0), site["examples"])
            tests[name] = max(tests.get(name, 0), site["tested"])
    if not images:
        return []
    rows = [[name, f"{images[name]:,}", f"{tests[name]:,}"] for name in sorted(images)]
    return markdown(["domain", "training images", "labelled tests"], rows)


def _ended(journal: Path) -> float:
    """When a run ended, 0 if its journal does not say."""
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
    found: dict[str, set[str]] = {}
    for each in results:
        for what, version in each["versions"].items():
            found.setdefault(what, set()).add(version)
    return ", ".join(f"{what} {_among(v)}" for what, v in found.items()) or "nothing yet"


def _among(values: Iterable[Any]) -> str:
    """One value, or all of them: 1, or 1 and 2."""
    *others, last = sorted(set(values))
    return f"{', '.join(map(str, others))} and {last}" if others else str(last)
