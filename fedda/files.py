"""Files that are there whole or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file to write beside `path`, that takes its place once it is whole."""
    part = part_of(path)
    try:
        yield part
        part.replace(path)
    finally:
        with suppress(OSError):
            part.unlink()


def part_of(path: Path) -> Path:
    """Where a file is until it is whole; only a crash leaves it there."""
    return path.with_name(f".{path.name}.part")
