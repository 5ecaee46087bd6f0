"""A server chooses every setting of a training; no choice shows it a single image."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from clients.fedavg import Source
from clients.site.memory import Site
from fedda.errors import BatchError, Code, FeddaError
from tests.asking import blank, closest, make_source, request_of, task_of, trained

IMAGES, LEAST = 300, 64
# Corners, values inside, and what no site should accept.
GRID: dict[str, tuple[Any, ...]] = {
    "method": ("fedavg", "fedprox"),
    "model.name": ("identity", "mlp"),
    "train.batch-size": (2, 3, 63, 64, 100, 1000),
    "train.rounds-per-epoch": (0.2, 1.0, 2.0, 4.0),
    "train.optimizer": ("sgd", "adam"),
    "train.lr": (1e-6, 0.001, 0.1, 1.0, 1000.0),
    "train.weight-decay": (0.0, 0.1, 1.0, 10.0, 1e6),
    "fedprox.mu": (0.0, 0.1, 1.0, 10.0, 100.0),
    "train.momentum": (0.0, 0.5, 0.9, 0.999),
    "train.accumulate": (1, 2, 7),
    "train.clip": (0.0, 1e-6, 1.0, 1e6),
    "train.lipschitz": (0.0, 1e-9, 0.5, 100.0),
    "train.sampler": ("shuffle", "balanced"),
    "train.carry-momentum": (False, True),
    "train.schedule": ("constant", "ganin"),
    "wire.dtype": ("float32",),
}


def images_of(site: Site) -> torch.Tensor:
    with np.load(site.path) as file:
        return torch.from_numpy(file["x_train"]).double().flatten(1) / 255


def shown(site: Site, settings: dict[str, Any]) -> float:
    """How close a row of the first layer comes to an image, whatever part of the old row it has."""
    task = task_of(site, {**settings, "model.hidden": "20" * (settings["model.name"] == "mlp")})
    sent = blank(task)
    name, before = next((n, w.double()) for n, w in sent.state_dict().items() if w.ndim == 2)
    after, x = trained(site, task, sent)[name].double(), images_of(site)
    share = (after * before).sum(1, keepdim=True) / (before**2).sum(1, keepdim=True)
    return max(closest(found, x) for found in (after, after - before, after - share * before))


@pytest.fixture
def site(tmp_path: Path) -> Site:
    return make_source(tmp_path, IMAGES, **{"min-images": LEAST})


@pytest.mark.parametrize("wiping", [{"train.weight-decay": 50.0}, {"fedprox.mu": 50.0}, {}])
def test_the_last_batch_of_two_is_not_shown(site: Site, wiping: dict[str, Any]) -> None:
    """Each step would wipe the model, so that the gradient of the last two images is all of it."""
    asked = {"method": "fedprox", "model.name": "identity", "train.batch-size": 2}
    asked |= {"train.lr": 0.02, "train.momentum": 0.0, "train.schedule": "constant"}
    with pytest.raises(FeddaError):
        assert shown(site, asked | wiping) < 0.999


def test_no_setting_of_a_training_shows_an_image(site: Site) -> None:
    answered = 0
    draws = np.random.default_rng(5)
    for _ in range(400):
        chosen = {k: v[draws.integers(len(v))] for k, v in GRID.items()}
        try:
            close = shown(site, chosen)
        except FeddaError:
            continue
        answered += 1
        assert close < 0.999, chosen
    assert answered > 20, "the site refuses nearly everything, so that nothing is tried"


def test_a_step_over_fewer_images_than_the_site_allows_is_refused_with_its_reason(
    site: Site,
) -> None:
    settings = {"method": "fedavg", "model.name": "identity", "train.batch-size": LEAST}
    sent = blank(task_of(site, settings))
    assert trained(site, task_of(site, settings), sent)
    with pytest.raises(BatchError, match=r"batch-size is 63, but .* fewer than 64 images"):
        trained(site, task_of(site, settings | {"train.batch-size": LEAST - 1}), sent)
    assert "raise" in Code.BATCH.public and BatchError("x").code is Code.BATCH


def test_the_order_of_images_is_the_sites_own(tmp_path: Path) -> None:
    """No server knows it, it depends on every setting, and it is the same after a restart."""

    def order(folder: str, seed: int = 0, **more: Any) -> list[int]:
        made = make_source(tmp_path / folder, IMAGES, **{"min-images": LEAST})
        settings = {"method": "fedavg", "model.name": "identity", "train.steps": 0} | more
        client = Source(made)
        client.begin(request_of(made, task_of(made, settings, seed)))
        return torch.cat(client.shares()).tolist()

    first = order("a")
    assert order("a") == first != order("b") and sorted(first) == list(range(IMAGES))
    others = [order("a", seed=1), order("a", 0, **{"train.lr": 0.03})]
    others += [order("a", 0, **{"train.batch-size": LEAST + 1})]
    assert all(other != first for other in others)
    secret = tmp_path / "a" / "state" / "anna" / "chance"
    assert secret.stat().st_mode & 0o777 == 0o600


def test_what_wipes_an_encoder_within_a_window_of_gradients_is_refused(site: Site) -> None:
    """A sum over 288 examples would hold the features of the window's last two."""
    asked = {"method": "fdann", "model.name": "mlp", "model.hidden": "20", "model.norm": "group"}
    asked |= {"train.lr": 1e-6, "exchange.p": 128, "train.batch-size": 2}
    for decay in (1e6, 1.0):
        with pytest.raises(FeddaError):
            site.check_batch(task_of(site, asked | {"train.weight-decay": decay}))
