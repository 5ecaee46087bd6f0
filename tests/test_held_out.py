"""A source without tests keeps images out of every training, to calibrate on."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import fedda
from clients.site.blocks import Blocks
from clients.site.memory import Site
from fedda.config import Inputs
from fedda.data import Labelled
from fedda.library.outcome import Run

SHAPE = (1, 6, 6)


def images(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Images of 6 x 6 whose brightness is their class."""
    draws, y = np.random.default_rng(seed), np.arange(n) % 3
    return (80 * y[:, None, None] + draws.integers(0, 80, (n, 6, 6))).astype(np.uint8), y


def place(folder: Path, n: int, tests: int = 0) -> Path:
    x, y = images(n, 1)
    arrays: dict[str, Any] = {"x_train": x, "y_train": y}
    if tests:
        arrays |= {"x_test": x[:tests], "y_test": y[:tests]}
    np.savez(folder / "s.npz", **arrays)
    return folder / "s.npz"


def site(data: Path, **more: Any) -> Site:
    return Site(
        {"role": "source", "name": "s", "data": str(data), "min-images": 20, "min-examples": 100}
        | more
    )


def trained_on(made: Site) -> Labelled:
    found = made.training(Inputs(SHAPE))
    assert isinstance(found, Labelled)
    return found


def test_every_so_many_th_block_is_kept_out() -> None:
    used = torch.tensor([0, 1, 2, 4, 5, 6, 7, 8, 9, 11, 12, 13])
    blocks = [torch.tensor([2 * i, 2 * i + 1]) for i in range(6)]
    groups = [torch.cat(blocks[:3]), torch.cat(blocks[3:])]
    made, out = Blocks(used, blocks, groups).divided(0.33, 4)
    assert out.tolist() == [0, 1, 7, 8]  # blocks 0 and 3
    assert made.used.tolist() == [2, 4, 5, 6, 9, 11, 12, 13]
    assert [b.tolist() for b in made.blocks] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [g.tolist() for g in made.groups] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    # Once the site has tests it trains on all, but sums no gradient over what had been out.
    later, none = Blocks(used, blocks, groups).divided(0.33, 4, trained=True)
    assert (len(later.used), len(later.blocks), len(none)) == (12, 6, 0)
    assert [later.used[g].tolist() for g in later.groups] == [
        made.used[g].tolist() for g in made.groups
    ]


def test_nothing_is_kept_out_where_it_would_cost_too_much() -> None:
    used, blocks = torch.arange(10), [torch.tensor([2 * i, 2 * i + 1]) for i in range(5)]
    whole = Blocks(used, blocks, [torch.arange(10)])
    assert whole.divided(0.0, 4)[0] is whole
    assert whole.divided(0.2, 9)[0] is whole  # no gradient could be summed
    assert len(whole.divided(0.2, 8)[1]) == 2
    few = Blocks(used[:8], blocks[:4], [torch.arange(8)])
    assert few.divided(0.2, 4)[0] is few


@pytest.mark.parametrize("kind", ["reproducible", "by chance"])
def test_the_same_images_are_out_in_every_training(tmp_path: Path, kind: str) -> None:
    more = {"state-dir": str(tmp_path / "state")} if kind == "by chance" else {}
    path = place(tmp_path, 210)
    first, again = (trained_on(site(path, **more)) for _ in range(2))
    assert 180 <= len(first) < 210 and torch.equal(first.x, again.x)
    whole = trained_on(site(path, **more, **{"hold-out": 0}))
    assert len(whole) == 210
    known = {x.numpy().tobytes() for x in first.x}
    added = tmp_path / "more"
    added.mkdir()
    x, y = images(210, 1)
    new, labels = images(60, 9)
    np.savez(added / "s.npz", x_train=np.concatenate([x, new]), y_train=np.concatenate([y, labels]))
    if kind == "by chance":
        later = {e.numpy().tobytes() for e in trained_on(site(added / "s.npz", **more)).x}
        assert known <= later  # what is out stays out, what is in stays in
        assert not (later - known) & {x.numpy().tobytes() for x in whole.x}


def test_who_has_tests_or_few_images_trains_on_all(tmp_path: Path) -> None:
    assert len(trained_on(site(place(tmp_path, 210, tests=30)))) == 210
    assert len(trained_on(site(place(tmp_path, 90)))) == 90
    target = Site({"role": "target", "name": "s", "data": str(place(tmp_path, 210))})
    assert len(target.training(Inputs(SHAPE))) == 210


def test_models_are_judged_on_images_that_they_have_not_seen(tmp_path: Path) -> None:
    """Other labels of the images that are out change the calibration, and no bit of the model."""

    def made(name: str, spoil: bool) -> Run:
        x, y = images(400, 1)
        if spoil:
            np.savez(tmp_path / "a.npz", x_train=x, y_train=y)
            node = {"role": "source", "name": "a", "data": str(tmp_path / "a.npz")}
            training = trained_on(Site(node))
            kept = {one.numpy().tobytes() for one in training.x}
            out = [i for i in range(400) if x[i].tobytes() not in kept]
            assert 60 < len(out) < 90
            y = y.copy()
            y[out] = (y[out] + 1) % 3
        sites = {"a": (x, y), "b": images(400, 2), "t": (images(100, 3)[0], None, images(60, 4))}
        settings: dict[str, Any] = {"model_name": "mlp", "model_hidden": "16", "quiet": True}
        return fedda.simulate(sites, "t", "fedavg", dir=tmp_path / name, rounds=2, **settings)

    plain, spoilt = made("plain", spoil=False), made("spoilt", spoil=True)
    estimates = [run.results.trainings[0].estimate for run in (plain, spoilt)]
    assert all(e is not None and e.held_out for e in estimates)
    models = [(tmp_path / n / "model.safetensors").read_bytes() for n in ("plain", "spoilt")]
    if models[0] == models[1]:
        told = [
            run.results.raw["trainings"]["fedavg"][0]["estimate"]["sources"]["a"]["accuracy"]
            for run in (plain, spoilt)
        ]
        assert told[1] < told[0]
    else:
        pytest.fail("the images that are out have changed the model")
