"""Decoded examples on disk, so that a set may be larger than memory and is decoded only once.

An entry is one file: all images as bytes, or all vectors as float32, then what was said of them,
as JSON, and a trailer with its shape and a checksum. Its name is a digest of what they are made
from: the content of every file or array row in order, the form, and the versions of Pillow and of
this layout. Names and dates of files do not matter, so an entry is never used for other examples,
and a copied folder finds it. Every entry is read once and checked before it is used; one that is
damaged, or was interrupted, is made again.
"""

import contextlib
import hashlib
import json
import logging
import math
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

from fedda.data.sets import DIGEST
from fedda.data.stored import Stored
from fedda.errors import ConfigError, DataError, reason
from fedda.files import clear_partial, keep_newest, keeping
from fedda.ops import system

logger = logging.getLogger("fedda.data")

Mode = Literal["auto", "memory", "disk"]
Notice = Callable[[str], object]
Rows = Iterable[np.ndarray]

LARGE = 10**9  # bytes of decoded examples from which `auto` keeps them on disk
KEPT = 4  # entries: training and test images, for two runs of different forms

_LAYOUT = 2
_MAGIC = {4: b"fedda-u8", 2: b"fedda-f4"}  # images (N, channels, H, W); vectors (N, d)
_TRAILER = struct.Struct("<8s4QQ")  # magic, N, channels, H, W (or N, d, 0, 0), crc32 of the values
_PIECE = 1 << 24  # bytes read at a time to check an entry
_ENDING = ".images"


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
        self, key: str, shape: tuple[int, ...], read: Callable[[Notice], Rows], notice: Notice
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
        self, key: str, shape: tuple[int, ...], examples: Rows, said: Sequence[str]
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
