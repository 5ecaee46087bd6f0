"""All that a site computes, on a pretended GPU: no tensor of the CPU may meet one of the GPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import clients.kd3a
import clients.site.memory
from clients import app
from clients.fedavg import Source
from clients.site.memory import Site
from fedda.maths import optimal_transport
from fedda.models import as_inputs, to_device
from tests.fingerprints import CASES
from tests.local_grid import SETTINGS, Node, make_domains, run
from tests.pretended_gpu import GPU, MixedDevices, Pretended

# The fingerprints' cases take every path through the methods' code; of these, only the server's
# half differs from another's.
SAME = {"fedavg few", "fedavg uniform", "fdann few"}
RUNS = {name: case for name, case in CASES.items() if name not in SAME} | {"mdan": ("mdan", {})}
RUNS["kd3a moments"] = "kd3a", {"kd3a.batchnorm": "loss", "kd3a.teacher-batchnorm": "batch"}
FEW: dict[str, Any] = {"feddadil.samples": 8, "feddadil.batch-size": 4, "feddadil.distil": 2}
FEW |= {"feddadil.fixed-points": 2}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Pretended:
    """Give every site of this process a pretended GPU, and watch what it computes there."""
    pretended, decided, fork = Pretended(), app._decided, torch.random.fork_rng

    def watched(*args: Any) -> Any:
        with pretended.watch():
            return decided(*args)

    monkeypatch.setattr(app, "_decided", watched)
    monkeypatch.setattr(clients.site.memory, "pick_device", lambda text: GPU)
    monkeypatch.setattr(torch.random, "fork_rng", lambda devices: fork(devices=[]))
    return pretended


NIGHTLY = pytest.mark.nightly("clients", "fedda/algorithms", "fedda/maths", "fedda/train.py")


def train(case: str, root: Path) -> dict[str, Any]:
    """Run a case with notes on the sites' disks."""
    method, settings = RUNS[case]
    nodes = [node | {"state-dir": str(root / "state")} for node in make_domains(root)]
    chosen = {"method": method, "run.dir": str(root)} | FEW | SETTINGS.get(method, {}) | settings
    return run(nodes, chosen)[0]


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[NIGHTLY] * (case not in ("kd3a", "fdann", "feddadil")))
        for case in RUNS
    ],
)
def test_a_method_keeps_to_its_device(case: str, gpu: Pretended, tmp_path: Path) -> None:
    results = train(case, tmp_path)
    assert not gpu.faults
    assert not results["events"], results["events"]
    assert gpu.operations > 100


# ---- the check itself: faults that it must find ------------------------------------------------


def labels(self: Source, indices: Tensor) -> Tensor:
    return self.data.y[indices]


def plan_on_cpu(cost: Tensor, entropy: float = 0.0) -> Tensor:
    return torch.arange(len(cost))


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    return torch.zeros(x.shape[1]), torch.zeros(x.shape[1])


FAULTS: dict[str, tuple[Any, str, Callable[..., Any], str]] = {
    "a loss": (Source, "labels", labels, "fedavg"),
    "a plan": (optimal_transport, "solve", plan_on_cpu, "feddadil"),
    "moments": (clients.kd3a, "_moments", moments, "kd3a moments"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_found(
    fault: str, gpu: Pretended, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where, name, wrong, case = FAULTS[fault]
    monkeypatch.setattr(where, name, wrong)
    with pytest.raises(Exception):  # noqa: B017 - each method ends in its own way
        train(case, tmp_path)
    assert gpu.faults


@pytest.mark.parametrize("reproducible", [True, False])
def test_a_reproducible_site_asks_cudnn_for_the_same_bits(
    reproducible: bool, gpu: Pretended, domains: list[Node], tmp_path: Path
) -> None:
    node = domains[0] | {"state-dir": str(tmp_path), "reproducible": reproducible}
    with torch.backends.cudnn.flags(deterministic=False, benchmark=True):
        Site(node)
        flags = (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark)
    assert flags == ((True, False) if reproducible else (False, True))


def test_images_and_labels_are_pinned_on_their_way_to_a_gpu(
    gpu: Pretended, monkeypatch: pytest.MonkeyPatch
) -> None:
    pinned: list[Tensor] = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda x: pinned.append(x) or x)
    x, y = torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.arange(2)
    with gpu.watch():
        assert as_inputs(x, GPU).device == to_device(y, GPU).device == GPU
        as_inputs(x, torch.device("cpu"))
    assert pinned[0] is x and pinned[1] is y and len(pinned) == 2


def test_gradients_lie_where_the_parameters_lie() -> None:
    with Pretended().watch():
        layer = torch.nn.Linear(3, 2).to(GPU)
        layer(torch.ones(5, 3).to(GPU)).sum().backward()
        grad = layer.weight.grad
        assert grad is not None and grad.device == GPU
        with pytest.raises(MixedDevices):
            torch.ones(2, 3).add_(grad)
