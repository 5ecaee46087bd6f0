"""The rings of the suite: what a test needs decides when it runs.

    fast      starts no process and computes for a moment: what one runs while writing
    gate      the fast tests and every guarantee once over real processes: README's test command
    nightly   what is left: more of the same at length, and what depends on other programs

A test is of the fast ring unless it is marked `slow` (gate) or `nightly`. A nightly test names the
files that it is about: `@pytest.mark.nightly("server/watching", "fedda/plugins.py")`. It runs in
the gate as well if one of them has changed since the last tag or `origin/main`, the nearer of both.
"""

import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RINGS = ("fast", "gate", "nightly")
HELP = "run the tests of this ring and of those inside it: fast, gate, nightly; see tests/rings.py"


def ring_of(item: pytest.Item) -> str:
    """The innermost ring that a test belongs to."""
    if item.get_closest_marker("nightly"):
        return "nightly"
    return "gate" if item.get_closest_marker("slow") else "fast"


def select(items: list[pytest.Item], ring: str) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """Split tests into those of a ring, with what it includes, and those that are left out.

    Args:
        items: tests in their order.
        ring: fast, gate, or nightly, which is all.
    """
    if ring == "nightly":
        return items, []
    inside = RINGS[: RINGS.index(ring) + 1]
    chosen = [ring_of(item) in inside or (ring == "gate" and touched(item)) for item in items]
    pairs = list(zip(items, chosen, strict=True))
    return [item for item, runs in pairs if runs], [item for item, runs in pairs if not runs]


def touched(item: pytest.Item) -> bool:
    """Whether a file that a nightly test is about has changed."""
    about = {name for mark in item.iter_markers("nightly") for name in mark.args}
    return any(path == name or path.startswith(f"{name}/") for name in about for path in changed())


@cache
def changed(root: Path = ROOT) -> frozenset[str]:
    """The files that differ from the last tag or, if that is nearer, from `origin/main`.

    In a fresh clone both may be missing or be this very commit; then the last commit counts.
    """
    head = _git(root, "rev-parse", "HEAD")
    tag, main = _git(root, "describe", "--tags", "--abbrev=0"), "origin/main"
    bases = {tag, _git(root, "merge-base", main, "HEAD")} - {"", head}
    distance = {base: int(_git(root, "rev-list", "--count", f"{base}..HEAD")) for base in bases}
    away = {base: count for base, count in distance.items() if count}
    base = min(away, key=lambda each: away[each]) if away else "HEAD~1"
    return frozenset(_git(root, "diff", "--name-only", base).splitlines())


def _git(root: Path, *arguments: str) -> str:
    """What git prints; nothing where it fails, or where this is no checkout."""
    try:
        done = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=False
        )
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
