"""Sites' data drawn by chance: files, what is right in them, and what nobody can read."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pyarrow as arrow
from fuzzed_images import Written, drawn, pick
from pyarrow import parquet

from fedda.data import Reading, Role

Labelled = list[tuple[str, np.ndarray]]

CLASSES = (
    ("Cat", "cat"),
    *(("cat", "dog"), ("0", "1"), ("10", "9"), ("Straße", "naïve"), ("a b", "c  d"), ("yes", "no")),
    *(
        ("100%", "50%"),
        ("#1", "=2"),
        ("none of these", "Not seen"),
        ("training", "valid"),
        ("É", "e"),
    ),
)
NO_CLASSES = ("NaN", "-1", "n/a", "None", "a|b", "a;b", "[1, 2]", "null", "?")
NO_TEXTS = ("", " ", "0.25", "-0.5", "1e-3x|y")  # which no folder is called
FILES = ("{}", "scan {}", "a;b{}", "it's {}", "ä{}", "-{}", "{}.copy", "100% {}", "#{}", "IMG_{}")
FILES += ("{}" + "x" * 100,)
MAPS = ("path=scan,label=diagnosis", "path=Image Index,label=Finding Labels", "label=dx")


@dataclass
class Case:
    """A site's data and what is right.

    Attributes:
        path: as a person gives it.
        role: source or target.
        about: what it is, for a person.
        right: the training examples with their classes; None if the data have to be refused.
        tests: the labelled tests.
        rows: all examples in the order of predictions.
        reading: what the site says.
        tolerance: of rounding, in pixels.
    """

    path: Path
    role: Role
    about: str
    right: Labelled | None
    tests: Labelled = field(default_factory=list)
    rows: list[np.ndarray] = field(default_factory=list)
    reading: Reading = field(default_factory=Reading)
    tolerance: float = 3.0


Rng = np.random.Generator


def _role(rng: Rng) -> Role:
    return pick(rng, "source", "target")


def _write(file: Path, image: Written) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(image.content)
    return file


def _pairs(names: Sequence[str], images: Sequence[Written]) -> Labelled | None:
    if any(image.right is None for image in images):
        return None
    return [(n, i.right) for n, i in zip(names, images, strict=True) if i.right is not None]


def _named(rng: Rng, ending: str, count: int) -> list[str]:
    """Names of files, in their order."""
    form = pick(rng, *FILES)
    ending = pick(rng, ending, ending, ending.upper())
    return sorted(f"{form.format(i)}.{ending}" for i in range(count))


def sites(rng: Rng, root: Path) -> Case:
    """Folders of images: class folders with tests or without, or flat."""
    role, (ending, images) = _role(rng), drawn(rng, 6)
    if pick(rng, True, False, False):
        names = _named(rng, ending, 6)
        for name, image in zip(names, images, strict=True):
            _write(root / name, image)
        right = None if role == "source" else _pairs(names, images)
        return Case(root, role, f"flat, {ending}", right, rows=_rights(images))
    classes = sorted(pick(rng, *CLASSES))
    bad = rng.random() < 0.15
    if bad:
        classes = sorted([classes[0], pick(rng, *(c for c in NO_CLASSES if "/" not in c))])
    split, tested = pick(rng, True, False), pick(rng, True, False)
    place, names = root / "train" if split else root, _named(rng, ending, 4)
    labels = [classes[i // 2] for i in range(4)]
    for label, name, image in zip(labels, names, images, strict=False):
        _write(place / label / name, image)
    tests, used = list[Written](), images[:4]
    if tested and split:
        tests, used = images[4:], images
        for label, image in zip(classes, tests, strict=True):
            _write(root / "test" / label / f"t.{ending}", image)
    if pick(rng, True, False, False):
        (place / ".DS_Store").write_bytes(b"x")
        (place / classes[0] / "notes.txt").write_text("by hand")
    right = _pairs(labels, images[:4])
    hidden = bad and role == "target" and not tests
    if (bad and not hidden) or any(image.right is None for image in used):
        right = None
    if role == "source" and pick(rng, *[False] * 9, True):
        odd = place / os.fsdecode(b"na\xefve")  # Latin-1, which is no UTF-8
        _write(odd / f"0.{ending}", images[0])
        right = None
    if rng.random() < 0.05:
        (place / classes[0] / f"link.{ending}").symlink_to("/etc/hostname")
        right = None
    about = f"class folders {classes}, {ending}, tests {bool(tests)}"
    rows = [*_rights(tests), *_rights(images[:4])]
    return Case(root, role, about, right, _pairs(classes, tests) or [] if tests else [], rows)


def _rights(images: Sequence[Written]) -> list[np.ndarray]:
    return [image.right for image in images if image.right is not None]


def lists(rng: Rng, root: Path) -> Case:
    """A domain with its lists, in it or beside it."""
    role, (ending, images) = _role(rng), drawn(rng, 6)
    classes = pick(rng, *CLASSES)
    domain = pick(rng, "clipart", "art_painting", "Real", "site")
    labels, names = [classes[i // 3] for i in range(6)], _named(rng, ending, 6)
    numbers = [i // 3 for i in range(6)]
    odd = pick(rng, "", "", "", "", "a label of two classes", "a missing file", "no number")
    train = [i for i in range(6) if i % 3 < 2]
    for label, name, image in zip(labels, names, images, strict=True):
        _write(root / domain / label / name, image)
    lines = [
        f"{domain}/{label}/{name} {n}"
        for label, name, n in zip(labels, names, numbers, strict=True)
    ]
    if odd == "a label of two classes":
        lines[0] = lines[0][:-1] + "1"
    elif odd == "a missing file":
        lines[1] = f"{domain}/{labels[1]}/gone.{ending} 0"
    elif odd == "no number":
        lines[1] = lines[1][:-2]
    place = pick(rng, root, root / domain)
    for part, chosen in (("train", train), ("test", [i for i in range(6) if i not in train])):
        end = pick(rng, "\n", "\r\n")
        text = end.join(lines[i] for i in chosen) + end
        (place / f"{domain}_{part}.txt").write_bytes(text.encode())
    path = pick(rng, root, root / domain)
    whole = _pairs(labels, images)
    tests = [] if whole is None else [whole[i] for i in range(6) if i not in train]
    right = None if whole is None or odd else [whole[i] for i in train]
    order = [i for i in range(6) if i not in train] + train  # the lists by name
    rows = [] if whole is None else [whole[i][1] for i in order]
    return Case(path, role, f"{classes}, {ending}, {odd or 'whole'}", right, tests, rows)


def held(rng: Rng, root: Path) -> Case:
    """Parquet as Hugging Face writes it: the images' bytes in the table, a file for each split."""
    role, (ending, images) = _role(rng), drawn(rng, 6)
    classes = pick(rng, *CLASSES)
    labels = [classes[i % 2] for i in range(6)]
    odd = pick(rng, "", "", "", "null image", "null label")
    struct = pick(rng, True, False)
    content: list[Any] = [image.content for image in images]
    cells: list[Any] = [{"bytes": c, "path": f"{i}.{ending}"} for i, c in enumerate(content)]
    column: list[Any] = cells if struct else content
    given: list[Any] = list(labels)
    if odd == "null image":
        column[1] = {"bytes": None, "path": None} if struct else None
    elif odd == "null label":
        given[1] = None
    place = pick(rng, root, root / "data")
    place.mkdir(parents=True)
    for part, chosen in (("train", slice(0, 4)), ("test", slice(4, 6))):
        table = arrow.table({"image": column[chosen], "label": given[chosen]})
        parquet.write_table(table, place / f"{part}-00000-of-00001.parquet")
    whole = _pairs(labels, images)
    hidden = odd == "null label" and role == "target"
    right = None if whole is None or (odd and not hidden) else whole[:4]
    tests = [] if whole is None else whole[4:]
    about = f"parquet with images, {classes}, {ending}, {odd or 'whole'}"
    return Case(root, role, about, right, tests, _rights([*images[4:], *images[:4]]))


def tables(rng: Rng, root: Path) -> Case:
    """CSV and parquet tables, columns by any name, in any order, with what tables have in them."""
    role, (ending, images) = _role(rng), drawn(rng, 6)
    root.mkdir(parents=True)
    classes = pick(rng, *CLASSES)
    labels, names = [classes[i % 2] for i in range(6)], _named(rng, ending, 6)
    odds = ("label", "two columns", "missing", "outside", "ragged", "unknown", "one number twice")
    odd = pick(rng, *[""] * 6, *odds)
    if odd == "label":
        labels[int(rng.integers(6))] = pick(rng, *NO_CLASSES, *NO_TEXTS)
    elif odd == "one number twice":
        labels = ["1", "01"] * 3
    hidden = odd in ("label", "one number twice") and role == "target"
    written = labels
    if not odd:  # as tables have them: with spaces, or as the numbers of a column with gaps
        form = pick(rng, "{}", "{}", " {}", "{}  ", *(["{}.0"] * all(c.isdigit() for c in classes)))
        written = [form.format(label) for label in labels]
    folder = pick(rng, "images", "a b", "deep/er")
    for name, image in zip(names, images, strict=True):
        _write(root / folder / name, image)
    columns = {"path": "path", "label": "label"}
    reading, said = Reading(), pick(rng, "", "", *MAPS)
    if odd == "unknown":
        columns = {"path": "scan", "label": "finding"}
    elif said:
        reading = Reading.of(columns=said)
        columns |= reading.named
    stem = ending == ending.lower() and pick(rng, True, False)
    stem = stem and not any("." in Path(name).stem for name in names)
    paths = [Path(name).stem if stem else f"{folder}/{name}" for name in names]
    if odd == "missing":
        paths[2] = f"{folder}/gone.{ending}"
    elif odd == "outside":
        paths[2] = pick(rng, "/etc/hostname", "../../elsewhere.png", f"{folder}/../../x.png")
    shuffled = [int(i) for i in rng.permutation(6)]
    rows = {columns["path"]: [paths[i] for i in shuffled], "age": ["40"] * 6}
    rows[columns["label"]] = [written[i] for i in shuffled]
    parted = not odd and pick(rng, True, False, False)
    if parted:
        rows[reading.named.get("split", "split")] = ["test" if i < 2 else "train" for i in shuffled]
    in_text = odd in ("two columns", "ragged", "one number twice")
    form = "csv" if in_text else pick(rng, "csv", "csv", "parquet")
    file = root / f"{pick(rng, 'all', 'labels')}.{form}"
    if form == "csv":
        file.write_bytes(_csv(rng, rows, odd, columns["label"]))
    else:
        parquet.write_table(arrow.table(_cells(rng, rows, columns["path"])), file)
    path = pick(rng, root, file) if form == "csv" or odd != "unknown" else file
    whole = _pairs(labels, images)
    right = None if whole is None or (odd and not hidden) else [whole[i] for i in shuffled]
    if odd == "unknown" and role == "target" and path == root:
        right = whole  # the images are read as a heap
    if odd == "two columns" and role == "target" and whole is not None:
        right = [whole[i] for i in shuffled]  # no label is read
    tests: Labelled = []
    if parted and right is not None and whole is not None:
        tests, right = whole[:2], [whole[i] for i in shuffled if i > 1]
    about = f"{form} {said} {classes}, {ending}, {odd or 'whole'}, {role}, {path.name}"
    ordered = [] if whole is None else [whole[i][1] for i in shuffled]
    if odd == "unknown":
        ordered = [] if whole is None else [each for _, each in whole]
    return Case(path, role, about, right, tests, ordered, reading)


def _csv(rng: Rng, rows: dict[str, list[str]], odd: str, label: str) -> bytes:
    comma, end = pick(rng, ",", ",", ";", "\t"), pick(rng, "\n", "\r\n")
    heads = [*rows, *([label] if odd == "two columns" else [])]

    def line(cells: Sequence[str]) -> str:
        quoted = any(c in cell for cell in cells for c in (",", ";", '"', "\t"))
        return comma.join(f'"{cell}"' if quoted else cell for cell in cells) + end

    text = line(heads)
    for i in range(6):
        cells = [rows[head][i] for head in heads]
        text += line([*cells, "more"] if odd == "ragged" and i == 3 else cells)
    text += pick(rng, "", end)
    return (pick(rng, b"", b"\xef\xbb\xbf") if odd != "bom" else b"") + text.encode()


def _cells(rng: Rng, rows: dict[str, list[str]], path: str) -> dict[str, Any]:
    """The columns of a parquet table, which may be typed."""
    found: dict[str, Any] = dict(rows)
    for head, values in rows.items():
        if head != path and all(value.isdecimal() for value in values):
            found[head] = [int(value) for value in values]
    return found


def arrays(rng: Rng, root: Path) -> Case:
    """`.npz` and HDF5: images and vectors of every type, with splits and names of classes."""
    role, n = _role(rng), 8
    root.mkdir(parents=True)
    odd = pick(rng, *[""] * 8, "type", "nan", "short", "negative", "float labels", "empty")
    kind = pick(rng, "gray", "rgb", "vector")
    y = np.arange(n) % 2
    if kind == "vector":
        x = rng.normal(size=(n, 5)).astype(pick(rng, "f2", "f4", "f8", ">f4", ">f8"))
        x = x if pick(rng, True, False) else (10 * x).astype(pick(rng, "i1", "i2", "i4", "i8"))
    else:
        x = rng.integers(0, 256, (n, 6, 6, *([3] * (kind == "rgb")))).astype(np.uint8)
    right_x = x.astype(np.float32)
    if odd == "nan" and kind == "vector" and x.dtype.kind == "f":
        x = x.copy()
        x[2, 1] = pick(rng, np.nan, np.inf)
    elif odd == "nan":
        odd = ""
    if odd == "type":
        x = x.astype(complex) if kind == "vector" else x.astype(pick(rng, "f4", "i8", "?"))
    labels: np.ndarray = y.astype(pick(rng, "i8", "i4", "u1", ">i2"))
    if odd == "short":
        labels = labels[:-1]
    elif odd == "negative":
        labels = np.where(np.arange(n) == 3, -1, y)
    elif odd == "float labels":
        labels = y + 0.5
    elif odd == "empty":
        x, labels, right_x = x[:0], labels[:0], right_x[:0]
    x = np.asfortranarray(x) if pick(rng, True, False) else x
    names = pick(rng, (), ("cat", "dog"), ("é", "b c"))
    called = names or ("0", "1")
    found: dict[str, Any] = {"x": x, "y": labels}
    tests: Labelled = []
    if tested := pick(rng, True, False):
        found = {"x_train": x, "y_train": labels, "x_test": x[:0:-1], "y_test": y[:0:-1]}
        tests = [(called[i], v) for i, v in zip(y[:0:-1], right_x[:0:-1], strict=False)]
    file = root / f"site.{pick(rng, 'npz', 'npz', 'h5')}"
    _save(file, found, names)
    hidden = role == "target" and odd in ("short", "negative", "float labels")
    right = None
    if not odd or hidden:
        right = [(called[i], v) for i, v in zip(y, right_x, strict=True)]
    rows = [*right_x, *(right_x[:0:-1] if tested else [])]
    path = pick(rng, file, root) if file.suffix == ".npz" else file
    about = f"{file.suffix} {kind} {x.dtype} labels {labels.dtype} {names}, {odd or 'whole'}"
    return Case(path, role, about, right, tests, rows, tolerance=1e-3)


def _save(file: Path, found: dict[str, Any], names: Sequence[str]) -> None:
    if file.suffix == ".npz":
        np.savez(file, allow_pickle=True, **found | ({"classes": np.array(names)} if names else {}))
        return
    with h5py.File(file, "w") as opened:
        for key, value in found.items():
            opened[key] = value
        if names:
            opened.create_dataset("classes", data=list(names), dtype=h5py.string_dtype())
