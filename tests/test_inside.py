"""A site reads regular files of the folder it was given; others only if it says so."""

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from clients.site.memory import Site
from fedda import data
from fedda.data import Reading, table
from fedda.errors import DataError
from tests.command_lines import call

FOLLOW = Reading(follow_links=True)
OUT = r"leads out of this folder.*--follow-links"


def picture(path: Path, gray: int = 7) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (6, 6), gray).save(path)
    return path


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """Another study's data, of every form."""
    place = tmp_path / "elsewhere"
    for split in ("train", "test"):
        for name in ("a", "b"):
            for i in range(2):
                picture(place / split / name / f"{i}.png", 10 * i)
    (place / "table.csv").write_text(
        "path,label\ntrain/a/0.png,a\ntrain/b/0.png,b\ntrain/b/1.png,b\n"
    )
    x = np.zeros((4, 6, 6), np.uint8)
    np.savez(place / "x.npz", x=x, y=np.arange(4) % 2)
    return place


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "site"
    for name in ("a", "b"):
        for i in range(2):
            picture(folder / "train" / name / f"{i}.png", i)
    return folder


Way = Callable[[Path, Path], object]  # from a site's folder out of it


def linked(own: str, other: str) -> Way:
    return lambda site, out: (site / own).symlink_to(out / other)


def table_of(cell: Callable[[Path], object], before: Way = lambda site, out: None) -> Way:
    """A table with an image of the site in each row but the last."""

    def make(site: Path, out: Path) -> None:
        before(site, out)
        text = f"path,label\ntrain/a/0.png,a\ntrain/b/0.png,b\n{cell(out)},b\n"
        (site / "manifest.csv").write_text(text)

    return make


def linked_train(site: Path, out: Path) -> None:
    (site / "train").rename(site.parent / "old")
    (site / "train").symlink_to(out / "train")


def linked_through(site: Path, out: Path) -> None:
    """A link to a link, relative, which leads up."""
    os.symlink("../../../elsewhere", site / "train" / "a" / "up")
    os.symlink("up/train/a/0.png", site / "train" / "a" / "9.png")


IMAGE = linked("train/a/9.png", "train/a/0.png")
WAYS: dict[str, Way] = {
    "image": IMAGE,
    "class": linked("train/c", "train/a"),
    "train": linked_train,
    "through": linked_through,
    "test": linked("test", "test"),
    "manifest": linked("manifest.csv", "table.csv"),
    "npz": linked("x.npz", "x.npz"),
    "in a table": table_of(lambda _: "train/a/9.png", IMAGE),
    "up": table_of(lambda _: "../elsewhere/train/a/0.png"),
    "up in the middle": table_of(lambda _: "train/../../elsewhere/train/a/0.png"),
    "absolute": table_of(lambda out: out / "train" / "a" / "0.png"),
    "not there": table_of(lambda _: "../nobody/knows.png"),
}


def uses(site: Path, reading: Reading) -> dict[str, Callable[[], object]]:
    """All that reads a site's data."""
    return {
        "source": lambda: data.load_source(site, reading=reading, size=4),
        "target": lambda: data.load_target(site, reading=reading, size=4),
        "tests": lambda: data.load_evaluation(site, reading=reading, size=4),
        "describe": lambda: data.describe(site, "source", reading),
        "verify": lambda: data.verify(site, "target", reading=reading),
        "digests": lambda: data.identities(site, "source", reading),
        "batches": lambda: list(data.batches(site, (1, 4, 4), 8, reading=reading)),
        "site": lambda: Site({"role": "source", "data": str(site), **reading.flat()}).reading,
    }


@pytest.mark.parametrize("way", WAYS)
def test_nothing_leads_out_of_the_folder_unless_the_site_says_so(
    site: Path, elsewhere: Path, way: str
) -> None:
    WAYS[way](site, elsewhere)
    # Training images are no business of a test, nor tests of a training, where they are apart.
    readers = {"source", "describe", "verify", "batches"}
    for name in readers if way == "test" else readers | {"target", "digests"}:
        with pytest.raises(DataError, match=OUT) as found:
            uses(site, Reading())[name]()
        assert str(site.parent / "elsewhere") not in str(found.value).split(" leads")[0], name
    if way == "not there":
        return
    for use in uses(site, FOLLOW).values():
        use()


def test_what_stays_in_the_folder_is_read(site: Path, tmp_path: Path) -> None:
    """Links within it, a link to it, links that nobody reads, and a path that turns back."""
    (site / "train" / "a" / "9.png").symlink_to(site / "train" / "b" / "0.png")
    os.symlink("../train/b", site / "train" / "c")
    (site / "readme.txt").symlink_to("/etc/hostname")
    (site / ".hidden.png").symlink_to("/etc/hostname")
    (tmp_path / "link").symlink_to(site)
    for path in (site, tmp_path / "link"):
        for use in uses(path, Reading()).values():
            use()
        assert len(data.load_source(path)) == 7
    (site / "manifest.csv").write_text(
        f"path,label\ntrain/a/../b/0.png,b\n{site / 'train' / 'a' / '0.png'},a\n"
    )
    (tmp_path / "table.csv").symlink_to(site / "manifest.csv")
    (tmp_path / "train").symlink_to(site / "train")  # beside the link, whose folder counts
    assert len(data.load_source(site)) == 2
    np.savez(tmp_path / "a.npz", x=np.zeros((4, 6, 6), np.uint8))
    (tmp_path / "b.npz").symlink_to(tmp_path / "a.npz")
    assert len(data.load_target(tmp_path / "b.npz")) == 4


def test_a_folder_in_itself_ends(site: Path) -> None:
    for name in ("x", "y"):
        (site / "train" / name).symlink_to(site)
    found = [name for names, _, _ in data.batches(site, (1, 4, 4), 8) for name in names]
    assert len(found) == 4


@contextmanager
def pipe(path: Path) -> Iterator[None]:
    """A named pipe that nobody may open; whoever does reads nothing, so no test waits."""
    os.mkfifo(path)
    done, opened = threading.Event(), list[str]()

    def write() -> None:
        while not done.is_set():
            with path.open("wb"):
                opened.append("" if done.is_set() else path.name)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        yield
    finally:
        done.set()
        reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        writer.join()
        os.close(reader)
        path.unlink()
    assert not any(opened), opened


@pytest.mark.parametrize("reading", [Reading(), FOLLOW], ids=["inside", "follow"])
def test_pipes_are_never_opened(site: Path, reading: Reading) -> None:
    pytest.importorskip("pyarrow")
    regular = "regular file"
    for name in ("train/a/9.png", "train/9.dcm", "train-0.parquet", "x.npz"):
        with pipe(site / name):
            for used, use in uses(site, reading).items():
                # Images beside class folders are passed over by name, and tests need no training.
                if used == "site" or (used == "tests" and name.startswith("train/")):
                    continue
                if name == "train/9.dcm" and used in ("source", "describe", "digests"):
                    continue
                with pytest.raises(DataError, match=regular):
                    use()
    with pipe(site / "train" / "a" / "9"):
        (site / "manifest.csv").write_text("path,label\ntrain/a/9,a\ntrain/b/0.png,b\n")
        for used, use in uses(site, reading).items():
            if used not in ("site", "tests"):
                with pytest.raises(DataError, match=regular):
                    use()


@pytest.mark.parametrize("name", ["data", "x.npz", "x.csv", "x.h5", "x.parquet"])
def test_data_that_are_a_pipe_are_refused(tmp_path: Path, name: str) -> None:
    with pipe(tmp_path / name):
        for use in (data.load_source, data.load_target, data.load_evaluation):
            with pytest.raises(DataError, match="is a pipe or a device"):
                use(tmp_path / name)


def test_devices_and_folders_are_no_images(site: Path) -> None:
    for cell in ("/dev/zero", "train", "train/a/..", "."):
        (site / "manifest.csv").write_text(f"path,label\n{cell},a\ntrain/b/0.png,b\n")
        with pytest.raises(DataError, match="regular file"):
            data.verify(site, "source", reading=FOLLOW)


def test_odd_cells_are_refused_in_a_sentence(site: Path) -> None:
    arrow, parquet = (pytest.importorskip(f"pyarrow{part}") for part in ("", ".parquet"))
    for cell in ("", "\0", "x" * 5000, "train/a/0.png\0", "~/x", "none.png"):
        (site / "manifest.csv").write_text(f"path,label\n{cell},a\ntrain/b/0.png,b\n")
        for reading in (Reading(), FOLLOW):
            with pytest.raises(DataError):
                data.verify(site, "source", reading=reading)
    (site / "manifest.csv").unlink()
    for column, values in {"path": [None, 3], "image": ["text", None]}.items():
        for value in values:
            odd = arrow.table({column: [value], "label": ["a"]})
            parquet.write_table(odd, site / "train-0.parquet")
            with pytest.raises(DataError, match=r"text cannot be read|row 1"):
                data.verify(site, "source")


@pytest.mark.contrib
def test_virtual_data_sets_are_not_read(tmp_path: Path) -> None:
    """They name other files, as external links do."""
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["x"] = np.full((4, 6, 6), 7, np.uint8)
    layout = h5py.VirtualLayout(shape=(4, 6, 6), dtype="u1")
    layout[:] = h5py.VirtualSource(str(tmp_path / "other.h5"), "x", shape=(4, 6, 6))
    with h5py.File(tmp_path / "a.h5", "w") as file:
        file.create_virtual_dataset("x", layout)
    for use in (data.load_target, lambda path: data.verify(path, "target")):
        with pytest.raises(DataError, match="no values of its own"):
            use(tmp_path / "a.h5")


def test_a_table_is_cut_within_its_folder(site: Path, elsewhere: Path, tmp_path: Path) -> None:
    table_of(lambda _: "../elsewhere/train/a/1.png")(site, elsewhere)
    text = (site / "manifest.csv").read_text().replace("label", "label,domain").splitlines()
    lines = [text[0], *(f"{line},one" for line in text[1:])]
    (site / "manifest.csv").write_text("\n".join(lines))
    with pytest.raises(DataError, match=OUT):
        table.split(site, tmp_path / "cut", "domain")
    assert table.split(site, tmp_path / "other", "domain", FOLLOW) == {"one": 3}
    with pytest.raises(DataError, match=OUT):
        data.load_source(tmp_path / "other" / "one")
    assert len(data.load_source(tmp_path / "other" / "one", reading=FOLLOW)) == 3
    (site / "manifest.csv").write_text("\n".join(lines[:3]))
    assert table.split(site, tmp_path / "own", "domain") == {"one": 2}
    own = tmp_path / "own" / "one"
    assert (own / "images" / "train" / "a" / "0.png").samefile(site / "train" / "a" / "0.png")
    assert len(data.load_source(own.rename(tmp_path / "moved"))) == 2


def test_commands_follow_links_by_their_option_alone(site: Path, elsewhere: Path) -> None:
    IMAGE(site, elsewhere)
    words = ("data", "check", site, "--min-images", 2)
    assert "train/a/9.png in" in call(*words, code=1, columns=400).stderr
    call(*words, "--follow-links")
