"""What a site says of its own files: the options of every command that reads data."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedda.cli.exits import clear_exit
from fedda.cli.options import Options, given

if TYPE_CHECKING:  # torch takes seconds to import, and --help should not
    from fedda.data import Reading

SplitOption = Annotated[
    str,
    typer.Option(
        metavar="NAME",
        help="The part of the data to train on: a folder NAME/ instead of train/, arrays x_NAME "
        "and y_NAME, or rows of this split in a table. The part test stays for testing, other "
        "parts are passed over. Default: train.",
        show_default=False,
    ),
]
GrayOption = Annotated[
    str,
    typer.Option(
        metavar="8..16|auto",
        help="Significant bits of image files with 16 bits of gray: with 12, 0 to 4095 become 0 to "
        "255. Give the same at all sites with such scans. auto: as many as the file stores per "
        "pixel, 16 but for TIFF files packed to fewer.",
    ),
]
WindowOption = Annotated[
    str,
    typer.Option(
        metavar="LOW,HIGH",
        help="The gray values of more than 8 bits that become black and white, as a run's "
        "input.window says it.",
        show_default=False,
    ),
]
SkipOption = Annotated[
    bool,
    typer.Option(
        "--skip-broken",
        help="Pass over images of a folder or table that cannot be read, and say which; without it "
        "they are an error.",
    ),
]
FollowOption = Annotated[
    bool,
    typer.Option(
        "--follow-links",
        help="Read also what symbolic links, and paths in tables, name outside of the data's "
        "folder; without it they are an error. Give it if you trust whoever made the folder.",
    ),
]
ColumnsOption = Annotated[
    str,
    typer.Option(
        metavar="NAME=COLUMN,..",
        help="What a table calls its columns path (or image), label, split and id, where it does "
        "not call them so: path=filename,label=diagnosis. Of a table of numbers, values=age+weight "
        "takes these alone, in this order at all sites, and drop=visit+notes leaves these out. Of "
        "several sites, north:label=outcome holds for one.",
        show_default=False,
    ),
]


OPTIONS: Options = {
    "split": (SplitOption, ""),
    "gray_bits": (GrayOption, "auto"),
    "skip_broken": (SkipOption, False),
    "follow_links": (FollowOption, False),
    "columns": (ColumnsOption, ""),
}


def reads_files(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command these options in place of its parameter `reading`, which gets all of them."""

    def reading(**given: Any) -> "Reading":
        with clear_exit():
            return reading_of(**given)

    return given("reading", OPTIONS, reading)(command)


def names_files(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command that reads no files yet the options in place of its parameter `files`.

    It gets them by name, as they were given.
    """
    return given("files", OPTIONS, dict)(command)


def reading_of(
    split: str = "",
    gray_bits: str = "auto",
    skip_broken: bool = False,
    follow_links: bool = False,
    columns: str = "",
) -> "Reading":
    """All together.

    Raises:
        ConfigError: one of them is not possible.
    """
    from fedda.data import Reading

    return Reading.of(split, gray_bits, skip_broken, follow_links, columns)
