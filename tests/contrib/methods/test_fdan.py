"""f-DAN over four sites: sums alone match the means of random Fourier features."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from fedda import models
from fedda.contrib.methods.fdan import algorithm as fdan
from fedda.errors import Code, ConfigError, QuorumError
from fedda.maths import fourier
from fedda.settings import RunConfig
from tests.adversarial_runs import SETTINGS, arrays, assert_as_in_one_place, cases, images, run
from tests.local_grid import CLASSES, SIDE, SOURCES, Node
from tests.reference import fourier as exact


@cases((3, False))
def test_four_sites_compute_the_same_as_one_plain_loop(
    domains: list[Node], tmp_path: Path, p: int, pairs: bool
) -> None:
    assert_as_in_one_place(domains, tmp_path, "fdan", p, pairs)


def test_without_a_scale_each_round_determines_the_next_ones(
    domains: list[Node], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[dict[str, Any]] = []
    measured: list[float] = []
    sent: list[float] = []

    def spy(z: Tensor, honest: Any = fourier.median_distance) -> float:
        measured.append(honest(z))
        return measured[-1]

    def watch(d: int, M: int, scale: float, *rest: Any, honest: Any = fourier.frequencies) -> Any:
        sent.append(scale)
        return honest(d, M, scale, *rest)

    monkeypatch.setattr(fourier, "median_distance", spy)
    monkeypatch.setattr(fourier, "frequencies", watch)
    found = run(domains, tmp_path, "fdan", events.append, **{"fdan.scale": 0.0, "rounds": 3})
    scale = measured[0]
    assert len(set(measured)) == 3  # one per round
    wanted = [measured[0]] * 4 + [measured[1]] * 4  # to four sites each, in three digits
    assert sent == pytest.approx(wanted, rel=2e-3)
    first, *others = found["rounds"]
    assert arrays(first) == {"to source model", "from source model", "to target model"}
    assert all("from target gradient" in arrays(entry) for entry in others)
    assert set(first["weights"]) == set(SOURCES)
    folder = Path(found["model"]).parent
    numbers = json.loads((folder / "checkpoint.json").read_text())["numbers"]
    assert numbers["scale"] == pytest.approx(measured[-1], rel=2e-3)
    # The scale is that of the first round's mean model, which a round of FedAvg gives.
    once = run(domains, tmp_path / "once", "fedavg", **{"rounds": 1})
    network = models.build(RunConfig.parse(SETTINGS).model, (1, SIDE, SIDE), CLASSES, seed=0)
    network.load_state_dict(load_file(once["model"]))
    network.eval()
    town = next(node for node in domains if node["name"] == "town")
    with torch.no_grad():
        z = network.features(images(town)[0])
    expected = exact.median_distance(z.tolist())
    assert scale == pytest.approx(expected, rel=0.05)  # the schedule differs between 3 rounds and 1
    assert not [e for e in events if e["event"] == "trouble"]


def test_a_target_with_few_images_refuses_to_send_their_median_distance(
    domains: list[Node], tmp_path: Path
) -> None:
    events: list[dict[str, Any]] = []
    careful = [n | {"min-images": 49} if n["name"] == "town" else n for n in domains]
    few = {"fdan.scale": 0.0, "wait.tries": 1, "train.batch-size": 49}
    with pytest.raises(QuorumError):
        run(careful, tmp_path, "fdan", events.append, **few)
    failed = {e["site"]: e["text"] for e in events if e.get("what") == "failed"}
    assert failed == {"town": Code.CONFIG.public}


def test_bandwidths_are_parsed() -> None:
    assert fdan.Config().bandwidths == (0.25, 0.5, 1, 2, 4)
    for wrong in ("", "1,", "0", "1,0.0", "a", "-1", "1e3", "nan"):
        with pytest.raises(ConfigError, match=r"fdan\.multiples.*numbers above 0"):
            RunConfig.parse({"fdan.multiples": wrong})
