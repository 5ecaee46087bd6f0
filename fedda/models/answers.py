"""What a finished model says of the examples at a path: their names and class probabilities.

The model is a file of `fedda.models.save`, or one that `fedda export` made of it (.onnx).
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fedda.data import Reading, batches
from fedda.models.networks import predict
from fedda.models.saved import load

EXPORTED = (".onnx",)


class Answers(NamedTuple):
    """What is said of some examples."""

    names: Sequence[str]  # of the examples, as `fedda.data.batches` has them
    p: Tensor  # (N, C) class probabilities, on the CPU
    # what a table itself calls its rows; empty of other data, and if it names none
    keys: Sequence[str]


def answers(
    model: Path,
    data: Path,
    batch: int,
    device: torch.device,
    reading: Reading,
    like: Path | None = None,
) -> tuple[tuple[str, ...], Iterator[Answers]]:
    """The names of a model's classes, and batch by batch what it says of the examples at a path.

    Args:
        model: its file.
        data: the examples, as `fedda.data.batches` reads them.
        batch: examples at a time.
        device: on which it computes; an exported model computes on the CPU.
        reading: what is said of the files.
        like: with `input.window=own`, the site whose scale the examples have.

    Raises:
        ModelError: the model cannot be read.
        DataError: the data cannot be read, or do not fit the model.
    """
    said: Callable[[Tensor], Tensor]
    if model.suffix in EXPORTED:
        from fedda.models.export import opened

        said, classes, inputs = opened(model)
    else:
        network, meta = load(model)
        network.to(device)
        said, classes, inputs = partial(predict, network, batch=batch), meta.classes, meta.inputs
    reading = reading.of_model(inputs)
    rest = batches(data, inputs.shape, batch, inputs.resize, reading, like)
    first = next(rest)  # an error comes before anything is written
    every = chain([first], rest)
    return classes, (Answers(some.names, said(some.examples.x), some.keys) for some in every)
