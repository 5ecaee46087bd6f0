"""Which folders and files of one folder are the data of a simulation's sites, and which are not."""

from collections.abc import Collection
from pathlib import Path

from fedda.data import number_table
from fedda.data.array_file import readers
from fedda.data.columns import IMAGES, headings
from fedda.data.file_lists import lists_of
from fedda.data.form import AS_IT_IS, Reading
from fedda.data.load import MOST_NAMED, describe
from fedda.data.naming import listed
from fedda.data.reader import added
from fedda.data.which_files import FILES
from fedda.errors import DataError, RunError

_SITE_FILES = ".csv, .parquet, .npz and HDF5"
# Of files that may be a site's data: beside sites that are files none is passed over.
_OTHERS = (".tsv", ".xlsx", ".xls", ".ods", ".gz", ".zip", ".feather", ".arrow", ".npy", ".mat")
_DATA = (*FILES, *_OTHERS, ".sav", ".dta")
_RECORD = "benchmark.json"  # how `fedda data import` made the folder


def domains(
    root: Path, reading: Reading = AS_IT_IS, targets: Collection[str] = ()
) -> dict[str, Path]:
    """Return a folder's domains: its subfolders and the files that a site can be, by name.

    Args:
        root: the folder.
        reading: names of tables' columns.
        targets: the sites whose tables need no labels.

    Raises:
        RunError: the folder does not exist, two domains have one name, or `reading` names none.
        DataError: domains are files, and another file of data cannot be one.
    """
    found, names, odd = dict[str, Path](), list[str](), list[Path]()
    for path in _visible(root):
        name = path.name if path.is_dir() else path.stem
        names.append(name)
        can_be = path.is_dir() or _can_be_site(path, reading.at(name), name in targets)
        if can_be and (other := found.setdefault(name, path)) is not path:
            raise RunError(
                f"{root} has {other.name} and {path.name}, which would both be the site "
                f"'{name}'; rename or remove one of them."
            )
        if not can_be and path.suffix.lower() in _DATA:
            odd.append(path)
    if unknown := [site for site in reading.sites if site not in ("", *names)]:
        raise RunError(
            f"--columns names the site {unknown[0]!r}, and {root} has {', '.join(names)}; choose "
            "among them."
        )
    if odd and not (found and all(path.is_dir() for path in found.values())):
        why = _why_no_site(odd[0], reading, targets)
        raise DataError(f"{why}; or move it out of {root}, where each file of data is a site")
    return found


def passed_over(root: Path, reading: Reading = AS_IT_IS, targets: Collection[str] = ()) -> str:
    """Which files of a folder of `domains` are none, and why each table is none; or nothing."""
    used = {path.absolute() for path in domains(root, reading, targets).values()}
    used |= {file for site in {*used} if site.is_dir() for file, _ in lists_of(site)}
    used.add((root / _RECORD).absolute())
    files = [path for path in _visible(root) if path.absolute() not in used]
    if not files:
        return ""
    reasons = [*filter(None, (_why_no_site(path, reading, targets) for path in files))]
    kinds = "" if len(reasons) == len(files) else f"; a site is a folder or one of {_SITE_FILES}"
    names = listed([path.name for path in files])
    head = f"{root}: no sites, and passed over: {names}{kinds}"
    return "\n  ".join([head, *reasons[:MOST_NAMED]])


def _why_no_site(file: Path, reading: Reading, targets: Collection[str]) -> str:
    """Why a file of data is no site; empty for other files."""
    if file.suffix.lower() not in _DATA:
        return ""
    try:
        describe(file, "target" if file.stem in targets else "source", reading.at(file.stem))
    except DataError as error:
        return str(error)
    return f"{file} has no number in its first row: put it into a folder of its own if it is a site"


def _visible(root: Path) -> list[Path]:
    if not root.is_dir():
        raise RunError(f"{root} is not a folder; give one that holds a folder per domain.")
    return [path for path in sorted(root.iterdir()) if not path.name.startswith(".")]


def _can_be_site(file: Path, reading: Reading, is_target: bool) -> bool:
    """Whether a file is one of arrays, a table, or for a reader of another package."""
    ending = file.suffix.lower()
    if ending in (".npz", *readers()):
        return True
    if ending in FILES:
        images = {*IMAGES} & {*headings(file, reading)}
        return bool(images) or number_table.can_be_site(file, reading, is_target)
    return added(file) is not None
