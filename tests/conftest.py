"""The settings, fixtures and test order of the whole suite."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from clients.site.memory import resident
from tests.local_grid import Node, make_domains

torch.set_num_threads(1)  # two cores and small tensors: more threads only wait for one another
settings.register_profile("fedda", deadline=None, derandomize=True)
settings.load_profile("fedda")

# The slow tests of these files start first, the longest file before the others. Otherwise one
# worker would still run a long test at the end while the other workers have nothing to do.
LONGEST = (
    "failures",
    "crossing",
    "benchmarks",
    "exchange_live",
    "compare",
    "demo",
    "deploy",
    "end_to_end",
)
LONGEST += ("resident", "plugins", "targets", "attach", "egress")
# The tests of each of these share a federation or a wheel, which is made once per worker.
SHARING = ("failures", "crossing", "exchange_live", "end_to_end", "kills", "packaging")


class Together(LoadScopeScheduling):
    """Sends all tests of a file in SHARING to one worker, in order; other tests to any worker."""

    def _split_scope(self, nodeid: str) -> str:
        """Return a key; tests with the same key go to the same worker."""
        file = nodeid.partition("::")[0]
        return file if Path(file).stem.removeprefix("test_") in SHARING else nodeid


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> Together | None:
    """Make `--dist loadscope` keep the tests of each file in SHARING together, and no others.

    `--dist loadgroup` with marks would do the same, but xdist 3.8 ignores the marks of pytest 9.2.
    """
    return Together(config, log) if config.getvalue("dist") == "loadscope" else None


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the longest tests first and leave the others as they were."""

    def place(item: pytest.Item) -> int:
        file = item.path.stem.removeprefix("test_")
        slow = item.get_closest_marker("slow") is not None
        return LONGEST.index(file) if slow and file in LONGEST else len(LONGEST)

    items.sort(key=place)


def pytest_configure() -> None:
    """Let Ctrl-C reach the commands that tests start, also from the background of a script.

    There SIGINT is ignored, and every program that is started inherits that.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def domains(tmp_path_factory: pytest.TempPathFactory) -> list[Node]:
    """Make three sources and a target as .npz files -> their node configurations."""
    return make_domains(tmp_path_factory.mktemp("domains"))


@pytest.fixture
def runs(tmp_path: Path) -> dict[str, str]:
    """Return settings that keep a run's results in the test's own folder."""
    return {"run.dir": str(tmp_path / "runs")}


@pytest.fixture
def fresh_sites() -> Iterator[None]:
    """Clear the memory of all sites of this process before and after a test."""
    resident.cache_clear()
    yield
    resident.cache_clear()


@pytest.fixture
def signal_handlers() -> Iterator[None]:
    """Restore the signal handlers that a command under test has replaced."""
    handlers = {
        each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    }
    yield
    for each, handler in handlers.items():
        signal.signal(each, handler)
