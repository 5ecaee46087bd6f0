"""Which site each node is: the name and the role that its key was registered with.

The SuperLink writes this into a file, and the programs of runs read it there: a site tells its name
and role itself, and one site must not pass for another.
"""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from fedda.errors import RunError, reason
from fedda.files import put
from fedda.ops.refusal import Refusal
from fedda.ops.spawn import REGISTERED


class RegisteredKey(NamedTuple):
    """What the operator registered a key with; an empty name or role was left open."""

    name: str
    role: str


def write(path: Path, entries: Mapping[int, RegisteredKey]) -> None:
    """Replace the file, if it says anything else."""
    text = json.dumps({str(node_id): entry._asdict() for node_id, entry in entries.items()})
    if not path.exists() or path.read_text() != text:
        put(path, text)


def read(path: Path) -> dict[int, RegisteredKey]:
    """Read what `write` wrote.

    Raises:
        OSError: there is no such file.
        ValueError: it is something else.
    """
    try:
        return {
            int(key): RegisteredKey(**entry) for key, entry in json.loads(path.read_text()).items()
        }
    except (TypeError, AttributeError) as error:
        raise ValueError(str(error)) from error


def everyone() -> set[int]:
    """The nodes of all registered sites; none where sites have no keys.

    Raises:
        RunError: the SuperLink's file of registered sites cannot be read.
    """
    return set(_entries() or {})


def names() -> set[str]:
    """The names of all registered sites; none where sites have no keys.

    Raises:
        RunError: the SuperLink's file of registered sites cannot be read.
    """
    return {entry.name for entry in (_entries() or {}).values()}


def objection(node_id: int, name: str, role: str) -> str:
    """Why a node is not the site that it says it is; empty if nothing speaks against it.

    Raises:
        RunError: the SuperLink's file of registered sites cannot be read.
    """
    entries = _entries()
    if entries is None:
        return ""
    known = entries.get(node_id)
    if known is None:
        return f"offers itself as {name!r}, but its key is not registered"
    if known.name != name and (known.name or name in {entry.name for entry in entries.values()}):
        return (
            f"offers itself as {name!r}, but its key is that of {known.name or 'a nameless site'!r}"
        )
    if known.role not in ("", role):
        return f"offers itself as a {role}, but its key is for a {known.role} only"
    return ""


def misfit(node_id: int, name: str, role: str) -> Refusal | None:
    """Why a registered node may not begin a session with this name and role; None if it may."""
    try:
        entries = _entries() or {}
    except RunError:
        return None  # a run will say so
    known = entries.get(node_id)
    if known is None:
        return None
    if known.role not in ("", role):
        return Refusal("role", known.role)
    others = {entry.name for entry in entries.values()}
    wrong = known.name != name and (known.name or name in others)
    return Refusal("name") if wrong else None


def _entries() -> dict[int, RegisteredKey] | None:
    path = os.environ.get(REGISTERED)
    if path is None:  # a server without keys, or none at all
        return None
    try:
        return read(Path(path))
    except FileNotFoundError:
        raise RunError(
            "No site is admitted at this server yet: register each by fedda keys sign NAME.pub."
        ) from None
    except (OSError, ValueError) as error:
        raise RunError(
            f"{path}, which says whose key is whose, cannot be read ({reason(error)}); start the "
            "server again, which writes it anew."
        ) from error
