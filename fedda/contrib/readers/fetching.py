"""`fedda data hub`: a data set of Hugging Face as folders of sites."""

from pathlib import Path
from typing import Annotated

import typer

from fedda.cli.data import TestShareOption
from fedda.cli.its_files import OPTIONS
from fedda.cli.options import given
from fedda.results.escaping import echo


@given("columns", {"columns": OPTIONS["columns"]}, lambda columns: columns)
def hub(
    name: Annotated[str, typer.Argument(metavar="NAME")],
    out: Annotated[Path, typer.Argument(metavar="OUT")],
    by: Annotated[str, typer.Option(metavar="COLUMN")] = "domain",
    columns: str = "",
    test_share: TestShareOption = 0.2,
) -> None:
    """Fetch a data set of Hugging Face and write one folder per domain (extra hub).

    It has parquet files with the columns image, label and one that names the domain. After an
    interruption, type the same again. A target's labels are in its folder, too: its training never
    reads them, and a test does.

      fedda data hub flwrlabs/pacs ./pacs

      fedda data hub flwrlabs/office-home ./office-home --test-share 0.5

      fedda run kd3a --simulate ./pacs --target sketch --preset photos

    Options:
        name: OWNER/NAME, or a folder with the data set's parquet files.
        out: A new or empty folder to write the sites to.
        by: The column that names each row's site.
    """
    from fedda.contrib.readers.hub import sites_of

    for site, rows in sites_of(name, out, by, columns, test_share).items():
        echo(f"{out / site}: {rows} examples")
