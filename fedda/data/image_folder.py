"""Image folders: `train/<class>/*` and `test/<class>/*`, or `<class>/*`, or flat for a target."""

import os
import random
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from fedda.data import naming
from fedda.data.form import AS_IT_IS, Form, Reading
from fedda.data.naming import listed
from fedda.data.pixels import Survey, broken, digest, labelled, read_images, sound, survey
from fedda.data.reader import SiteData
from fedda.data.samples import EXTENSIONS, is_dicom, volumes
from fedda.data.sets import Description, Labelled, Progress, Role, Unlabelled, odd_classes
from fedda.data.which_files import Inside, unread
from fedda.errors import DataError, reason

_CLUTTER = frozenset({"thumbs.db", "desktop.ini", "__macosx"})

ByClass = Mapping[str, list[Path]]


class Listing(NamedTuple):
    """A folder's image files, folders and other files, each sorted by name."""

    images: list[Path]
    folders: list[Path]
    strays: list[Path]


class ImageFolder(SiteData):
    """One site's folder of images; `warnings` collects what reading it passed over.

    Args:
        path: the folder.
        reading: as the site says; `split` is the folder in it to train on instead of `train`.

    Raises:
        DataError: there is no such folder in it.
    """

    def __init__(self, path: Path, reading: Reading = AS_IT_IS) -> None:
        self.path = path
        self.warnings: list[str] = []
        self._gray = reading.gray
        self._skips = reading.skip_broken
        self._inside = Inside(path, reading.follow_links)
        self._named = bool(reading.split)
        self._test = _inside(path, "test")
        self._train = _inside(path, reading.split or "train")
        if reading.split and not self._train.is_dir():
            names = listed([folder.name for folder in listing(path).folders], 12) or "no folder"
            raise DataError(
                f"{path} has no split {reading.split} ({names}): give --split the name of a "
                f"folder in it, or leave --split out"
            )
        if not self._train.is_dir():
            self._train = path

    @property
    def chosen(self) -> Path:
        """The folder that `--split` names, or without it the whole one."""
        return self._train if self._named else self.path

    def source(self, form: Form, progress: Progress | None) -> Labelled:
        files = self._source_files()
        self._test_files_of(files)
        return labelled(*_flat(files), tuple(files), form, progress)

    def target(self, form: Form, progress: Progress | None) -> Unlabelled:
        return Unlabelled(read_images(self._target_files(), form, progress))

    def evaluation(self, form: Form, progress: Progress | None) -> Labelled | None:
        files = self._test_files()
        if not any(files.values()):
            return None
        # A source's test classes are numbered like its training classes. A target's folders under
        # train/ need not be classes, so there the test folders alone may name the classes.
        names = tuple(folder.name for folder in listing(self._train, self._inside).folders)
        classes = names if set(files) <= set(names) else tuple(files)
        return labelled(*_flat(files), classes, form, progress)

    def identities(self, role: Role) -> list[bytes]:
        """Digests of the files; a source's cover their class, too."""
        if role == "target":
            return [digest(file) for file in self._target_files()]
        return [*map(digest, *_flat(self._source_files()))]

    def tests(self) -> list[bytes]:
        """Digests of the labelled test images, without their classes."""
        return [*map(digest, _flat(self._test_files())[0])]

    def names(self) -> list[str]:
        """The path of each image that a target trains on, in the order of `target`."""
        return [file.relative_to(self.chosen).as_posix() for file in self._target_files()]

    def broken(self, role: Role) -> list[str]:
        """A sentence for each image file that cannot be read, those of the test included."""
        own = role == "source"
        train = _flat(self._source_files())[0] if own else sorted(self._target_files())
        return broken([*train, *_flat(self._test_files())[0]], self._gray)

    def describe(self, role: Role) -> Description:
        if role == "source":
            by_class = self._source_files()
            counts = {name: len(files) for name, files in by_class.items()}
            train, test = _flat(by_class)[0], self._test_files_of(by_class)
        else:
            counts, train, test = {}, self._target_files(), self._test_files()
        if self._train != self.path:
            known = (self._train, self._test)
            unused = [f for f in listing(self.path, self._inside).folders if f not in known]
            names = dict.fromkeys((self._train.name, self._test.name))
            used = " and ".join(f"{each}/" for each in names)
            self._warn_passed_over(self.path, unused, f"folders beside {used}")
        if table := unread(self.path):
            self.warnings.append(f"{table}, or what it says is passed over")
        found = self._survey(train, _flat(test)[0])
        self.warnings += odd_classes(counts)
        return Description(
            path=self.path,
            role=role,
            kind="image",
            shape=found.shape,
            train=len(train),
            test=sum(map(len, test.values())),
            classes=tuple(counts) or tuple(name for name, files in test.items() if files),
            counts=counts,
            warnings=tuple(dict.fromkeys(self.warnings)),
            gray=found.gray(self._gray),
            needs_window=found.needs_window,
        )

    def _survey(self, train: list[Path], test: list[Path]) -> Survey:
        """The training images' headers; warns where images differ."""
        training = survey(train)
        if training.mixed:
            self.warnings.append(training.mixed)
        if len(training.channels) > 1:
            self.warnings.append(
                f"some images are grayscale ({training.channels[1]}) and some in colour "
                f"({training.channels[3]}): all are read as colour unless input.channels is 1"
            )
        if test and not training.mixed and (testing := survey(test)).shape != training.shape:
            self.warnings.append(
                f"test images are {_sizes(testing.shape)} and training images "
                f"{_sizes(training.shape)}: a run needs input.channels and input.size to use both"
            )
        return training

    def _source_files(self) -> ByClass:
        if self._train == self.path and self._test.is_dir():
            raise DataError(
                f"{self.path} has a folder test/ but no train/: move the class folders to "
                f"train/ in it"
            )
        if self._train == self.path and (odd := unread(self.path)):
            raise DataError(odd)
        inside = listing(self._train, self._inside)
        if inside.images and not inside.folders:
            raise DataError(
                f"{self._train} holds {len(inside.images)} images and no class folders, but a "
                f"source needs labels: sort the images into {self._train}/<class>/, or let the "
                f"site be a target (--role target, or --target)"
            )
        if not inside.folders:
            raise DataError(
                f"{self._train} holds no images{volumes(inside.strays)}: put them into "
                f"{self._train}/<class>/, as {listed(sorted(EXTENSIONS), 9)}"
            )
        self._warn_passed_over(self._train, inside.images, "images outside the class folders")
        by_class = self._by_class(inside)
        if not any(by_class.values()):
            raise DataError(
                f"{self._train} holds only empty class folders ({listed(list(by_class))}): put "
                f"images into them"
            )
        return by_class

    def _target_files(self) -> list[Path]:
        inside = listing(self._train, self._inside)
        files = inside.images
        self._warn_passed_over(self._train, inside.strays, "files that are not images")
        for folder in inside.folders:
            if folder != self._test:
                inner = listing(folder, self._inside)
                files = files + inner.images
                self._warn_passed_over(folder, inner.strays, "files that are not images")
                self._warn_passed_over(folder, inner.folders, "folders inside a folder")
        if not files:
            raise DataError(
                f"{self._train} holds no training images{volumes(self._train.rglob('*'))}: put "
                f"them into it, as {listed(sorted(EXTENSIONS), 9)}"
            )
        files = self._sound(files, self._train)
        # Neither folder names nor the order of the examples may reveal a class.
        random.Random(0).shuffle(files)
        return files

    def _test_files(self) -> ByClass:
        """The test images by class; empty without a labelled test set."""
        if not self._test.is_dir() or self._test == self._train:
            return {}
        inside = listing(self._test, self._inside)
        if not inside.folders:
            what = "images without class folders" if inside.images else "no images"
            self.warnings.append(
                f"{self._test} holds {what}: nothing is evaluated at this site; "
                f"put labelled images into {self._test}/<class>/"
            )
            return {}
        self._warn_passed_over(self._test, inside.images, "images outside the class folders")
        return self._by_class(inside)

    def _test_files_of(self, train: ByClass) -> ByClass:
        """As `_test_files`; every class must be one of the training classes."""
        test = self._test_files()
        unknown = [name for name in test if name not in train]
        if unknown:
            raise DataError(
                f"{self._test / unknown[0]} is a class that {self._train} does not have "
                f"({listed(list(train))}): rename it, remove it, or add training images of it, or "
                f"an empty folder of its name if other sites have them"
            )
        return test

    def _by_class(self, classes: Listing) -> ByClass:
        """The images of each class; an empty folder is a class that this site has none of."""
        naming.check((folder.name for folder in classes.folders), classes.folders[0].parent)
        by_class = {}
        for folder in classes.folders:
            images, folders, strays = listing(folder, self._inside)
            if not images and (folders or strays):
                others = listed([entry.name for entry in [*folders, *strays]], 3)
                raise DataError(
                    f"the class folder {folder} holds no images, only {others}{volumes(strays)}: "
                    f"put images into it ({listed(sorted(EXTENSIONS), 9)}), remove it, give its "
                    f"path instead if it is the folder of a whole site, or call it train or test "
                    f"if it is one of these"
                )
            self._warn_passed_over(folder, strays, "files that are not images")
            self._warn_passed_over(folder, folders, "folders inside a class folder")
            by_class[folder.name] = self._sound(images, folder) if images else []
        return by_class

    def _sound(self, files: list[Path], where: Path) -> list[Path]:
        """The files that can be read, if the others are to be passed over; else all."""
        good = sound(files, self._gray, where) if self._skips else files
        bad = set(files) - set(good)
        entries = [file for file in files if file in bad]
        self._warn_passed_over(where, entries, "images that cannot be read")
        return good

    def _warn_passed_over(self, where: Path, entries: list[Path], what: str) -> None:
        if names := listed([entry.name for entry in entries], 3):
            many = f"{len(entries)} " if len(entries) > 1 else ""
            self.warnings.append(f"{where}: {many}{what} are passed over ({names})")


def _inside(path: Path, name: str) -> Path:
    """The folder of this name in another; `Train` serves as `train` if there is no `train`.

    Raises:
        DataError: there are several such folders, whose names differ only in case.
    """
    if not path.is_dir():
        return path / name
    alike = [folder for folder in listing(path).folders if folder.name.lower() == name.lower()]
    if len(alike) > 1:
        names = " and ".join(f"{folder.name}/" for folder in alike)
        raise DataError(
            f"{path} holds {names}, whose names differ only in case: put their images into one of "
            f"them, or rename the other"
        )
    return alike[0] if alike else path / name


def listing(folder: Path, within: Inside | None = None) -> Listing:
    """A folder's content, without hidden files and the files that file managers leave behind.

    Args:
        folder: it.
        within: where it and its images have to lie; None: anywhere.

    Raises:
        DataError: it cannot be opened, or one of them lies elsewhere.
    """
    inside = Listing([], [], [])
    if within is not None:
        within.check_folder(folder)
    try:
        with os.scandir(folder) as scan:
            entries = sorted(scan, key=lambda entry: entry.name)
    except OSError as error:
        raise DataError(
            f"{folder} cannot be opened ({reason(error)}): check its permissions"
        ) from error
    for entry in entries:
        name = entry.name.lower()
        if name.startswith(".") or name in _CLUTTER:
            continue
        if entry.is_dir():
            inside.folders.append(folder / entry.name)
        elif os.path.splitext(name)[1] in EXTENSIONS or (
            entry.is_file(follow_symlinks=False) and is_dicom(folder / entry.name)
        ):
            if within is not None and not entry.is_file(follow_symlinks=False):
                within.check(folder / entry.name)
            inside.images.append(folder / entry.name)
        else:
            inside.strays.append(folder / entry.name)
    return inside


def _flat(by_class: ByClass) -> tuple[list[Path], list[str]]:
    """The images of all classes, and the class of each."""
    pairs = [(file, name) for name, files in by_class.items() for file in files]
    return [file for file, _ in pairs], [name for _, name in pairs]


def _sizes(shape: tuple[int, int, int]) -> str:
    channels, height, width = shape
    size = f"{width}x{height}" if width else "of several sizes"
    return f"{'colour' if channels == 3 else 'grayscale'} {size}"
