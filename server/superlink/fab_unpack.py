"""The app of a run: it must be this installation's own, and is unpacked before the run begins.

A run's program is its app, and runs as the server's user; so no other app is taken.

flwr has each run's program unpack its app, file by file, to where all runs of this app look for it,
and take what is there for whole. Of two first runs that begin together one would find half of it;
and after a program that was ended meanwhile, none would ever find more.
"""

import io
import logging
import os
import tempfile
import threading
import tomllib
import zipfile
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException

from fedda import flower
from fedda.ops import bundle

STORES = ("store_fab", "store_app")  # by which flwr's LinkStates keep an app; which differs

log = logging.getLogger("fedda.superlink")


def unpacked_first(state: Any, any_app: bool = False) -> None:
    """Let flwr's LinkState unpack each app that a run is started with, if it is this one.

    Args:
        state: the LinkState.
        any_app: whether another app is taken, too, as in tests.
    """
    one_by_one = threading.Lock()

    def stored(store: Callable[..., Any], *fab: Any, **named: Any) -> Any:
        content = (fab or (named["fab"],))[0].content
        if not any_app and (odd := foreign(content)):
            raise HTTPException(403, odd)
        done = store(*fab, **named)
        try:
            with one_by_one:
                unpack(content, sha256(content).hexdigest())
        except Exception as error:  # the run's program will meet the same, and say so in its log
            log.warning("the app of a run cannot be unpacked: %s", error)
        return done

    for name in STORES:
        if hasattr(state, name):
            setattr(state, name, partial(stored, getattr(state, name)))


def foreign(content: bytes) -> str:
    """What of an app is not of this installation, in a sentence; empty if all is.

    Its pyproject.toml may differ, as it holds the run's settings, but not in what is executed.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(content)) as packed:
            names = [name for name in packed.namelist() if not name.endswith("/")]
            files = {name: packed.read(name) for name in names}
        about = tomllib.loads(files.pop("pyproject.toml", b"").decode())
    except (ValueError, zipfile.BadZipFile):
        return "the run's program is no Flower app"
    own = {path.as_posix(): source for source, path in bundle.modules()}
    odd = [name for name, text in files.items() if not _is_own(name, text, own)]
    odd += [name for name, times in Counter(names).items() if times > 1]
    if about.get("tool", {}).get("flwr", {}).get("app", {}).get("components") != bundle.COMPONENTS:
        odd.append("pyproject.toml")
    if not odd:
        return ""
    return (
        f"the run's program differs in {odd[0]}: use the fedda that the server has, or, if it was "
        "updated there, start `fedda superlink` again"
    )


def _is_own(name: str, text: bytes, own: Mapping[str, Path]) -> bool:
    """Whether a file is a module of this installation, or what flwr notes of all files."""
    return own[name].read_bytes() == text if name in own else name == ".info/CONTENT"


def unpack(content: bytes, name: str) -> None:
    """Put an app's files where flwr looks for them; those that are there already stay untouched.

    Args:
        content: the app, as flwr packs it.
        name: SHA-256 of the content.
    """
    with zipfile.ZipFile(io.BytesIO(content)) as packed:
        about = tomllib.loads(packed.read("pyproject.toml").decode())
        project, publisher = about["project"], about["tool"]["flwr"]["app"]["publisher"]
        app = f"{publisher}/{project['name']}", project["version"]
        there = flower.get_project_dir(*app, name)
        there.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=there.parent, prefix=".") as beside:
            packed.extractall(beside)  # which keeps every file below the folder
            for file in filter(Path.is_file, Path(beside).rglob("*")):
                to = there / file.relative_to(beside)
                if not to.is_file() or to.read_bytes() != file.read_bytes():
                    to.parent.mkdir(parents=True, exist_ok=True)
                    os.replace(file, to)
