"""Examples for a finished model: everything at a path by name, in a fixed order, batch by batch."""

from collections.abc import Iterator
from pathlib import Path

from fedda.data.arrays import ArrayFile
from fedda.data.folder import ImageFolder, listing
from fedda.data.npz import Npz
from fedda.data.pixels import EXTENSIONS, read_images
from fedda.data.sets import Unlabelled, listed
from fedda.data.site import open_site
from fedda.data.unify import conform
from fedda.errors import DataError

Named = tuple[list[str], Unlabelled]

_ARRAYS = ("x_train", "x_test", "x")


def stream(path: str | Path, shape: tuple[int, ...], batch: int) -> Iterator[Named]:
    """Examples as a model takes them, with their names; labels are not read.

    An image is named by its path within the folder, and every folder in it is read, `train/` and
    `test/` alike: the images of each folder by name, before those of the folders in it. A row of
    an .npz file is named by its number from 0, as `x_train/0` where there are several arrays.

    Args:
        path: an image folder, an .npz file, or a folder that holds exactly one .npz file.
        shape: of one example, (channels, H, W) or (d,). Images are brought to it as in a run.
        batch: examples at a time.

    Raises:
        DataError: there is nothing, something cannot be read, or it does not fit the shape.
    """
    site = open_site(path)
    if isinstance(site, ArrayFile):
        yield from _rows(site.path, shape, batch)
    else:
        yield from _images(site, shape, batch)


def _rows(path: Path, shape: tuple[int, ...], batch: int) -> Iterator[Named]:
    with Npz(path) as npz:
        arrays = [x for x in _ARRAYS if npz.has(x)]
        if not arrays:
            raise DataError(
                f"{path} has no examples; found: {listed(npz.keys, 12) or 'nothing'}; needed: "
                f"x, or x_train, x_test, or their CSR pieces"
            )
        for x in arrays:  # before the first row is given out
            _check(f"{x} in {path} has", npz.shape(x)[1:], shape)
        for x in arrays:
            prefix, start = f"{x}/" if len(arrays) > 1 else "", 0
            for rows in npz.examples(x).split(batch):
                names = [f"{prefix}{start + i}" for i in range(len(rows))]
                start += len(rows)
                yield names, _fitted(Unlabelled(rows), shape)


def _images(site: ImageFolder, shape: tuple[int, ...], batch: int) -> Iterator[Named]:
    files = list(_walk(site.path))
    if not files:
        raise DataError(
            f"{site.path} holds no images: put them into it, as {listed(sorted(EXTENSIONS), 9)}"
        )
    _check(f"{site.path} holds", (3, 0, 0), shape)
    channels, height, width = shape
    for start in range(0, len(files), batch):
        some = files[start : start + batch]
        # Where a model's images are not square the files must have its size already.
        x = read_images(some, channels, height if height == width else 0, None)
        names = [file.relative_to(site.path).as_posix() for file in some]
        yield names, _fitted(Unlabelled(x), shape)


def _walk(folder: Path) -> Iterator[Path]:
    found = listing(folder)
    yield from found.images
    for inner in found.folders:
        yield from _walk(inner)


def _check(what: str, found: tuple[int, ...], needed: tuple[int, ...]) -> None:
    """Refuse what cannot be brought to the shape."""
    if len(found) == len(needed) and (len(needed) == 3 or found == needed):
        return
    raise DataError(
        f"{what} {_words(found)}, and the model takes {_words(needed)}: give the data that it was "
        f"trained for, or another model"
    )


def _words(shape: tuple[int, ...]) -> str:
    return "images" if len(shape) == 3 else f"vectors of {shape[0]} numbers"


def _fitted(examples: Unlabelled, shape: tuple[int, ...]) -> Unlabelled:
    if examples.kind == "image" and shape[1] == shape[2]:
        examples = conform(examples, shape[0], shape[1])
    if examples.shape != shape:
        raise DataError(
            f"an image is {'x'.join(map(str, examples.shape))} (channels, height, width) and the "
            f"model takes {'x'.join(map(str, shape))}: bring the images to that shape"
        )
    return examples
