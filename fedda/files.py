"""Writing files so that they exist complete or not at all."""

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A partial file to write, which replaces `path` once the `with` block ends without error."""
    part = partial_path(path)
    try:
        yield part
        part.replace(path)
    finally:
        with suppress(OSError):
            part.unlink()


def partial_path(path: Path) -> Path:
    """Where a file lies until it is complete; only a crash leaves it there."""
    return path.with_name(f".{path.name}.part")
