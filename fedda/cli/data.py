"""`fedda data`: make digits, rotate a domain, cut a table, check data, show images."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from fedda.cli.as_json import JsonOption, print_json
from fedda.cli.helped import OpenGroup
from fedda.cli.its_files import OPTIONS, WindowOption, reading_of, reads_files
from fedda.cli.options import given
from fedda.config import IMAGES_HIDE
from fedda.errors import ConfigError
from fedda.files import filling
from fedda.results.escaping import PlainConsole, echo

if TYPE_CHECKING:  # torch takes seconds to import, and --help should not
    from fedda.data import Reading
    from fedda.data.sets import Description, Progress

app = typer.Typer(
    cls=OpenGroup,
    no_args_is_help=True,
    help="Make, import, check and look at the data a site brings.",
)

DataPath = Annotated[
    Path,
    typer.Argument(
        metavar="DIR", help="A folder of images, an .npz file, or a folder with one .npz file."
    ),
]
RoleOption = Annotated[
    Literal["source", "target"],
    typer.Option(help="Role of the site: a source has labels; a target's labels are never read."),
]
_SHOWN = 400  # classes, with their counts
_SHEET_SIZE = 96  # pixels per side, if the images have several sizes
MOMENTS = (
    "a model with BatchNorm, as runs have it by default, takes means over these unlabelled images "
    'along, which nearly tell how frequent each class is; with allow.norms = ["group"] in its '
    "policy this site takes part only in runs with model.norm=group, which send none."
)


@app.command()
def digits(
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Folder to write the domains to.")],
    seed: Annotated[int, typer.Option(help="Another seed draws other digits.")] = 0,
    train: Annotated[
        int | None, typer.Option(min=1, help="Training images per domain.", show_default=False)
    ] = None,
    test: Annotated[
        int | None, typer.Option(min=1, help="Test images per domain.", show_default=False)
    ] = None,
    colour: Annotated[bool, typer.Option("--colour")] = False,
    size: Annotated[int | None, typer.Option(min=8, max=128, show_default=False)] = None,
    fonts: Annotated[Path | None, typer.Option(exists=True, file_okay=False)] = None,
) -> None:
    """Write the demo's digit domains, one folder with one .npz each.

    They are made from packages that are already installed; nothing is downloaded.

      fedda data digits ./digits

      fedda data digits ./digits --train 200 --test 100 --seed 1

    With --colour, one domain `syn` of coloured numbers in its place: in the manner of the set SYN,
    whose file is no longer published, for a Digit-Five whose other four sets you have:

      fedda data digits ./digit-five --colour

    Options:
        colour: Draw 9000 and 2000 coloured numbers of 32 pixels.
        size: Pixels per side of these.
        fonts: A folder of fonts for these, beside the few that are installed with matplotlib.
    """
    from fedda.data import digits as plain
    from fedda.data import synthetic

    counts = {k: v for k, v in {"train": train, "test": test}.items() if v is not None}
    if not colour and (size or fonts):
        raise ConfigError("--size and --fonts are for coloured numbers: add --colour.")
    if colour:
        more = {"size": size} if size else {}
        echo(synthetic.build(out, seed=seed, fonts=fonts, **counts, **more))
        return
    for path in plain.build(out, seed=seed, **counts):
        echo(path)


@app.command()
@reads_files
def rotate(
    path: DataPath,
    out: Annotated[Path, typer.Argument(metavar="OUT")],
    angles: Annotated[str, typer.Option(metavar="0,30,..")],
    everywhere: Annotated[bool, typer.Option("--everywhere")] = False,
    role: RoleOption = "source",
    size: Annotated[int, typer.Option(min=0, max=4096)] = 0,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    *,
    reading: "Reading",
) -> None:
    """Make one rotated domain per angle from a domain: Rotated MNIST, from any images.

    Training images stay training images, and test images stay test images. Corners that the
    rotation uncovers get the image's own background. Each domain can be a source or the target of a
    run. With --role target the training labels are left out, so the domains can be targets only.

      fedda data digits ./digits --train 500

      fedda data rotate ./digits/handwritten ./rotated --angles 0,30,60,90

      fedda run kd3a --simulate ./rotated --target 90

    Options:
        out: A new or empty folder to write the domains to.
        angles: Degrees clockwise, one domain each.
        everywhere: Put every image into all domains, as in FRUDA, not into one only.
        size: Pixels per side to scale images to; 0: no scaling
        seed: Seed for dealing out the images.
    """
    from fedda.data.rotate import build

    done = build(
        path,
        out,
        degrees(angles),
        role=role,
        size=size,
        everywhere=everywhere,
        seed=seed,
        reading=reading,
    )
    for domain in done:
        echo(f"{domain.path}: {domain.train} training, {domain.test} test")


TestShareOption = Annotated[
    float,
    typer.Option(
        min=0,
        max=0.9,
        help="Share of each class to test on, drawn at random, where there is no split test.",
    ),
]


@app.command("split")
@given("files", {name: OPTIONS[name] for name in ("follow_links", "columns")}, dict)
def split_(
    table: Annotated[Path, typer.Argument(metavar="TABLE")],
    out: Annotated[Path, typer.Argument(metavar="OUT")],
    by: Annotated[str, typer.Option(metavar="COLUMN")] = "domain",
    split: Annotated[str, typer.Option(metavar="NAME", show_default=False)] = "",
    *,
    files: dict[str, Any],
    test_share: TestShareOption = 0.0,
) -> None:
    """Cut one table into one folder per site.

    The table has a row per image and the columns path, label and optionally split (train or test),
    or it is a data set of Hugging Face, in parquet files or saved by save_to_disk, with the columns
    image and label; or it is one of numbers, with a row per example. Images that a table names are
    linked into the sites' folders, or copied to another disk.

      fedda data split ./pacs.csv ./pacs --by domain

      fedda data split ./patients.csv ./hospitals --by hospital --columns label=diagnosis

      fedda data split ./saved-by-datasets ./sites --by scanner --split validation

      fedda run kd3a --simulate ./pacs --target sketch -c input.size=224

    Options:
        table: A CSV or parquet table, or a folder of them.
        out: A new or empty folder to write the sites to.
        by: The column that names each row's site.
        split: The split whose rows become the sites' training examples. Rows of the split test
            become their tests, those of other splits are left out. Default: train.
    """
    from fedda.data.table import split as cut

    with filling(out):
        reading = reading_of(split=split, **files)
        for site, rows in cut(table, out, by, reading, test_share).items():
            echo(f"{out / site}: {rows} examples")


@app.command()
@reads_files
def check(
    path: DataPath,
    role: RoleOption = "source",
    as_json: JsonOption = False,
    *,
    reading: "Reading",
    window: WindowOption = "",
    min_images: Annotated[int, typer.Option(min=2)] = IMAGES_HIDE,
) -> None:
    """Read all data in DIR once and show how a run would understand them.

    DIR is one of

      a folder with train/<class>/* and test/<class>/*, or <class>/* and no test set,

      for a target also a folder of images, or train/*, without class folders,

      an .npz or .h5 file with x_train, y_train, x_test, y_test, or x, y,

      a table of images, .csv or .parquet, with the columns path, label and optionally split (or
      others, see --columns), or the folder of images that it lies in; or a data set of Hugging
      Face, in parquet files or saved by save_to_disk, with the columns image and label,

      a table of numbers, .csv or .parquet, with the column label and a column per number,

      a domain of DomainNet or PACS with its lists, such as clipart/ beside clipart_train.txt.

    Images are png, jpg, bmp, webp, tif or dcm. They are turned upright as EXIF says, 16 bits of
    gray become 8 (0 to 65535 become 0 to 255, unless --gray-bits says that fewer bits are used, or
    --window which values become black and white), transparent parts become white, and animations
    and files of several pages are refused. If a run could not use the data, the command says why
    and ends with exit code 1.

      fedda data check ./clinic-a

      fedda data check ./clinic-b --role target --json

      fedda data check ./scans --gray-bits 12

      fedda data check ./ct --window=-160,240

      fedda data check ./saved-by-datasets --split validation

    Options:
        min_images: Refuse fewer training images, as fedda-client does with the same option; a
            simulated run takes any number.
    """
    from fedda.data import verify

    with bar() as progress:
        reading = reading.within(window)
        description = verify(path, role, progress, reading=reading, most=sys.maxsize)
    if as_json:
        print_json(description.to_json())
    else:
        _print(description, reading.split)
    description.check_size(min_images)


@app.command()
@reads_files
def show(
    path: DataPath,
    out: Annotated[
        Path, typer.Option(metavar="PNG", dir_okay=False, help="The picture to write.")
    ] = Path("contact-sheet.png"),
    role: RoleOption = "source",
    per_class: Annotated[
        int, typer.Option(min=1, max=50, help="Images per class; for a target, rows of images.")
    ] = 10,
    *,
    reading: "Reading",
    window: WindowOption = "",
) -> None:
    """Draw a contact sheet of DIR: a row per class, or a plain grid for a target.

    fedda data show ./clinic-a

    fedda data show ./clinic-b --role target --out clinic-b.png --per-class 8
    """
    from fedda.data import describe, load_source, load_target
    from fedda.data.show import contact_sheet

    reading = reading.within(window)
    odd = list[str]()
    description = describe(path, role, reading)
    mixed = description.kind == "image" and description.shape[1] == 0
    load = load_source if role == "source" else load_target
    with bar() as progress:
        size = _SHEET_SIZE if mixed else 0
        dataset = load(path, size=size, progress=progress, reading=reading, notice=odd.append)
    echo(contact_sheet(dataset, out, per_class))
    if description.gray:
        echo(f"gray values {description.gray}")
    for warning in odd:
        echo(f"warning: {warning}", err=True)


def degrees(angles: str) -> tuple[int, ...]:
    """The angles of an option."""
    try:
        return tuple(int(angle) for angle in angles.split(","))
    except ValueError:
        raise ConfigError(f"--angles is {angles!r}: give whole numbers, such as 0,30,60") from None


@contextmanager
def bar(doing: str = "reading") -> "Iterator[Progress]":
    """Show a progress bar on stderr that disappears at the end; stdout has only the answer."""
    columns = (TextColumn(doing), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    console = PlainConsole(stderr=True)
    # Disabled without a terminal, where it would leave an empty line.
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(doing, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)


def _print(description: "Description", split: str) -> None:
    table = Table(show_header=False)
    for name, value in _rows(description, split):
        table.add_row(name, escape(value))
    console = PlainConsole()
    heading = f"{description.path} as a {description.role}"
    console.print(escape(heading), soft_wrap=True, highlight=False)
    console.print(table)
    for warning in description.warnings:
        console.print(f"[yellow]warning:[/yellow] {escape(warning)}", soft_wrap=True)
    if description.role == "target":
        console.print(f"[yellow]note:[/yellow] {escape(MOMENTS)}", soft_wrap=True, highlight=False)


def _rows(description: "Description", split: str) -> Iterator[tuple[str, str]]:
    from fedda.data.cache import is_large
    from fedda.data.naming import listed

    yield "examples", description.form
    if description.gray:
        yield "gray values", description.gray
    labels = "with labels" if description.role == "source" else "labels, if any, are not read"
    part = f"the split {split}, " if split else ""
    yield "training", f"{description.train} ({part}{labels})"
    if is_large((description.train, *description.shape)):
        yield "kept", "in a private file under the --state-dir of fedda-client, see its --cache"
    tests = f"{description.test} (with labels)" if description.test else ""
    yield "test", tests or "none: no accuracy at this site"
    if description.role == "source":
        counts = [f"{name}: {count}" for name, count in description.counts.items()]
        yield f"{len(description.classes)} classes", listed(counts, _SHOWN)
    elif description.classes:
        yield f"{len(description.classes)} test classes", listed(description.classes, _SHOWN)
