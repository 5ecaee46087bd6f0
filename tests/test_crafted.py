"""Models that were made to read single images are refused; trained ones are not."""

from pathlib import Path

import numpy as np
import pytest
import torch

import fedda
from clients.site import crafted
from clients.site.crafted import check_rows
from clients.site.memory import Site
from fedda import models
from fedda.errors import WireError
from fedda.settings import Task
from tests.asking import blank, closest, make_source, task_of, trained
from tests.test_last_steps import images_of
from tests.test_refine import SETTINGS
from tests.test_refine import sites as clouds_of_sites

BINS, IMAGES, LEAST = 500, 300, 128
ONE_STEP = {
    "method": "fedavg",
    "model.name": "mlp",
    "model.hidden": str(BINS),
    "train.batch-size": 1000,
    "train.rounds-per-epoch": 2.0,  # one block of 150 images
    "train.lr": 1e-3,
    "train.momentum": 0.0,
}


def imprint(task: Task, images: torch.Tensor) -> models.Model:
    """A first layer that sorts images by their brightness, one bin per unit.

    BatchNorm would move all thresholds to the units' means, so its scale and shift undo that for
    images of the same kind as those that the server expects.
    """
    made = blank(task)
    values = dict(made.named_parameters())
    (W, b), scale, shift = (
        [values[f"encoder.1.{n}"] for n in ("weight", "bias")],
        *[values[f"encoder.2.{n}"] for n in ("weight", "bias")],
    )
    brightness = images.mean(dim=1)
    cuts = torch.quantile(brightness, torch.linspace(0, 1, BINS, dtype=torch.float64))
    spread, centre = brightness.std(unbiased=False), brightness.mean()
    with torch.no_grad():
        W.fill_(1 / images.shape[1])
        b.zero_()
        scale.copy_(torch.full_like(scale, float(spread)))
        shift.copy_((centre - cuts).float())
        made.head.weight.copy_(torch.tensor([1.0, -1.0, 0.5])[:, None].expand_as(made.head.weight))
    return made


def read_bins(site: Site, task: Task, made: models.Model) -> float:
    """How close to an image the difference of two neighbouring units' gradients comes.

    Through BatchNorm it is the image less what the step's mean image and the images' regression on
    brightness make of its bin; of these two a server has a good guess, and here the right ones.
    """
    x, before, after = images_of(site), made.state_dict(), trained(site, task, made)
    gradient, offset = (
        (before[f"encoder.{n}"] - after[f"encoder.{n}"]).double() for n in ("1.weight", "2.bias")
    )
    spread, pace = before["encoder.2.weight"].double(), float(task.train.lr)
    height = x.mean(dim=1)
    z = (height - height.mean()) / height.std(unbiased=False)
    slope = (z[:, None] * x).mean(dim=0)
    D, step = gradient[:-1] - gradient[1:], offset[:-1] - offset[1:]
    own = step.abs() > 1e-6 * pace
    place = -(before["encoder.2.bias"][:-1][own].double()) / spread[:-1][own]
    ratio = (D[own] / step[own, None]) * height.std(unbiased=False) / spread[:-1][own, None]
    return closest(ratio + x.mean(dim=0) + place[:, None] * slope, x)


def test_an_honest_critic_whose_units_came_to_measure_one_direction_is_no_made_model(
    tmp_path: Path,
) -> None:
    critic = {"fwdgrl_discriminator_lr": 0.3, "guard_max_change": 0.0, "rounds": 6}
    near = {"exchange_p": 1, "exchange_min_examples": 1, "exchange_expose_features": True}
    every = SETTINGS | critic | near
    run = fedda.simulate(clouds_of_sites(), "t", "fwdgrl", dir=tmp_path / "r", **every)
    assert run.results.accuracy is not None


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return make_source(tmp_path, IMAGES, **{"min-images": LEAST})


def test_a_layer_of_bins_is_refused(site: Site) -> None:
    task = task_of(site, ONE_STEP)
    made = models.to_arrays(imprint(task, images_of(site)))
    with pytest.raises(WireError, match=r"rows of encoder\.1\.weight are parallel"):
        check_rows("model", made)


@pytest.mark.parametrize(
    "before",
    [
        np.tile(np.arange(49), (49, 1)),  # EfficientFormer's numbers of positions
        np.ones((1, 1, 12), np.float32),  # a token, as in most transformers of timm
        np.ones((1, 50, 12), np.float32),  # tokens, or a table of positions
        np.ones((1, 12, 7, 7), np.float32),  # a table of positions of an image
        np.eye(12, dtype=np.float32),  # a linear transform
    ],
    ids=lambda before: "x".join(map(str, before.shape)),
)
def test_what_comes_before_the_first_layer_does_not_hide_it(before: np.ndarray) -> None:
    conv = np.random.default_rng(0).normal(size=(30, 3, 2, 2)).astype(np.float32)
    later = np.ones_like(conv)  # of convolutions only the first one is compared
    check_rows("model", {"before": before, "conv": conv, "later": later})
    with pytest.raises(WireError, match="30 of 30 rows of conv are parallel"):
        check_rows("model", {"before": before, "conv": np.ones_like(conv), "later": later})


def test_a_sound_model_is_compared_once_and_a_changed_one_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compared: list[int] = []
    parallel = crafted.parallel

    def noted(rows: np.ndarray) -> np.ndarray:
        compared.append(len(rows))
        return parallel(rows)

    monkeypatch.setattr(crafted, "parallel", noted)
    small, large = (
        {"w": np.random.default_rng(n).normal(size=(n, 20)).astype(np.float32)}
        for n in (50, crafted.ROWS + 1)
    )
    for model in (small, small, large, large):
        check_rows("model", model)
    assert compared == [50, crafted.ROWS, crafted.ROWS]  # of the large one others each time
    small["w"][:] = 1
    with pytest.raises(WireError, match="50 of 50 rows of w"):
        check_rows("model", small)


def test_bins_would_show_an_image_in_one_step_over_many(site: Site) -> None:
    """The attack itself works, so that its refusal says something."""
    task = task_of(site, ONE_STEP)
    assert read_bins(site, task, imprint(task, images_of(site))) > 0.99
