"""`fedda label`: a few labels at a target, and what they say of models."""

import csv
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedda.cli.its_files import reads_files
from fedda.errors import ConfigError
from fedda.files import filling
from fedda.results.escaping import cell, echo
from fedda.results.read import model_file

if TYPE_CHECKING:
    from fedda.data import Reading

SIDE = 224  # pixels of an image that is shown, where a folder's images have several sizes
COUNTS = (20, 50, 100, 200)


@reads_files
def label(
    target: Annotated[Path, typer.Option(metavar="DIR")],
    out: Annotated[Path, typer.Option(metavar="FOLDER")] = Path("to-label"),
    n: Annotated[int, typer.Option("--n", min=1)] = 50,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    model: Annotated[list[Path] | None, typer.Option(metavar="RUN|FILE")] = None,
    id_column: Annotated[str, typer.Option("--id", metavar="COLUMN", show_default=False)] = "",
    *,
    reading: "Reading",
) -> None:
    """Label a few of a target's images by hand, and judge models by them; no label is sent.

    Nobody without labels can know how good a model is there. First draw images at random:

      fedda label --target ./clinic-b --n 50 --out ./clinic-b-labels

    FOLDER then has the images as numbered PNG files and labels.csv, in random order; rows of a
    table have its own id in the column `key`, too. Fill in the column `label` from the top, as far
    as you like, with the names of the classes. Then:

      fedda label --target ./clinic-b --out ./clinic-b-labels --model runs/kd3a --model runs/fedavg

    It says each model's accuracy on these images, with an interval, and whether two models differ.
    You may look, label more and look again: the intervals hold for all looks together.

    Options:
        target: The target's data.
        out: Of the drawn images and labels.csv.
        n: Images to label.
        seed: Of the draw.
        model: Judge this model by the labels; can be given several times.
        id_column: Name rows also by this column of a table, as --columns id=COLUMN does.
    """
    reading = reading.with_id(id_column)
    if model:
        _judge(target, out, [model_file(path) for path in model], reading)
    else:
        _draw(target, out, n, seed, reading)


def _draw(target: Path, out: Path, n: int, seed: int, reading: "Reading") -> None:
    from fedda.contrib.lab import labelled
    from fedda.data import describe, identities, load_target
    from fedda.data import keys as keys_of
    from fedda.data import names as names_of

    if out.exists() and any(out.iterdir()):
        raise ConfigError(
            f"--out is {out}, which holds something already; give a new folder, or judge models "
            "by its labels with --model."
        )
    own = keys_of(target, reading)
    if (wanted := reading.named.get("id")) and not own:
        raise ConfigError(
            f"--id is {wanted}, but {target} is no table with such a column; give one that it has, "
            "or leave it out."
        )
    drawn = labelled.Drawn.of(identities(target, "target", reading), n, seed)
    about = describe(target, "target", reading)
    images, size = about.kind == "image", 0 if all(about.shape) else SIDE
    x = load_target(target, size=size, reading=reading).x if images else None
    names = [f"{number:04d}{'.png' if images else ''}" for number in range(1, n + 1)]
    called = names_of(target, reading)  # as `fedda predict` calls them
    with filling(out), (out / labelled.LABELS).open("w", newline="", encoding="utf-8") as file:
        if x is not None:
            _pictures(x[list(drawn.images)], [out / name for name in names])
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["image", "file", *(["key"] if own else []), "label"])
        for name, i in zip(names, drawn.images, strict=True):
            key = [cell(own[i])] if own else []
            writer.writerow([name, cell(called[i]), *key, ""])
        drawn.write(out)
    what = "images" if images else "rows (vectors have no picture)"
    echo(f"{out}: {n} of {drawn.total} {what}, to label in {labelled.LABELS}")
    sizes = labelled.widths(sorted({*COUNTS, n}))
    told = ", ".join(f"{count}: {100 * width:.0f}" for count, width in sizes.items())
    echo(f"width of an accuracy's interval in points, by the number of labels, at 80 %: {told}")


def _pictures(x: Any, places: list[Path]) -> None:
    """Write images (n, channels, H, W) of bytes as PNG files."""
    from PIL import Image

    for image, place in zip(x.permute(0, 2, 3, 1).numpy(), places, strict=True):
        Image.fromarray(image[..., 0] if image.shape[2] == 1 else image).save(place)


def _judge(target: Path, folder: Path, files: list[Path], reading: "Reading") -> None:
    from fedda.contrib.lab import labelled
    from fedda.data.load import identities
    from fedda.models import describe

    labels = labelled.Labels.read(folder, identities(target, "target", reading))
    drawn = labels.drawn
    right = [labelled.right(path, target, labels, reading) for path in files]
    labels.looked()
    count = len(right[0])
    echo(f"{count} of {len(drawn.images)} images labelled, look {drawn.looks}")
    for path, answers in zip(files, right, strict=True):
        found = labelled.interval(sum(answers), count, drawn.looks)
        doubt = found.doubt(len(describe(path).classes))
        echo(
            f"{cell(str(path))}: {100 * found.accuracy:.1f} %, from {100 * found.low:.1f} to "
            f"{100 * found.high:.1f}{doubt and f'; {doubt}'}"
        )
    best = max(range(len(files)), key=lambda i: sum(right[i]))
    for i in (i for i in range(len(files)) if i != best):
        p = labelled.differ(right[best], right[i])
        verdict = (
            "is better than" if p < labelled.error_of(drawn.looks) else "may be no better than"
        )
        echo(f"{cell(str(files[best]))} {verdict} {cell(str(files[i]))} (p {p:.2g})")
