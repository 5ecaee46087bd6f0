"""Arrays in an .npz file: `x_train, y_train, x_test, y_test`, or `x, y`; dense or CSR pieces.

    images   uint8 (N, H, W) or (N, H, W, 3)
    vectors  float or integer (N, d)
    sparse   scipy's CSR as x_train_data, x_train_indices, x_train_indptr, x_train_shape
    labels   integer (N,), from 0
    classes  optional, C strings: the name of each label
    columns  optional, d strings: the name of each number of a vector
    texts    optional, strings: a column's name and, a line each, the texts that its numbers mean

A gap in vectors is NaN; infinite values are refused.

Arrays are read one by one and only when asked for: a target's labels stay in the file. Examples are
read some at a time, so that they may be more than memory holds; in Fortran order, however, they are
read whole, and so are the pieces of sparse vectors, which are made dense (4 bytes per column).
"""

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

from fedda.data import decompression_limits, naming, npy
from fedda.data.categories import Coding, Texts, check_coded, listed_as
from fedda.data.naming import listed
from fedda.data.own_columns import Gaps, gaps_of
from fedda.errors import DataError

_PIECES = ("data", "indices", "indptr", "shape")
_MOST_CLASSES = 1 << 16  # a higher label is a mistake, such as an identity number
_MOST_SPARSE = 100_000  # entries of sparse vectors for each one that is not zero
# What damaged files raise in zipfile and numpy; SystemError is for text that is no Unicode.
_UNREADABLE = (OSError, ValueError, EOFError, KeyError, TypeError, OverflowError, SystemError)
_UNREADABLE += (NotImplementedError, RuntimeError, RecursionError, SyntaxError)
_UNREADABLE += (zipfile.BadZipFile, zlib.error, tokenize.TokenError)


def check_highest(labels: str, highest: int) -> None:
    """Check that whole-number labels are classes, by the highest of them.

    Raises:
        DataError: they are not; `labels` says what they are.
    """
    if highest >= _MOST_CLASSES:
        raise DataError(
            f"{labels} has the label {highest}: classes are numbered from 0 to C - 1 with at most "
            f"{_MOST_CLASSES} of them; number them again"
        )


class Npz:
    """An open .npz file; every problem with it is a DataError that names it."""

    # what makes the model's columns of the file's; None: they are the same
    coding: Coding | None = None

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
        shape = self._stored(x)
        return shape if self.coding is None else (shape[0], len(self.coding.names))

    def _stored(self, x: str) -> tuple[int, ...]:
        """The same as it lies in the file."""
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

    def examples(self, x: str, batch: int = 1) -> Iterator[Tensor]:
        """All examples in order, some at a time -> uint8 (n, channels, H, W) or float32 (n, d).

        Args:
            x: the name of the array.
            batch: n is a multiple of it, but for the last.
        """
        shape = self._stored(x)
        if len(shape) == 2:
            found = self._finite(x, self._vectors(x, *shape, batch))
            yield from found if self.coding is None else self.coding.every(found)
            return
        for images in self._rows(x, batch):  # (n, H, W) or (n, H, W, channels)
            images = images.reshape(*images.shape[:3], shape[1]).transpose(0, 3, 1, 2)
            yield torch.from_numpy(np.ascontiguousarray(images))

    def columns(self, d: int) -> tuple[str, ...]:
        """The names of the columns of vectors of d numbers; "0" to d - 1 where none are given."""
        named = self.named  # read anew each time
        return named if len(named) == d else tuple(map(str, range(d)))

    @property
    def named(self) -> tuple[str, ...]:
        """The names of the columns of vectors; none: the file gives none."""
        return self._named() if self.coding is None else self.coding.names

    @property
    def texts(self) -> Texts:
        """The texts that numbers in the file's columns mean."""
        columns = {*self._named()}
        if not columns or "texts" not in self.keys or self._header("texts")[1].kind != "U":
            return {}
        found = (str(text).split("\n") for text in self._array("texts").flat)
        return {name: of for name, *of in found if of and name in columns}

    @property
    def listed_texts(self) -> tuple[str, ...]:
        """The columns of texts with their values, as a run lists them."""
        return tuple(listed_as(*each) for each in self.texts.items())

    def without_texts(self, vectors: Tensor) -> Tensor:
        """Vectors (n, d) with gaps in place of numbers that mean texts; images as they are."""
        texts = self.texts
        places = [i for i, name in enumerate(self.named) if name in texts]
        return vectors.index_fill(1, torch.tensor(places), torch.nan) if places else vectors

    def check_texts(self) -> None:
        """Refuse columns of texts that the run does not code.

        Raises:
            DataError: there are some.
        """
        check_coded(self.path, self.listed_texts, self.named)

    def _named(self) -> tuple[str, ...]:
        """The names of the file's own columns."""
        if "columns" not in self.keys or self._header("columns")[1].kind != "U":
            return ()
        return tuple(map(str, self._array("columns").flat))

    def odd_columns(self, x: str, y: Tensor | None) -> list[str]:
        """Warnings of columns of the examples `x`, with labels y (N,), that may be no measurements.

        Only where columns have names, as people then choose among them.
        """
        return []

    def unlabelled(self, x: str) -> DataError:
        """The error of a source whose examples `x` have no labels."""
        return DataError(
            f"{self.path} has {x} but no y{x[1:]} (found: {listed(self.keys, 12)}), but a source "
            f"needs labels: add y{x[1:]}, or let the site be a target (--role target, or --target)"
        )

    def row_keys(self, x: str) -> list[str]:
        """What the file itself calls the examples `x`; none if it names none."""
        return []

    def gaps(self, x: str) -> Gaps:
        """Where vectors have no value; of images nowhere."""
        shape = self.shape(x)
        name = x if x in self.keys else f"{x}_data"
        if len(shape) != 2 or self._header(name)[1].kind != "f":
            return Gaps.none(0)
        return sum(map(gaps_of, self.examples(x)), Gaps.none(shape[1]))

    def check_room(self, x: str, size: int) -> None:
        """Refuse to keep `size` bytes of an array in memory, if that is more than there is.

        Raises:
            DataError: it is.
        """
        decompression_limits.check_memory(f"{x} in {self.path}", size)

    def _check_growth(self, key: str, size: int, stored: int) -> None:
        """Refuse an array that is far larger than its part of the file."""
        if decompression_limits.grows(size, stored):
            raise DataError(
                f"{key} in {self.path} grows from {stored} to {size} bytes, which only zeros can: "
                f"give real data, or write the file without compression"
            )

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
        check_highest(f"{y} in {self.path}", int(array.max()))
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
        naming.check(names, f"classes in {self.path}")
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
        about = self._start(key)
        return about.shape, about.dtype

    def _start(self, key: str) -> npy.Start:
        assert self._file.zip is not None
        with self._reading(key), self._file.zip.open(f"{key}.npy") as stream:
            about = npy.start(stream)
            member, head = self._file.zip.getinfo(f"{key}.npy"), stream.tell()
        if about.dtype.hasobject:
            raise DataError(
                f"{key} in {self.path} holds Python objects, which are never read because "
                f"unpickling can run any code: save plain numbers or strings"
            )
        if about.size + head != member.file_size:
            raise DataError(
                f"{key} in {self.path} claims {about.size} bytes of values and holds "
                f"{member.file_size - head}: the file is damaged; write it again with "
                f"numpy.savez_compressed"
            )
        self._check_growth(key, about.size, member.compress_size)
        return about

    def _array(self, key: str) -> np.ndarray:
        """A whole array."""
        self.check_room(key, self._start(key).size)
        with self._reading(key):
            return self._file[key]

    def _rows(self, key: str, batch: int) -> Iterator[np.ndarray]:
        """Rows of an array in order, some at a time -> (n, ...)."""
        about = self._start(key)
        many = npy.at_a_time(about.shape, about.dtype.itemsize, batch)
        if about.fortran:
            array = self._array(key)
            yield from (array[i : i + many] for i in range(0, len(array), many))
            return
        assert self._file.zip is not None
        with self._reading(key), self._file.zip.open(f"{key}.npy") as stream:
            yield from npy.rows(stream, npy.start(stream), many)

    def _bad(self, x: str, shape: tuple[int, ...], dtype: np.dtype) -> DataError:
        return DataError(
            f"{x} in {self.path} is {dtype} {shape}: images are needed as uint8 (N, H, W) or "
            f"(N, H, W, 3), vectors as numbers (N, d)"
        )

    def _vectors(self, x: str, n: int, d: int, batch: int) -> Iterator[Tensor]:
        """Dense or sparse vectors, some at a time -> float32 (m, d)."""
        if x in self.keys:
            for vectors in self._rows(x, batch):
                with np.errstate(over="ignore"):  # too large for float32 is inf: refused later
                    yield torch.from_numpy(np.ascontiguousarray(vectors, dtype=np.float32))
            return
        from scipy.sparse import csr_array  # it takes half a second

        data, indices, indptr = self._csr(x, n, d)
        many = npy.at_a_time((n, d), 4, batch)
        for i in range(0, n, many):
            some = indptr[i : i + many + 1]
            inside = slice(int(some[0]), int(some[-1]))
            with np.errstate(over="ignore"):
                values = data[inside].astype(np.float32)
            pieces = values, indices[inside].astype(np.int64), some.astype(np.int64) - inside.start
            yield torch.from_numpy(csr_array(pieces, shape=(len(some) - 1, d)).toarray())

    def _finite(self, x: str, found: Iterator[Tensor]) -> Iterator[Tensor]:
        """The vectors, if none is infinite; else those that are are counted and refused."""
        done, bad, first = 0, 0, 0
        for vectors in found:
            odd = vectors.isinf().any(dim=1).nonzero()[:, 0]
            first = first if bad or not len(odd) else done + int(odd[0])
            done, bad = done + len(vectors), bad + len(odd)
            if not bad:
                yield vectors
        if bad:
            raise DataError(
                f"{x} in {self.path} has values that are not finite in {bad} rows, the first is "
                f"row {first}: fill or remove them (a gap is NaN), or scale what is too large for "
                "single precision"
            )

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
        n, d = map(int, shape)
        entries = (*self._header(f"{x}_data")[0], 0)[0]
        if 4 * n * d > decompression_limits.SMALL and n * d > _MOST_SPARSE * entries:
            raise DataError(
                f"{x} in {self.path} is {n} x {d} with {entries} values, so nearly all of it is "
                f"zeros: {x}_shape is wrong, or keep only columns that are used"
            )
        return n, d

    def _csr(self, x: str, n: int, d: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The pieces of sparse vectors (N, d), which fit together -> data, indices, indptr."""
        names = [f"{x}_{piece}" for piece in _PIECES[:3]]
        for name in names:
            self._header(name)  # refuses Python objects, before any is read
        data, indices, indptr = map(self._array, names)
        if wrong := npy.mismatch(data, indices, indptr, n, d):
            raise DataError(
                f"the CSR pieces of {x} in {self.path} do not fit together: {wrong}; write the "
                f"attributes data, indices, indptr and shape of one scipy.sparse.csr_matrix"
            )
        return data, indices, indptr
