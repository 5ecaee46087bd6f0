"""Examples for a trained model: all at a path, with their names, in a fixed order, in batches."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from fedda.config.inputs import INDICATOR
from fedda.data.array_file import ArrayFile
from fedda.data.form import AS_IT_IS, Form, Reading, Resize, conform
from fedda.data.image_folder import ImageFolder, listing
from fedda.data.load import open_site
from fedda.data.naming import listed
from fedda.data.own_columns import CHUNK, own_columns
from fedda.data.pixels import Encoded, read_images, sound
from fedda.data.samples import EXTENSIONS, volumes
from fedda.data.sets import Unlabelled
from fedda.data.table import Table
from fedda.data.which_files import Inside
from fedda.errors import DataError


class Batch(NamedTuple):
    """Some examples in a fixed order."""

    names: list[str]  # what they are called, as `batches` says
    examples: Unlabelled  # in the model's shape
    # what a table itself calls its rows; empty of other data, and if it names none
    keys: Sequence[str] = ()


_ARRAYS = ("x_train", "x_test", "x")


def batches(
    path: str | Path,
    shape: tuple[int, ...],
    batch: int,
    resize: Resize = "stretch",
    reading: Reading = AS_IT_IS,
    like: str | Path | None = None,
) -> Iterator[Batch]:
    """Yield batches of names and examples in the model's shape; labels are not read.

    Row i is example i of the data, and every one is there, of all splits unless one is named. An
    image is named by its path within the folder. Every folder in it is read, `train/` and
    `test/` too: first a folder's own images, sorted by name, then the folders in it. A row of an
    .npz file is named by its number from 0; if there are several arrays, by array and number, as
    `x_train/0`. A row of a table is named likewise, of several files as `train-0.parquet/0`. A
    reader of another package gives what a target would train on, named by number.

    Args:
        path: an image folder, an .npz file, a folder that holds exactly one .npz file, a table of
            images, or what a reader of another package takes.
        shape: of one example, (channels, H, W) or (d,). Images are converted to it as in a run.
        batch: examples at a time.
        resize: how images come to the model's size, `stretch` or `crop`.
        reading: what is said of the files. With a split, only its examples are read.
        like: with `input.window=own` or `input.missing`, the site whose means scale the examples
            and fill their gaps, those of its training part as in a run; by default this data's.

    Raises:
        DataError: there are no examples, or they cannot be read or do not fit the shape.
    """
    if len(shape) == 1 and reading.missing == INDICATOR:
        shape = (shape[0] // 2,)  # the other half are the indicators
    own = None
    if reading.own or (len(shape) == 1 and (reading.fills or reading.scales)):
        own = own_columns(_training(like or path, shape, reading), like or path, reading)
    for some in _batches(path, shape, batch, resize, reading):
        if own is None:
            own_columns(some.examples.x, path, reading)  # refuses gaps
            yield some
        else:
            yield some._replace(examples=own.of(some.examples))


def _training(path: str | Path, shape: tuple[int, ...], reading: Reading) -> Tensor:
    """The vectors that a target would train on -> (N, d): all where there is no training part."""
    site = open_site(path, replace(reading, split=""))
    if isinstance(site, ArrayFile):
        with site.opened() as npz:
            parted = npz.has("x_train") or npz.has("x")
        if parted:
            found = site.target(Form(), None).x
            _check(f"{path} holds", tuple(found.shape[1:]), shape)
            return found
    every = _batches(path, shape, CHUNK, "stretch", reading)
    return torch.cat([each.examples.x for each in every])


def _batches(
    path: str | Path, shape: tuple[int, ...], batch: int, resize: Resize, reading: Reading
) -> Iterator[Batch]:
    """As `batches`, but vectors as they lie in the files."""
    site = open_site(path, reading)
    channels, height, width = shape if len(shape) == 3 else (0, 0, 0)
    # Images are resized to squares only; for a model of another shape they must have its size.
    form = Form(channels, height if height == width else 0, resize, gray=reading.gray)
    if isinstance(site, ArrayFile):
        only = (f"x_{reading.split}",) if reading.split else _ARRAYS
        yield from _rows(site, only, shape, batch, resize)
    elif isinstance(site, Table):
        numbers, keys, images, _ = map(list, zip(*site.every(), strict=True))
        yield from _read(images, numbers, path, shape, batch, form, keys if any(keys) else ())
    elif isinstance(site, ImageFolder):
        folder = site.chosen
        files = [*_walk(folder, Inside(Path(path), reading.follow_links), set())]
        files = sound(files, form.gray, folder) if reading.skip_broken else files
        if not files:
            some = listed(sorted(EXTENSIONS), 9)
            others = volumes(folder.rglob("*"))
            raise DataError(f"{folder} holds no images{others}: put them into it, as {some}")
        names = [file.relative_to(folder).as_posix() for file in files]
        yield from _read(files, names, folder, shape, batch, form)
    else:
        _check(f"{path} holds", site.describe("target").shape, shape)
        x = site.target(form, None).x
        for start in range(0, len(x), batch):
            rows = x[start : start + batch]
            names = [str(start + i) for i in range(len(rows))]
            yield Batch(names, fitted(Unlabelled(rows), shape))


def _rows(
    site: ArrayFile, only: tuple[str, ...], shape: tuple[int, ...], batch: int, resize: Resize
) -> Iterator[Batch]:
    path = site.path
    with site.opened() as npz:
        npz.check_texts()
        arrays = [x for x in only if npz.has(x)]
        if not arrays:
            raise DataError(
                f"{path} has no examples; found: {listed(npz.keys, 12) or 'nothing'}; needed: "
                f"x, or x_train, x_test, or their CSR pieces"
            )
        for x in arrays:  # all arrays, before the first row is yielded
            _check(f"{x} in {path} has", npz.shape(x)[1:], shape)
        for x in arrays:
            prefix, start = f"{x}/" if len(arrays) > 1 else "", 0
            keys = npz.row_keys(x)
            for rows in (rows for some in npz.examples(x, batch) for rows in some.split(batch)):
                names = [f"{prefix}{start + i}" for i in range(len(rows))]
                its = keys[start : start + len(rows)]
                yield Batch(names, fitted(Unlabelled(rows), shape, resize), its)
                start += len(rows)


def _read(
    files: Sequence[Path | Encoded],
    names: list[str],
    where: object,
    shape: tuple[int, ...],
    batch: int,
    form: Form,
    keys: Sequence[str] = (),
) -> Iterator[Batch]:
    """Images with their names, some at a time."""
    _check(f"{where} holds", (3, 0, 0), shape)
    form = replace(form, notice=lambda _: None)  # a batch says little about the whole set
    for start in range(0, len(files), batch):
        some = slice(start, start + batch)
        x = read_images(files[some], form, None)
        yield Batch(names[some], fitted(Unlabelled(x), shape), keys[some])


def _walk(folder: Path, inside: Inside, seen: set[Path]) -> Iterator[Path]:
    """The images in a folder and in all folders in it, each folder once: a link may lead back."""
    if (real := folder.resolve()) in seen:
        return
    seen.add(real)
    found = listing(folder, inside)
    yield from found.images
    for inner in found.folders:
        yield from _walk(inner, inside, seen)


def _check(what: str, found: tuple[int, ...], needed: tuple[int, ...]) -> None:
    """Refuse examples that cannot be converted to the needed shape."""
    if len(found) == len(needed) and (len(needed) == 3 or found == needed):
        return
    raise DataError(
        f"{what} {_words(found)}, but the model takes {_words(needed)}: give data like its "
        f"training data, or another model"
    )


def _words(shape: tuple[int, ...]) -> str:
    return "images" if len(shape) == 3 else f"vectors of {shape[0]} numbers"


def fitted(examples: Unlabelled, shape: tuple[int, ...], resize: Resize = "stretch") -> Unlabelled:
    if examples.kind == "image" and shape[1] == shape[2]:
        examples = conform(examples, shape[0], shape[1], resize)
    if examples.shape != shape:
        raise DataError(
            f"an image is {'x'.join(map(str, examples.shape))} (channels, height, width), but the "
            f"model takes {'x'.join(map(str, shape))}: bring the images to that shape"
        )
    return examples
