"""What a server that lies can find out about single images: attacks, and why they fail."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from clients.fada import GAIN
from clients.fedavg import Target
from clients.site import boundary, output_privacy
from clients.site.memory import Site, resident
from clients.site.request import Request
from fedda import models
from fedda.algorithms.kd3a import FOCUS
from fedda.errors import FewImagesError, NotFiniteError, PolicyError, WireError
from fedda.models import Model
from fedda.settings import RunConfig
from fedda.wire import ACCURACY, INFOMAX, LOSS, PREDICTED, Number, packing
from fedda.wire.packing import Kind
from tests.local_grid import (
    CLASSES,
    EXAMPLES,
    SIDE,
    Node,
    ScriptedGrid,
    make_domains,
    run,
    settings_of,
)

LR = 1e-3
N = EXAMPLES["anna"]
# One step over all images of the round: what comes back is the sum of their gradients.
ONE_STEP = {
    "method": "fedavg",
    "rounds": 1,
    "model.name": "identity",
    "model.hidden": "",
    "train.batch-size": 1000,
    "train.lr": LR,
    "train.momentum": 0.0,
    "train.weight-decay": 0.0,
    "run.expect": 2,
    "run.evaluate": False,
}


def gradients(model: Path, images: int) -> torch.Tensor:
    """Return the sum of the gradients of a round's images, from the model after it -> (C, d)."""
    config = RunConfig.parse(ONE_STEP)
    start = models.build(config.model, (1, SIDE, SIDE), CLASSES, 0).state_dict()
    (name,) = [n for n, w in start.items() if w.ndim == 2]
    return (start[name] - load_file(model)[name]) * images / LR


def closest(found: torch.Tensor, x: torch.Tensor) -> float:
    """The largest cosine between a row of what was found (C, d) and an image (N, d)."""
    rows = found[found.norm(dim=1) > 1e-6 * x.norm(dim=1).mean()]
    if not len(rows):
        return 0.0
    cosines = torch.nn.functional.cosine_similarity(rows[:, None], x[None], dim=2)
    return float(cosines.abs().max())


def images_of(node: Node) -> torch.Tensor:
    with np.load(node["data"]) as file:
        return torch.from_numpy(file["x_train"]).float().flatten(1) / 255


@pytest.fixture
def pair(tmp_path: Path) -> list[Node]:
    """One source and the target, so that a round's mean is the source's own model."""
    return [n for n in make_domains(tmp_path) if n["name"] in ("anna", "town")]


@pytest.mark.parametrize("more", [1, 2, 3, 8])
def test_two_rounds_never_differ_by_fewer_images_than_a_block(
    pair: list[Node], tmp_path: Path, fresh_sites: None, more: int
) -> None:
    """Rounds over 20 images and over 20 + `more`: their difference would be a few images."""
    pair = [n | {"min-images": 8} for n in pair]

    def asked_for(images: int) -> tuple[torch.Tensor, int]:
        settings = {"run.dir": str(tmp_path), "run.name": f"of-{images}"}
        settings |= ONE_STEP | {"train.rounds-per-epoch": N / images}
        model = run(pair, settings)[0]["trainings"]["fedavg"][0]["model"]
        trained = [b for k in range(1, 6) if (b := 8 * k) <= images + 1e-6][-1]  # whole blocks
        return gradients(Path(model), trained), trained

    (first, few), (second, many) = asked_for(20), asked_for(20 + more)
    assert many - few in (0, 8)
    assert closest(second - first, images_of(pair[0])) < 0.999
    if many == few:
        assert torch.equal(first, second)


# ---- tests ---------------------------------------------------------------------------------------


def one_hot(classes: list[int], C: int = 3) -> torch.Tensor:
    return torch.eye(C)[classes]


def trained(n: int) -> torch.Tensor:
    draws = torch.Generator().manual_seed(0)
    return (4 * torch.randn(n, 3, generator=draws)).softmax(dim=1)


def test_answers_of_a_trained_network_pass() -> None:
    output_privacy.check_answers(trained(40), 16)
    output_privacy.check_answers(trained(5), 16)  # a small test set
    sure = (20 * torch.randn(60, 3, generator=torch.Generator().manual_seed(1))).softmax(dim=1)
    output_privacy.check_answers(sure, 16)


def test_answers_that_are_about_few_images_are_refused() -> None:
    constant = torch.full((40, 3), 1 / 3)
    lit = constant.clone()
    lit[7] = torch.tensor([0.9, 0.05, 0.05])
    saturated = one_hot([i % 3 for i in range(40)])
    for p, text in (
        (constant, "all but 0 of 40 images alike"),
        (lit, "all but 1 of 40 images alike"),
        (saturated, "infinitely sure of all but 0 of 40"),
    ):
        with pytest.raises(WireError, match=text):
            output_privacy.check_answers(p, 16)
    enough = constant.clone()
    enough[:16] = trained(16)
    output_privacy.check_answers(enough, 16)


@pytest.mark.parametrize("n", [10, 41, 63, 100, 101])
@pytest.mark.parametrize("sure", [3.0, 30.0])
def test_a_good_model_of_two_classes_is_no_made_one(n: int, sure: float) -> None:
    """Of few images half are answered alike, and the middle one of an odd number is the usual."""
    draws = torch.Generator().manual_seed(n)
    y = torch.arange(n) % 5 < 2  # two of five images are of one class
    z = torch.where(y, sure, -sure)[:, None] * torch.tensor([1.0, 0.0])
    p = (z + torch.randn(n, 2, generator=draws)).softmax(dim=1)
    output_privacy.check_answers(p, 64)


def test_numbers_of_a_test_by_hand() -> None:
    def privatise(number: Number, value: float, images: int = 40) -> float:
        return output_privacy.privatise(number, value, images, number.bounds(3, 5), 0)

    assert INFOMAX.bounds(3, 5) == (0, math.log(3)) and FOCUS.bounds(3, 5) == (-5, 5)
    assert privatise(INFOMAX, 0.4567) == 0.46
    assert privatise(INFOMAX, -0.2) == 0
    assert privatise(LOSS, 123.4) == 10
    assert privatise(LOSS, float("inf")) == 10
    with pytest.raises(NotFiniteError, match=r"infomax is not a number: .* lower train.lr"):
        privatise(INFOMAX, float("nan"))
    assert privatise(GAIN, 0.12345) == 0.123
    assert privatise(GAIN, -12.3) == -10
    assert privatise(ACCURACY, 2 / 3, 30) == 2 / 3  # steps of 1/30 hide more
    assert privatise(ACCURACY, 0.66666, 30_000) == 0.667


def test_answers_by_class_by_hand() -> None:
    y = torch.tensor([0] * 25 + [1] * 31 + [2] * 9)
    said = torch.tensor([0] * 19 + [1] * 6 + [1] * 31 + [2] * 9)
    p = torch.eye(3)[said]
    assert output_privacy.answers(p, y, 10) == [10, 0, 0, 20, 0, 30, 0, 30, 0, 0, 0, 0]
    assert output_privacy.answers(p, y, 1) == [19, 6, 0, 25, 0, 31, 0, 31, 0, 0, 9, 9]


def test_noise_on_numbers_of_a_test_is_as_large_as_said_and_never_the_same() -> None:
    drawn = [output_privacy.privatise(LOSS, 5.0, 40, (0, 10), 0.05) for _ in range(400)]
    assert len({*drawn}) > 50
    assert np.std(drawn) == pytest.approx(0.5, rel=0.2)
    assert np.mean(drawn) == pytest.approx(5.0, abs=0.15)
    assert all(
        0 <= output_privacy.privatise(ACCURACY, 0.99, 40, (0, 1), 0.5) <= 1 for _ in range(50)
    )


def test_the_number_of_predicted_classes_by_hand() -> None:
    # 30 images of 3 classes: an equal share is 10, so a class counts from 1 image.
    assert output_privacy.predicted(one_hot([0] * 20 + [1] * 9 + [2]), 1) == 3
    assert output_privacy.predicted(one_hot([0] * 14 + [1] * 14 + [2] * 2), 3) == 2  # not of so few
    assert (
        output_privacy.predicted(one_hot([0] * 14 + [1] * 14 + [2] * 2), 6) is None
    )  # 12 a class needed
    # 63 images: a tenth of 21 is 2.1, so a class counts from 3.
    assert output_privacy.predicted(one_hot([0] * 31 + [1] * 30 + [2] * 2), 1) == 2
    assert output_privacy.predicted(one_hot([0] * 30 + [1] * 30 + [2] * 3), 1) == 3
    assert output_privacy.privatise(PREDICTED, 2, 63, (0, 3), 0) == 2
    assert {output_privacy.privatise(PREDICTED, 2, 63, (0, 3), 0.3) for _ in range(2000)} == {
        0,
        1,
        2,
        3,
    }


def probe(change: Mapping[str, torch.Tensor], node: Node, **more: Any) -> dict[str, Any]:
    """Ask a target to test a model that a server made up -> the numbers of its reply."""
    config = RunConfig.parse(ONE_STEP)
    task = config.task("fedavg", 0, (1, SIDE, SIDE), ("0", "1", "2", "3"), 2)
    model = models.build(task.model, task.dims, task.classes, 0)
    model.load_state_dict({**model.state_dict(), **change})
    packed = packing.pack(models.to_arrays(model), Kind.MODEL)
    (stage,) = task.stages
    request = Request(task, 1, stage, "test", "target", {"model": packed}, {})
    return Target(Site(node | more)).test(request)


def head(model: Model | None = None) -> dict[str, torch.Tensor]:
    return {"head.weight": torch.zeros(CLASSES, SIDE**2), "head.bias": torch.zeros(CLASSES)}


def test_a_model_that_one_image_lights_reads_no_pixel(pair: list[Node], tmp_path: Path) -> None:
    """A large weight on the difference to an image that the attacker knows nearly.

    Answers are uniform but for this image, whose answer tells the pixel.
    """
    town = pair[1]
    x = images_of(town)
    direction = x[3] - x.mean(dim=0)
    scores = x @ direction
    made = head()
    made["head.weight"][0] = 1e4 * direction
    made["head.bias"][0] = -1e4 * float((scores.max() + scores.sort().values[-2]) / 2)
    in_experiment = probe(made, town)  # one person has all data, and sees what happens
    assert "infomax" in in_experiment
    with pytest.raises(WireError, match="few images"):
        probe(made, town, reproducible=False, **{"state-dir": str(tmp_path), "min-images": 16})


@pytest.mark.parametrize("lit", [0.0, 0.9, math.nan])
def test_through_noise_on_tests_no_refusal_tells_of_an_image(
    pair: list[Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lit: float
) -> None:
    """All answers are alike but for an image's, which would be refused, or all but few."""

    def predict(self: Target, x: torch.Tensor) -> torch.Tensor:
        p = torch.full((len(x), CLASSES), 1 / CLASSES)
        p[7, 0] = p[7, 0] + lit
        return p

    monkeypatch.setattr(Target, "predict", predict)
    real = {"reproducible": False, "state-dir": str(tmp_path), "min-images": 16}
    told = probe({}, pair[1], **real, **{"test-noise": 0.1})
    refined = {"changed", "agreed", "accuracy-refined"}  # as there are where a model was refined
    assert {*told} == {"infomax", "tested", "loss", "accuracy", "seconds"} | refined
    assert math.isfinite(told["infomax"]) and math.isfinite(told["loss"])
    with pytest.raises(WireError, match="few images"):
        probe({}, pair[1], **real)


OTHERS = pytest.mark.nightly("clients", "fedda/contrib/methods")


@pytest.mark.parametrize(
    "method",
    ["kd3a", "shot", *(pytest.param(m, marks=OTHERS) for m in ("decision", "comda", "fada"))],
)
def test_through_noise_on_tests_no_name_and_no_error_tells_of_an_image(
    tmp_path: Path, fresh_sites: None, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    """Two targets that differ in an image: of one all that models make of it is about few."""
    real = {"reproducible": False, "state-dir": str(tmp_path / "state"), "min-images": 16}
    town = {**real, "test-noise": 0.1, "noise": 0.1}
    nodes = [n | (town if n["name"] == "town" else {}) for n in make_domains(tmp_path)]

    def told(few: bool) -> list[tuple[object, ...]]:
        def check(*about: object) -> None:
            if few:
                raise FewImagesError("all but 1")

        resident.cache_clear()
        monkeypatch.setattr(output_privacy, "check_answers", check)
        monkeypatch.setattr(output_privacy, "check_spread", check)
        grid = ScriptedGrid(nodes)
        attentive = {"fada.weighting": "attention"} if method == "fada" else {}
        place = {"run.dir": str(tmp_path / f"few-{few}"), "rounds": 2}
        run(nodes, settings_of(method) | attentive | place, grid=grid)
        found = [c for c in grid.crossed if c.way == "from" and c.site == "town"]
        return [(c.hop, c.error, sorted(c.numbers), sorted(c.arrays)) for c in found]

    assert told(False) == told(True)


@pytest.mark.parametrize("far", [1e30, math.inf, -1e30, math.nan])
def test_a_number_far_beyond_its_bounds_does_not_show_through_noise(far: float) -> None:
    """As one image can make it, where it is a mean over all: else it is always the bound."""
    drawn = [output_privacy.privatise(LOSS, far, 40, (0, 10), 0.1) for _ in range(40)]
    assert len({*drawn}) > 5 and all(0 <= n <= 10 for n in drawn)


@pytest.mark.parametrize(
    "settings", [{"method": "fruda"}, {"method": "fdan"}, {"method": "fada", "fada.gain": "sum"}]
)
def test_with_noise_on_tests_no_method_tells_of_models_without(
    pair: list[Node], settings: Mapping[str, str]
) -> None:
    config = RunConfig.parse({**settings, "rounds": 9})
    task = config.task(config.method, 0, (1, SIDE, SIDE), ("0", "1", "2", "3"), 2)
    with pytest.raises(PolicyError, match="has noise on tests"):
        boundary.offered(Site(pair[1] | {"test-noise": 0.1}), task.flat())
    assert boundary.offered(Site(pair[1]), task.flat())


def test_a_model_in_training_is_tested_at_a_real_site(pair: list[Node], tmp_path: Path) -> None:
    real = {"reproducible": False, "state-dir": str(tmp_path), "min-images": 16}
    found = probe({}, pair[1], **real)
    assert found["infomax"] == round(found["infomax"], 2)
    assert found["loss"] == round(found["loss"], 2)
    assert {k: found[k] for k in ("infomax", "accuracy")} == {
        k: probe({}, pair[1])[k] for k in ("infomax", "accuracy")
    }
    assert "predicted" not in found  # 4 classes would need 128 images; in an experiment 8
    assert probe({}, pair[1])["predicted"] in range(1, 5)
    noisy = [probe({}, pair[1], **real, **{"test-noise": 0.1})["loss"] for _ in range(4)]
    assert len({*noisy}) > 1
