"""Files of class probabilities: what a program has said of examples, by their names.

    NAME.csv    a table as `fedda predict` writes it: file, p_CLASS...
    NAME.npz    arrays `p` (N, C), `classes` (C,) and, but for rows of arrays, `names` (N,)

A reader takes the file and the names of the examples in question. What is wrong with the file is a
ValueError, or whatever the libraries raise for damaged ones.
"""

import csv
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedda.data.naming import listed
from fedda.files import encoding
from fedda.results.escaping import cell

Rows = tuple[tuple[str, ...], Mapping[str, Tensor]]  # the classes, and by an example's key (C,)


def key(name: str) -> str:
    """An example's name as `fedda predict` writes it, whatever its file's name is made of."""
    return cell(name.encode(errors="backslashreplace").decode())


def _by_key(names: Sequence[str], p: Sequence[Tensor] | Tensor) -> dict[str, Tensor]:
    if len(names) != len(p):
        raise ValueError(f"p has {len(p)} rows for {len(names)} names")
    keys = [key(name) for name in names]
    if twice := [name for name, n in Counter(keys).items() if n > 1]:
        raise ValueError(f"it has several rows of {listed(twice)}")
    return dict(zip(keys, p, strict=True))


def _read_csv(file: Path, names: Sequence[str]) -> Rows:
    with file.open(newline="", encoding=encoding(file)) as stream:
        table = csv.reader(stream)
        heads = next(table, [])
        columns = [i for i, head in enumerate(heads) if head.startswith("p_")]
        if "file" not in heads or not columns:
            raise ValueError(f"its columns are {listed(heads) or 'none'}")
        at, own, p = heads.index("file"), [], []
        for row in filter(None, table):
            if len(row) != len(heads):
                raise ValueError(f"line {table.line_num} has {len(row)} of {len(heads)} columns")
            own.append(row[at])
            p.append(torch.tensor([float(row[i]) for i in columns]))
    return tuple(heads[i].removeprefix("p_") for i in columns), _by_key(own, p)


def _read_npz(file: Path, names: Sequence[str]) -> Rows:
    with file.open("rb") as stream, np.load(stream, allow_pickle=False) as held:
        p = torch.from_numpy(np.asarray(held["p"], dtype=np.float32))
        classes = tuple(map(str, held["classes"].tolist()))
        own = [*map(str, held["names"].tolist())] if "names" in held else None
    if p.dim() != 2 or p.shape[1] != len(classes):
        raise ValueError(f"p is {tuple(p.shape)} for {len(classes)} classes")
    return classes, _by_key(_numbered(names, len(p)) if own is None else own, p)


def _numbered(names: Sequence[str], count: int) -> list[str]:
    """Names in the order of their numbers, as rows of arrays have them; others are refused."""
    by_number = {name.rpartition("/")[2]: name for name in names}
    wanted = [*map(str, range(len(names)))]
    if by_number.keys() != set(wanted):  # those of several files begin anew in each
        raise ValueError("it lacks `names`, those of the images")
    if count != len(names):
        raise ValueError(f"p has {count} rows for {len(names)} examples")
    return [by_number[number] for number in wanted]


READERS: dict[str, Callable[[Path, Sequence[str]], Rows]] = {".csv": _read_csv, ".npz": _read_npz}
