"""Apps of runs are unpacked as a whole before a run begins."""

import hashlib
import inspect
import io
import logging
import zipfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from flwr.cli.install import install_from_fab
from flwr.supercore.corestate import in_memory_corestate, sql_corestate
from starlette.exceptions import HTTPException

from fedda import flower
from fedda.ops import bundle
from server.superlink.fab_unpack import STORES, unpacked_first


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def started(content: bytes, any_app: bool = False) -> str:
    """Start a run with an app -> what flwr calls the app."""
    state = SimpleNamespace(store_app=lambda fab, **_: hashlib.sha256(fab.content).hexdigest())
    unpacked_first(state, any_app)
    return state.store_app(fab=SimpleNamespace(content=content), app_type="serverapp")


def files(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file() and ".info" not in path.parts)
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def test_an_app_lies_there_as_flwr_itself_would_unpack_it(home: Path, tmp_path: Path) -> None:
    content = flower.build_fab_from_disk(bundle.stage(tmp_path / "app"))
    started(content)
    (there,) = (home / "apps").iterdir()
    mine = files(there)
    assert "pyproject.toml" in mine
    flwrs = install_from_fab(content, tmp_path / "other", skip_prompt=True)
    assert files(flwrs) == mine and flwrs.name == there.name
    assert install_from_fab(content, skip_prompt=True) == there  # and flwr finds it


def test_half_an_app_that_an_ended_program_left_is_completed(home: Path, tmp_path: Path) -> None:
    content = flower.build_fab_from_disk(bundle.stage(tmp_path / "app"))
    started(content)
    (there,) = (home / "apps").iterdir()
    whole = files(there)
    untouched, *others = sorted(there.rglob("*.py"))
    inode = untouched.stat().st_ino
    (there / "pyproject.toml").unlink()
    others[0].write_bytes(b"")
    started(content)
    assert files(there) == whole and untouched.stat().st_ino == inode
    assert [path.name for path in (home / "apps").iterdir()] == [there.name]


def test_what_is_no_app_is_left_to_the_runs_program(
    home: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert started(b"no app", any_app=True) == hashlib.sha256(b"no app").hexdigest()
    assert "cannot be unpacked" in caplog.text


def test_all_ways_in_which_flwr_keeps_an_app_are_known() -> None:
    """Of a version with another one, the apps of runs would be neither checked nor unpacked."""
    for kind in (in_memory_corestate.InMemoryCoreState, sql_corestate.SqlCoreState):
        stores = {name for name in dir(kind) if name.startswith("store_")}
        apps = {n for n in stores if "fab" in inspect.signature(getattr(kind, n)).parameters}
        assert apps and apps <= {*STORES}


@pytest.mark.parametrize(
    ("change", "odd"),
    [
        ({}, ""),
        ({"server/app.py": "import os"}, "differs in server/app.py"),
        ({"fedda/__init__.py": ""}, "differs in fedda/__init__.py"),
        ({"server/more.py": ""}, "differs in server/more.py"),
        ({"torch/__init__.py": ""}, "differs in torch/__init__.py"),
        ({"clients/../server/app.py": ""}, r"differs in clients/\.\./server/app.py"),
        ({".info/../server/app.py": ""}, r"differs in \.info/\.\./server/app.py"),
        ({"pyproject.toml": '[tool.flwr.app.components]\nserverapp = "os:path"'}, "pyproject"),
        ({"pyproject.toml": ""}, "pyproject"),
        ({"pyproject.toml": "no toml"}, "no Flower app"),
    ],
)
def test_only_this_installations_own_program_is_run(
    home: Path, tmp_path: Path, change: dict[str, str], odd: str
) -> None:
    """A run's program runs as the server's user, whoever started it."""
    content = flower.build_fab_from_disk(bundle.stage(tmp_path / "app"))
    with zipfile.ZipFile(io.BytesIO(content)) as packed:
        files = {name: packed.read(name) for name in packed.namelist()}
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as packed:
        for name, text in (files | change).items():
            packed.writestr(name, text)
    if not odd:
        started(made.getvalue())
        return
    with pytest.raises(HTTPException, match=odd):
        started(made.getvalue())
    assert not home.exists()


def test_of_two_files_of_one_name_none_is_run(home: Path, tmp_path: Path) -> None:
    content = io.BytesIO(flower.build_fab_from_disk(bundle.stage(tmp_path / "app")))
    with zipfile.ZipFile(content) as packed:
        own = packed.read("server/app.py")
    with zipfile.ZipFile(content, "a") as packed, pytest.warns(UserWarning, match="Duplicate"):
        packed.writestr("server/app.py", own)
    with pytest.raises(HTTPException, match=r"differs in server/app.py") as refused:
        started(content.getvalue())
    assert "use the fedda that the server has, or, if" in refused.value.detail
    assert refused.value.detail.endswith("updated there, start `fedda superlink` again")
