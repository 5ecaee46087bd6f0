"""Files of class probabilities: what a program has said of examples, by their names.

    NAME.csv    a table as `fedda predict` writes it: file, p_CLASS...
    NAME.npz    arrays `p` (N, C), `classes` (C,) and, but for rows of arrays, `names` (N,)

A reader takes the file and the names of the examples in question, and raises a ValueError or a
KeyError that says what is wrong.
"""

import csv
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedda.data.sets import listed
from fedda.results.plainly import cell

Rows = tuple[tuple[str, ...], Mapping[str, Tensor]]  # the classes, and by an example's name (C,)


def _read_csv(file: Path, names: Sequence[str]) -> Rows:
    with file.open(newline="", encoding="utf-8-sig") as stream:
        table = csv.reader(stream)
        heads = next(table, [])
        columns = [i for i, head in enumerate(heads) if head.startswith("p_")]
        if "file" not in heads or not columns:
            raise ValueError(f"its columns are {listed(heads) or 'none'}")
        at = heads.index("file")
        rows = {row[at]: torch.tensor([float(row[i]) for i in columns]) for row in table if row}
    return tuple(heads[i].removeprefix("p_") for i in columns), rows


def _read_npz(file: Path, names: Sequence[str]) -> Rows:
    with np.load(file, allow_pickle=False) as held:
        p = torch.from_numpy(np.asarray(held["p"], dtype=np.float32))
        classes = tuple(map(str, held["classes"].tolist()))
        own = [cell(str(name)) for name in held["names"].tolist()] if "names" in held else None
    if p.dim() != 2 or p.shape[1] != len(classes):
        raise ValueError(f"p is {tuple(p.shape)} for {len(classes)} classes")
    if own is None:  # rows of arrays are named by their numbers, and no other examples are
        numbers = [name.rpartition("/")[2] for name in names]
        if not all(number.isdecimal() for number in numbers):
            raise ValueError("it lacks `names`, those of the images")
        if len(p) != len(names):
            raise ValueError(f"p has {len(p)} rows for {len(names)} examples")
        return classes, {name: p[int(n)] for name, n in zip(names, numbers, strict=True)}
    if len(own) != len(p):
        raise ValueError(f"p has {len(p)} rows for {len(own)} names")
    return classes, dict(zip(own, p, strict=True))


READERS: dict[str, Callable[[Path, Sequence[str]], Rows]] = {".csv": _read_csv, ".npz": _read_npz}
