"""Replacing a file leaves the whole old file or the whole new one, even after an error."""

import os
from pathlib import Path

import pytest

from fedda.files import keep_newest, partial_path, replacing


def test_a_file_replaces_the_old_one_once_it_is_complete(tmp_path: Path) -> None:
    path = tmp_path / "file.txt"
    path.write_text("old")
    with replacing(path) as part:
        part.write_text("new")
        assert part == partial_path(path) and path.read_text() == "old"
    assert path.read_text() == "new"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_after_an_error_only_the_old_file_exists(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "file.txt"
    path.write_text("old")
    with pytest.raises(type(error)), replacing(path) as part:
        part.write_text("half")
        raise error
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_only_the_newest_files_stay(tmp_path: Path) -> None:
    for age in (3, 1, 2):
        path = tmp_path / str(age)
        path.touch()
        os.utime(path, (1000 - age, 1000 - age))
    keep_newest(tmp_path.iterdir(), 2)
    assert {path.name for path in tmp_path.iterdir()} == {"1", "2"}
    keep_newest(tmp_path.iterdir(), 2)
    assert len(list(tmp_path.iterdir())) == 2
