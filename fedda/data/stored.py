"""Examples that stay in a file: a tensor whose rows are read when they are asked for."""

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

_MOST_MAPPED = 1 << 26  # bytes read before the file's pages are given back to the system

_aten = torch.ops.aten


class Rows:
    """A file that begins with N rows of numbers, read through a memory map.

    What was read is given back to the system every 64 MB, which may keep it in its file cache, so
    the process stays small however large the file is.

    Args:
        path: the file; it may be deleted while it is open.
        shape: (N, ...) of its numbers.
        dtype: their type, uint8 or float32.
    """

    def __init__(
        self, path: Path, shape: tuple[int, ...], dtype: torch.dtype = torch.uint8
    ) -> None:
        self.shape, self.dtype = shape, dtype
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        n, *one = shape
        count = n * int(np.prod(one))
        kind = np.uint8 if dtype == torch.uint8 else np.float32
        self._rows = np.frombuffer(self._map, kind, count).reshape(n, -1)
        self._mapped = 0

    def read(self, chosen: np.ndarray) -> Tensor:
        """The rows at some indices (n,), in that order, in memory -> (n, ...)."""
        found = torch.from_numpy(self._rows[chosen]).reshape(len(chosen), *self.shape[1:])
        self._mapped += found.nbytes
        if self._mapped > _MOST_MAPPED:
            self._map.madvise(mmap.MADV_DONTNEED)
            self._mapped = 0
        return found


class ChangedRows:
    """Rows of a file that become others whenever they are read.

    Args:
        rows: as they are.
        change: takes some (n, ...) and gives as many, each of which depends on its own row alone.
    """

    def __init__(self, rows: "Rows | ChangedRows", change: Callable[[Tensor], Tensor]) -> None:
        self._rows, self._change = rows, change
        one = self.read(np.arange(1))
        self.shape, self.dtype = (rows.shape[0], *one.shape[1:]), one.dtype

    def read(self, chosen: np.ndarray) -> Tensor:
        """The rows at some indices (n,), in that order, in memory -> (n, ...)."""
        return self._change(self._rows.read(chosen))


class Stored(Tensor):
    """uint8 or float32 (n, ...): some rows of a file, in an order.

    `x[indices]` and `x[i]` read rows into memory; `x[a:b]`, `x.split(n)` and `x.take_rows(indices)`
    choose rows and read nothing. Every other operation reads all chosen rows first, so its result
    is that of an ordinary tensor.
    """

    _rows: Rows | ChangedRows
    _order: np.ndarray

    @staticmethod
    def __new__(cls, rows: Rows | ChangedRows, order: np.ndarray) -> "Stored":
        shape = (len(order), *rows.shape[1:])
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=rows.dtype)  # type: ignore[attr-defined]
        made._rows, made._order = rows, order
        return made

    @classmethod
    def whole(cls, path: Path, shape: tuple[int, ...], dtype: torch.dtype = torch.uint8) -> Self:
        """All rows of a file, in their order."""
        return cls(Rows(path, shape, dtype), np.arange(shape[0]))

    def take_rows(self, chosen: Tensor) -> "Stored":
        """The rows at some indices, in that order, without reading them."""
        return Stored(self._rows, self._order[chosen.numpy()])

    def changed(self, change: Callable[[Tensor], Tensor]) -> "Stored":
        """The same rows, of which each becomes another when it is read (`ChangedRows`)."""
        return Stored(ChangedRows(self._rows, change), self._order)

    def read(self) -> Tensor:
        """All chosen rows, in memory."""
        return self._rows.read(self._order)

    def numpy(self, *, force: bool = False) -> np.ndarray:
        """All chosen rows as an array in memory."""
        return self.read().numpy(force=force)

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"Stored({tuple(self.shape)})"  # never the values: a repr ends up in logs

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        x, *more = args
        if isinstance(x, Stored) and not kwargs:
            lazy = _LAZY.get(func)
            found = lazy(x, *more) if lazy else NotImplemented
            if found is not NotImplemented:
                return found

        def in_memory(value: Any) -> Any:
            return value.read() if isinstance(value, Stored) else value

        return func(*tree_map(in_memory, args), **tree_map(in_memory, kwargs or {}))


def _index(x: Stored, indices: list[Tensor | None]) -> Any:
    first = indices[0]
    if len(indices) != 1 or first is None or first.ndim != 1:
        return NotImplemented
    if first.dtype == torch.bool and len(first) != len(x):
        return NotImplemented
    return x._rows.read(x._order[first.cpu().numpy()])


def _index_select(x: Stored, dim: int, index: Tensor) -> Any:
    return _index(x, [index]) if dim == 0 and index.ndim == 1 else NotImplemented


def _select(x: Stored, dim: int, index: int) -> Any:
    return x._rows.read(x._order[[index]])[0] if dim == 0 else NotImplemented


def _slice(
    x: Stored, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    return Stored(x._rows, x._order[start:end:step]) if dim == 0 else NotImplemented


def _split(x: Stored, size: int, dim: int = 0) -> Any:
    if dim != 0:
        return NotImplemented
    return [Stored(x._rows, x._order[i : i + size]) for i in range(0, max(len(x), 1), size)]


_LAZY: dict[Any, Any] = {
    _aten.index.Tensor: _index,
    _aten.index_select.default: _index_select,
    _aten.select.int: _select,
    _aten.slice.Tensor: _slice,
    _aten.split.Tensor: _split,
    _aten.detach.default: lambda x: x,
}


def take_rows(x: Tensor, chosen: Tensor) -> Tensor:
    """The rows of a tensor at some indices; those of a stored one stay in its file."""
    return x.take_rows(chosen) if isinstance(x, Stored) else x[chosen]
