"""Decoded examples on disk, so that a set may be larger than memory and is decoded only once.

An entry is one file: all images as bytes, or all vectors as float32, then what was said of them,
as JSON, and a trailer with its shape and a checksum. Its name is a digest of what they are made
from: the content of every file or array row in order, the form, and the versions of Pillow and of
this layout. Names and dates of files do not matter, so an entry is never used for other examples,
and a copied folder finds it. Every entry is read once and checked before it is used; one that is
damaged, or was interrupted, is made again. What is read of it is a tensor that stays in the file
(`Stored`).
"""

import contextlib
import hashlib
import json
import logging
import math
import mmap
import os
import shutil
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import PIL
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from fedda.errors import ConfigError, DataError, reason
from fedda.files import clear_partial, keep_newest, keeping
from fedda.ops import system

logger = logging.getLogger("fedda.data")

Notice = Callable[[str], object]

LARGE = 10**9  # bytes of decoded examples from which `auto` keeps them on disk
KEPT = 4  # entries: training and test images, for two runs of different forms

DIGEST = 16  # bytes of a digest of an example
_LAYOUT = 2
_MAGIC = {4: b"fedda-u8", 2: b"fedda-f4"}  # images (N, channels, H, W); vectors (N, d)
_TRAILER = struct.Struct("<8s4QQ")  # magic, N, channels, H, W (or N, d, 0, 0), crc32 of the values
_PIECE = 1 << 24  # bytes read at a time to check an entry
_ENDING = ".images"
_MOST_MAPPED = 1 << 26  # bytes read before the file's pages are given back to the system

_aten = torch.ops.aten


class Cache:
    """A folder of decoded sets of examples, of which the last used are kept.

    Args:
        folder: it is made when it is needed.
        always: whether small sets go there, too.
    """

    def __init__(self, folder: Path, always: bool = False) -> None:
        self.folder = folder
        self._always = always

    @classmethod
    def of(cls, mode: Literal["auto", "memory", "disk"], folder: Path | None) -> "Cache | None":
        """The cache that a site asked for; in memory there is none.

        Raises:
            ConfigError: there is no folder for `disk`.
        """
        if mode == "disk" and folder is None:
            raise ConfigError("A cache on disk needs a state directory; give --state-dir.")
        if mode == "memory" or folder is None:
            return None
        return cls(folder, always=mode == "disk")

    def takes(self, shape: tuple[int, ...]) -> bool:
        """Whether a set of this shape belongs on disk: more than 1 GB, or a quarter of memory."""
        return self._always or is_large(shape)

    def get(
        self,
        key: str,
        shape: tuple[int, ...],
        read: Callable[[Notice], Iterable[np.ndarray]],
        notice: Notice,
    ) -> Tensor:
        """The examples of an entry, which is made if there is no sound one.

        Args:
            key: the entry's name.
            shape: (N, channels, H, W) of uint8, or (N, d) of float32.
            read: gives the examples, some at a time in order, and says what is odd of them.
            notice: is told so, even if that was found when the entry was made.

        Raises:
            DataError: there is no room for it, or it cannot be written.
        """
        found, said = self._find(key, shape), list[str]()
        if found is None:
            found = self._make(key, shape, read(said.append), said)
        else:
            with self._path(key).open("rb") as file:
                file.seek(_size(shape))
                said = json.loads(file.read()[: -_TRAILER.size])
        for text in said:
            notice(text)
        return found

    def _find(self, key: str, shape: tuple[int, ...]) -> Tensor | None:
        path = self._path(key)
        if not path.exists():
            return None
        if wrong := _wrong(path, shape):
            logger.warning("%s is made again: %s", path, wrong)
            path.unlink(missing_ok=True)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # the entries used last are kept
        return Stored.whole(path, shape, _dtype(shape))

    def _make(
        self, key: str, shape: tuple[int, ...], examples: Iterable[np.ndarray], said: Sequence[str]
    ) -> Tensor:
        path, size = self._path(key), _size(shape)
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            self._make_room(path)
            if (free := shutil.disk_usage(self.folder).free) < size + _TRAILER.size:
                raise DataError(
                    f"the decoded examples take {size / 1e9:.1f} GB and {self.folder} has "
                    f"{free / 1e9:.1f} GB left: make room, choose another --state-dir, or keep "
                    f"them in memory (--cache memory)"
                )
            with keeping(path, private=True) as part, part.open("wb") as file:
                checksum = 0
                text = (np.frombuffer(json.dumps(said).encode(), np.uint8) for _ in (said,))
                for some in chain(examples, text):  # all is said once all are read
                    flat = np.ascontiguousarray(some).data
                    checksum = zlib.crc32(flat, checksum)
                    file.write(flat)
                file.write(_TRAILER.pack(*_stated(shape), checksum))
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise DataError(
                f"{path} cannot be written ({reason(error)}): check the folder, choose another "
                f"--state-dir, or keep them in memory (--cache memory)"
            ) from error
        return Stored.whole(path, shape, _dtype(shape))

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}{_ENDING}"

    def _make_room(self, new: Path) -> None:
        """Delete what an interruption left, and the entries used longest ago."""
        clear_partial(self.folder, f"*{_ENDING}")
        others = (path for path in self.folder.glob(f"*{_ENDING}") if path != new)
        keep_newest(others, KEPT - 1)  # a process that uses a deleted one keeps it open


def is_large(shape: tuple[int, ...]) -> bool:
    """Whether a set of this shape, (N, channels, H, W) or (N, d), goes to disk by itself."""
    return _size(shape) > min(LARGE, system.memory() // 4)


def key_of(contents: Iterable[bytes], *form: Any) -> str:
    """The name of an entry.

    Args:
        contents: a digest of each example's content, in order.
        form: everything else that decides over the values.
    """
    about = json.dumps([_LAYOUT, PIL.__version__, *form]).encode()
    total = hashlib.blake2b(about, digest_size=DIGEST)
    for content in contents:
        total.update(content)
    return total.hexdigest()


def _dtype(shape: tuple[int, ...]) -> torch.dtype:
    return torch.uint8 if len(shape) == 4 else torch.float32


def _size(shape: tuple[int, ...]) -> int:
    """Bytes of the examples of an entry."""
    return math.prod(shape) * _dtype(shape).itemsize


def _stated(shape: tuple[int, ...]) -> tuple[bytes, int, int, int, int]:
    """What a trailer says of them."""
    n, first, *more = shape
    height, width = more or (0, 0)
    return _MAGIC[len(shape)], n, first, height, width


def _wrong(path: Path, shape: tuple[int, ...]) -> str:
    """What is wrong with an entry, in words; empty if nothing is."""
    checksum = 0
    try:
        size = path.stat().st_size - _TRAILER.size
        if size < _size(shape):
            return "it has another size than its examples"
        with path.open("rb") as file:
            for start in range(0, size, _PIECE):
                checksum = zlib.crc32(file.read(min(_PIECE, size - start)), checksum)
            *its, stated = _TRAILER.unpack(file.read(_TRAILER.size))
    except (OSError, struct.error) as error:
        return f"it cannot be read ({reason(error)})"
    if tuple(its) != _stated(shape):
        return "it was made for examples of another shape"
    return "" if stated == checksum else "its checksum is wrong"


Read = Callable[[np.ndarray], Tensor]  # the rows at some indices (n,), in that order, in memory


def rows_of(path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> Read:
    """What reads a file that begins with N rows of numbers, through a memory map.

    What was read is given back to the system every 64 MB, which may keep it in its file cache, so
    the process stays small however large the file is.

    Args:
        path: the file; it may be deleted while it is open.
        shape: (N, ...) of its numbers.
        dtype: their type, uint8 or float32.
    """
    with path.open("rb") as file:
        whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    kind = np.uint8 if dtype == torch.uint8 else np.float32
    rows, mapped = np.frombuffer(whole, kind, math.prod(shape)).reshape(shape[0], -1), 0

    def read(chosen: np.ndarray) -> Tensor:
        nonlocal mapped
        found = torch.from_numpy(rows[chosen]).reshape(len(chosen), *shape[1:])
        mapped += found.nbytes
        if mapped > _MOST_MAPPED:
            whole.madvise(mmap.MADV_DONTNEED)
            mapped = 0
        return found

    return read


class Stored(Tensor):
    """uint8 or float32 (n, ...): some rows of a file, in an order.

    `x[indices]` and `x[i]` read rows into memory; `x[a:b]`, `x.split(n)` and `x.take_rows(indices)`
    choose rows and read nothing. Every other operation reads all chosen rows first, so its result
    is that of an ordinary tensor.
    """

    _rows: Read
    _order: np.ndarray

    @staticmethod
    def __new__(
        cls, rows: Read, order: np.ndarray, one: tuple[int, ...], dtype: torch.dtype
    ) -> "Stored":
        made = Tensor._make_wrapper_subclass(cls, (len(order), *one), dtype=dtype)  # type: ignore[attr-defined]
        made._rows, made._order = rows, order
        return made

    @classmethod
    def whole(
        cls, path: Path, shape: tuple[int, ...], dtype: torch.dtype = torch.uint8
    ) -> "Stored":
        """All rows of a file, in their order."""
        return Stored(rows_of(path, shape, dtype), np.arange(shape[0]), shape[1:], dtype)

    def _in(self, order: np.ndarray) -> "Stored":
        """Rows of the same file in another order."""
        return Stored(self._rows, order, tuple(self.shape[1:]), self.dtype)

    def take_rows(self, chosen: Tensor) -> "Stored":
        """The rows at some indices, in that order, without reading them."""
        return self._in(self._order[chosen.numpy()])

    def changed(self, change: Callable[[Tensor], Tensor]) -> "Stored":
        """The same rows, of which each becomes another whenever it is read.

        Args:
            change: takes some (n, ...) and gives as many, each of which depends on its own row
                alone.
        """
        rows = self._rows
        one = change(rows(np.arange(1)))
        return Stored(lambda at: change(rows(at)), self._order, tuple(one.shape[1:]), one.dtype)

    def read(self) -> Tensor:
        """All chosen rows, in memory."""
        return self._rows(self._order)

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
    return x._rows(x._order[first.cpu().numpy()])


def _index_select(x: Stored, dim: int, index: Tensor) -> Any:
    return _index(x, [index]) if dim == 0 and index.ndim == 1 else NotImplemented


def _select(x: Stored, dim: int, index: int) -> Any:
    return x._rows(x._order[[index]])[0] if dim == 0 else NotImplemented


def _slice(
    x: Stored, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Any:
    return x._in(x._order[start:end:step]) if dim == 0 else NotImplemented


def _split(x: Stored, size: int, dim: int = 0) -> Any:
    if dim != 0:
        return NotImplemented
    return [x._in(x._order[i : i + size]) for i in range(0, max(len(x), 1), size)]


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
