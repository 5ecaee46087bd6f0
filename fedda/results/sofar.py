"""A run so far, in the form of results.json: what the report's sections draw."""

from collections import Counter
from pathlib import Path
from typing import Any

from fedda.results.pace import Key
from fedda.results.read import ABOUT, Results, noted

from .story import Story

WORTH = "worth"  # what the last round's entry says of the model's worth; a training's own later


def results(
    story: Story,
    name: str,
    settings: dict[str, Any],
    roster: dict[str, Any],
    about: dict[str, Any] | None = None,
) -> Results:
    """Return what results.json would say if the run had ended now; no trainings before a round.

    Args:
        story: the journal so far.
        name: the run's name.
        settings: the content of its config.json.
        roster: the content of its roster.json; empty while it waits for sites.
        about: the content of its about.json; None if its version wrote none.
    """
    trainings: dict[str, list[dict[str, Any]]] = {}
    for key, rounds in story.trainings.items():
        if rounds:
            trainings.setdefault(key[0], []).append(_training(story, key))
    own = str(settings.get("method", ""))
    return {
        "name": name,
        # The baseline trains first, so the run's own method may have nothing to show yet.
        "method": own if own in trainings else next(iter(trainings), own),
        "titles": (about or {}).get("titles") or _titles(trainings),
        "defaults": (about or {}).get("defaults"),
        "config": settings,
        "seeds": list(dict.fromkeys(key[1] for key, rounds in story.trainings.items() if rounds)),
        "versions": {},
        "sites": _sites(story, roster),
        "shape": story.shape,
        "classes": story.classes,
        "trainings": trainings,
        "events": story.troubles,
    }


def roster_of(folder: Path) -> dict[str, Any]:
    """The roster in a run's folder; empty if there is none yet."""
    return noted(folder / "roster.json")


def about_of(folder: Path) -> dict[str, Any]:
    """What the run noted of its methods and settings; empty if its version wrote nothing."""
    return noted(folder / ABOUT)


def _training(story: Story, key: Key) -> dict[str, Any]:
    entries = [entry for _, entry in sorted(story.trainings[key].items())]
    total: Counter[str] = Counter()
    for entry in entries:
        total.update(entry.get("bytes") or {})
    target = key[2] or next(iter(story.targets), "")
    return {
        "seed": key[1],
        **({"target": target} if target else {}),
        **entries[-1].get(WORTH, {}),
        "seconds": round(sum(entry["seconds"] for entry in entries), 3),
        "bytes": dict(total),
        "doubts": [
            {"round": doubt["round"], "text": doubt["text"]} for doubt in story.doubts.get(key, ())
        ],
        "rounds": [{k: v for k, v in entry.items() if k != WORTH} for entry in entries],
    }


def _sites(story: Story, roster: dict[str, Any]) -> list[dict[str, Any]]:
    """The sites of the roster, or those that have joined while there is none."""
    counts = roster.get("counts", {})
    known = [
        {
            "name": node["name"],
            "role": node["role"],
            "examples": counts.get(node["name"]),
            "tested": node.get("tested"),
        }
        for node in roster.get("nodes", ())
    ]
    return known or [{"name": name, "role": role} for name, role in story.joined.items()]


def _titles(trainings: dict[str, Any]) -> dict[str, str]:
    from fedda import plugins  # loads torch, which the server's own process does without

    known = plugins.methods()
    return {m: plugins.method(m).title for m in trainings if m in known}
