"""Tables that a program has, of whatever library: their columns go by name.

    pandas, polars      and all that has `columns` and `to_numpy`
    pyarrow             and all that has `column_names` and `column`
    dicts               of columns
    numpy               arrays of records

A cell that its library calls missing or masks is a gap, NaN, whatever number lies below it.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from fedda.data import categories, naming
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
        cells, its = _cells(x, i), categories.ColumnCells()
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
