"""Arrays in an HDF5 file, with the names and shapes of those in an .npz file (`fedda.data.npz`).

Only values that lie in the file itself are read. Compressed chunks must be those of shuffle, gzip
and lzf: HDF5 inflates a chunk whole, whatever size it should have, so gzip's are measured before.
"""

import math
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fedda.data import decompression_limits, npy
from fedda.data.npz import Npz
from fedda.data.optional import needed
from fedda.errors import DataError

ENDINGS = (".h5", ".hdf5")
_GZIP, _SHUFFLE, _CHECKSUM, _LZF = 1, 2, 3, 32000  # the format's numbers of filters
_DEFLATES = 1032  # bytes that one byte of gzip becomes at most
_MISSING = ("_FillValue", "missing_value")  # attributes of a data set
_MOST_TEXT = 1 << 20  # characters of all names of classes, or of columns


class Hdf5(Npz):
    """An open HDF5 file, whose data sets at the top are the arrays."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._measured: set[str] = set()
        h5py = needed("h5py", "hdf5", f"{path} is an HDF5 file, which")
        try:
            self._file = h5py.File(path, "r")
            # Links may lead to other files of this machine, which nobody gave as data.
            kinds = {key: self._file.get(key, getlink=True) for key in self._file}
            sets = [key for key, link in kinds.items() if isinstance(link, h5py.HardLink)]
            self.keys = tuple(k for k in sets if isinstance(self._file[k], h5py.Dataset))
        except (OSError, RuntimeError, ValueError, KeyError) as error:
            raise DataError(
                f"{path} cannot be read as HDF5 ({error}): write it again with h5py"
            ) from error
        self._close = self._file.close

    def _header(self, key: str) -> tuple[tuple[int, ...], np.dtype]:
        with self._reading(key):
            found = self._file[key]
            shape, dtype = found.shape, found.dtype
        if shape is None or found.external or found.is_virtual:
            raise DataError(f"{key} in {self.path} holds no values of its own: write an array")
        if dtype.hasobject and key in ("classes", "columns", "texts"):
            return shape, np.dtype("U")
        if dtype.hasobject:
            raise DataError(
                f"{key} in {self.path} holds objects of variable length: save plain numbers"
            )
        if key not in self._measured:
            with self._reading(key):
                self._measure(key, found)
            self._measured.add(key)
        return shape, dtype

    def _measure(self, key: str, found: Any) -> None:
        """Refuse a data set of which little in the file would fill the memory."""
        size, stored = found.size * found.dtype.itemsize, found.id.get_storage_size()
        self._check_growth(key, size, stored)
        if not found.chunks:
            return
        about = found.id.get_create_plist()
        filters = [about.get_filter(i)[0] for i in range(about.get_nfilters())]
        if filters.count(_GZIP) > 1 or not {*filters} <= {_GZIP, _SHUFFLE, _CHECKSUM, _LZF}:
            raise DataError(
                f"{key} in {self.path} is compressed in a way that is not read: write it with "
                f"gzip, lzf or without compression"
            )
        chunk = math.prod(found.chunks) * found.dtype.itemsize
        self._check_growth(key, chunk, stored)
        for i in range(found.id.get_num_chunks()):
            its = found.id.get_chunk_info(i)
            packed = its.size
            if _GZIP in filters and decompression_limits.grows(_DEFLATES * packed, 0):
                content = found.id.read_direct_chunk(its.chunk_offset)[1]
                packed = decompression_limits.inflated(content, zlib.MAX_WBITS, 2 * chunk)
            if packed > 2 * chunk:
                raise DataError(
                    f"{key} in {self.path} has a chunk that is not of its size: the file is "
                    f"damaged; write it again with h5py"
                )

    def _array(self, key: str) -> np.ndarray:
        with self._reading(key):
            found = self._file[key]
            if found.dtype.hasobject:
                return _texts(found)
            self.check_room(key, found.size * found.dtype.itemsize)
            return found[()]

    def _rows(self, key: str, batch: int) -> Iterator[np.ndarray]:
        with self._reading(key):
            found = self._file[key]
            many = npy.at_a_time(found.shape, found.dtype.itemsize, batch)
            # Whole chunks of the file, where it has chunks: each is decompressed only once.
            chunk = math.lcm(batch, found.chunks[0]) if found.chunks else 1
            many = max(1, many // chunk) * chunk
            gaps = [v for name in _MISSING for v in np.ravel(found.attrs.get(name, ()))]
            for i in range(0, len(found), many):
                rows = found[i : i + many]
                if gaps and rows.ndim == 2:  # as netCDF says which number means that there is none
                    rows = np.where(np.isin(rows, gaps), np.nan, rows)
                yield rows


def _texts(found: Any) -> np.ndarray:
    """A data set of texts (C,), read one by one, as many of them may be one and the same."""
    texts, total = list[str](), 0
    for i in range(len(found)):
        texts.append(str(found.asstr()[i]))
        total += len(texts[-1])
        if total > _MOST_TEXT:
            raise ValueError(f"its texts are longer than {_MOST_TEXT} characters")
    return np.array(texts, dtype=str)
