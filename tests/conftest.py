"""What every test runs under."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

from clients.site import resident
from tests.local_grid import Node, make_domains

torch.set_num_threads(1)  # two cores and small tensors: more threads only wait for one another
settings.register_profile("fedda", deadline=None, derandomize=True)
settings.load_profile("fedda")


@pytest.fixture(scope="session")
def domains(tmp_path_factory: pytest.TempPathFactory) -> list[Node]:
    """Three sources and a target as .npz files -> their node configurations."""
    return make_domains(tmp_path_factory.mktemp("domains"))


@pytest.fixture
def runs(tmp_path: Path) -> dict[str, str]:
    """Settings of a run that keeps its results in the test's own folder."""
    return {"run.dir": str(tmp_path / "runs")}


@pytest.fixture
def fresh_sites() -> Iterator[None]:
    """No site of this process remembers anything, before a test and after it."""
    resident.cache_clear()
    yield
    resident.cache_clear()


@pytest.fixture
def signal_handlers() -> Iterator[None]:
    """What a test's command does to signals ends with the test."""
    kept = {each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP)}
    yield
    for each, handler in kept.items():
        signal.signal(each, handler)
