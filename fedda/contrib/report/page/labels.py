"""Where the names of groups of points go in a square of 100: in it, and none over another."""

import unicodedata
from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

SIZE = 3.2  # of the letters, as in the style sheet
LONGEST = 18  # characters; longer names are cut
NEAR = 4.0  # largest distance of a neighbour
APART = 0.4  # between two names, and between a name and the edge
GROUPS = 3  # places in a class's points that are tried
# Steps from a group of points that are tried, in heights of a letter; the nearest first.
STEPS = sorted(
    ((x, 1.5 * y) for x in range(-10, 11) for y in range(-6, 7)),
    key=lambda step: step[0] ** 2 + step[1] ** 2,
)

Box = tuple[float, float, float, float]  # left, lower, right, upper
Points = NDArray[np.float64]


def placed(groups: Mapping[str, Points]) -> dict[str, tuple[float, float]]:
    """Return the middle of each name, near most of its points; a name without room is left out.

    Args:
        groups: the points (N, 2) of each name; those with most points choose first.
    """
    taken: list[Box] = []
    found = {}
    for name, points in sorted(groups.items(), key=lambda g: -len(g[1])):
        for x, y in _places(points):
            x, y, box = _inside(name, x, y)
            if not any(_over(box, other) for other in taken):
                taken.append(box)
                found[name] = (x, y)
                break
    return found


def cut(name: str) -> str:
    """A name as it is drawn: a long one is cut, and says so."""
    return name if len(name) <= LONGEST else f"{name[: LONGEST - 1]}…"


def width(name: str) -> float:
    """How wide a name is at most, in bold letters of the widest font that the page may get."""
    return SIZE * sum(map(_letter, cut(name)))


def _letter(letter: str) -> float:
    if unicodedata.east_asian_width(letter) in "WF":
        return 1.0
    if letter in "mwMW@%…":
        return 1.12
    return 0.46 if letter in "ijlft.,:;|' -()" else 0.86 if letter.isupper() else 0.74


def _places(points: Points) -> Iterator[tuple[float, float]]:
    """Yield places for a name: near the densest group of points, then near the next ones."""
    for x, y in _densest(points):
        for right, up in STEPS:
            yield x + right * SIZE, y + up * SIZE


def _densest(points: Points) -> Iterable[Sequence[float]]:
    """Yield the points with most neighbours; the mean of several groups may be in none of them."""
    apart = np.linalg.norm(points[:, None] - points[None], axis=2)
    neighbours = (apart < NEAR).sum(axis=1).astype(float)
    for _ in range(GROUPS):
        best = int(neighbours.argmax())
        if neighbours[best] <= 0:
            return
        yield points[best].tolist()
        neighbours[apart[best] < 2 * NEAR] = 0


def _inside(name: str, x: float, y: float) -> tuple[float, float, Box]:
    """Move a name into the square -> its middle, and what it covers."""
    wide, high = width(name) / 2 + APART, 0.6 * SIZE + APART
    x, y = min(max(x, wide), 100 - wide), min(max(y, high), 100 - high)
    return x, y, (x - wide, y - high, x + wide, y + high)


def _over(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
