"""The app of a run, unpacked as a whole before the run begins.

flwr has each run's program unpack its app, file by file, to where all runs of this app look for it,
and take what is there for whole. Of two first runs that begin together one would find half of it;
and after a program that was ended meanwhile, none would ever find more.
"""

import io
import logging
import os
import tempfile
import threading
import zipfile
from pathlib import Path
from typing import Any

from fedda import flower

log = logging.getLogger("fedda.superlink")


def unpacked_first(state: Any) -> None:
    """Let flwr's LinkState unpack each app that a run is started with."""
    store, one_by_one = state.store_fab, threading.Lock()

    def stored(app: Any) -> str:
        name = store(app)
        try:
            with one_by_one:
                unpack(app.content, name)
        except Exception as error:  # the run's program will meet the same, and say so in its log
            log.warning("the app of a run cannot be unpacked: %s", error)
        return name

    state.store_fab = stored


def unpack(content: bytes, name: str) -> None:
    """Put an app's files where flwr looks for them; those that are there already stay untouched.

    Args:
        content: the app, as flwr packs it.
        name: SHA-256 of the content.
    """
    there = flower.get_project_dir(*flower.get_fab_metadata(content), name)
    there.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(dir=there.parent, prefix=".") as beside,
        zipfile.ZipFile(io.BytesIO(content)) as packed,
    ):
        flower.safe_extract_zip(packed, Path(beside))
        for file in filter(Path.is_file, Path(beside).rglob("*")):
            to = there / file.relative_to(beside)
            if not to.is_file() or to.read_bytes() != file.read_bytes():
                to.parent.mkdir(parents=True, exist_ok=True)
                os.replace(file, to)
