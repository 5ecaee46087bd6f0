"""Arrays in an HDF5 file, with the names and shapes of those in an .npz file (`fedda.data.npz`)."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from fedda.data import npy
from fedda.data.npz import Npz
from fedda.data.optional import needed
from fedda.errors import DataError

ENDINGS = (".h5", ".hdf5")


class Hdf5(Npz):
    """An open HDF5 file, whose data sets at the top are the arrays."""

    def __init__(self, path: Path) -> None:
        self.path = path
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
        if shape is None or found.external:
            raise DataError(f"{key} in {self.path} holds no values of its own: write an array")
        if dtype.hasobject and key == "classes":
            return shape, np.dtype("U")
        if dtype.hasobject:
            raise DataError(
                f"{key} in {self.path} holds objects of variable length: save plain numbers"
            )
        return shape, dtype

    def _array(self, key: str) -> np.ndarray:
        with self._reading(key):
            found = self._file[key]
            self.check_room(key, found.size * found.dtype.itemsize)
            return found.asstr()[()] if found.dtype.hasobject else found[()]

    def _rows(self, key: str, batch: int) -> Iterator[np.ndarray]:
        with self._reading(key):
            found = self._file[key]
            many = npy.at_a_time(found.shape, found.dtype.itemsize, batch)
            # Whole chunks of the file, where it has chunks: each is decompressed only once.
            chunk = batch * found.chunks[0] if found.chunks else 1
            many = max(1, many // chunk) * chunk
            for i in range(0, len(found), many):
                yield found[i : i + many]


def opened(path: Path) -> Npz:
    """The arrays of an .npz or HDF5 file."""
    return Hdf5(path) if path.suffix.lower() in ENDINGS else Npz(path)
