"""An installed package as a site's policy names it.

name==VERSION          what the package says of itself, also of an editable install
*                      any package
"""

import re
from collections.abc import Iterable, Sequence
from importlib.metadata import EntryPoint, entry_points

from fedda.errors import PolicyError

OWN = "fedda"  # the name of our own
ANY = ("*",)
ENTRY = re.compile(r"\*|(?P<name>[\w.-]+)==(?P<version>[\w.+!-]+)")


def origin_of(point: EntryPoint) -> str:
    """Where an entry point comes from: `fedda`, or the package that has it and its version."""
    package = point.dist
    if package is None:
        return "an unknown package"
    return OWN if package.name == OWN else f"{package.name} {package.version}"


def check_entry(text: str) -> None:
    """Refuse what names no package.

    Raises:
        ValueError: it has none of the forms above.
    """
    if ENTRY.fullmatch(text) is None:
        raise ValueError(f"'{text[:80]}' is not like 'name==1.0'")


def check_allowed(point: EntryPoint, allowed: Sequence[str]) -> None:
    """Refuse a package that a site's policy does not name; none of its code is run.

    Raises:
        PolicyError: no entry names it, or another version of it.
    """
    if "*" in allowed:
        return
    package = point.dist
    if package is None:
        raise PolicyError("the policy allows named packages only (allow.plugins).")
    own = [
        m for m in map(ENTRY.fullmatch, allowed) if m and plain(m["name"]) == plain(package.name)
    ]
    if not own:
        raise PolicyError(f"the policy does not name the package {package.name} (allow.plugins).")
    if package.version not in [match["version"] for match in own]:
        raise PolicyError(
            f"the policy allows another version than {package.version} (allow.plugins)."
        )


def entries(groups: Iterable[str]) -> list[tuple[str, str]]:
    """What names each installed package that adds something to fedda, and what it adds.

    No code of these packages is run.
    """
    added: dict[str, list[str]] = {}
    for group in sorted(groups):
        for point in sorted(entry_points(group=f"fedda.{group}"), key=lambda p: p.name):
            if point.dist is not None and point.dist.name != OWN:
                entry = f"{plain(point.dist.name)}=={point.dist.version}"
                added.setdefault(entry, []).append(f"{group} {point.name}")
    return [(entry, ", ".join(parts)) for entry, parts in sorted(added.items())]


def plain(name: str) -> str:
    """A package's name as all spellings of it agree."""
    return re.sub(r"[-_.]+", "-", name).lower()
