"""Tables of any size: read some rows at a time, the same to the bit, and never whole in memory."""

import csv
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clients.site.memory import Site
from fedda import data
from fedda.config.inputs import Inputs
from fedda.data import Reading, columns, npy
from fedda.data.cache import Cache, Stored
from fedda.data.own_columns import OwnColumns
from fedda.errors import DataError

N = 211
DRAW = np.random.default_rng(0)
CELLS: dict[str, list[Any]] = {
    "float": [*DRAW.normal(size=N - 4).tolist(), 1e-45, -0.0, 16777217.0, 1 / 3],
    "gaps": [None if i % 3 else i / 7 for i in range(N)],
    "whole": [2**53 + 1 if i % 2 else -i for i in range(N)],
    "whole-gaps": [None if i == 5 else i % 11 for i in range(N)],
    "yes": [i % 3 == 0 for i in range(N)],
    "kind": [("Beech", "oak ", None, "BEECH", "ash")[i % 5] for i in range(N)],
    "late": [None if i < N - 1 else "once" for i in range(N)],
}
KINDS = {"kind": ["ash", "beech", "oak"], "late": ["once"]}
LABEL = [("ill", "well")[i % 2] for i in range(N)]
SPLIT = [("train", "train", "test")[i % 3] for i in range(N)]
TRAIN = [i for i in range(N) if i % 3 != 2]


def to_csv(path: Path, table: dict[str, list[Any]]) -> None:
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(table)
        writer.writerows(zip(*table.values(), strict=True))


def to_parquet(path: Path, table: dict[str, list[Any]]) -> None:
    arrow, parquet = (pytest.importorskip(f"pyarrow{part}") for part in ("", ".parquet"))
    parquet.write_table(arrow.table(table), path, row_group_size=max(60, len(table["label"]) // 3))


WRITERS: dict[str, Callable[[Path, dict[str, list[Any]]], None]] = {
    "a.csv": to_csv,
    "a.parquet": to_parquet,
}


def wanted(name: str, cells: Sequence[Any]) -> np.ndarray:
    """A column as a whole, cell by cell -> float32 (n,); True is a text in a CSV file."""

    def number(cell: Any) -> float:
        if cell is None:
            return math.nan
        return KINDS[name].index(cell.strip().lower()) if isinstance(cell, str) else float(cell)

    return np.array([number(cell) for cell in cells], np.float64).astype(np.float32)


@pytest.fixture(params=WRITERS)
def table(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """One with a split, of which a few rows are read at a time."""
    monkeypatch.setattr(columns, "_FEW", 90)
    monkeypatch.setattr(columns, "_MANY", 90)
    monkeypatch.setattr(columns, "_ROWS", 13)
    monkeypatch.setattr(npy, "PIECE", 500)
    path = tmp_path / request.param
    WRITERS[request.param](path, CELLS | {"label": LABEL, "split": SPLIT, "id": [*range(N)]})
    return path


def bits(x: torch.Tensor) -> bytes:
    return x.numpy().tobytes()


def test_values_are_the_same_to_the_bit(table: Path, tmp_path: Path) -> None:
    names = tuple(sorted(CELLS))
    whole = np.stack([wanted(name, CELLS[name]) for name in names], axis=1)
    reading = Reading().within("", "mean", names)
    with data.load.open_site(table, reading).opened() as npz:  # type: ignore[union-attr]
        assert npz.texts == {"kind": ("ash", "Beech", "oak"), "late": ("once",)} | (
            {"yes": ("False", "True")} if table.suffix == ".csv" else {}
        )
        for x, rows in (("x_train", TRAIN), ("x_test", range(2, N, 3))):
            for batch in (1, 8, 50):
                found = [*npz.examples(x, batch)]
                assert all(len(some) % batch == 0 for some in found[:-1]) and len(found) > 1
                assert bits(torch.cat(found)) == whole[[*rows]].tobytes()
        assert npz.row_keys("x_test") == [str(i) for i in range(2, N, 3)]


@pytest.mark.parametrize("window", ["", "own"])
@pytest.mark.parametrize("missing", ["mean", "median", "indicator"])
def test_what_stays_on_disk_is_filled_and_scaled_as_in_memory(
    table: Path, tmp_path: Path, window: str, missing: Any
) -> None:
    columns_ = Reading.of(columns="values=float+gaps+whole+whole-gaps")
    reading = columns_.within(window, missing)
    place = Cache(tmp_path / "cache", always=True)
    plain = data.load_source(table, reading=reading)
    kept = data.load_source(table, reading=reading, cache=place)
    assert isinstance(kept.x, Stored) and not isinstance(plain.x, Stored)
    assert kept.x.shape == plain.x.shape and bits(kept.x) == bits(plain.x)
    raw = np.stack([wanted(c, CELLS[c]) for c in columns_.values], axis=1)[TRAIN]
    x = torch.from_numpy(raw)
    own = OwnColumns(x, table, reading)
    assert bits(own(x)) == bits(plain.x) and bits(x) == raw.tobytes()
    median = np.nanmedian(raw, axis=0)
    if missing == "median":
        assert own.middle.tolist() == median.tolist()
    assert plain.y.tolist() == kept.y.tolist() == [("ill", "well").index(LABEL[i]) for i in TRAIN]
    some = torch.tensor([100, 3, 3])
    assert bits(kept.take(some).x[torch.tensor([2, 0])]) == bits(plain.x[[3, 100]])
    tests = [data.load_evaluation(table, reading=reading, cache=c) for c in (None, place)]
    assert tests[0] is not None and tests[1] is not None and bits(tests[0].x) == bits(tests[1].x)
    assert len(data.identities(table, "source", reading)) == len(TRAIN)


def test_a_site_trains_on_a_coded_table_that_stays_on_disk(table: Path, tmp_path: Path) -> None:
    names = ("float", "kind=ash", "kind=Beech", "kind=oak", "whole-gaps")
    inputs = Inputs((5,), "stretch", "own", "mean", names)
    node = {"role": "source", "data": str(table), "name": "x", "min-images": 16}
    node |= {"reproducible": True, "columns": "values=float+kind+whole-gaps"}
    plain = Site(node).training(inputs)
    kept = Site(node | {"cache": "disk", "state-dir": str(tmp_path / "state")}).training(inputs)
    assert isinstance(kept.x, Stored) and bits(kept.x) == bits(plain.x) and len(plain) > 100
    assert bits(kept.x[torch.tensor([7, 2])]) == bits(plain.x[[7, 2]])
    (file,) = (tmp_path / "state").rglob("*.images")
    assert file.stat().st_mode & 0o77 == 0
    assert len({*plain.x[:, 1].tolist()}) == 3  # ash, other kinds, and what fills gaps


def test_a_cell_that_is_neither_is_named_wherever_it_lies(table: Path) -> None:
    odd: list[Any] = [str(i) for i in range(N)]
    for cells, row in (([*odd[:150], "a,b", *odd[151:]], 151), (["x", *odd[1:]], 1)):
        WRITERS[table.name](table, {"float": CELLS["float"], "label": LABEL, "odd": cells})
        with pytest.raises(DataError, match=rf"has '[ax].*' in row {row} of its column odd"):
            data.load_source(table)
    many = [None, *(f"name {i}" for i in range(N - 1))]
    WRITERS[table.name](table, {"float": CELLS["float"], "label": LABEL, "odd": many})
    with pytest.raises(DataError, match="has 'name 0' in row 2 of its column odd"):
        data.load_source(table)


def test_a_table_that_changes_meanwhile_is_refused(
    table: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reading, real = Reading.of(columns="values=float+kind"), columns.parts

    def shorter(*about: Any) -> Iterator[Any]:
        yield from islice(real(*about), 3)

    def others(*about: Any) -> Iterator[Any]:
        for some in real(*about):
            yield {**some, "kind": ["elm"] * len(some["kind"])}

    for changed in (shorter, others):
        with data.load.open_site(table, reading).opened() as npz:  # type: ignore[union-attr]
            assert npz.texts == {"kind": ("ash", "Beech", "oak")}
            with monkeypatch.context() as patch, pytest.raises(DataError, match="start again"):
                patch.setattr(columns, "parts", changed)
                list(npz.examples("x_train"))


CHILD = """
import resource, sys
from pathlib import Path
import torch
from fedda import data
from fedda.data import Reading

small, path, matrix = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
reading = Reading.of().within("own", "median")

def read(path, cache=None):
    found = data.verify(path, "source", reading=reading)
    return found.train, data.load_source(path, reading=reading, cache=cache).x

read(small)  # what a process needs once
about = dict(line.split(":") for line in open("/proc/self/status") if line.startswith("Vm"))
now = 1024 * int(about["VmData"].split()[0])
resource.setrlimit(resource.RLIMIT_DATA, (now + matrix + (180 << 20), resource.RLIM_INFINITY))
n, x = read(path)
assert x.nbytes == matrix and n == len(x), (x.shape, n)
total = float(x.double().sum())
del x
n, x = read(path, data.Cache(path.parent / "cache", always=True))
assert total == float(sum(some.double().sum() for some in x.split(1000)))
try:  # the limit holds; the cells of the whole table, as Python has them, take more
    bytearray(matrix + (180 << 20))
except MemoryError:
    print("bounded")
"""


@pytest.mark.nightly("fedda/data")
@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc and Linux's limit of memory")
@pytest.mark.parametrize("name", WRITERS)
def test_a_table_takes_its_matrix_and_little_more(tmp_path: Path, name: str) -> None:
    """All that a site does with a table of 198,000 rows, in a process that cannot have more."""
    d, block, many = 16, 3000, 66
    x = DRAW.normal(size=(block, d)).round(9)
    for place, times in (("small", 1), ("large", many)):
        (tmp_path / place).mkdir()
        found = {f"c{i}": x[:, i].tolist() * times for i in range(d)}
        found["label"] = ["ill", "well"] * (block // 2) * times
        WRITERS[name](tmp_path / place / name, found)
    files = [str(tmp_path / place / name) for place in ("small", "large")]
    env = {"ARROW_DEFAULT_MEMORY_POOL": "system", "OMP_NUM_THREADS": "1"}
    env["PYTHONPATH"] = str(Path(__file__).parents[1])
    command = [sys.executable, "-c", CHILD, *files, str(4 * many * block * d)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0 and done.stdout.endswith("bounded\n"), done.stderr
