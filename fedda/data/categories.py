"""Columns of texts, such as sex: all sites turn them into numbers by one list, that of the run.

    input.categories    sex=female/f|male/m, thal=normal|fixed|reversible
    columns of a file   age, sex, thal: what a site has, and tells the names of
    coded columns       age, sex=female/f|male/m, thal=normal, thal=fixed, thal=reversible

Two values become one column, 0 and 1 in their order; more become a column each, which is 1 at its
value. Sites may write a value in different ways, which a slash separates. The names of coded
columns say all of it, so a training's task and a model's file need no
more to code another table. Case, spaces and a number's zeros make no difference. Until then a text
is the number of it among those of its own file (`column_cells`), which never leaves the site.
"""

import logging
import math
import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from fedda.config.inputs import spellings
from fedda.data.column_cells import GAPS, MOST, number
from fedda.data.naming import escaped, listed, option, plain, unlike
from fedda.errors import DataError

FEW_NUMBERS = 16  # different numbers of a column that mean kinds; of more they are measurements
LEAVING = "or leave these columns out with --columns values=age+weight"
Texts = Mapping[str, Sequence[str]]  # the texts of columns, in the order of their numbers

_BOOLEANS = {"false": 0.0, "true": 1.0}  # texts in one file are numbers in another's
_DATE = re.compile(r"\d{1,4}([-./])\d\d?\1\d{1,4}([ t].*)?")  # of a plain name

logger = logging.getLogger("fedda.data")


def together(texts: Texts, undecided: Collection[str] = ()) -> str:
    """What `input.categories` is over sites, whose columns of texts are as `listed_as` has them.

    Each value is listed once, however its case and spaces differ; a column of one is left out.
    Undecided columns have dots instead, which no run takes.
    """
    every = {column: _united(sites.values()) for column, sites in _by_site(texts, {}).items()}
    shown = {c: ["..."] if c in undecided else [v[k] for k in sorted(v)] for c, v in every.items()}
    return ",".join(listed_as(c, shown[c]) for c, v in every.items() if len(v) > 1)


def listed_as(column: str, texts: Sequence[str]) -> str:
    """A column's part of `input.categories`."""
    return f"{column}={'|'.join(texts)}"


def advice(parts: Sequence[str]) -> str:
    """What to give to a run for columns of texts, as `listed_as` has them."""
    every = (part if "|" in part else f"{part}|..." for part in parts)  # other sites have others
    return option("input.categories", ", ".join(every))


def coded(columns: Sequence[str], declared: Texts) -> tuple[str, ...]:
    """The names of coded columns.

    Args:
        columns: those of the sites' files.
        declared: what `fedda.config.categories_of` made of the run's list.

    Raises:
        DataError: a declared column is none of these, or two would have one name.
    """
    if odd := [name for name in declared if name not in columns]:
        raise DataError(
            f"input.categories names '{escaped(odd[0])}', and the sites' columns have other names"
            " or none: take its name from the files' first row"
        )
    for name, values in declared.items():
        if gap := next((name for name in spellings(*values) if name.lower() in GAPS), ""):
            raise DataError(
                f"input.categories lists '{gap}' of the column {escaped(name)}, which means in "
                "tables that there is none: leave it out, or give it another name in the files"
            )
    found = list[str]()
    for name in columns:
        values = declared.get(name, ())
        each = [values] if len(values) == 2 else [[value] for value in values]
        found += [listed_as(name, some) for some in each] or [name]
    if len({*found}) < len(found):
        raise DataError("input.categories gives two columns one name: rename one in the files")
    return tuple(found)


def taken(names: Sequence[str], there: Sequence[str]) -> tuple[str, ...]:
    """The columns among those of a file that coded ones are made of; other names stay."""
    known = {*there}
    return tuple(dict.fromkeys(name if name in known else _parted(name)[0] for name in names))


def are_of(names: Sequence[str], own: Sequence[str]) -> bool:
    """Whether coded columns are made of a site's own, all of them in its order."""
    few = len(names) <= MOST * len(own)  # a server chose the names
    return bool(own) and few and taken(names, own) == tuple(own)


def check_are_of(where: object, names: Sequence[str], own: Sequence[str]) -> None:
    """Refuse coded columns that are not made of a site's own, all of them in its order.

    Raises:
        DataError: they are not; it says which differ.
    """
    if names and not are_of(names, own):
        differs = unlike(own, taken(names[: MOST * len(own)], own))
        raise DataError(
            f"{where} has {differs or 'fewer columns'}, where the run has others: give the data "
            "that this site offered for it, or begin a new run"
        )


class Coding:
    """How the vectors of a file become those of a model.

    Args:
        own: the file's columns.
        names: the coded ones; their columns are the file's.
        texts: what numbers of the file's columns mean.
        where: what the vectors are, for messages.
        fills: whether the run fills gaps: a value that is not listed then is one.
    """

    def __init__(
        self, own: Sequence[str], names: Sequence[str], texts: Texts, where: object, fills: bool
    ) -> None:
        self.names = tuple(names)
        self._where, self._fills, self._texts = where, fills, texts
        self._place = {name: i for i, name in enumerate(own)}
        self._values: dict[str, list[str]] = {}  # all that are listed, by column
        for name in names:
            if name not in self._place:
                column, values = _parted(name)
                self._values.setdefault(column, []).extend(values)

    def every(self, found: Iterator[Tensor]) -> Iterator[Tensor]:
        """Vectors (m, d), some at a time -> float32 (m, D).

        Raises:
            DataError: values are not listed, and the run fills no gaps; or a column is one of
                measurements: a model's weights for one of these are of the few rows that have it.
        """
        odd = dict.fromkeys(self._values, 0)
        numbers = {c: torch.empty(0) for c in odd if not self._texts.get(c)}
        for x in found:
            for column, before in numbers.items():
                numbers[column] = self._kinds(column, before, x)
            known = {column: self._known(column, x) for column in odd}
            for column, good in known.items():
                odd[column] += int((~good).sum())
            if self._fills or not any(odd.values()):
                yield torch.stack([self._column(name, x, known) for name in self.names], dim=1)
        for column, count in odd.items():
            if count and not self._fills:
                raise _unlisted(self._where, column, count)
            if count:
                logger.warning("%s: missing there", _said(self._where, column, count))

    def _kinds(self, column: str, before: Tensor, x: Tensor) -> Tensor:
        """A column's different numbers so far, without gaps."""
        own = torch.cat([before, x[:, self._place[column]]])
        kinds = own[~own.isnan()].unique()
        if len(kinds) > FEW_NUMBERS:
            raise DataError(
                f"{self._where} has more than {FEW_NUMBERS} different numbers in its column "
                f"{escaped(column)}, which input.categories takes for kinds: whoever starts the "
                "run leaves this column out of it"
            )
        return kinds

    def _known(self, column: str, x: Tensor) -> Tensor:
        """Where a value is listed or missing -> bool (m,)."""
        own = x[:, self._place[column]]
        return own.isnan() | torch.isin(own, self._codes(column, self._values[column]))

    def _column(self, name: str, x: Tensor, known: Mapping[str, Tensor]) -> Tensor:
        """One coded column -> float32 (m,)."""
        if name in self._place:
            return x[:, self._place[name]]
        column, values = _parted(name)
        own = x[:, self._place[column]]
        here = torch.isin(own, self._codes(column, values[-1:])).float()
        return torch.where(known[column] & ~own.isnan(), here, math.nan)

    def _codes(self, column: str, values: Sequence[str]) -> Tensor:
        """The numbers that some values have in the file -> float32."""
        own = {plain(text): float(i) for i, text in enumerate(self._texts.get(column, ()))}
        every = spellings(*values)
        found = (own.get(plain(v)) if own else _BOOLEANS.get(plain(v), number(v)) for v in every)
        return torch.tensor([code for code in found if code is not None], dtype=torch.float32)


def check_listed(where: object, parts: Sequence[str], names: Sequence[str]) -> None:
    """Refuse texts that a run does not list.

    Args:
        where: what has them.
        parts: its columns of texts, as `listed_as` has them.
        names: the coded columns of the run.

    Raises:
        DataError: there are some.
    """
    for column, texts in map(_parted, parts):
        listed = [v for c, values in map(_parted, names) if c == column for v in values]
        known = {*map(plain, spellings(*listed))}
        if odd := [text for text in texts if known and plain(text) not in known]:
            raise _unlisted(where, column, len(odd), odd)


def apart(texts: Texts, declared: Texts) -> dict[str, str]:
    """Columns of dates, or of which some sites have no value in common with the others.

    Arguments as of `alone`.

    Returns:
        What to say of each.
    """
    said = dict[str, str]()
    for column, sites in _by_site(texts, declared).items():
        if column not in declared and all(map(_DATE.fullmatch, _united(sites.values()))):
            what = f"the column {escaped(column)} seems to hold dates, which are no kinds of things"
            said[column] = f"{what}: leave it out with --columns drop={escaped(column)}"
            continue
        near = [*sites][:1]
        for _ in sites:  # those that share a value with the first, or with one that does, and so on
            known = _united(sites[s] for s in near).keys()
            near = [s for s in sites if s in near or known & sites[s].keys()]
        if far := [s for s in sites if s not in near]:
            each = ([*_united(sites[s] for s in some).values()] for some in (near, far))
            one, other = map(listed, each)
            what = f"{one} at {listed(near)}, and {other} at {listed(far)}, none in common: if they"
            what += f" mean the same, {_slashed(column)}; else leave it out, as it tells the site"
            said[column] = f"the column {escaped(column)} has {what}"
    return said


def alone(texts: Texts, declared: Texts) -> list[str]:
    """Say which values occur at one site alone, as where sites write one value in several ways.

    Where sites have none in common at all, `apart` says it, once for the column.

    Args:
        texts: of each site, by its name, the columns of texts, as `listed_as` has them.
        declared: the values that a run lists, by column; ways to write one count as one.
    """
    said = apart(texts, declared)
    odd = [*said.values()]
    for column, sites in _by_site(texts, declared).items():
        count = Counter(key for own in sites.values() for key in own)
        for site, own in sites.items() if len(sites) > 1 and column not in said else ():
            if values := [v for key, v in own.items() if count[key] == 1]:
                what = f"{escaped(', '.join(values))} in the column {escaped(column)}"
                way = f"if another writes it otherwise, {_slashed(column)}"
                odd.append(f"{site} alone has {what}: {way}")
    return odd


def _slashed(column: str) -> str:
    return f"list both ways with a slash between, as {escaped(column)}=female/f|male/m"


def _by_site(texts: Texts, declared: Texts) -> dict[str, dict[str, dict[str, str]]]:
    """By column and site, its values, by what they are plainly or in a run's list."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for site, parts in texts.items():
        for column, values in map(_parted, parts):
            called = {plain(n): plain(v) for v in declared.get(column, ()) for n in spellings(v)}
            found.setdefault(column, {})[site] = {called.get(plain(v), plain(v)): v for v in values}
    return found


def _united(some: Iterable[Mapping[str, str]]) -> dict[str, str]:
    """The values of some sites, as the first writes them."""
    return {key: value for own in reversed([*some]) for key, value in own.items()}


def _unlisted(where: object, column: str, count: int, texts: Sequence[str] = ()) -> DataError:
    """The error of values that a run does not list; the texts are for the site's own log."""
    its = f" ({escaped(', '.join(texts))})" if texts else ""
    return DataError(
        f"{_said(where, column, count)}{its}: add them to it, mend them, or train with "
        "-c input.missing=mean, which takes them for missing"
    )


def _said(where: object, column: str, count: int) -> str:
    values = "value" if count == 1 else "values"
    return (
        f"{where} has {count} {values} in its column {escaped(column)} that input.categories "
        "does not list"
    )


def check_coded(where: object, parts: Sequence[str], names: Sequence[str]) -> None:
    """Refuse columns of texts that a run or a model does not code.

    Args:
        where: what has them.
        parts: its columns of texts, as `listed_as` has them.
        names: the columns that the run or the model takes.

    Raises:
        DataError: there are some.
    """
    columns = {_parted(name)[0] for name in names if "=" in name}
    if odd := [part for part in parts if _parted(part)[0] not in columns]:
        raise refused(where, odd)


def refused(where: object, parts: Sequence[str]) -> DataError:
    """The error of columns of texts, as `listed_as` has them, that nothing codes."""
    columns = ", ".join(escaped(_parted(part)[0]) for part in parts)
    return DataError(
        f"{where} has texts in {columns}, and a run or model needs numbers: whoever starts a run "
        f"lists the values of all sites, as {advice(parts)}; write numbers there, {LEAVING}"
    )


def _parted(name: str) -> tuple[str, list[str]]:
    """Column and values of a coded column's name."""
    column, _, values = name.partition("=")
    return column, values.split("|")
