"""Arrays in an .npz file: `x_train, y_train, x_test, y_test`, or `x, y`; dense or CSR pieces.

    images   uint8 (N, H, W) or (N, H, W, 3)
    vectors  float or integer (N, d)
    sparse   scipy's CSR as x_train_data, x_train_indices, x_train_indptr, x_train_shape
    labels   integer (N,), from 0
    classes  optional, C strings: the name of each label

Sparse vectors are made dense, which takes N * d * 4 bytes. Arrays are read one by one and only
when asked for: a target's labels stay in the file.
"""

import math
import os
import tokenize
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Self

import numpy as np
import torch
from torch import Tensor

from fedda.data import sparse
from fedda.data.sets import listed
from fedda.errors import DataError

_PIECES = ("data", "indices", "indptr", "shape")
_MOST_CLASSES = 1 << 16  # a higher label is a mistake, such as an identity number
_MOST_ZEROS = 500  # bytes from one compressed byte; only an array of nothing but zeros has more
_MOST_SPARSE = 100_000  # entries of sparse vectors for each one that is not zero
_SMALL = 1 << 24  # bytes of an array that may hold nothing but zeros
# What damaged files raise in zipfile and numpy; SystemError is for text that is no Unicode.
_UNREADABLE = (OSError, ValueError, EOFError, KeyError, TypeError, OverflowError, SystemError)
_UNREADABLE += (NotImplementedError, RuntimeError, RecursionError, SyntaxError)
_UNREADABLE += (zipfile.BadZipFile, zlib.error, tokenize.TokenError)


class Npz:
    """An open .npz file; every problem with it is a DataError that names it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with ExitStack() as stack, self._reading():
            stream = stack.enter_context(path.open("rb"))
            file = np.load(stream, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise DataError(f"{path} is one array and not an .npz: write it with numpy.savez")
            stack.callback(file.close)
            self._close = stack.pop_all().close
        self._file = file
        self.keys: tuple[str, ...] = tuple(file.files)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._close()

    def has(self, x: str) -> bool:
        """Whether the file has the examples `x`, dense or as CSR pieces."""
        return x in self.keys or f"{x}_data" in self.keys

    def used(self, x: str) -> set[str]:
        """The names of the arrays that hold the examples `x`."""
        return {x} if x in self.keys else {f"{x}_{piece}" for piece in _PIECES}

    def shape(self, x: str) -> tuple[int, ...]:
        """(N, channels, H, W) or (N, d) of the examples `x`, without reading them."""
        if x not in self.keys:
            return self._csr_shape(x)
        stored, dtype = self._header(x)
        if dtype == np.uint8 and len(stored) in (3, 4):
            n, height, width, channels = stored if len(stored) == 4 else (*stored, 1)
            if channels not in (1, 3):
                raise self._bad(x, stored, dtype)
            shape = (n, channels, height, width)
        elif dtype.kind in "fiub" and len(stored) == 2:
            shape = stored
        else:
            raise self._bad(x, stored, dtype)
        if 0 in shape:
            raise DataError(
                f"{x} in {self.path} is empty, {stored}: one example or more is needed; give "
                f"another file"
            )
        return shape

    def examples(self, x: str) -> Tensor:
        """-> uint8 (N, channels, H, W) or float32 (N, d)."""
        shape = self.shape(x)
        with np.errstate(over="ignore"):  # values too large for float32 become inf: refused below
            if x not in self.keys:
                return self._finite(x, self._csr(x, *shape))
            array = self._array(x)
            if len(shape) == 2:
                return self._finite(x, np.ascontiguousarray(array, dtype=np.float32))
        if array.ndim == 3:
            array = array[..., None]
        return torch.from_numpy(np.ascontiguousarray(array.transpose(0, 3, 1, 2)))

    def labels(self, y: str, n: int) -> Tensor:
        """-> int64 (N,), none negative."""
        shape, dtype = self._header(y)
        if dtype.kind not in "iu" or len(shape) != 1:
            raise DataError(
                f"{y} in {self.path} is {dtype} {shape}, but labels are one integer per example: "
                f"number the classes from 0 and save {y} as int64 of shape ({n},)"
            )
        if shape[0] != n:
            raise DataError(
                f"{self.path} has {n} examples and {shape[0]} labels in {y}: one label per "
                f"example is needed; add or remove labels"
            )
        array = self._array(y)
        if array.min() < 0:
            raise DataError(
                f"{y} in {self.path} has the label {array.min()}: classes are numbered from 0, and "
                f"a source has no unlabelled examples; remove these or number the classes again"
            )
        if array.max() >= _MOST_CLASSES:
            raise DataError(
                f"{y} in {self.path} has the label {array.max()}: classes are numbered from 0 to "
                f"C - 1 with at most {_MOST_CLASSES} of them; number them again"
            )
        return torch.from_numpy(array.astype(np.int64))

    def classes(self, y: str, labels: Tensor) -> tuple[str, ...]:
        """The names in `classes`, or "0" to the highest label; `y` names the labels in messages."""
        highest = int(labels.max())
        if "classes" not in self.keys:
            return tuple(map(str, range(highest + 1)))
        shape, dtype = self._header("classes")
        with self._reading("classes"):
            names = [str(name) for name in self._array("classes")] if len(shape) == 1 else []
        if dtype.kind != "U" or len(set(names)) != len(names) or not names:
            raise DataError(
                f"classes in {self.path} is {dtype} {shape}: one string per class is needed, "
                f"each different, as numpy.array(['cat', 'dog'])"
            )
        if highest >= len(names):
            raise DataError(
                f"{y} in {self.path} has the label {highest}, but `classes` names {len(names)} "
                f"classes, 0 to {len(names) - 1}: add the missing names or mend the labels"
            )
        return tuple(names)

    @contextmanager
    def _reading(self, key: str = "") -> Iterator[None]:
        try:
            yield
        except _UNREADABLE as error:
            raise DataError(
                f"{f'{key} in ' if key else ''}{self.path} cannot be read ({error}): the file is "
                f"damaged or is no .npz; write it again with numpy.savez_compressed"
            ) from error

    def _header(self, key: str) -> tuple[tuple[int, ...], np.dtype]:
        """Shape and type of an array, from its first bytes."""
        assert self._file.zip is not None
        with self._reading(key), self._file.zip.open(f"{key}.npy") as stream:
            version = np.lib.format.read_magic(stream)
            if version == (1, 0):
                shape, _, dtype = np.lib.format.read_array_header_1_0(stream)
            else:
                shape, _, dtype = np.lib.format.read_array_header_2_0(stream)
            member, head = self._file.zip.getinfo(f"{key}.npy"), stream.tell()
        if dtype.hasobject:
            raise DataError(
                f"{key} in {self.path} holds Python objects, which are never read because "
                f"unpickling can run any code: save plain numbers or strings"
            )
        size = math.prod(shape) * dtype.itemsize
        if size + head != member.file_size:
            raise DataError(
                f"{key} in {self.path} claims {size} bytes of values and holds "
                f"{member.file_size - head}: the file is damaged; write it again with "
                f"numpy.savez_compressed"
            )
        if size > max(_SMALL, _MOST_ZEROS * member.compress_size):
            raise DataError(
                f"{key} in {self.path} grows from {member.compress_size} to {size} bytes, which "
                f"only zeros can: give real data, or write the file with numpy.savez"
            )
        self._check_room(key, size)
        return shape, dtype

    def _check_room(self, key: str, size: int) -> None:
        has = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        if size > has:
            raise DataError(
                f"{key} in {self.path} needs {size / 2**30:.0f} GiB and this machine has "
                f"{has / 2**30:.0f}: keep fewer examples or columns"
            )

    def _array(self, key: str) -> np.ndarray:
        with self._reading(key):
            return self._file[key]

    def _bad(self, x: str, shape: tuple[int, ...], dtype: np.dtype) -> DataError:
        return DataError(
            f"{x} in {self.path} is {dtype} {shape}: images are needed as uint8 (N, H, W) or "
            f"(N, H, W, 3), vectors as numbers (N, d)"
        )

    def _finite(self, x: str, array: np.ndarray) -> Tensor:
        vectors = torch.from_numpy(array)
        bad = (~vectors.isfinite().all(dim=1)).nonzero()
        if len(bad):
            raise DataError(
                f"{x} in {self.path} has values that are not finite in {len(bad)} rows, the first "
                f"is row {int(bad[0])}: fill or remove them"
            )
        return vectors

    def _csr_shape(self, x: str) -> tuple[int, int]:
        missing = [f"{x}_{piece}" for piece in _PIECES if f"{x}_{piece}" not in self.keys]
        if missing:
            raise DataError(
                f"{self.path} has {x}_data but no {listed(missing)}: sparse vectors need the four "
                f"pieces {', '.join(f'{x}_{piece}' for piece in _PIECES)}"
            )
        self._header(f"{x}_shape")
        shape = self._array(f"{x}_shape")
        if shape.shape != (2,) or shape.dtype.kind not in "iu" or shape.min() < 1:
            raise DataError(
                f"{x}_shape in {self.path} is {shape.tolist()}: the number of examples and of "
                f"columns is needed, two positive integers"
            )
        return int(shape[0]), int(shape[1])

    def _csr(self, x: str, n: int, d: int) -> np.ndarray:
        """Make the pieces dense -> float32 (N, d)."""
        names = [f"{x}_{piece}" for piece in _PIECES[:3]]
        for name in names:
            self._header(name)  # refuses Python objects
        data, indices, indptr = map(self._array, names)
        if wrong := sparse.mismatch(data, indices, indptr, n, d):
            raise DataError(
                f"the CSR pieces of {x} in {self.path} do not fit together: {wrong}; write the "
                f"attributes data, indices, indptr and shape of one scipy.sparse.csr_matrix"
            )
        if 4 * n * d > _SMALL and n * d > _MOST_SPARSE * len(data):
            raise DataError(
                f"{x} in {self.path} is {n} x {d} with {len(data)} values, so nearly all of it is "
                f"zeros: {x}_shape is wrong, or keep only columns that are used"
            )
        self._check_room(x, 4 * n * d)
        return sparse.densify(data, indices, indptr, n, d)
