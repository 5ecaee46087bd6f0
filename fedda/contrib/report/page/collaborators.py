"""From whom each target has learned, in a method whose targets choose: a tree, and their tables."""

from collections.abc import Mapping, Sequence
from typing import Any

from fedda.results.selection import headings, outcome, rows

from .html import Html, e, join
from .parts import folded, note, section, table
from .series import RunSeries

Training = Mapping[str, Any]


def collaborators(run: RunSeries) -> Html | None:
    """Make the section of the targets' choices; None if no method of the run has any."""
    chains: dict[tuple[str, Any], list[Training]] = {}
    for method in run.methods:
        for training in run.results["trainings"][method]:
            if "selection" in training:
                chains.setdefault((method, training["seed"]), []).append(training)
    if not chains:
        return None
    parts: list[Html] = []
    for (method, seed), trainings in chains.items():
        about = run.short(method) + (f", seed {seed}" if len(run.seeds) > 1 else "")
        parts.append(e("h3", f"Who learned from whom: {about}"))
        parts.append(tree(trainings))
        tables = [_table(training, about) for training in trainings]
        parts.append(folded("All candidates of each target", *tables))
    parts.append(
        note(
            "eps: a candidate's error on its own data, carried forward along the chain where it "
            "has no labels. theta: Lipschitz constant of its classifier. W1: distance of features, "
            "± how far two halves of the data disagree. The smallest bound is chosen."
        )
    )
    return section("collaborators", "Collaborators", *parts)


def tree(trainings: Sequence[Training]) -> Html:
    """Make nested lists: under each site the targets that have adapted from it."""
    children: dict[str, list[Training]] = {}
    for training in trainings:
        children.setdefault(training["selection"]["collaborator"], []).append(training)
    targets = {training["target"] for training in trainings}

    def below(name: str, above: frozenset[str]) -> Html | None:
        mine = [t for t in children.get(name, ()) if t["target"] not in above]
        if not mine:
            return None
        items = [
            e("li", described(t), below(t["target"], above | {name, t["target"]})) for t in mine
        ]
        return e("ul", *items, class_="tree")

    roots = [name for name in children if name not in targets]
    return e(
        "ul",
        *(e("li", e("b", name), " (source)", below(name, frozenset({name}))) for name in roots),
        class_="tree",
    )


def described(training: Training) -> Html:
    """Describe a target: its accuracy where it was tested, else its bound; negative transfer."""
    accuracy, after = training.get("final_accuracy"), training["selection"].get("after") or {}
    if accuracy is not None:
        words = f": accuracy {100 * accuracy:.1f} %"
    elif "eps" in after:
        words = f": error at most {after['eps']:.3f}"
    else:
        words = ": not adapted"
    bad = after.get("kept") == "before"
    transfer = e("span", ", negative transfer", class_="bad") if bad else None
    return join(e("b", training["target"]), words, transfer)


def _table(training: Training, about: str) -> Html:
    selection, target = training["selection"], training["target"]
    named = f"Candidates for {target} ({about})"
    made = table(headings(selection), rows(selection), label=named)
    return join(e("h4", f"{target}, by {selection['selector']}"), made, note(outcome(selection)))
