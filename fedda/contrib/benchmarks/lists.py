"""Image benchmarks that come with lists: a line names a file and its class as a number.

    DomainNet     clipart_train.txt:               clipart/zebra/clipart_343_000001.jpg 343
    PACS          art_painting_train_kfold.txt:    art_painting/dog/pic_001.jpg 1    (from 1)
    ImageCLEF-DA  list/cList.txt:                  c/056.dog/056_0021.jpg 7

PACS calls its held-out list crossval; its test list joins the other two. In DomainNet and PACS the
folder gives the class. ImageCLEF-DA's folder names differ between domains, so the number gives it.
"""

import os
from contextlib import suppress
from pathlib import Path

from fedda.contrib.benchmarks import class_folders
from fedda.contrib.benchmarks.common import (
    ByClass,
    ImportedImages,
    ImportRequest,
    Sites,
    count,
    domain_folders,
    key,
    strays,
)
from fedda.contrib.benchmarks.splits import limited, split_images
from fedda.data.file_lists import Line, class_of, lines
from fedda.data.naming import listed
from fedda.data.samples import EXTENSIONS
from fedda.errors import DataError
from fedda.results.read import counted


class _Images:
    """Finds the files of a list, reading each folder once: DomainNet's lists have 600,000 lines."""

    def __init__(self, folder: Path, names: tuple[str, ...]) -> None:
        self.folder = folder  # of a domain, which has these names in lists
        self._names = names
        self._inside: dict[Path, frozenset[str]] = {}

    def find(self, line: Line) -> Path:
        if line.path.suffix.lower() not in EXTENSIONS:
            raise DataError(
                f"{line.where}: {line.path} is no image ({listed(sorted(EXTENSIONS), 9)})"
            )
        file = self.folder.parent / line.path
        if not self._is_there(file):
            # The list may have the domain in another case, or folders before it.
            parts = line.path.parts
            at = [i for i, part in enumerate(parts[:-1]) if key(part) in self._names]
            file = self.folder.joinpath(*parts[at[0] + 1 :]) if len(at) == 1 else file
        if not self._is_there(file):
            raise DataError(
                f"{line.where}: {line.path} is not at {file}: unpack all the images there"
            )
        return file

    def _is_there(self, file: Path) -> bool:
        if file.parent not in self._inside:
            try:
                self._inside[file.parent] = frozenset(os.listdir(file.parent))
            except OSError:
                self._inside[file.parent] = frozenset()
        return file.name in self._inside[file.parent]


def read_domainnet(request: ImportRequest) -> Sites:
    """`<domain>_train.txt` and `<domain>_test.txt`, labels from 0."""
    return _with_split(request, "_train", "_test", first=0)


def read_pacs(request: ImportRequest) -> Sites:
    """`<domain>_train_kfold.txt` and `<domain>_crossval_kfold.txt`, labels from 1."""
    return _with_split(request, "_train_kfold", "_crossval_kfold", first=1)


def read_imageclef(request: ImportRequest) -> Sites:
    """`list/<domain>List.txt`, which names all images of a domain, split here; or class folders."""
    folders = domain_folders(request)
    lists = _find_lists(request, folders, ("List", ""))
    if not lists:
        return class_folders.read(request)
    classes = request.benchmark.classes
    assert isinstance(classes, tuple)
    sites: Sites = {}
    for domain, folder in folders.items():
        if domain not in lists:
            raise request.wrong(f"{request.source} has no list of {domain}")
        by_class: ByClass = {name: [] for name in classes}
        images = _Images(folder, request.domains[domain])
        for line in _lines(request, lists[domain], first=0):
            by_class[classes[line.label]].append(images.find(line))
        by_class = {name: list(dict.fromkeys(files)) for name, files in by_class.items()}
        twice = count(by_class) - len({file for files in by_class.values() for file in files})
        if twice:
            request.notes.append(f"{domain}: {counted(twice, 'image')} listed under two classes")
        if empty := [name for name, files in by_class.items() if not files]:
            raise DataError(f"{lists[domain]} names no image of {listed(empty)}: all are needed")
        sites[domain] = split_images(request, domain, by_class)
    return sites


def _with_split(request: ImportRequest, train: str, test: str, first: int) -> Sites:
    if request.options.test_share is not None:
        return class_folders.read(request)
    folders = domain_folders(request)
    both = [_find_lists(request, folders, (ending,)) for ending in (train, test)]
    for lists, ending in zip(both, (train, test), strict=True):
        if missing := [d for d in folders if d not in lists]:
            raise request.wrong(
                f"{request.source} has no list {folders[missing[0]].name}{ending}.txt (without the "
                f"lists, --test-share 0.2 splits the images)"
            )
    names: dict[int, tuple[str, str]] = {}
    halves: dict[str, ImportedImages] = {}
    for domain, folder in folders.items():
        images = _Images(folder, request.domains[domain])
        training, testing = (
            _by_folder(_lines(request, lists[domain], first), images, names) for lists in both
        )
        union = {
            c: list(dict.fromkeys(training.get(c, []) + testing.get(c, [])))
            for c in training | testing
        }
        shared = count(training) + count(testing) - count(union)
        if shared:
            request.notes.append(f"{domain}: {counted(shared, 'image')} in both lists")
        all_files = ImportedImages(union, union)
        halves[domain] = (
            all_files if request.options.transductive else ImportedImages(training, testing)
        )
    _same_classes(request, halves)
    return {domain: limited(request, domain, images) for domain, images in halves.items()}


def _same_classes(request: ImportRequest, halves: dict[str, ImportedImages]) -> None:
    names = sorted({name for images in halves.values() for name in images.train})
    for domain, images in halves.items():
        if missing := sorted({*names, *images.test} - {*images.train}):
            raise DataError(
                f"{request.source}: the training list of {domain} names no image of "
                f"{listed(missing)}, which another list has: all domains need the same classes"
            )
    classes = request.benchmark.classes
    if isinstance(classes, int):
        class_folders.note_count(request, len(names))


def _find_lists(
    request: ImportRequest, domains: dict[str, Path], endings: tuple[str, ...]
) -> dict[str, Path]:
    """The list of every domain that has one; the domains' image folders are not searched."""
    own = frozenset(domains.values())
    files = strays(request, lambda file: f"{key(file.stem)}{file.suffix.lower()}", own)
    lists = {}
    for domain, names in request.domains.items():
        stems = (f"{name}{key(ending)}.txt" for ending in endings for name in names)
        if found := [file for stem in stems for file in files.get(stem, ())]:
            lists[domain] = _fitting(request, domain, found, _Images(domains[domain], names))
    return lists


def _fitting(request: ImportRequest, domain: str, files: list[Path], images: _Images) -> Path:
    """The one list, or of several the one whose first image is there."""
    fit = files if len(files) == 1 else []
    for file in files if not fit else ():
        with suppress(DataError):
            images.find(lines(file)[0])
            fit.append(file)
    if len(fit) != 1:
        raise DataError(
            f"{request.source} has {len(files)} lists of {domain} "
            f"({listed([*map(str, files)])}), and the first image of {len(fit)} of them is there: "
            f"leave only the right one"
        )
    return fit[0]


def _lines(request: ImportRequest, file: Path, first: int) -> list[Line]:
    """The lines of a list, with labels counted from 0."""
    classes = request.benchmark.classes
    number = classes if isinstance(classes, int) else len(classes)
    found = []
    for line in lines(file):
        if not first <= line.label < first + number:
            raise DataError(
                f"{line.where}: the label {line.label} is out of range; {request.benchmark.title} "
                f"has the labels {first} to {first + number - 1}"
            )
        if not any(map(line.path.match, request.benchmark.broken)):
            found.append(line._replace(label=line.label - first))
    return found


def _by_folder(given: list[Line], images: _Images, names: dict[int, tuple[str, str]]) -> ByClass:
    """Files by their folder; `names` holds the folder and the line in which a label came first."""
    by_class: ByClass = {}
    for line in given:
        by_class.setdefault(class_of(line, names), []).append(images.find(line))
    return {name: list(dict.fromkeys(files)) for name, files in sorted(by_class.items())}
