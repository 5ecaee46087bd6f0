"""The settings, fixtures and test order of the whole suite."""

import gc
import os
import signal
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import settings

from clients.site.memory import resident
from fedda import plugins
from fedda.ops.distributions import ANY
from fedda.ops.spawn import Process
from tests import forked, plugged, rings
from tests.federation import LOW, Federation
from tests.local_grid import Node, make_domains
from tests.processes import leaving_nothing

torch.set_num_threads(1)  # two cores and small tensors: more threads only wait for one another
settings.register_profile("fedda", deadline=None, derandomize=True)
settings.load_profile("fedda")


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the suite's own options."""
    group = parser.getgroup("fedda")
    group.addoption("--ring", choices=rings.RINGS, default="nightly", help=rings.HELP)
    group.addoption("--shuffle", type=int, metavar="SEED", help="run in an order drawn by chance")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests of outer rings, and put those over processes first.

    Otherwise one worker would still run a long file at the end while the other has nothing to do.
    """
    plugged.leave_out(items)
    items[:], left_out = rings.select(items, str(config.getoption("--ring")))
    config.hook.pytest_deselected(items=left_out)
    if (seed := config.getoption("--shuffle")) is not None:
        Random(seed).shuffle(items)
        return
    live = {item.path for item in items if rings.ring_of(item) != "fast"}
    items.sort(key=lambda item: item.path not in live)


def pytest_collection_finish() -> None:
    """Let no garbage collection look again and again through all that was imported."""
    gc.collect()
    gc.freeze()


def pytest_unconfigure() -> None:
    """Let libraries free what they have; else some complain on their way out."""
    gc.unfreeze()


def pytest_configure(config: pytest.Config) -> None:
    """Let tests find the same from a terminal, in a script's background and in an environment."""
    # An activated environment would hide that a program is only found in one.
    places = os.environ["PATH"].split(os.pathsep)
    os.environ["PATH"] = os.pathsep.join(p for p in places if p != sysconfig.get_path("scripts"))
    # In the background of a script SIGINT is ignored, and all that is started inherits that.
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(autouse=True)
def all_packages() -> Iterator[None]:
    """Let a test use all installed packages, whatever policy a test before it has set."""
    plugins.restrict(ANY)
    yield
    plugins.restrict(ANY)


@pytest.fixture(autouse=True)
def own_modules(request: pytest.FixtureRequest) -> Iterator[None]:
    """Forget what a test imported from its own folder: the next may write others of these names."""
    own = request.getfixturevalue("tmp_path") if "tmp_path" in request.fixturenames else None
    yield
    for name, module in list(sys.modules.items()) if own else []:
        if str(getattr(module, "__file__", "")).startswith(f"{own}{os.sep}"):
            del sys.modules[name]


@pytest.fixture(scope="session", autouse=True)
def forks(request: pytest.FixtureRequest) -> Iterator[None]:
    """Let what the tests start be forks of a process that has imported all that is needed."""
    with pytest.MonkeyPatch.context() as patch:
        if any(rings.ring_of(item) != "fast" for item in request.session.items):
            patch.setattr(Process, "begin", forked.begin)
        yield


@pytest.fixture(scope="session")
def domains(tmp_path_factory: pytest.TempPathFactory) -> list[Node]:
    """Make three sources and a target as .npz files -> their node configurations."""
    return make_domains(tmp_path_factory.mktemp("domains"))


@pytest.fixture(scope="session")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """Start a federation whose sites can be told to misbehave: one for all tests of a worker."""
    folder = tmp_path_factory.mktemp("federation")
    database = folder / "hub" / "state.db"
    options: Any = {"server_options": ["--any-app"], "client_options": LOW}
    made = Federation(folder / "hub", acting=True, database=database, **options)
    with leaving_nothing(made) as hub:
        yield hub


@pytest.fixture
def hub(federation: Federation) -> Iterator[Federation]:
    """Give the worker's federation, and restore its processes after the test."""
    yield federation
    federation.mend()


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
    plugins.restrict(ANY)  # the policy of a site of this process


@pytest.fixture
def signal_handlers() -> Iterator[None]:
    """Restore the signal handlers that a command under test has replaced."""
    handlers = {
        each: signal.getsignal(each) for each in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
    }
    yield
    for each, handler in handlers.items():
        signal.signal(each, handler)
