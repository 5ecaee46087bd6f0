"""A data set of Hugging Face as sites: its parquet files are fetched and cut by a column.

    flwrlabs/pacs   data/train-00000-of-00001.parquet, with the columns image, domain and label

becomes OUT/cartoon/train-0.parquet and so on, which fedda reads as any other table of images. What
is fetched stays in Hugging Face's own cache, so a fetch that broke off goes on where it was; sites
are written to a folder beside OUT first, which takes OUT's name when all are there.
"""

from pathlib import Path

from fedda.data.form import Reading
from fedda.data.optional import needed
from fedda.data.table import split
from fedda.errors import DataError
from fedda.files import filling


def sites_of(
    name: str, out: Path, by: str = "domain", columns: str = "", test_share: float = 0.0
) -> dict[str, int]:
    """Fetch a data set and write a folder for each of its domains -> rows by site.

    Args:
        name: of the data set, OWNER/NAME, or a folder that holds its parquet files already.
        out: a new or empty folder.
        by: the column that names each row's site.
        columns: what it calls its columns, as `image=img,label=class`.
        test_share: the share of each class to test on, drawn at random, where it has no split test.

    Raises:
        DataError: it cannot be fetched, has no parquet files or no such column, or OUT is taken.
    """
    with filling(out):
        folder = Path(name) if Path(name).is_dir() else _fetched(name)
        # A cache's files are links to others of the same cache.
        reading = Reading.of(follow_links=True, columns=columns)
        if not any(folder.rglob("*.parquet")):
            raise DataError(
                f"{name} has no parquet files: save it with datasets' save_to_disk, and cut it "
                "with fedda data split"
            )
        return split(folder, out, by, reading, test_share)


def _fetched(name: str) -> Path:
    """The folder of Hugging Face's cache with the parquet files of a data set."""
    hub = needed("huggingface_hub", "hub", f"fetching {name} from Hugging Face")
    try:
        return Path(hub.snapshot_download(name, repo_type="dataset", allow_patterns="*.parquet"))
    except Exception as error:  # of httpx, of files, and its own
        raise DataError(
            f"{name} cannot be fetched from Hugging Face ({' '.join(str(error).split())[:200]}): "
            "check the name, such as flwrlabs/pacs, and the network, or give a folder that holds "
            "its parquet files"
        ) from error
