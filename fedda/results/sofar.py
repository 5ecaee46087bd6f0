"""A run so far, in the form of results.json: what the report's sections draw."""

from collections import Counter
from collections.abc import Mapping
from typing import Any

from .read import Results
from .story import Key, Story

WORTH = "worth"  # what the last round's entry says of the model's worth; a training's own later


def results(
    story: Story,
    name: str,
    settings: Mapping[str, Any],
    roster: Mapping[str, Any],
    about: Mapping[str, Any],
) -> Results:
    """Return what results.json would say if the run had ended now; no trainings before a round.

    Args:
        story: the journal so far.
        name: the run's name.
        settings: the content of its config.json.
        roster: the content of its roster.json; empty while it waits for sites.
        about: the content of its about.json; empty if its version wrote none.
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
        "titles": about.get("titles"),
        "defaults": about.get("defaults"),
        "config": dict(settings),
        "seeds": list(dict.fromkeys(key[1] for key, rounds in story.trainings.items() if rounds)),
        "versions": {},
        "sites": _sites(story, roster),
        "shape": story.shape,
        "classes": story.classes,
        "trainings": trainings,
        "events": story.troubles,
    }


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
        "stopped": story.endings.get(key, ""),
        "seconds": round(sum(entry["seconds"] for entry in entries), 3),
        "bytes": dict(total),
        "doubts": [
            {k: d[k] for k in ("what", "round", "text") if k in d}
            for d in story.doubts.get(key, ())
        ],
        "rounds": [{k: v for k, v in entry.items() if k != WORTH} for entry in entries],
    }


def _sites(story: Story, roster: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The sites of the roster, or those that have joined while there is none."""
    told = ("name", "role", "examples", "tested")
    known = [{k: node.get(k) for k in told} for node in roster.get("nodes", ())]
    return known or [{"name": name, "role": role} for name, role in story.joined.items()]
