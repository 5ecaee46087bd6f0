"""What a site says of its own files: the options of every command that reads data."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedda.cli.options import given, of_section
from fedda.config.site_config import FileOptions

if TYPE_CHECKING:  # torch takes seconds to import, and --help should not
    from fedda.data import Reading

SHOWN = {"split": "NAME", "gray_bits": "8..16|auto", "columns": "NAME=COLUMN,.."}
OPTIONS = of_section(FileOptions, {name: {"metavar": shown} for name, shown in SHOWN.items()})
WindowOption = Annotated[
    str,
    typer.Option(
        metavar="LOW,HIGH",
        help="The gray values of more than 8 bits that become black and white, as a run's "
        "input.window says it.",
        show_default=False,
    ),
]


def reading_of(**said: Any) -> "Reading":
    """What these options say, all together; what is not possible ends the command."""
    from fedda.data import Reading

    return Reading.of(**said)


# Give a command these options in place of its parameter `reading`, which gets all of them; or, of a
# command that reads no files yet, in place of `files`, which gets them by name as they were given.
reads_files = given("reading", OPTIONS, reading_of)
names_files = given("files", OPTIONS, dict)
