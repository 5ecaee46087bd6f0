"""Decoded images on disk: the same to the bit, made once, made again if damaged, and bounded."""

import logging
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from clients.site.memory import Site
from fedda import data
from fedda.config.inputs import Inputs
from fedda.data import cache, pixels
from fedda.data.cache import Cache, Stored
from fedda.errors import ConfigError


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder of 24 colour images of 9 x 7 pixels in two classes, and six to test."""
    draw = np.random.default_rng(0)
    for part, count in (("train", 12), ("test", 3)):
        for i in range(2 * count):
            path = tmp_path / "site" / part / "ab"[i % 2] / f"{i}.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(draw.integers(0, 256, (7, 9, 3), dtype=np.uint8)).save(path)
    return tmp_path / "site"


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files that were decoded, in the order in which this happened."""
    seen: list[Path] = []
    really = pixels._pixels

    def spy(file: Path, **form: object) -> np.ndarray:
        seen.append(file)
        return really(file, **form)  # type: ignore[arg-type]

    monkeypatch.setattr(pixels, "_pixels", spy)
    return seen


def entries(folder: Path) -> list[Path]:
    return sorted(folder.glob("*"))


def load(site: Path, folder: Path, size: int = 6, **more: str) -> data.Labelled:
    return data.load_source(site, size=size, cache=Cache(folder, always=True), **more)  # type: ignore[arg-type]


def test_images_are_the_same_and_decoded_once(
    site: Path, tmp_path: Path, decoded: list[Path]
) -> None:
    plain = data.load_source(site, size=6)
    assert len(decoded) == 24
    first = load(site, tmp_path / "c")
    assert len(decoded) == 48
    second = load(site, tmp_path / "c")
    assert len(decoded) == 48  # found
    for found in (first, second):
        assert isinstance(found.x, Stored)
        assert torch.equal(found.x, plain.x) and torch.equal(found.y, plain.y)
        assert found.shape == plain.shape and found.kind == "image" and len(found) == 24
        assert found.digests() == plain.digests()
    assert oct(entries(tmp_path / "c")[0].stat().st_mode)[-3:] == "600"


def test_rows_give_their_memory_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """2,000 rows of 64 kB are read, and only a few of these 128 MB stay in the process."""
    shape = (2000, 1, 256, 256)
    with (tmp_path / "rows").open("wb") as file:
        for i in range(shape[0]):
            file.write(bytes([i % 256]) * (1 << 16))
    monkeypatch.setattr(cache, "_MOST_MAPPED", 1 << 23)
    x = Stored.whole(tmp_path / "rows", shape)

    def mapped() -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("RssFile")).split()[1])

    before, most = mapped(), 0
    for part in torch.randperm(2000).split(50):
        assert torch.equal(x[part][:, 0, 0, 0], (part % 256).to(torch.uint8))
        most = max(most, mapped() - before)
    assert most < 48e6


@pytest.mark.parametrize("damage", ["bit", "cut", "longer", "empty", "shape"])
def test_a_damaged_entry_is_made_again(
    site: Path, tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture, decoded: list[Path]
) -> None:
    plain = load(site, tmp_path / "c").x.numpy()
    (entry,) = entries(tmp_path / "c")
    whole = entry.read_bytes()
    changed = {
        "bit": bytes([whole[0] ^ 1]) + whole[1:],
        "cut": whole[:-60],
        "longer": whole + b"x",
        "empty": b"",
        "shape": whole[:-40] + bytes([whole[-40] ^ 1]) + whole[-39:],
    }
    entry.write_bytes(changed[damage])
    with caplog.at_level(logging.WARNING):
        assert (load(site, tmp_path / "c").x.numpy() == plain).all()
    assert "is made again" in caplog.text and len(decoded) == 48
    assert entry.read_bytes() == whole


@pytest.mark.parametrize("kind", ["images", "array"])
def test_what_is_odd_is_said_again_of_what_lies_there(
    site: Path, tmp_path: Path, decoded: list[Path], kind: str
) -> None:
    for file in site.rglob("*.png"):
        Image.fromarray(np.asarray(Image.open(file)) // 32).save(file)
    if kind == "array":
        x = np.random.default_rng(0).integers(0, 9, (24, 6, 6)).astype(np.uint8)
        site = tmp_path / "a.npz"
        np.savez(site, x=x, y=np.arange(24) % 2)
    said: list[str] = []
    for _ in range(2):
        kept = Cache.of("disk", tmp_path / "c")
        data.load_source(site, size=6, cache=kept, notice=said.append)
    assert len(said) == 2 and said[0] == said[1] and "almost black" in said[0]
    assert len(decoded) == 24 * (kind == "images")


def test_an_interrupted_entry_is_not_used(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really, folder = pixels._pixels, tmp_path / "c"

    def stops(file: Path, **form: object) -> np.ndarray:
        if file.name == "20.png":
            raise KeyboardInterrupt
        return really(file, **form)  # type: ignore[arg-type]

    with monkeypatch.context() as patched:
        patched.setattr(pixels, "_pixels", stops)
        with pytest.raises(KeyboardInterrupt):
            load(site, folder)
    assert entries(folder) == []
    half = folder / ".killed.images.1.part"
    half.write_bytes(b"half")  # as after SIGKILL
    os.utime(half, (0, 0))
    assert torch.equal(load(site, folder).x, data.load_source(site, size=6).x)
    assert [path.suffix for path in entries(folder)] == [".images"]


def test_other_images_and_other_forms_get_other_entries(site: Path, tmp_path: Path) -> None:
    folder = tmp_path / "c"
    load(site, folder)
    changed = site / "train" / "a" / "0.png"
    before = changed.stat()
    image = np.asarray(Image.open(changed)).copy()
    image[0, 0] ^= 255
    Image.fromarray(image).save(changed)
    os.utime(changed, ns=(before.st_atime_ns, before.st_mtime_ns))  # content alone decides
    assert torch.equal(load(site, folder).x, data.load_source(site, size=6).x)
    for form in ({"size": 5}, {"resize": "crop"}):
        found, plain = load(site, folder, **form), data.load_source(site, **{"size": 6} | form)  # type: ignore[arg-type]
        assert torch.equal(found.x, plain.x)
    assert len(entries(folder)) == 4
    site.rename(tmp_path / "moved")
    load(tmp_path / "moved", folder)
    assert len(entries(folder)) == 4  # the content is the same


def test_the_entries_used_last_are_kept(site: Path, tmp_path: Path) -> None:
    folder, paths = tmp_path / "c", {}
    for size in range(4, 8):
        known = set(entries(folder))
        load(site, folder, size)
        (paths[size],) = set(entries(folder)) - known
        os.utime(paths[size], (size, size))
    (folder / "mine.txt").touch()
    load(site, folder, 4)  # used again, so 5 is the oldest now
    load(site, folder, 9)
    left = set(entries(folder))
    assert len(left) == cache.KEPT + 1 and folder / "mine.txt" in left
    assert paths[5] not in left and paths[4] in left


def test_auto_keeps_only_large_sets_on_disk(
    site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = Cache.of("auto", tmp_path / "c")
    assert found is not None and not found.takes((1000, 3, 224, 224))  # 0.15 GB
    assert found.takes((20_000, 3, 224, 224))  # 3 GB
    assert not isinstance(data.load_source(site, size=6, cache=found).x, Stored)
    monkeypatch.setattr(cache, "LARGE", 100)
    assert isinstance(data.load_source(site, size=6, cache=found).x, Stored)
    assert Cache.of("memory", tmp_path) is None and Cache.of("auto", None) is None
    with pytest.raises(ConfigError, match="--state-dir"):
        Cache.of("disk", None)


@pytest.mark.parametrize("role", ["source", "target"])
def test_a_site_trains_and_tests_on_the_same_images(site: Path, tmp_path: Path, role: str) -> None:
    node = {"role": role, "data": str(site), "name": "x", "min-images": 16, "reproducible": True}
    plain = Site(node)
    disk = Site(node | {"cache": "disk", "state-dir": str(tmp_path / "state")})
    for resize in ("stretch", "crop"):
        mine, its = (s.training(Inputs((3, 6, 6), resize)) for s in (disk, plain))
        assert isinstance(mine.x, Stored) and not isinstance(its.x, Stored)
        assert torch.equal(mine.x, its.x)
        mine, its = (s.evaluation(Inputs((3, 6, 6), resize), ("a", "b")) for s in (disk, plain))
        assert mine is not None and its is not None and isinstance(mine.x, Stored)
        assert torch.equal(mine.x, its.x) and torch.equal(mine.y, its.y)
    assert len(entries(tmp_path / "state" / "x" / "cache")) == 4


def test_a_site_leaves_images_outside_whole_blocks_on_disk(site: Path, tmp_path: Path) -> None:
    node = {"role": "source", "data": str(site), "name": "x", "min-images": 5}
    node |= {"cache": "disk", "state-dir": str(tmp_path / "state")}
    Site(node).training(Inputs((3, 6, 6)))
    (site / "train" / "a" / "0.png").unlink()  # its block waits
    left = Site(node)
    found = left.training(Inputs((3, 6, 6)))
    assert isinstance(found.x, Stored) and len(found) == len(left.blocks.used) < 23
    whole = data.load_source(site, size=6)
    assert torch.equal(found.x, whole.x[left.blocks.used])
