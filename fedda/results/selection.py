"""The table of candidates from which a target has chosen its collaborator, as FRUDA measures it."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Selection = Mapping[str, Any]  # a training's `selection` in results.json

HEADINGS = ("candidate", "eps", "theta", "W1", "bound", "chosen")
PAD_HEADINGS = ("candidate", "eps", "theta", "PAD", "chosen")


def headings(selection: Selection) -> Sequence[str]:
    """Return the headings of the columns; with proxy A-distances there is no bound."""
    return PAD_HEADINGS if selection["selector"] == "pad" else HEADINGS


def rows(selection: Selection) -> Iterator[tuple[str, ...]]:
    """Yield the table's rows; the error of a site without labels was carried forward."""
    distance = "pad" if selection["selector"] == "pad" else "w1"
    for row in selection["candidates"]:
        carried = "" if row["labelled"] else " (carried forward)"
        measured = f"{row[distance]:.3g} ± {row[f'{distance}-error']:.1g}"
        cells = [row["name"], f"{row['eps']:.3f}{carried}", f"{row['theta']:.3g}", measured]
        cells += [f"{row['bound']:.3g}"] if "bound" in row else []
        yield (*cells, "chosen" if row["chosen"] else "")


def outcome(selection: Selection) -> str:
    """Say what came of the choice; empty if the target has not adapted."""
    after = selection.get("after")
    if not after:
        return ""
    infomax = f"infomax {after['infomax-before']:.2f} before, {after['infomax-after']:.2f} after"
    text = f"W1 {after['w1']:.3g} after it, so eps at most {after['eps']:.3f}; {infomax}"
    if after["kept"] == "before":
        text += f"; negative transfer: it keeps the model of {selection['collaborator']}"
    return text
