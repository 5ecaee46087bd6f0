"""The benchmarks' programs: nightly each runs in small.

It is in the gate where the program has changed, or a module that it imports from its folder.
"""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.small_benchmarks import (
    FOLDER,
    PROGRAM_OF,
    SMALL,
    files,
    make_data,
    words,
)

PROGRAMS = {p.stem for p in FOLDER.glob("*.py") if "ArgumentParser(" in p.read_text()}
NEEDS = {"privacy": "opacus", "peers_simulation": "ray"}


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that imports a benchmark as the other benchmarks do."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the small data."""
    folder = tmp_path_factory.mktemp("benchmarks")
    make_data(folder)
    return folder


def test_mean_ranks_by_hand(load: Any) -> None:
    """Demsar's example of ten classifiers has q = 3.164; here ranks, ties, and the cliques."""
    ranks = load("ranks")
    scores = np.array([[0.9, 0.8, 0.7], [0.5, 0.5, 0.1]])
    assert ranks.ranks(scores).tolist() == [[1, 2, 3], [1.5, 1.5, 3]]
    # section 3.2.2: four classifiers, 14 sets: CD = 2.569 sqrt(4 * 5 / (6 * 14)) = 1.25
    assert ranks.critical_difference(4, 14) == pytest.approx(1.25, abs=0.005)
    assert ranks.critical_difference(10, 1) == pytest.approx(3.164 * (110 / 6) ** 0.5, abs=0.01)
    assert ranks.cliques([1.0, 1.5, 2.4, 4.0], 1.0) == [(0, 1), (1, 2)]
    assert ranks.cliques([1.0, 3.0], 1.0) == []
    # Friedman's chi2 by its formula: 12 * 4 / (3 * 4) * (1 + 4 + 9 - 12) = 8, exp(-8 / 2)
    same = np.array([[0.9, 0.8, 0.7]] * 4)
    assert ranks.friedman(same) == pytest.approx(np.exp(-4.0))


def case(name: str) -> object:
    about = pytest.mark.nightly(*sorted(files(PROGRAM_OF.get(name, name))))
    return pytest.param(name, marks=about)


@pytest.mark.parametrize("name", [case(name) for name in SMALL])
def test_a_benchmark_in_small_prints_figures(name: str, here: Path) -> None:
    assert {PROGRAM_OF.get(name, name) for name in SMALL} == PROGRAMS
    pytest.importorskip(NEEDS.get(name, "torch"))
    program = FOLDER / f"{PROGRAM_OF.get(name, name)}.py"
    assert json.loads(ran(program, *words(name, here)).splitlines()[-1])


def ran(program: Path, *words: str, cwd: Path | None = None) -> str:
    """Run a program of the examples -> what it printed."""
    command = [sys.executable, str(program), *words]
    done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


@pytest.mark.nightly("examples/feddadil.py")
def test_the_example_of_feddadil_in_small(tmp_path: Path) -> None:
    ran(FOLDER.parent / "feddadil.py", "--rounds", "2", cwd=tmp_path)
    assert (tmp_path / "runs" / "feddadil-example" / "feddadil" / "report.html").is_file()
