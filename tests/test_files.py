"""Replacing a file leaves the whole old file or the whole new one, even after an error."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from fedda import models
from fedda.config import ModelConfig
from fedda.config.inputs import Inputs
from fedda.errors import ConfigError, ModelError, RunError
from fedda.files import (
    encoding,
    filling,
    keep_newest,
    keeping,
    partial_path,
    replacing,
    states,
    unmarked,
    writing,
)
from fedda.models.export import export

MODEL = ModelConfig(name="mlp", hidden="4")


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


@pytest.mark.parametrize("there", [True, False])
def test_of_a_folder_that_was_not_filled_nothing_is_left(tmp_path: Path, there: bool) -> None:
    out = tmp_path / "out"
    if there:
        out.mkdir()
    with pytest.raises(OSError), filling(out):
        (out / "a").mkdir()
        (out / "a" / "file").touch()
        (out / "b").touch()
        raise OSError(28, "No space left on device")
    assert [*tmp_path.rglob("*")] == [out] * there


@pytest.mark.skipif(not Path("/proc/self/ns/pid").exists(), reason="this system has no /proc")
def test_what_a_killed_process_left_is_deleted_at_once_and_another_s_is_not(tmp_path: Path) -> None:
    path = tmp_path / "report.png"
    code = "import os, sys; from pathlib import Path; from fedda.files import replacing\n"
    code += "with replacing(Path(sys.argv[1])) as part: part.write_text('b'); os._exit(9)"
    subprocess.run([sys.executable, "-c", code, path])
    (left,) = tmp_path.iterdir()
    living = left.with_name(left.name.replace(left.name.split("-")[-1], f"{os.getppid()}.part"))
    elsewhere = left.with_name(left.name.replace(".png.", ".png.another"))
    living.touch()
    elsewhere.touch()
    with replacing(path) as part:
        part.write_text("a")
    assert {*tmp_path.iterdir()} == {path, living, elsewhere}


def test_two_commands_may_write_the_same_file_at_once(tmp_path: Path) -> None:
    path, stale = tmp_path / "report.png", tmp_path / ".report.png.1.part"
    stale.write_text("of a command that was killed")
    os.utime(stale, (0, 0))
    code = "import sys; from pathlib import Path; from fedda.files import replacing\n"
    code += "with replacing(Path(sys.argv[1])) as part: part.write_text('b')"
    with replacing(path) as part:
        part.write_text("a")
        subprocess.run([sys.executable, "-c", code, path], check=True)
        assert path.read_text() == "b"
    assert path.read_text() == "a"
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


def aged(path: Path, age: int, size: int = 1) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(bytes(size))
    for changed in (path, path.parent):
        os.utime(changed, (1000 - age, 1000 - age))
    return path


def test_the_oldest_go_beyond_a_number_of_bytes(tmp_path: Path) -> None:
    files = [aged(tmp_path / name, age, 10) for age, name in enumerate("abc")]
    keep_newest([*files, tmp_path / "gone"], room=20)
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}
    keep_newest(files, room=-1)
    assert not any(tmp_path.iterdir())


def test_of_a_folder_only_its_own_files_go(tmp_path: Path) -> None:
    for age, name in enumerate("abc"):
        aged(tmp_path / name / "note", age)
    aged(tmp_path / "b" / "mine", 1)
    aged(partial_path(tmp_path / "c" / "note"), 2)
    keep_newest(tmp_path.iterdir(), 1, parts=["note"])
    left = {str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*")}
    assert left == {"a", "a/note", "b", "b/mine"}


def test_what_a_link_leads_to_is_somebody_elses(tmp_path: Path) -> None:
    elsewhere, here = tmp_path / "elsewhere", tmp_path / "here"
    mine = aged(elsewhere / "note", 9)
    here.mkdir()
    (here / "folder").symlink_to(elsewhere)
    (here / "file").symlink_to(mine)
    keep_newest(here.iterdir(), 0, parts=["note"])
    assert mine.exists() and len([*here.iterdir()]) == 2


def test_what_cannot_be_looked_at_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for age, name in enumerate("abc"):
        aged(tmp_path / name / "note", age)
    look = Path.iterdir

    def iterdir(path: Path) -> Iterator[Path]:
        if path.name == "b":
            raise PermissionError(13, "Permission denied")
        return look(path)

    monkeypatch.setattr(Path, "iterdir", iterdir)
    keep_newest([tmp_path / name for name in "abc"], 1, parts=["note"])
    monkeypatch.undo()
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b"}


def test_a_private_file_is_its_owners_alone(tmp_path: Path) -> None:
    path = tmp_path / "new" / "secret"
    path.parent.mkdir()
    partial_path(path).touch(mode=0o644)  # left by a crash
    for private in (True, False):
        with keeping(path, private=private) as part:
            part.write_text("x")
        assert (path.stat().st_mode & 0o077 == 0) == private


@pytest.mark.parametrize("opened", [replacing, lambda path: writing(path, "take another")])
def test_what_is_no_file_is_written_to_as_it_is(tmp_path: Path, opened: Any) -> None:
    pipe, got = tmp_path / "pipe", list[str]()
    os.mkfifo(pipe)
    reader = Thread(target=lambda: got.append(pipe.read_text()))
    reader.start()
    with opened(pipe) as part:
        part.write_text("all")
    reader.join()
    assert got == ["all"] and pipe.is_fifo() and [*tmp_path.iterdir()] == [pipe]


def test_what_a_user_links_to_is_written_through(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    real, link = tmp_path / "shared" / "real.csv", tmp_path / "link.csv"
    real.write_text("old")
    link.symlink_to("shared/real.csv")
    with writing(link, "take another") as part:
        part.write_text("new")
    assert link.is_symlink() and real.read_text() == "new"


def test_a_write_protected_file_is_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.csv").write_text("mine")
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # as root may write anything
    with (
        pytest.raises(RunError, match=r"write-protected\); take another"),
        writing(tmp_path / "mine.csv", "take another") as part,
    ):
        part.write_text("new")
    with pytest.raises(ModelError, match="write-protected"):
        made = models.build(MODEL, (4,), 2, 0)
        models.save(
            tmp_path / "mine.csv", made, config=MODEL, inputs=Inputs((4,)), classes=("a", "b")
        )
    assert (tmp_path / "mine.csv").read_text() == "mine"


@pytest.mark.parametrize("write", ["model", "export"])
def test_models_are_written_to_files_alone(tmp_path: Path, write: str) -> None:
    pipe = tmp_path / "pipe.onnx"
    os.mkfifo(pipe)
    made = models.build(MODEL, (4,), 2, 0)
    with pytest.raises(ModelError, match="is no file"):
        if write == "export":
            export(tmp_path / "model.safetensors", pipe)
        models.save(pipe, made, config=MODEL, inputs=Inputs((4,)), classes=("a", "b"))
    assert pipe.is_fifo()


@pytest.mark.parametrize(
    "content", [b"a = 1\n", b"\xef\xbb\xbfa = 1\r\n", b"\xff\xfe" + "a = 1\n".encode("utf-16-le")]
)
def test_texts_of_windows_are_read(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "text"
    file.write_bytes(content)
    assert file.read_text(encoding=encoding(file)) == "a = 1\n"
    assert unmarked(content).decode().strip() == "a = 1"


def test_an_account_without_a_home_has_to_say_where_its_state_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def unknown() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", unknown)
    with pytest.raises(ConfigError, match="--state-dir"):
        states()
