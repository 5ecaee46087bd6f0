"""The columns of a table's files: CSV, parquet, and Arrow as `datasets` saves it.

Where a table calls a column otherwise, a site says how (`Reading.named`): all functions here take
and give fedda's names. Which files are a table, `which_files` says.
"""

import csv
import json
import re
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from fedda.data import decompression_limits, file_lists
from fedda.data.form import AS_IT_IS, Reading
from fedda.data.optional import needed
from fedda.errors import DataError, reason
from fedda.files import encoding

IMAGES = ("path", "image")  # columns that name or hold images
KEYS = ("id", "key")  # columns that name rows

_DELIMITERS = (",", ";", "\t")  # of CSV files; where a comma is decimal, Excel writes semicolons
_SEPARATOR = re.compile(r'"?sep=([^\r\n"])"?\s*', re.IGNORECASE)  # Excel's line above the heading
_DECIMAL = re.compile(r"\s*[+-]?\d+,\d+(e[+-]?\d+)?\s*", re.IGNORECASE)
_POINT = re.compile(r"\s*[+-]?(\d+\.\d+(e[+-]?\d+)?|\d{1,3}(\.\d{3})+)\s*", re.IGNORECASE)
_ALSO = {"file_name": "path", "filename": "path", "file": "path"}  # if there is no path or image
_ROWS = 64  # read at a time of a file with texts or images, or of very many columns
_FEW = 1 << 12  # cells of a CSV file: with more of them a processor's cache does not hold them
FEW = 1 << 14  # images that any file may hold
LEAST = 32  # bytes of an image of its own; the shortest PNG has 67
_MANY = 1 << 18  # cells of a parquet file of numbers
_BUFFER = 1 << 16  # bytes of each column of a parquet file

Cells = Sequence[Any] | np.ndarray
Columns = dict[str, list[Any]]


def read(file: Path, wanted: Sequence[str] = (), reading: Reading = AS_IT_IS) -> Columns:
    """Some columns of a CSV, parquet or Arrow file or a list, by default all; it may lack some.

    Raises:
        DataError: it cannot be read, has two columns of one name, or needs a package that is not
            installed.
    """
    first, *others = parts(file, wanted, reading)
    columns = {name: [*values] for name, values in first.items()}
    for some in others:
        for name, values in some.items():
            columns[name] += values
    return columns


def parts(
    file: Path,
    wanted: Sequence[str] = (),
    reading: Reading = AS_IT_IS,
    numbers: Collection[str] = (),
) -> Iterator[Mapping[str, Cells]]:
    """The same some rows at a time; the first part may have none, and names the columns.

    Args:
        file: it.
        wanted: the columns; none: all.
        reading: as the site says: names of columns.
        numbers: columns of which only the values of numbers are wanted: where the file itself has
            numbers they come as float64 (n,), NaN at gaps.

    Raises:
        DataError: as `read`.
    """
    if file.suffix == file_lists.ENDING:
        yield _read_list(file)
    elif file.suffix.lower() == ".csv":
        yield from _of_csv(file, wanted, reading, numbers)
    else:
        yield from _of_arrow(file, wanted, reading, numbers)


def _of_arrow(
    file: Path, wanted: Sequence[str], reading: Reading, numbers: Collection[str]
) -> Iterator[Mapping[str, Cells]]:
    """The parts of a parquet file, or of one in Arrow's stream format."""
    is_stream = file.suffix.lower() == ".arrow"
    kind = "an Arrow" if is_stream else "a parquet"
    arrow = needed("pyarrow", "parquet", f"{file} is {kind} file, which")
    try:
        with ExitStack() as stack:
            if is_stream:
                mapped = stack.enter_context(arrow.memory_map(str(file)))
                opened = stack.enter_context(arrow.ipc.open_stream(mapped))
                schema = opened.schema
                theirs = _theirs(file, schema.names, wanted, reading)
                found = (batch.select(theirs) for batch in opened)
            else:
                parquet = import_module("pyarrow.parquet")
                # Else whole columns of a row group are in memory, and a file may have one group.
                about = {"buffer_size": _BUFFER, "pre_buffer": False}
                opened = stack.enter_context(parquet.ParquetFile(file, **about))
                schema = opened.schema_arrow
                theirs = _theirs(file, schema.names, wanted, reading)
                _check_growth(file, _unpacked(opened.metadata, {*theirs}))
                kinds = (schema.field(name).type for name in theirs)
                short = all(map(arrow.types.is_primitive, kinds))  # a text may have any length
                rows = max(_ROWS, _MANY // max(1, len(theirs))) if short else _ROWS
                found = (
                    batch.select(theirs) for batch in opened.iter_batches(rows, columns=theirs)
                )
            about = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
            features = about.get("info", {}).get("features", {})
            ours, size, rows = _ours(theirs, reading), 0, 0
            files = any(_holds_files(arrow, schema.field(name).type) for name in theirs)
            yield {name: [] for name in ours}
            for batch in found:
                # A value that occurs in many rows may lie in the file once.
                size += sum(_size(arrow, column) for column in batch.columns)
                _check_growth(file, size)
                rows += len(batch)
                if files and rows > max(FEW, file.stat().st_size // LEAST):
                    raise DataError(
                        f"{file} has more than {rows - 1:,} images in {file.stat().st_size:,} "
                        "bytes, so most are copies of a few: write it again without them"
                    )
                some = dict[str, Cells]()
                for name, its, column in zip(ours, theirs, batch.columns, strict=True):
                    texts = features.get(its, {}).get("names")  # numbers that have names
                    floats = _floats(arrow, column) if name in numbers and not texts else None
                    some[name] = column.to_pylist() if floats is None else floats
                    if texts:
                        some[name] = [_text(file, name, texts, v) for v in some[name]]
                yield some
    except (OSError, ValueError, KeyError) as error:
        kind = kind.partition(" ")[2]
        raise DataError(f"{file} cannot be read as {kind} ({error}): write it again") from error


def _unpacked(about: Any, chosen: Collection[str]) -> int:
    """The bytes that some columns of a parquet file take, as its metadata says."""
    groups = (about.row_group(i) for i in range(about.num_row_groups))
    columns = (group.column(i) for group in groups for i in range(group.num_columns))
    return sum(
        each.total_uncompressed_size
        for each in columns
        if each.path_in_schema.split(".")[0] in chosen
    )


def _floats(arrow: Any, column: Any) -> np.ndarray | None:
    """A column of Arrow's numbers -> float64 (n,), NaN at gaps; None of other kinds of values."""
    kind, types = column.type, arrow.types
    if types.is_boolean(kind):
        column = column.cast(arrow.int8())
    elif not (types.is_integer(kind) or types.is_floating(kind)):
        return None
    return column.to_numpy(zero_copy_only=False).astype(np.float64)


def _holds_files(arrow: Any, kind: Any) -> bool:
    """Whether a column of Arrow's holds image files, and not numbers or texts."""
    kind, types = getattr(kind, "value_type", kind), arrow.types  # of one that is coded
    return types.is_struct(kind) or types.is_binary(kind) or types.is_large_binary(kind)


def _size(arrow: Any, column: Any) -> int:
    """The bytes of all values of a column of Arrow's, also of those that it holds but once."""
    if arrow.types.is_struct(column.type):
        return sum(_size(arrow, each) for each in column.flatten())
    is_coded = arrow.types.is_dictionary(column.type)
    return (column.dictionary_decode() if is_coded else column).nbytes


def _check_growth(file: Path, size: int) -> None:
    if decompression_limits.grows(size, file.stat().st_size):
        raise DataError(
            f"{file} grows to more than {decompression_limits.GROWTH} times its size, which no "
            "table of images does: write it again"
        )


def _text(file: Path, column: str, texts: Sequence[str], number: int | None) -> str | None:
    """The name of a number; None if it has none: Hugging Face writes -1 for an unknown label."""
    if number is None or number == -1:
        return None
    if not 0 <= number < len(texts):
        raise DataError(
            f"{file} has the number {number} in its column {column}, which its metadata gives "
            f"{len(texts)} names: mend the numbers or the names"
        )
    return texts[number]


def _ours(there: Sequence[str], reading: Reading) -> list[str]:
    """Fedda's names of a file's columns; what is called so but is not meant gets another."""
    named = reading.named
    ours = {theirs: name for name, theirs in named.items()}
    if not {"path", "image"} & {*there, *named}:
        also = next((name for name in _ALSO if name in there), "")
        ours |= {also: _ALSO[also]} if also else {}
    return [ours.get(name, f"{name} (not meant)" if name in named else name) for name in there]


def _theirs(file: Path, there: Sequence[str], wanted: Sequence[str], reading: Reading) -> list[str]:
    """The file's own names of the columns that are wanted."""
    ours = _ours(there, reading)
    place = _places(ours)
    return [there[place[name]] for name in _chosen(file, ours, wanted)]


def _places(names: Sequence[str]) -> dict[str, int]:
    """Where each name first is; a table of genes has twenty thousand."""
    return {name: i for i, name in reversed([*enumerate(names)])}


def _chosen(file: Path, there: Sequence[str], wanted: Sequence[str]) -> list[str]:
    """Those of a file's columns that are wanted; each has to be there once, as joins write two."""
    known = {*wanted}
    names = [name for name in there if not known or name in known]
    many = Counter(names)
    if twice := [name for name in names if many[name] > 1]:
        raise DataError(
            f"{file} has {many[twice[0]]} columns {twice[0]}, and only one can be meant: "
            "keep that one, or rename the others; if its first row holds values and no names of "
            "columns, write a row of names above it"
        )
    return names


def _read_list(file: Path) -> Columns:
    """The images of a list and their classes, which are the names of their folders."""
    found, names = file_lists.lines(file), dict[int, tuple[str, str]]()
    labels = [file_lists.class_of(line, names) for line in found]
    return {"path": [line.path.as_posix() for line in found], "label": labels}


def _of_csv(
    file: Path, wanted: Sequence[str], reading: Reading, numbers: Collection[str]
) -> Iterator[Mapping[str, Cells]]:
    """The parts of a CSV file; where semicolons separate columns, a number's comma is decimal."""
    try:
        with file.open(newline="", encoding=encoding(file)) as stream:
            there, rows = _rows_of(stream)
            there = _ours(there, reading)
            place = _places(there)
            places = {name: place[name] for name in _chosen(file, there, wanted)}
            yield {name: () for name in places}
            whole = _even(file, rows, len(there))
            many = max(_ROWS, _FEW // max(1, len(there)))
            comma = {*numbers} if rows.dialect.delimiter == ";" else set[str]()
            seen = dict[re.Pattern[str], str]()
            while columns := [*zip(*islice(whole, many), strict=True)]:
                for name in comma & {*places}:
                    _check_points(file, name, columns[places[name]], seen)
                yield {
                    name: [*map(_with_point, columns[at])] if name in comma else columns[at]
                    for name, at in places.items()
                }
    except (OSError, UnicodeError, csv.Error) as error:
        todo = "close each quote, and write one within a text twice"
        todo = todo if isinstance(error, csv.Error) else "write it as UTF-8"
        raise DataError(f"{file} cannot be read as CSV ({reason(error)}): {todo}") from error


def _check_points(
    file: Path, name: str, cells: Sequence[str], seen: dict[re.Pattern[str], str]
) -> None:
    """Refuse a file with decimal commas and points: 1.776 beside 36,1 may be 1776.

    Args:
        file: it.
        name: a column of numbers.
        cells: some of its rows.
        seen: the first cell of either kind in the file, written here.

    Raises:
        DataError: the file has both.
    """
    for kind, mark in ((_DECIMAL, ","), (_POINT, ".")):
        found = (cell for cell in cells if mark in cell and kind.fullmatch(cell))
        if kind not in seen and (cell := next(found, None)) is not None:
            seen[kind] = f"{cell.strip()} in the column {name}"
    if len(seen) == 2:
        raise DataError(
            f"{file} has {seen[_DECIMAL]}, whose comma is decimal, and {seen[_POINT]}, whose "
            "point may be either: write all numbers with a decimal point and without other marks"
        )


def _with_point(cell: str) -> str:
    """A number with a decimal point; any other text as it is."""
    return cell.replace(",", ".") if _DECIMAL.fullmatch(cell) else cell


def _even(file: Path, rows: Any, width: int) -> Iterator[list[str]]:
    """The rows of a CSV file in which a cell is not empty, each of so many values."""
    for row in (row for row in rows if any(row)):
        if len(row) != width:
            raise DataError(
                f"{file} has more or fewer values than columns in line {rows.line_num}: "
                f"mend it, or put texts with commas into quotation marks"
            )
        yield row


def blank_rows(file: Path) -> str:
    """A sentence about rows of a CSV file that have cells, all empty; empty without any."""
    if file.suffix.lower() != ".csv":
        return ""
    with file.open(newline="", encoding=encoding(file)) as stream:
        n = sum(not any(row) for row in _rows_of(stream)[1] if row)
    rows = "row has" if n == 1 else "rows have"
    return f"{n} {rows} no value in any cell: passed over" if n else ""


def _rows_of(stream: TextIO) -> tuple[list[str], Any]:
    """The names of a CSV file's columns, and a `csv.reader` of the rows below."""
    rows = csv.reader(stream, delimiter=delimiter(stream), skipinitialspace=True, strict=True)
    return [name.strip() for name in next(rows, [])], rows


def delimiter(stream: TextIO) -> str:
    """What separates a file's columns: most often in its heading, or as Excel's line `sep=;` says.

    The stream then is at the heading.
    """
    heading = stream.readline()
    if "\0" in heading:
        raise UnicodeError("it has zero bytes, as UTF-16 has without a mark at its beginning")
    if said := _SEPARATOR.fullmatch(heading):
        return said[1]
    stream.seek(0)
    return max(_DELIMITERS, key=heading.count)


def headings(file: Path, reading: Reading | None = None) -> tuple[str, ...]:
    """The names of a file's columns: fedda's, or without a reading its own; none if unreadable."""
    try:
        if file.suffix.lower() == ".csv":
            with file.open(newline="", encoding=encoding(file)) as stream:
                names = _rows_of(stream)[0]
        else:
            needed("pyarrow", "parquet", f"{file} is a parquet file, which")
            names = import_module("pyarrow.parquet").read_schema(file).names
    except (OSError, ValueError, csv.Error):
        return ()
    return tuple(names if reading is None else _ours(names, reading))


def samples_of(file: Path) -> dict[str, str]:
    """The first row of a CSV file's columns, by the file's own names; empty if it has none."""
    try:
        with file.open(newline="", encoding=encoding(file)) as stream:
            there, rows = _rows_of(stream)
            first = next(filter(any, rows), [])
            if rows.dialect.delimiter == ";":
                first = [*map(_with_point, first)]
            return dict(zip(there, first, strict=True))
    except (OSError, ValueError, csv.Error):
        return {}
