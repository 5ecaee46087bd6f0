"""Runs of f-DANN, f-WDGRL and f-DAN over four sites, and the same training in one plain loop."""

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn, optim

from fedda import models
from fedda.adversarial import discriminators
from fedda.adversarial.discriminators import Discriminator
from fedda.maths import fourier
from fedda.settings import RunConfig
from fedda.train import generator, seed_for
from server.journal import Journal
from server.simulation import simulate
from tests import plugged
from tests.local_grid import CLASSES, EXAMPLES, PLAIN, SIDE, SOURCES, Node
from tests.reference import adversarial as twin
from tests.reference import windows

METHODS = ["fdann", "fwdgrl", "fdan"]
BATCH, LR, DI_LR, GAMMA, WIDTH = 16, 0.02, 0.01, 10.0, 16
BETAS = (0.4, 0.99)
FAST = 100.0  # times the rate at which a critic soon meets its bound
SETTINGS: dict[str, Any] = {
    **PLAIN,
    "fdann.reversal.strength": 1.0,
    "fwdgrl.reversal.strength": 1.0,
    "rounds": 2,
    "run.name": "four",
    "model.name": "mlp",
    "model.hidden": str(WIDTH),
    "train.batch-size": BATCH,
    "train.lr": LR,
    "train.schedule": "constant",
    "exchange.p": 2,
    "exchange.min-examples": 1,
    "exchange.expose-features": True,
    "exchange.clip": 1e9,
    "track.tensorboard": False,
    "fdann.discriminator.sizes": "8",
    "fdann.discriminator.lr": DI_LR,
    "fdann.discriminator.beta1": BETAS[0],
    "fdann.discriminator.beta2": BETAS[1],
    "fwdgrl.discriminator.sizes": "8",
    # Not Adam: the gradient of a critic's bias can be 0 up to rounding, and Adam magnifies that.
    "fwdgrl.discriminator.optimizer": "sgd",
    "fwdgrl.discriminator.lr": DI_LR / 5,
    "fwdgrl.critic-steps": 2,
    "fwdgrl.spectral": False,
    "fwdgrl.penalty": GAMMA,
}
if plugged.HERE:
    SETTINGS |= {"fdan.reversal.strength": 1.0, "fdan.frequencies": 20, "fdan.scale": 3.0}


def run(
    domains: list[Node], folder: Path, method: str, listener: Any = None, **settings: Any
) -> dict[str, Any]:
    """Train a method over processes of one computer -> the training's entry in the results."""
    flat = SETTINGS | {"method": method, "run.dir": str(folder)} | settings
    journal = Journal(None, *([listener] if listener else []))
    sites = [node | {"threads": 1} for node in domains]
    return simulate(RunConfig.parse(flat), sites, journal, "process")["trainings"][method][0]


# ---- the same data, in one place ---------------------------------------------------------------


def images(node: Node) -> tuple[Tensor, Tensor | None]:
    """Return a site's training images and, for a source, their classes."""
    with np.load(node["data"]) as file:
        x = torch.from_numpy(file["x_train"]).float().unsqueeze(1) / 255
        return x, torch.from_numpy(file["y_train"]) if "y_train" in file else None


Read = dict[str, list[list[twin.Batch]]]


def batches(domains: list[Node], method: str, p: int, rounds: int) -> tuple[Read, Any]:
    """Return what each site reads, by round and step, and the batches for its critic alone."""
    steps = -(-4 // p) * p  # 60 images in batches of 16
    many = 2 * p if method == "fwdgrl" else 1  # of two windows all but one batch is the critic's
    data: Read = {}
    extra: dict[str, list[list[Tensor]]] = {}
    for node in domains:
        (x, y), name = images(node), node["name"]
        blocks = windows.blocks(len(x), name, 2)
        parts = windows.batches(blocks, BATCH, p, seed_for(0, name), rounds * steps * many)
        read = [(x[part], None if y is None else y[part]) for part in parts]
        cut = [read[t * steps * many : (t + 1) * steps * many] for t in range(rounds)]
        data[name] = [part[many - 1 :: many] for part in cut]
        extra[name] = [[x for i, (x, _) in enumerate(part, 1) if i % many] for part in cut]
    return data, extra if many > 1 else {}


def groups(pairs: bool) -> dict[str, list[str]]:
    """Return the sources of each discriminator, by its name's ending: one for all, or one each."""
    return {f"/{s}": [s] for s in SOURCES} if pairs else {"": list(SOURCES)}


def centralised(
    method: str, domains: list[Node], p: int, pairs: bool, rounds: int, loss: str = "inverted"
) -> Any:
    """Train a method for that many rounds in one plain loop -> the model."""
    config = RunConfig.parse(SETTINGS)
    start = models.build(config.model, (1, SIDE, SIDE), CLASSES, seed=0)
    data, extra = batches(domains, method, p, rounds)
    members = groups(pairs)
    if method == "fdan":
        multiples = (0.25, 0.5, 1.0, 2.0, 4.0)
        W = fourier.frequencies(WIDTH, 20, 3.0, multiples, generator(0, "frequencies"))
        return twin.matching(start, W, members, data, EXAMPLES, p, LR)
    DIs = {d: Discriminator(WIDTH, (8,), seed_for(0, f"gradient{d}")) for d in members}
    if method == "fdann":
        adam = partial(optim.Adam, lr=DI_LR, betas=BETAS)
        loss = {"reversal": "grl"}.get(loss, loss)
        return twin.adversarial(loss, start, DIs, members, data, {}, EXAMPLES, p, LR, adam)
    draws: dict[str, torch.Generator] = {}
    calls = dict.fromkeys(EXAMPLES, 0)
    per_round = 2 * p * len(data["town"][0])  # critic steps

    def penalty(DI: nn.Module, z: Tensor, site: str) -> Tensor:
        each = len(members) if site == "town" else 1
        if calls[site] % (per_round * each) == 0:
            draws[site] = generator(0, site, calls[site] // (per_round * each) + 1, "penalty")
        calls[site] += 1
        return GAMMA * discriminators.gradient_penalty(DI, z.detach(), draws[site])

    spectral = loss == "spectral"
    sgd = partial(optim.SGD, lr=DI_LR / 5 * (FAST if spectral else 1), momentum=0.9)
    return twin.adversarial(
        *("wassda", start, DIs, members, data, extra, EXAMPLES, p, LR, sgd),
        None if spectral else penalty,
        spectral=spectral,
    )


def alone(domains: list[Node], method: str, p: int) -> dict[str, Tensor]:
    """Return the model that results if no other domain influences a site's encoder."""
    start = models.build(RunConfig.parse(SETTINGS).model, (1, SIDE, SIDE), CLASSES, seed=0)
    data, _ = batches(domains, method, p, 2)
    return twin.matching(start, torch.zeros(1, WIDTH), {}, data, EXAMPLES, p, LR).state_dict()


def cases(*fast: tuple[int, bool]) -> pytest.MarkDecorator:
    """Run a test with each `p` and `pairs`; all but the fast cases are slow tests."""
    every = [(p, pairs) for p in (1, 3) for pairs in (False, True)]
    marked = [pytest.param(*c, marks=[] if c in fast else pytest.mark.slow) for c in every]
    return pytest.mark.parametrize(("p", "pairs"), marked)


# ---- comparisons -------------------------------------------------------------------------------


def assert_as_in_one_place(
    domains: list[Node], folder: Path, method: str, p: int, pairs: bool, loss: str = ""
) -> None:
    """Check that two rounds over four sites give the loop's model, not that of `alone`."""
    settings: dict[str, Any] = {"exchange.p": p, f"{method}.pairs": pairs}
    if loss == "spectral":
        rate = SETTINGS["fwdgrl.discriminator.lr"] * FAST
        settings |= {"fwdgrl.spectral": True, "fwdgrl.penalty": 0.0}
        settings |= {"fwdgrl.discriminator.lr": rate}
    elif loss:
        settings |= {f"{method}.reversal.loss": loss}
    found = load_file(run(domains, folder, method, **settings)["model"])
    wanted = centralised(method, domains, p, pairs, 2, loss or "inverted")
    plain = alone(domains, method, p)
    moved = 0.0
    for name, value in wanted.state_dict().items():
        if value.is_floating_point():
            torch.testing.assert_close(found[name], value, rtol=1e-3, atol=2e-5)
            if not name.endswith(("running_mean", "running_var")):
                moved = max(moved, float((found[name] - plain[name]).abs().max()))
    assert moved > 1e-3


def arrays(entry: dict[str, Any]) -> set[str]:
    """Return the direction, role and kind of all arrays that a round sent."""
    return {k for k in entry["bytes"] if "scalars" not in k}
