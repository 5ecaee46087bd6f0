"""What a site's machine dials, as the kernel sees it: the server and nothing else.

`tests/test_end_to_end.py` watches what Python dials. Libraries in C dial without Python's
knowledge, so here strace follows two sites, a source and the target, and all that they start.
"""

import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from fedda.ops.spawn import LOOPBACK
from tests.federation import LOW, Federation
from tests.local_grid import SMALL_SUMS
from tests.processes import leaving_nothing

TRACE = ["strace", "-D", "-f", "--seccomp-bpf", "-qq"]  # -D: signals reach the traced program
TRACE += ["-e", "trace=connect,sendto,sendmsg,sendmmsg"]
DIALLED = re.compile(
    r"sin6?_port=htons\((?P<port>\d+)\).*?"
    r'(?:inet_addr\("(?P<v4>[^"]+)"\)|inet_pton\(AF_INET6, "(?P<v6>[^"]+)")'
)
TRACED = ("bert", "town")
SUMS = {"method": "fdann", "rounds": 1, "train.batch-size": 16} | SMALL_SUMS


def traceable() -> bool:
    """Whether strace is installed and may follow a process here."""
    if shutil.which("strace") is None:
        return False
    return subprocess.run([*TRACE, "true"], capture_output=True, check=False).returncode == 0


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not traceable(), reason="strace is not installed or may not be used"),
]


def dialled(trace: Path) -> set[tuple[str, int]]:
    """Return the addresses and ports that a traced program sent anything to.

    An IPv4 address may also be written as one of IPv6.
    """
    found = set()
    for line in trace.read_text(errors="replace").splitlines():
        if match := DIALLED.search(line):
            address = match["v4"] or match["v6"].removeprefix("::ffff:")
            found.add((address, int(match["port"])))
    return found


class Traced(Federation):
    """A federation in which strace follows some sites."""

    def __init__(self, directory: Path) -> None:
        super().__init__(directory, client_options=LOW)

    def trace(self, name: str) -> Path:
        """The file to which strace writes what a site dials."""
        return self.directory / f"{name}.trace"

    def _program(self, name: str) -> Sequence[Any]:
        own = super()._program(name)
        return [*TRACE, "-o", self.trace(name), *own] if name in TRACED else own


@pytest.fixture(scope="module")
def hub(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Traced]:
    folder = tmp_path_factory.mktemp("egress")
    with leaving_nothing(Traced(folder / "hub")) as made:
        yield made


@pytest.mark.nightly("clients/node", "fedda/lane")
def test_a_site_dials_the_server_only(hub: Traced) -> None:
    results = hub.begin("sums", SUMS).finish()
    assert results["events"] == []
    for name in TRACED:
        assert dialled(hub.trace(name)) == {(LOOPBACK, hub.port)}
