"""All that a site computes, on a pretended GPU: no tensor of the CPU may meet one of the GPU."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import clients.kd3a
import clients.site.memory
from clients.fedavg import Source
from clients.node import bridge
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
    pretended, decided, fork = Pretended(), bridge._decided, torch.random.fork_rng

    def watched(*args: Any) -> Any:
        with pretended.watch():
            return decided(*args)

    monkeypatch.setattr(bridge, "_decided", watched)
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


REFUSED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "a sum": lambda x, y: x + torch.ones(4),
    "labels": lambda x, y: F.cross_entropy(x[None], y[:1]),
    "numpy": lambda x, y: x.numpy(),
    "asarray": lambda x, y: np.asarray(x),
    "a number changed in place": lambda x, y: torch.zeros(()).add_(x.sum()),
    "a number joined": lambda x, y: torch.stack([torch.zeros(()), x.sum()]),
    "an index of the GPU": lambda x, y: torch.ones(4)[y.to(GPU)],
    "a draw": lambda x, y: torch.randperm(4, generator=torch.Generator(), device=x.device),
    "a draw in place": lambda x, y: x.normal_(generator=torch.Generator()),
}
ALLOWED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "a number": lambda x, y: x * torch.tensor(2.0),
    "an index of the CPU": lambda x, y: x[y],
    "a copy": lambda x, y: x.copy_(torch.ones(4)),
    "a new one like it": lambda x, y: x.new_ones(4) + torch.ones_like(x),
    "moved": lambda x, y: torch.ones(4).to(x) + x,
    "made there": lambda x, y: torch.ones(4, device=x.device) + x,
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cuda_refuses_is_refused(what: str) -> None:
    with Pretended().watch(), pytest.raises(MixedDevices):
        REFUSED[what](torch.ones(4, device="cuda"), torch.arange(4))


@pytest.mark.parametrize("what", ALLOWED)
def test_what_cuda_allows_is_allowed(what: str) -> None:
    with Pretended().watch():
        assert ALLOWED[what](torch.ones(4, device="cuda"), torch.arange(4)).device == GPU


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
