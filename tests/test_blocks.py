"""How a site divides its images, once and for good."""

import itertools
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from clients.site import blocks
from clients.site.memory import Site
from fedda import data
from fedda.config.inputs import Inputs
from fedda.errors import ConfigError, DataError
from fedda.train import generator


def images(*numbers: int) -> list[bytes]:
    return [b"image %d" % n for n in numbers]


def named(found: blocks.Blocks, given: list[bytes]) -> tuple[set[frozenset[bytes]], ...]:
    """The blocks and the groups as sets of images."""

    def those(parts: list[torch.Tensor]) -> set[frozenset[bytes]]:
        return {frozenset(given[int(found.used[i])] for i in part) for part in parts}

    return those(found.blocks), those(found.groups)


def test_images_are_divided_once_whatever_their_order_and_the_restart(tmp_path: Path) -> None:
    given = images(*range(50))
    first = blocks.kept(tmp_path, given, 8, 20)
    assert sorted(map(len, first.blocks)) == [8, 8, 8, 8, 9, 9]
    assert sorted(map(len, first.groups)) == [24, 26]
    assert first.used.tolist() == [*range(50)]
    again = blocks.kept(tmp_path, given[::-1], 8, 20)
    assert named(first, given) == named(again, given[::-1])
    for group in named(first, given)[1]:  # of whole blocks
        assert group == frozenset().union(*(b for b in named(first, given)[0] if b <= group))


def test_each_site_draws_blocks_of_its_own_unless_it_must_be_reproducible(tmp_path: Path) -> None:
    given = images(*range(50))
    places = [named(blocks.kept(tmp_path / name, given, 8, 20), given) for name in "ab"]
    assert places[0] != places[1]
    alike = [named(blocks.fixed("anna", given, 8, 20), given) for _ in range(2)]
    assert alike[0] == alike[1] != named(blocks.fixed("bert", given, 8, 20), given)


def test_new_images_wait_until_they_fill_blocks_of_their_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old = named(blocks.kept(tmp_path, images(*range(50)), 8, 20), images(*range(50)))
    more = images(*range(57))
    found = blocks.kept(tmp_path, more, 8, 20)
    assert named(found, more) == old
    assert found.used.tolist() == [*range(50)]
    assert "7 images wait" in caplog.text
    more = images(*range(58))
    grown, groups = named(blocks.kept(tmp_path, more, 8, 20), more)
    assert grown - old[0] == {frozenset(images(*range(50, 58)))}
    assert groups == old[1]  # eight are no group yet
    more = images(*range(70))
    grown, groups = named(blocks.kept(tmp_path, more, 8, 20), more)
    assert groups - old[1] == {frozenset(images(*range(50, 70)))}
    assert old[0] < grown and len(grown) == 8


def test_a_removed_image_keeps_its_block_out_until_it_is_back(tmp_path: Path) -> None:
    given = images(*range(50))
    old, groups = named(blocks.kept(tmp_path, given, 8, 20), given)
    fewer = given[1:]
    found = blocks.kept(tmp_path, fewer, 8, 20)
    assert named(found, fewer)[0] == {b for b in old if given[0] not in b}
    assert named(found, fewer)[1] == {g for g in groups if given[0] not in g}
    changed = [b"another", *fewer]
    assert named(blocks.kept(tmp_path, changed, 8, 20), changed)[0] < old
    assert named(blocks.kept(tmp_path, given, 8, 20), given) == (old, groups)


def test_no_combination_of_old_and_new_sums_is_over_fewer_images_than_a_block(
    tmp_path: Path,
) -> None:
    """Images come and go five times; all blocks that were ever used are disjoint."""
    draws = np.random.default_rng(0)
    ever: set[frozenset[bytes]] = set()
    for _ in range(5):
        given = images(*sorted(draws.choice(120, 90, replace=False).tolist()))
        ever |= named(blocks.kept(tmp_path, given, 8, 20), given)[0]
    assert all(len(b) >= 8 for b in ever)
    assert all(not a & b for a, b in itertools.combinations(ever, 2))


def test_equal_images_are_as_many_as_there_are(tmp_path: Path) -> None:
    given = images(1, 1, 1, 2, 2, 3, 4, 5)
    found = blocks.kept(tmp_path, given, 4, 4)
    assert sorted(map(len, found.blocks)) == [4, 4]
    fewer = blocks.kept(tmp_path, given[1:], 4, 4)
    assert len(fewer.used) == 4  # the block of one of the three


def test_stricter_limits_join_blocks_and_laxer_ones_leave_them(tmp_path: Path) -> None:
    given = images(*range(50))
    old = named(blocks.kept(tmp_path, given, 8, 20), given)
    joined = named(blocks.kept(tmp_path, given, 16, 40), given)
    assert [len(b) for b in joined[1]] == [50] and all(len(b) >= 16 for b in joined[0])
    assert all(any(b <= big for big in joined[0]) for b in old[0])
    assert named(blocks.kept(tmp_path, given, 2, 2), given) == old
    assert not blocks.kept(tmp_path, given, 51, 60).blocks


def test_the_file_tells_nothing_without_the_secret_and_is_private(tmp_path: Path) -> None:
    blocks.kept(tmp_path, images(*range(50)), 8, 20)
    path = tmp_path / blocks.FILE
    assert path.stat().st_mode & 0o077 == 0
    content = json.loads(path.read_text())
    assert len(bytes.fromhex(content["secret"])) == 32
    assert not set(content["images"]) & {i.hex() for i in images(*range(50))}


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"secret": "xy", "images": {}}', "\0"])
def test_a_damaged_file_is_named_and_not_replaced(tmp_path: Path, content: str) -> None:
    (tmp_path / blocks.FILE).write_text(content)
    with pytest.raises(DataError, match=r"blocks\.json.*restore it"):
        blocks.kept(tmp_path, images(*range(50)), 8, 20)
    assert (tmp_path / blocks.FILE).read_text() == content


def write(path: Path, n: int, start: int = 0) -> Path:
    rng = np.random.default_rng(0)
    x = rng.integers(0, 255, (200, 8, 8), np.uint8)
    np.savez(path, x_train=x[start:n], y_train=np.arange(start, n) % 4)
    return path


def node(path: Path, **more: object) -> dict[str, object]:
    return {"role": "source", "name": "anna", "data": str(path), **more}


def test_a_site_trains_on_images_in_whole_blocks_in_every_shape(tmp_path: Path) -> None:
    path, state = write(tmp_path / "a.npz", 100), tmp_path / "state"
    site = Site(node(path, **{"state-dir": str(state), "min-images": 16}))
    assert len(site.training(Inputs((1, 8, 8)))) == 100
    first = site.blocks
    write(path, 107)
    site = Site(node(path, **{"state-dir": str(state), "min-images": 16}))
    assert len(site.training(Inputs((3, 16, 16)))) == 100  # another shape: the same images
    assert named(site.blocks, images(*range(107))) == named(first, images(*range(107)))
    write(path, 100, start=1)
    site = Site(node(path, **{"state-dir": str(state), "min-images": 16}))
    assert 83 <= len(site.training(Inputs((1, 8, 8)))) <= 84
    whole, used = data.load_source(path), site.training(Inputs((1, 8, 8)))
    assert isinstance(used, data.Labelled)
    assert torch.equal(used.x, whole.x[site.blocks.used])
    assert torch.equal(used.y, whole.y[site.blocks.used])


def test_a_corrected_label_is_another_example_of_a_source_but_not_of_a_target(
    tmp_path: Path,
) -> None:
    path = write(tmp_path / "a.npz", 100)
    before = [data.identities(path, role) for role in ("source", "target")]
    with np.load(path) as file:
        x, y = file["x_train"], file["y_train"].copy()
    y[7] += 1
    np.savez(path, x_train=x, y_train=y)
    after = [data.identities(path, role) for role in ("source", "target")]
    assert [i for i, (a, b) in enumerate(zip(before[0], after[0], strict=True)) if a != b] == [7]
    assert before[1] == after[1]


def test_a_site_without_enough_images_for_a_block_says_so(tmp_path: Path) -> None:
    few = node(write(tmp_path / "a.npz", 63))
    for limits in ({"min-images": 64}, {"state-dir": str(tmp_path)}):
        with pytest.raises(ConfigError, match=r"has 63 images.*trains on 64 or more"):
            Site(few | limits).training(Inputs((1, 8, 8)))
    assert len(Site(few).training(Inputs((1, 8, 8)))) == 63  # in an experiment they are one block


def test_images_of_a_folder_are_told_apart_by_their_files(tmp_path: Path) -> None:
    from PIL import Image

    for k in range(6):
        place = tmp_path / "ab"[k % 2]
        place.mkdir(exist_ok=True)
        Image.new("L", (8, 8), 40 * k).save(place / f"{k}.png")
    source = data.identities(tmp_path, "source")
    target = data.identities(tmp_path, "target")
    assert len({*source}) == len({*target}) == 6 and not {*source} & {*target}
    (tmp_path / "a" / "0.png").rename(tmp_path / "a" / "9.png")
    assert sorted(data.identities(tmp_path, "source")) == sorted(source)
    (tmp_path / "a" / "9.png").rename(tmp_path / "b" / "9.png")  # another class
    assert len({*data.identities(tmp_path, "source")} & {*source}) == 5
    assert sorted(data.identities(tmp_path, "target")) == sorted(target)


def test_the_reproducible_division_does_not_depend_on_chance() -> None:
    found = blocks.fixed("anna", images(*range(6)), 2, 4)
    order = torch.randperm(6, generator=generator("blocks", "anna"))
    assert [sorted(b.tolist()) for b in found.blocks] == [
        sorted(part.tolist()) for part in order.split(2)
    ]
