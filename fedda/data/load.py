"""From the path a site gives to its training set, its test set and a description of both."""

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict, Unpack, get_args

from fedda import __version__
from fedda.data import number_table
from fedda.data.array_file import ArrayFile, readers
from fedda.data.cache import DIGEST, Cache
from fedda.data.form import AS_IT_IS, Form, Reading, Resize
from fedda.data.image_folder import ImageFolder
from fedda.data.naming import listed
from fedda.data.odd_values import SCALE
from fedda.data.own_columns import empty_columns, own_columns
from fedda.data.reader import SiteData, added
from fedda.data.sets import (
    AnySet,
    Description,
    Examples,
    Labelled,
    Progress,
    Role,
    Unlabelled,
    align,
)
from fedda.data.table import Table
from fedda.data.which_files import Inside, parts_of
from fedda.errors import ConfigError, DataError, reason

Notice = Callable[[str], object] | None

logger = logging.getLogger("fedda.data")

MOST_NAMED = 20  # broken images, or tables, in one message


class How(TypedDict, total=False):
    """How examples are read.

    channels   1 or 3 for images of so many channels; 0 leaves arrays as they are, and reads a
               folder as grayscale if all its images are, else as colour
    size       pixels per side, to which images are resized. 0 leaves them as they are, which needs
               images of one size
    resize     how: `stretch` or `crop` (`fedda.data.form.Form`)
    cache      where the decoded examples of a large set stay on disk; by default in memory
    progress   called with the number of images read so far and the number of all
    reading    what is said of the files: the split to train on, and how gray of more than 8 bits is
               read
    notice     called with a sentence about images that look odd; by default it is logged
    """

    channels: int
    size: int
    resize: Resize
    cache: Cache | None
    progress: Progress | None
    reading: Reading
    notice: Notice


def load_source(path: str | Path, **how: Unpack[How]) -> Labelled:
    """A source's training set, with its labels.

    Args:
        path: an image folder, an .npz file, a folder that holds exactly one .npz file, an HDF5
            file, a table of images, a data set that Hugging Face's `datasets` saved, or what a
            reader of another package takes.
        how: it is read.
    """
    site, form, reading = _opened(path, how)
    return _own(site, site.source(form, how.get("progress")), reading, how.get("notice"))


def load_target(path: str | Path, **how: Unpack[How]) -> Unlabelled:
    """A target's training set: no label is read, not even where there are some.

    An .npz file's labels stay unread, class folders are one heap of images in a fixed shuffled
    order. The arguments are those of `load_source`.
    """
    site, form, reading = _opened(path, how)
    return _own(site, site.target(form, how.get("progress")), reading, how.get("notice"))


def load_evaluation(
    path: str | Path, *, classes: Sequence[str] = (), **how: Unpack[How]
) -> Labelled | None:
    """The labelled test set of a site of either role, or None if it has none.

    Labels index `classes`, the class names of the run. Without them they index the site's own:
    those of its training folders or `classes` array where these cover the test set, as at every
    source, else those of the test set. The other arguments are those of `load_source`.
    """
    site, form, reading = _opened(path, how)
    test = site.evaluation(form, how.get("progress"))
    if test is None:
        return None
    train = site.target(form, None) if reading.own or reading.fills else test
    test = _own(site, test, reading, how.get("notice"), train)
    return align(test, classes) if classes else test


def _opened(path: str | Path, how: How) -> tuple[SiteData, Form, Reading]:
    """A site, the form of its examples, and what is said of its files."""
    reading = how.get("reading", AS_IT_IS)
    shape = how.get("channels", 0), how.get("size", 0), how.get("resize", "stretch")
    heard = _heard(how.get("notice"), reading)
    return open_site(path, reading), Form(*shape, how.get("cache"), reading.gray, heard), reading


def _own(
    site: SiteData, found: AnySet, reading: Reading, notice: Notice, train: Examples | None = None
) -> AnySet:
    """The examples as a run wants them of vectors: filled and scaled by the site's training part.

    Args:
        site: whose they are.
        found: the examples.
        reading: how the run fills gaps, and whether it scales.
        notice: called with a sentence about columns without a value.
        train: the training part; None: these are it.
    """
    own = own_columns((found if train is None else train).x, site.path, reading, found.x)
    if own is None:
        return found
    if own.gaps.empty and isinstance(site, ArrayFile):
        (notice or logger.warning)(empty_columns(own.gaps, site.columns(len(own.gaps.seen))))
    return own.of(found, spare=isinstance(site, ArrayFile))


def _heard(notice: Notice, reading: Reading) -> Callable[[str], object]:
    """Who is told of odd values; where each column is scaled, not that it should be."""
    heard = notice or logger.warning
    if not (reading.own or reading.scales):
        return heard
    return lambda said: None if SCALE in said else heard(said)


def describe(path: str | Path, role: Role, reading: Reading = AS_IT_IS) -> Description:
    """What is at `path`, from file names, image headers and labels, without decoding an image.

    A target's training labels are not read here either.
    """
    if role not in get_args(Role):
        raise ConfigError(f"the role {role!r} is unknown: give source or target")
    found = open_site(path, reading).describe(role)
    return replace(found, warnings=(*found.warnings, *_idle(found, reading)))


def _idle(found: Description, reading: Reading) -> list[str]:
    """A warning about what is said of gray where there is none of more than 8 bits; else none."""
    said = [f"--gray-bits {reading.gray_bits}"] if reading.gray_bits else []
    said += [f"the window {reading.window}"] if reading.gray.window is not None else []
    if not said or found.gray:
        return []
    what = "images of 8 bits" if found.kind == "image" else "vectors"
    return [f"{' and '.join(said)} does not apply, as these are {what}: they are read as they are"]


def verify(
    path: str | Path,
    role: Role,
    progress: Progress | None = None,
    known: Path | None = None,
    reading: Reading = AS_IT_IS,
    most: int = MOST_NAMED,
) -> Description:
    """`describe`, after reading every value once: finds damaged images and values not finite.

    Args:
        path: the site's data.
        role: of the site.
        progress: called with how many images were read, and of how many.
        known: a file that notes which files were found good. If none of them has changed since,
            their values are not read again.
        reading: what the site says of its own files.
        most: how many images that cannot be read are named.
    """
    try:
        return _verified(Path(path), role, progress, known, reading)
    except DataError as error:
        bad = open_site(path, reading).broken(role)
        if len(bad) < 2:
            raise
        lines = "".join(f"\n  {text}" for text in bad[:most])
        more = f"\n  and {len(bad) - most} more" if len(bad) > most else ""
        raise DataError(f"{len(bad)} images cannot be read:{lines}{more}") from error


def _verified(
    path: Path, role: Role, progress: Progress | None, known: Path | None, reading: Reading
) -> Description:
    """As `verify`; an error names the first file alone."""
    found = describe(path, role, reading)
    site, odd = open_site(path, reading), list[str]()
    state = _state(path, role, reading) if known and not isinstance(site, Table) else ""
    if known and state and known.is_file() and known.read_text(errors="replace") == state:
        return found
    if isinstance(site, ArrayFile):
        site.check(progress, _heard(odd.append, reading))
    else:
        # Reduced to a few pixels each, images are decoded in full but do not fill the memory.
        size = 8 if found.kind == "image" and found.path.is_dir() else 0
        form = Form(size=size, gray=reading.gray.to_try(found.needs_window), notice=odd.append)
        site.source(form, progress) if role == "source" else site.target(form, progress)
        site.evaluation(form, progress)
    odd = odd[:1]
    if both := shared(path, reading):
        odd.append(_leak(both, found.test))
    if odd:  # it is said again at the next start, so the files are not noted as good
        return replace(found, warnings=(*found.warnings, *odd))
    if known and state:
        with suppress(OSError):  # a full disk costs time at the next start
            known.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            known.write_text(state)
    return found


def _state(path: Path, role: Role, reading: Reading) -> str:
    """A digest of names, sizes and times of all files; empty if some are links to others."""
    files = _files(path)
    if any(file.is_symlink() for file in files):
        return ""
    return state_of(path, files, f"{__version__} {role} {reading} {path.absolute()}")


def state_of(path: Path, files: Sequence[Path] = (), about: str = "") -> str:
    """A digest of names, sizes and times of all files at a place, which changes if one does."""
    total = hashlib.blake2b(about.encode(), digest_size=DIGEST)
    for file in files or _files(path):
        its = file.stat()
        total.update(f"\n{file.relative_to(path.parent)} {its.st_size} {its.st_mtime_ns}".encode())
    return total.hexdigest()


def _files(path: Path) -> list[Path]:
    return sorted(path.rglob("*")) if path.is_dir() else [path]


def identities(path: str | Path, role: Role, reading: Reading = AS_IT_IS) -> list[bytes]:
    """A digest of each training example, in their order: it tells whether two are the same.

    It does not depend on the shape that a run wants. A source's digests cover the labels, too; a
    target's labels are not read.
    """
    return [*open_site(path, reading).identities(role)]


def names(path: str | Path, reading: Reading = AS_IT_IS) -> list[str]:
    """What predictions call each example that a target trains on, in the order of `load_target`.

    This order hides classes, so whatever leaves the training names its examples by these.
    """
    return open_site(path, reading).names()


def keys(path: str | Path, reading: Reading = AS_IT_IS) -> list[str]:
    """What a table itself calls each example that a target trains on, as `names` has them.

    There are none of data that are no table, or that name no rows.
    """
    return open_site(path, reading).keys()


def shared(path: str | Path, reading: Reading = AS_IT_IS) -> int:
    """How many test examples are training examples, too, whatever shape a run wants."""
    site = open_site(path, reading)
    return _among(site.tests(), site)


def leaks(sites: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say of which targets test examples are training examples at a site of the same simulation.

    Folders of images are left out, as all images would be read for it.

    Args:
        sites: their configurations.
    """
    opened = {s["name"]: open_site(s["data"], Reading.said(s).at(s["name"])) for s in sites}
    arrays = {name: site for name, site in opened.items() if isinstance(site, ArrayFile)}
    said = list[str]()
    for target in (s["name"] for s in sites if s["role"] == "target" and s["name"] in arrays):
        tests = arrays[target].tests()
        count = {name: _among(tests, site) for name, site in arrays.items()}
        of = len(tests)
        said += [f"{target}: {_leak(n, of, f' at {name}')}" for name, n in count.items() if n]
    return said


def _among(tests: Sequence[bytes], site: SiteData) -> int:
    """How many test examples are among a site's training examples."""
    different = {*tests}
    training = {one for one in site.identities("target") if one in different} if tests else {}
    return sum(one in training for one in tests)


def _leak(n: int, of: int, where: str = "") -> str:
    return (
        f"{n} of the {of} test examples are also training examples{where}, so the accuracy of "
        "these tests would be too good: remove them from one of both"
    )


def open_site(path: str | Path, reading: Reading = AS_IT_IS) -> SiteData:
    """A folder of images, an .npz file or what a reader of another package takes, from its path."""
    path = Path(path)
    if not path.is_file() and not path.is_dir():
        what = "is a pipe or a device" if path.exists() else "does not exist"
        raise DataError(
            f"{path} {what}: give a folder of images, an .npz file, or a folder with one"
        )
    inside = Inside(path, reading.follow_links)
    if path.is_file() and path.suffix.lower() == ".npz":
        return ArrayFile(path, reading)
    if (reader := added(path)) is not None:
        if reading.split:
            raise DataError(
                f"{path} is read by a reader of another package, which knows no splits: leave "
                f"--split out"
            )
        return reader
    if path.is_file() and path.suffix.lower() in readers():
        return ArrayFile(path, reading)
    if (numbers := number_table.file_of(path, reading)) is not None:
        return ArrayFile(numbers, reading)
    if path.is_file() and not path.stat().st_size:
        raise DataError(f"{path} is empty: write it again")
    if parts_of(path, reading, inside):
        return Table(path, reading)
    if path.suffix.lower() == ".zip":
        raise DataError(f"{path} is an archive: unpack it, and give the folder that comes of it")
    if path.is_file():
        raise DataError(
            f"{path} is neither a folder nor an .npz file, nor a table (.csv, .parquet) "
            f"or an HDF5 file: give the folder of the images, save a table as .csv, or arrays with "
            f"numpy.savez_compressed"
        )
    try:
        archives = sorted(p for p in path.glob("*.npz") if not p.name.startswith("."))
    except OSError as error:
        raise DataError(f"{path} cannot be opened ({reason(error)}): check it") from error
    if len(archives) > 1:
        raise DataError(
            f"{path} holds {len(archives)} .npz files ({listed([p.name for p in archives])}): "
            f"name the one to use, for example {archives[0]}"
        )
    if not archives:
        return ImageFolder(path, reading)
    inside.check(archives[0])
    return ArrayFile(archives[0], reading)
