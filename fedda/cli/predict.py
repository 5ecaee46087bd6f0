"""`fedda predict`: predict the classes of a site's data with a finished model."""

import csv
import json
import sys
from collections.abc import Iterator, Sequence
from itertools import chain, repeat
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedda.cli.its_files import reads_files
from fedda.files import writing
from fedda.halves import load
from fedda.results.escaping import Output, cell, echo
from fedda.results.read import RESULTS, model_file
from fedda.results.remarks import adapted_elsewhere

if TYPE_CHECKING:
    from fedda.data import Reading
    from fedda.models.answers import Answers


@reads_files
def predict(
    model: Annotated[Path, typer.Argument(metavar="MODEL")],
    data: Annotated[Path, typer.Argument(metavar="DIR")],
    out: Annotated[Path | None, typer.Option(metavar="FILE.csv", dir_okay=False)] = None,
    batch: Annotated[int, typer.Option(min=1)] = 256,
    device: str = "auto",
    like: Annotated[Path | None, typer.Option(metavar="DIR")] = None,
    *,
    reading: "Reading",
) -> None:
    """Predict the class of each example in DIR, and write the predictions as CSV.

    Each image in DIR and its subfolders, or each row of an .npz file or a table, gets one row, in
    their order: its path within DIR or its row number; the likeliest class and its probability;
    then the probability of every class, in the columns p_CLASS; of a table also its own id or path,
    in the column key. A text that a spreadsheet would compute begins with an
    apostrophe. Images are converted to the size and colours that the model was trained with; give
    --gray-bits as at the sites that trained it. With --skip-broken, images that cannot be read get
    no row. With --split, only this part of DIR is read. Vectors of a model that was trained with
    input.window=own or input.missing are scaled, and their gaps filled, by means of DIR's training
    part, or of all where it has none: no site's are in the model's file; give --like for a few.

      fedda predict runs/kd3a ./clinic-b --out clinic-b.csv

      fedda predict model.safetensors ./scans | head

    Options:
        model: A model.safetensors, or the folder of a run or training with one.
        data: A folder of images, an .npz file, or a folder with one .npz file.
        out: Write to this file, not to stdout.
        batch: Examples at a time.
        device: auto, cpu or cuda:N.
        like: With input.window=own or input.missing: scale vectors, and fill their gaps, by means
            of this site's training part and not of DIR's.
    """
    for text in _warnings(model):
        echo(f"warning: {text}", err=True)
    from fedda.models.answers import answers

    chosen = load("clients", "site.memory").pick_device(device)
    found = rows(*answers(model_file(model), data, batch, chosen, reading, like))
    if out is None:
        Output.ends = True
        csv.writer(sys.stdout, lineterminator="\n").writerows(map(cells, found))
    else:
        write(found, out)


def write(found: Iterator[list[str]], out: Path) -> None:
    """Write predictions to a file, the heading first, and say how many."""
    with (
        writing(out, "give another file by --out") as part,
        part.open("w", newline="", encoding="utf-8") as file,
    ):
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(cells(next(found)))
        count = sum(1 for row in found if writer.writerow(cells(row)))
    echo(f"{out}: {count} predictions")


def cells(row: list[str]) -> list[str]:
    """A row for a file that a spreadsheet may open, or a terminal show."""
    return [cell(text) for text in row]


def rows(classes: Sequence[str], found: "Iterator[Answers]") -> Iterator[list[str]]:
    """The rows of what a model says of examples, the heading first."""
    first = next(found)
    heading = ["file", "class", "probability", *(f"p_{name}" for name in classes)]
    yield heading + ["key"] * bool(first.keys)  # a table's own names of its rows come last
    for some in chain([first], found):
        best, label = some.p.max(dim=1)
        own = ([key] for key in some.keys) if some.keys else repeat([], len(some.names))
        said = zip(some.names, label.tolist(), best.tolist(), some.p.tolist(), own, strict=True)
        for name, c, top, each, key in said:
            # A file's name may hold bytes that are not text; they become escapes such as \udcff.
            name = name.encode(errors="backslashreplace").decode()
            yield [name, classes[int(c)], f"{top:.6g}", *(f"{value:.6g}" for value in each), *key]


def _warnings(model: Path) -> list[str]:
    """Return a warning for each adapted model of the run that stayed at its target."""
    folder = model if model.is_dir() else model.parent
    try:
        if (folder / RESULTS).is_file():
            return adapted_elsewhere(json.loads((folder / RESULTS).read_text()))
        results = json.loads((folder.parent / RESULTS).read_text())
        results["trainings"] = {
            method: [t for t in trainings if Path(t["model"]).parent.name == folder.name]
            for method, trainings in results["trainings"].items()
        }
        return adapted_elsewhere(results)
    except (OSError, ValueError, LookupError, AttributeError, TypeError):
        return []  # a model may come without its run's results
