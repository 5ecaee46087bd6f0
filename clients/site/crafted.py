"""Refuse models that were made to read images: rows of a layer that differ in their bias alone.

Fowl et al., Robbing the Fed, ICLR 2022, https://arxiv.org/abs/2110.13057: units that all measure
the same thing, such as brightness, each from another value on, sort a step's images into bins, and
the difference of two units' gradients is the image in the bin between them. In a layer that begins
from random weights and is trained, hardly two rows point in the same direction.

A server that knows this check can hide parallel rows, for example behind pixels that are always
black. The check makes the known attack fail; only noise bounds every made model.

Discriminators are not checked: the units of an honest critic come to measure one direction, 81 of
100 after some rounds of f-WDGRL. Their gradients are of features, and leave as sums over
`min-examples` or more.
"""

import hashlib
from collections import deque
from collections.abc import Iterator

import numpy as np
import torch

from fedda.errors import WireError
from fedda.wire.packing import Arrays

PARALLEL = 0.99  # |cosine| of two rows from which on they measure the same
FEW = 4  # rows may do so in any layer, such as the two of a head of two classes
SHARE = 0.05  # of a layer's rows may, as units do that have died in training
INPUTS = 9  # of fewer numbers rows are parallel by chance
GROWING = "discriminator"  # how the names of networks begin that are not checked
ROWS = 512  # of a larger layer are compared, drawn by chance

# Of models all of whose rows were compared: sites that are simulated in one process get the same.
_sound: deque[bytes] = deque(maxlen=8)


def check_rows(what: str, arrays: Arrays) -> None:
    """Check the first layer of a model and all its linear ones.

    Args:
        what: the model's name in the request.
        arrays: its values by name, the first layer first.

    Raises:
        WireError: too many rows of a layer are parallel.
    """
    layers = [*_layers(arrays)]
    whole = all(len(rows) <= ROWS for _, rows in layers)
    digest = _digest(layers) if whole else b""
    if digest in _sound:
        return
    for name, rows in layers:
        # Which rows of a larger layer are compared, nobody knows.
        some = rows if whole else rows[np.random.default_rng().permutation(len(rows))[:ROWS]]
        alike = int(parallel(some.astype(np.float64)).sum())  # squares of any float32 fit
        if alike > max(FEW, SHARE * len(some)):
            raise WireError(
                f"In '{what}' of the server {alike} of {len(some)} rows of {name} are parallel to "
                "another one. No training gives such a layer, and it can read single images; ask "
                "the server's operator where the model is from."
            )
    if whole:
        _sound.append(digest)


def parallel(rows: np.ndarray) -> np.ndarray:
    """Whether each row (n, d) has a nearly parallel one among the others -> (n,) bool."""
    norm = np.linalg.norm(rows, axis=1, keepdims=True)
    unit = np.zeros(rows.shape, np.float32)
    np.divide(rows, norm, out=unit, where=norm > 0, casting="same_kind")
    z = torch.from_numpy(unit)  # numpy's product would take all cores, whatever --threads says
    cosine = (z @ z.T).abs().fill_diagonal_(0)
    return (cosine > PARALLEL).any(dim=1).numpy()


def _layers(arrays: Arrays) -> Iterator[tuple[str, np.ndarray]]:
    """The rows of the layers to check, by name -> (n, inputs) each; whole numbers are none.

    These are all linear ones, and the first of more axes. What has a single row is no layer, such
    as tokens and positions, which transformers have before their first.
    """
    convolutions = 0
    for name, w in arrays.items():
        if w.ndim > 1 and len(w) > 1 and w.dtype.kind not in "biu":
            convolutions += w.ndim > 2
            rows = w.reshape(len(w), -1)
            if (w.ndim == 2 or convolutions == 1) and rows.shape[1] >= INPUTS:
                yield name, rows


def _digest(layers: list[tuple[str, np.ndarray]]) -> bytes:
    """What tells a model's layers from any others."""
    found = hashlib.sha256()
    for name, rows in layers:
        found.update(f"{name} {rows.dtype.str} {rows.shape}".encode())
        found.update(np.ascontiguousarray(rows).view(np.uint8).data)
    return found.digest()
