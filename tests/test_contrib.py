"""What is built on the rest, fedda/contrib: all works without it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fedda import plugins
from tests.local_grid import make_domains

ROOT = Path(__file__).parents[1]
# In place of an installation: the core alone, and fedda as a package that adds nothing.
METADATA = "Metadata-Version: 2.1\nName: fedda\nVersion: 0.2.0\n"
RUN = """
import sys
from importlib.util import find_spec
import fedda
assert fedda.__file__.startswith(sys.argv[1]) and find_spec("fedda.contrib") is None
del sys.argv[:1]
from fedda.cli import main
main()
"""


OWN: tuple[plugins.Group, ...] = ("methods", "commands", "images", "arrays", "listeners", "pages")


@pytest.mark.contrib
def test_its_entry_points_are_feddas_own() -> None:
    assert not plugins.broken()
    found = {name: each for group in OWN for name, each in plugins.installed(group).items()}
    assert {"compare", "choose", "label", "report", "audit", "live", "data.import", "fact"} <= {
        *found
    }
    assert {each.origin for each in found.values()} == {plugins.OWN}


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout without fedda/contrib, and without entry points."""
    folder = tmp_path_factory.mktemp("core")
    for top in ("fedda", "clients", "strategies", "server"):
        away = shutil.ignore_patterns("__pycache__", *["contrib"] * (top == "fedda"))
        shutil.copytree(ROOT / top, folder / top, ignore=away)
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / "fedda-0.2.0.dist-info").mkdir()
    (folder / "fedda-0.2.0.dist-info" / "METADATA").write_text(METADATA)
    return folder


def run(core: Path, at: Path, *words: str) -> str:
    """Run `fedda` of the core alone -> what it prints."""
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(core), *words],
        cwd=at,
        env={**os.environ, "PYTHONPATH": str(core), "COLUMNS": "120", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_without_it_a_method_runs(core: Path, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    make_domains(tmp_path / "data")
    small = ["-c", "model.name=mlp", "-c", "model.hidden=8", "-c", "train.batch-size=16"]
    simulated = ["--simulate", "data", "--target", "town", "--rounds", "1"]
    shown = run(core, tmp_path, "run", "kd3a", *simulated, *small)
    assert "KD3A" in shown
    folder = tmp_path / "runs" / "kd3a"
    assert (folder / "results.json").is_file() and not (folder / "report.html").exists()


@pytest.mark.nightly("tests/plugged.py")
@pytest.mark.timeout(3600)
def test_the_cores_own_tests_pass_without_it(tmp_path: Path) -> None:
    """The fast ones; those that are about it are left out (`tests.plugged`)."""
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in files.stdout.splitlines():
        if not name.startswith(("fedda/contrib/", "tests/contrib/")) and (ROOT / name).is_file():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, tmp_path / name)
    for words in (["init", "--quiet"], ["add", "."]):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    about = tmp_path / "fedda-0.2.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(METADATA)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "--ring", "fast", "-n", "2", "-p", "no:cacheprovider"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-20_000:]
