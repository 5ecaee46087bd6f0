"""Short runs of every benchmark's program: it works and prints the keys that it promises.

Each runs when the program has changed, or one of the modules that it imports from its folder. In
test_benchmarks.py one of them stands for all, and all programs read their arguments.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.small_benchmarks import (
    FOLDER,
    PROGRAM_OF,
    SMALL,
    check_promised,
    files,
    make_data,
    words,
)

NEEDS = {"privacy": "opacus", "peers_simulation": "ray"}


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the small data."""
    folder = tmp_path_factory.mktemp("benchmarks")
    make_data(folder)
    return folder


def case(name: str) -> object:
    about = pytest.mark.nightly(*sorted(files(PROGRAM_OF.get(name, name))))
    return pytest.param(name, marks=about)


@pytest.mark.parametrize("name", [case(name) for name in SMALL if name != "grand"])
def test_a_benchmark_in_small_prints_what_it_promises(name: str, here: Path) -> None:
    pytest.importorskip(NEEDS.get(name, "torch"))
    command = [sys.executable, str(FOLDER / f"{PROGRAM_OF.get(name, name)}.py"), *words(name, here)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    check_promised(name, json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.nightly("examples/feddadil.py")
def test_the_example_of_feddadil_in_small(tmp_path: Path) -> None:
    command = [sys.executable, str(FOLDER.parent / "feddadil.py"), "--rounds", "2"]
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, timeout=280, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / "runs" / "feddadil-example" / "feddadil" / "report.html").is_file()
