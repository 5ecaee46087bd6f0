"""Image benchmarks with a folder per domain and in it a folder per class.

Every class is split by itself. No image is decoded.

Office-31         amazon/images/back_pack/frame_0001.jpg
Office-Home       Art/Alarm_Clock/00001.jpg, "Real World" or RealWorld
Adaptiope         product_images/acoustic guitar/0001.jpg
Office-Caltech10  amazon/back_pack/..., or .mat files of features
"""

import re
from pathlib import Path

from fedda.contrib.benchmarks.common import ByClass, ImportRequest, Sites, domain_folders, key
from fedda.contrib.benchmarks.splits import split_images
from fedda.data.image_folder import listing
from fedda.data.naming import listed, quoted
from fedda.data.samples import EXTENSIONS
from fedda.errors import DataError
from fedda.results.read import counted


def read(request: ImportRequest) -> Sites:
    """Every domain's class folders, split class by class."""
    folders = domain_folders(request)
    files = unify(request, {d: class_folders(request, folder) for d, folder in folders.items()})
    return {d: split_images(request, d, by_class) for d, by_class in files.items()}


def class_folders(request: ImportRequest, domain: Path) -> ByClass:
    """The images in every class folder of a domain's folder."""
    others, folders, _ = listing(domain)
    if inner := [f for f in folders if key(f.name) == "images"]:
        others, folders, _ = listing(inner[0])
    if not folders:
        raise request.wrong(f"{domain} holds no class folders")
    by_class: ByClass = {}
    for folder in folders:
        by_class[folder.name], deeper, strays = listing(folder)
        others += deeper + strays
    if empty := [name for name, files in by_class.items() if not files]:
        raise request.wrong(f"{folders[0].parent / empty[0]} holds no images")
    request.passed_over(domain, others, EXTENSIONS)
    return by_class


def unify(request: ImportRequest, domains: dict[str, ByClass]) -> dict[str, ByClass]:
    """Give all domains the same class names: the benchmark's, or those of the first domain."""
    classes = request.benchmark.classes
    spellings = (
        {class_key(name, request): name for name in classes} if isinstance(classes, tuple) else {}
    )
    fixed, ignored = bool(spellings), set()
    unified: dict[str, ByClass] = {}
    for domain, by_class in domains.items():
        unified[domain], owners = {}, dict[str, str]()
        for name, files in by_class.items():
            plain = class_key(name, request)
            if fixed and plain not in spellings:
                ignored.add(name)
                continue
            if (other := owners.setdefault(plain, name)) != name:
                raise DataError(
                    f"{request.source}: {domain} has the class folders {quoted(other)} and "
                    f"{quoted(name)}, which count as one name (case, spaces and punctuation make "
                    f"no difference): put their images into one folder if they are one class, "
                    f"else give them names that differ in more"
                )
            unified[domain][spellings.setdefault(plain, name)] = files
    names = sorted(spellings.values())
    for domain, by_class in unified.items():
        if missing := [name for name in names if name not in by_class]:
            what = f"{request.source}: {domain} has no images of {listed(missing)}"
            if fixed:
                raise request.wrong(what)
            raise DataError(
                f"{what}, which another domain has: all domains need the same classes; add the "
                f"images, or remove the class from every domain"
            )
    if ignored:
        request.notes.append(
            f"{counted(len(ignored), 'folder')} passed over, not a class of "
            f"{request.benchmark.title} ({listed(sorted(ignored))})"
        )
    if isinstance(classes, int):
        note_count(request, len(names))
    return {d: {name: by_class[name] for name in names} for d, by_class in unified.items()}


def note_count(request: ImportRequest, count: int) -> None:
    """Add a note if the number of classes is not the benchmark's."""
    classes = request.benchmark.classes
    if count != classes:
        request.notes.append(
            f"there are {count} classes, but {request.benchmark.title} has {classes}: results are "
            f"not comparable with published ones"
        )


def class_key(name: str, request: ImportRequest) -> str:
    """A class name without case, punctuation and Caltech-256's numbers ("145.motorbikes-101")."""
    short = key(re.sub(r"^\d+\.|-101$", "", name))
    return request.benchmark.aliases.get(short, short)
