"""Rotated MNIST from MNIST's own files: each domain has digits of its own, turned by its angle.

    train-images-idx3-ubyte   0x00000803, N, 28, 28, big end first; then N * 784 bytes
    train-labels-idx1-ubyte   0x00000801, N; then N bytes
    t10k-...                  the test set, likewise; any of the files may be compressed (.gz)

Digits turn clockwise, as in FRUDA. MNIST's training digits stay training digits. FRUDA turns all
60,000 for every domain; here each digit is in one domain only, as it would be at different sites.
"""

import gzip
import struct
import zlib
from functools import partial
from pathlib import Path

import numpy as np
import torch

from fedda.contrib.benchmarks.common import Arrays, ImportRequest, Lazy, Sites, key, only, strays
from fedda.contrib.benchmarks.splits import complete
from fedda.data.rotate import deal, rotate
from fedda.errors import ConfigError, DataError, reason

FRUDA = tuple(range(0, 360, 30))
DIGITS = tuple("0123456789")
_MAGIC = {1: 0x801, 3: 0x803}


def read(request: ImportRequest) -> Sites:
    """One domain per angle, named after it."""
    angles = request.options.angles or FRUDA
    if len({a % 360 for a in angles}) < len(angles):
        raise ConfigError(
            f"--angles names an angle twice (360 is a whole turn): {', '.join(map(str, angles))}"
        )
    files = strays(request, lambda file: key(file.name.removesuffix(".gz")))
    paths = []
    for name in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1"):
        path = only(files, key(f"{name}-ubyte"))
        if path is None:
            raise request.wrong(f"{request.source} has no {name}-ubyte or {name}-ubyte.gz")
        paths.append(path)
    halves = [(idx(paths[i], 3), idx(paths[i + 1], 1)) for i in (0, 2)]
    shares = []
    for i, (x, y) in enumerate(halves):
        if len(x) != len(y):
            raise DataError(
                f"{paths[2 * i]} has {len(x)} images and {paths[2 * i + 1]} {len(y)} labels: one "
                f"label per image is needed; get the files again"
            )
        if len(x) < len(angles):
            raise DataError(
                f"{paths[2 * i]} has {len(x)} images for {len(angles)} angles: every angle needs "
                f"one; give fewer angles"
            )
        if y.max() > 9:
            raise DataError(f"{paths[2 * i + 1]} has the label {y.max()}: 0 to 9 is needed")
        labels = torch.tensor(y)
        shares.append(deal(labels, len(angles), request.rng("rotated-mnist")))
    return {
        str(angle): Lazy(partial(_domain, request, angle, halves, [share[i] for share in shares]))
        for i, angle in enumerate(angles)
    }


def _domain(
    request: ImportRequest,
    angle: int,
    halves: list[tuple[np.ndarray, np.ndarray]],
    rows: list[np.ndarray],
) -> Arrays:
    arrays: Arrays = {}
    limits = (request.options.limit, request.options.test_limit)
    for split, (x, y), own, most in zip(("train", "test"), halves, rows, limits, strict=True):
        chosen = own[:most]
        turned = rotate(torch.from_numpy(x[chosen])[:, None], angle)
        arrays[f"x_{split}"] = turned[:, 0].contiguous().numpy()
        arrays[f"y_{split}"] = y[chosen].astype(np.int64)
    return complete(arrays, f"{angle} degrees of {request.source}", DIGITS)


def idx(file: Path, dimensions: int) -> np.ndarray:
    """Read an idx file, compressed or not -> uint8 array of `dimensions` axes."""
    try:
        data = file.read_bytes()
        data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{file} cannot be read ({reason(error)}): get it again") from error
    head = 4 * (1 + dimensions)
    if len(data) < head or struct.unpack(">I", data[:4])[0] != _MAGIC[dimensions]:
        raise DataError(
            f"{file} begins with {data[:4].hex()}: an idx file of bytes with {dimensions} "
            f"dimensions begins with {_MAGIC[dimensions]:08x}"
        )
    shape = struct.unpack(f">{dimensions}I", data[4:head])
    if len(data) - head != np.prod(shape):
        raise DataError(
            f"{file} has {len(data) - head} bytes for {'x'.join(map(str, shape))}: get it again"
        )
    return np.frombuffer(data, np.uint8, offset=head).reshape(shape)
