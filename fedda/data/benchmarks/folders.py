"""Image benchmarks that are folders of class folders: one split per class, files never decoded.

Office-31         amazon/images/back_pack/frame_0001.jpg
Office-Home       Art/Alarm_Clock/00001.jpg, "Real World" or RealWorld
Adaptiope         product_images/acoustic guitar/0001.jpg
Office-Caltech10  amazon/back_pack/..., or .mat files of features
"""

import re
from pathlib import Path

from fedda.data.benchmarks.common import ByClass, Request, Sites, domain_folders, key
from fedda.data.benchmarks.splits import split_images
from fedda.data.folder import listing
from fedda.data.sets import listed
from fedda.errors import DataError


def read(request: Request) -> Sites:
    """Every domain's class folders, split class by class."""
    places = domain_folders(request)
    found = unify(request, {d: class_folders(request, place) for d, place in places.items()})
    return {d: split_images(request, d, by_class) for d, by_class in found.items()}


def class_folders(request: Request, place: Path) -> ByClass:
    """The images in every class folder of a domain."""
    found = listing(place)
    if inner := [f for f in found.folders if key(f.name) == "images"]:
        found = listing(inner[0])
    if not found.folders:
        raise request.wrong(f"{place} holds no class folders")
    by_class = {folder.name: listing(folder).images for folder in found.folders}
    if empty := [name for name, files in by_class.items() if not files]:
        raise request.wrong(f"{found.folders[0].parent / empty[0]} holds no images")
    return by_class


def unify(request: Request, found: dict[str, ByClass]) -> dict[str, ByClass]:
    """The same class names in every domain: those of the benchmark, or of its first domain."""
    classes = request.benchmark.classes
    spelled = (
        {class_key(name, request): name for name in classes} if isinstance(classes, tuple) else {}
    )
    fixed, others = bool(spelled), set()
    unified: dict[str, ByClass] = {}
    for domain, by_class in found.items():
        unified[domain] = {}
        for name, files in by_class.items():
            short = class_key(name, request)
            if fixed and short not in spelled:
                others.add(name)
                continue
            unified[domain].setdefault(spelled.setdefault(short, name), []).extend(files)
    names = sorted(spelled.values())
    for domain, by_class in unified.items():
        if missing := [name for name in names if name not in by_class]:
            what = f"{request.source}: {domain} has no images of {listed(missing)}"
            if fixed:
                raise request.wrong(what)
            raise DataError(
                f"{what}, a class of another domain: all domains need the same classes; add the "
                f"images, or remove the class from every domain"
            )
    if others:
        request.notes.append(
            f"{len(others)} folders that are no class of {request.benchmark.title} are passed "
            f"over ({listed(sorted(others))})"
        )
    if isinstance(classes, int):
        note_count(request, len(names))
    return {d: {name: by_class[name] for name in names} for d, by_class in unified.items()}


def note_count(request: Request, found: int) -> None:
    """Say so if this is a part of the benchmark."""
    classes = request.benchmark.classes
    if found != classes:
        request.notes.append(
            f"{found} classes are there and {request.benchmark.title} has {classes}: results are "
            f"not comparable with published ones"
        )


def class_key(name: str, request: Request) -> str:
    """A class name without case, punctuation and Caltech-256's numbers ("145.motorbikes-101")."""
    short = key(re.sub(r"^\d+\.|-101$", "", name))
    return request.benchmark.aliases.get(short, short)
