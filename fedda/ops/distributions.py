"""An installed package as a site's policy names it: by its version, or by the hash of its files.

    name==VERSION          what the package says of itself, also of an editable install
    name sha256:HEX        every file that was installed, so that any change is seen
    *                      any package

The hash is over the list of files and the SHA-256 of each: all that the package's RECORD lists, and
all else in its folders. Left out are what pip writes about an installation, and the compiled files
that Python makes itself. What the package imports from other packages is not in it.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import Distribution, EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path

from fedda.errors import PolicyError

ANY = ("*",)
ENTRY = re.compile(
    r"\*|(?P<name>[\w.-]+)(==(?P<version>[\w.+!-]+)| sha256:(?P<digest>[0-9a-f]{64}))"
)
PIPS_OWN = {"RECORD", "INSTALLER", "REQUESTED", "direct_url.json"}
COMPILED = "__pycache__"


def check_entry(text: str) -> None:
    """Refuse what names no package.

    Raises:
        ValueError: it has none of the forms above.
    """
    if ENTRY.fullmatch(text) is None:
        raise ValueError(f"'{text[:80]}' is not like 'name==1.0' or 'name sha256:' and 64 digits")


def check_allowed(point: EntryPoint, allowed: Sequence[str]) -> None:
    """Refuse a package that a site's policy does not name; none of its code is run.

    Args:
        point: what the package adds.
        allowed: the entries of the policy.

    Raises:
        PolicyError: no entry names it, its files are not those that an entry names, or its code is
            not among its files.
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
    if any(match["version"] == package.version for match in own):
        return
    if not any(match["digest"] for match in own):
        raise PolicyError(
            f"the policy allows another version than {package.version} (allow.plugins)."
        )
    digest = hash_of(package)
    if digest is None or digest not in [match["digest"] for match in own]:
        raise PolicyError(
            "its files are not those that the policy names (allow.plugins); see `fedda policy "
            "plugins`."
        )
    if not holds(package, point):
        raise PolicyError(
            f"the code of {point.module} is not among its files, so their hash says nothing of it; "
            "install it from a wheel."
        )


def entries(groups: Iterable[str]) -> list[tuple[str, str]]:
    """What names each installed package that adds something to fedda, and what it adds.

    No code of these packages is run.

    Args:
        groups: the kinds of what packages add.
    """
    added: dict[str, tuple[EntryPoint, list[str]]] = {}
    for group in sorted(groups):
        for point in sorted(entry_points(group=f"fedda.{group}"), key=lambda p: p.name):
            if point.dist is not None:
                added.setdefault(point.dist.name, (point, []))[1].append(f"{group} {point.name}")
    return [(_entry(point), ", ".join(parts)) for _, (point, parts) in sorted(added.items())]


def _entry(point: EntryPoint) -> str:
    package = point.dist
    assert package is not None
    digest = hash_of(package) if holds(package, point) else None
    name = plain(package.name)
    return f"{name} sha256:{digest}" if digest else f"{name}=={package.version}"


def plain(name: str) -> str:
    """A package's name as all spellings of it agree."""
    return re.sub(r"[-_.]+", "-", name).lower()


def hash_of(package: Distribution) -> str | None:
    """The hash of a package's files; None if it has no list of files."""
    if package.files is None:
        return None
    found = dict(_files(package))
    lines = [(name, hashlib.sha256(found[name].read_bytes()).hexdigest()) for name in sorted(found)]
    return hashlib.sha256(json.dumps(lines).encode()).hexdigest()


def holds(package: Distribution, point: EntryPoint) -> bool:
    """Whether the code of an entry point is one of the package's files, and no other one's."""
    top = point.module.partition(".")[0]
    spec = find_spec(top)
    if spec is None or spec.origin is None:
        return False
    return Path(spec.origin).resolve() in {path.resolve() for _, path in _files(package)}


def _files(package: Distribution) -> Iterator[tuple[str, Path]]:
    """Each file's name within the installation, and where it lies."""
    root, folders = Path(str(package.locate_file(""))), set[str]()
    for file in package.files or ():
        made = COMPILED in file.parts and file.hash is None
        info = file.parts[0].endswith((".dist-info", ".egg-info"))
        if made or (info and file.name in PIPS_OWN):
            continue
        path = Path(str(package.locate_file(file)))
        if path.is_file():
            yield file.as_posix(), path
        if len(file.parts) > 1 and file.parts[0] != ".." and not info:
            folders.add(file.parts[0])
    for folder in folders:
        for path in (root / folder).rglob("*"):
            if path.is_file() and COMPILED not in path.parts:
                yield path.relative_to(root).as_posix(), path
