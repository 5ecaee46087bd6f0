"""Tables, arrays and images that a program has, of whatever library; tables' columns go by name.

    pandas, polars      and all that has `columns` and `to_numpy`
    pyarrow             and all that has `column_names` and `column`
    dicts               of columns
    numpy               arrays, of records too; and torch's
    Pillow              images, of whatever mode

A cell that its library calls missing or masks is a gap, NaN, whatever number lies below it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image

from fedda.data import categories, naming
from fedda.data.column_cells import ColumnCells
from fedda.data.pixels import on_white
from fedda.data.samples import VEILED, is_veiled
from fedda.errors import DataError


def columns_of(x: Any) -> tuple[str, ...]:
    """The names of a table's columns; of all else none."""
    return tuple(map(str, _names(x)))


def _names(x: Any) -> Sequence[Any]:
    """The same as the table has them."""
    if isinstance(x, np.ndarray):
        return x.dtype.names or ()
    if isinstance(x, Mapping):
        return [*x]
    if hasattr(x, "column_names"):
        return x.column_names
    return x.columns if hasattr(x, "columns") and hasattr(x, "to_numpy") else ()


def unmasked(x: Any) -> Any:
    """An array without numpy's mask, which becomes NaN; all else as it is."""
    if not isinstance(x, np.ma.MaskedArray):
        return x
    return np.where(np.ma.getmaskarray(x), np.nan, x.data) if np.ma.is_masked(x) else x.data


def frame(
    x: Any, whose: str, names: Sequence[str] = ()
) -> tuple[np.ndarray, dict[str, Sequence[str]]]:
    """A table as numbers (N, d), NaN where one is missing; its columns of texts.

    Args:
        x: the table.
        whose: it is, for messages.
        names: of the columns to take, in this order; by default all.

    Raises:
        DataError: a column has neither numbers nor a few texts, or another length than others.
    """
    own, found, texts = columns_of(x), [], {}
    for i in map(own.index, names) if names else range(len(own)):
        cells, its = _cells(x, i), ColumnCells()
        its.add(cells)
        if its.odd:
            raise DataError(
                f"{whose} has {str(its.odd[1])[:40]!r} in its column {naming.escaped(own[i])}: "
                "numbers, or a few texts without commas, are needed"
            )
        found.append(its.numbers(cells))
        texts |= {own[i]: its.texts} if its.texts else {}
    if len({*map(len, found)}) > 1:
        raise DataError(f"{whose} has columns of different lengths: give a value of each per row")
    return np.stack(found, axis=1), texts


def _cells(x: Any, i: int) -> Any:
    """The cells of column i: float64 (N,) of numbers, else a list."""
    if hasattr(x, "iloc"):
        column = x.iloc[:, i]
    else:
        column = x.column(i) if hasattr(x, "column") else x[_names(x)[i]]
    if hasattr(column, "to_pylist"):  # Arrow's codes of texts lose their gaps on the way to numpy
        return column.to_pylist()
    array = unmasked(column if isinstance(column, np.ma.MaskedArray) else np.asarray(column))
    if array.dtype.kind in "biuf" and array.ndim == 1:
        return array.astype(np.float64)
    return [*map(str, array)] if array.dtype.kind in "mMc" else [*array]


def _numbers(
    x: Any, names: Sequence[str] = (), coded: Sequence[str] = ()
) -> tuple[np.ndarray, dict[str, Sequence[str]]]:
    """What `frame` makes of a table for a model of these columns, which codes all texts.

    Raises:
        DataError: it does not, or as `frame`.
    """
    numbers, texts = frame(x, "the table", names)
    parts = [categories.listed_as(*each) for each in texts.items()]
    categories.check_coded("the table", parts, coded)
    return numbers, texts


def in_order(x: Any, columns: Sequence[str], fills: bool = False) -> Any:
    """Of a table the columns that a model takes, in their order (N, d); all else as it is.

    Args:
        x: the table.
        columns: the model's.
        fills: whether gaps are filled.

    Raises:
        DataError: it lacks some of them, or has texts that the model does not know.
    """
    own = columns_of(x)
    if not own or not columns or naming.brief(own) == tuple(columns):
        return x
    place, wanted = {name: i for i, name in enumerate(own)}, columns
    columns = categories.taken(wanted, own)
    if not {*columns} <= place.keys():
        raise DataError(
            f"the table has {naming.unlike(own, columns)}, and the model takes columns by name: "
            "give them the names that they had in training"
        )
    if twice := [name for name in columns if place[name] != own.index(name)]:
        raise DataError(
            f"the table has two columns {naming.quoted(twice[0])}, and the model takes one: "
            "give it the one that is meant"
        )
    if columns == tuple(wanted):
        return _numbers(x, columns)[0]
    numbers, texts = _numbers(x, columns, wanted)
    coding = categories.Coding(columns, wanted, texts, "the table", fills)
    return torch.cat([*coding.every(iter([torch.from_numpy(numbers).float()]))])


def images(x: Any, whose: str) -> np.ndarray:
    """Arrays of images or vectors, of any library -> uint8 (N, H, W[, 3]) or float32 (N, d).

    Colours come last, or first as in torch. Floats of images are from 0 to 1.

    Raises:
        DataError: they are neither.
    """
    first = isinstance(x, torch.Tensor)
    array = as_array(x)
    array = array.detach().cpu().numpy() if isinstance(array, torch.Tensor) else array
    if array.dtype.kind not in "fiub" or array.ndim not in (2, 3, 4) or 0 in array.shape:
        raise DataError(
            f"{whose} is {array.dtype} {array.shape}: give images as (N, H, W), (N, H, W, 3) or "
            "(N, 3, H, W), or vectors as (N, d)"
        )
    if array.ndim == 2:
        with np.errstate(over="ignore"):  # too large for float32 is inf: refused later
            return array.astype(np.float32)
    if array.ndim == 4:
        front, back = array.shape[1] in (1, 3), array.shape[3] in (1, 3)
        if not front and not back:
            raise DataError(
                f"{whose} has the shape {array.shape}: images have 1 or 3 colours, as "
                "(N, H, W, 3) or (N, 3, H, W)"
            )
        if front and (first or not back):
            array = array.transpose(0, 2, 3, 1)
        array = array[..., 0] if array.shape[3] == 1 else array
    return np.ascontiguousarray(_bytes(array, whose))


def as_array(x: Any) -> Any:
    """Arrays as numpy's or torch's; images of Pillow as gray or RGB, whatever their mode is.

    What a table calls missing, or an array masks, is NaN.
    """
    if columns_of(x):
        return _numbers(x)[0]
    if isinstance(x, Image.Image):
        if is_veiled(x):
            raise DataError(f"an image {VEILED}: give red, green and blue alone")
        known = x.mode in ("L", "RGB") or x.mode[0] in "IF"
        return np.asarray(x if known else on_white(x).convert("RGB"))
    if isinstance(x, list | tuple) and any(isinstance(each, Image.Image) for each in x):
        return np.stack([as_array(each) for each in x])
    if isinstance(x, list | tuple) and any(isinstance(each, np.ma.MaskedArray) for each in x):
        x = np.ma.stack(x)
    x = unmasked(x)
    if not isinstance(x, torch.Tensor):
        return np.asarray(x)
    return x.float() if x.dtype == torch.bfloat16 else x  # which numpy does not know


def _bytes(array: np.ndarray, whose: str) -> np.ndarray:
    if array.dtype == np.uint8:
        return array
    highest = 1 if array.dtype.kind in "fb" else 255
    finite = np.isfinite(array).all()
    if not (finite and array.min() >= 0 and array.max() <= highest):
        span = f"from {array.min():g} to {array.max():g}" if finite else "masked or not finite"
        raise DataError(
            f"{whose} has values {span}: give images as whole "
            "numbers from 0 to 255 or as floats from 0 to 1, before any normalisation"
        )
    return np.rint(array * 255).astype(np.uint8) if highest == 1 else array.astype(np.uint8)
