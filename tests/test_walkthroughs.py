"""The walk-throughs of the documentation, run command by command from the pages' own text."""

import json
import os
import re
import shlex
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from fedda.data import digits
from fedda.ops.bundle import stage
from fedda.ops.spawn import LOOPBACK, Reserved, quiet_port
from tests.patience import PATIENCE, wait_until

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parent.parent
BIN = Path(sys.executable).parent
QUICK_TOML = {"rounds": "1", "input.size": "16", "model.name": "'mlp'", "model.hidden": "'16'"}
QUICK = " ".join(f"-c {key}={value}" for key, value in QUICK_TOML.items())


class Terminals:
    """Terminals in which commands are run, as a reader of a page would."""

    def __init__(self, home: Path) -> None:
        path = os.pathsep.join([str(BIN), os.environ["PATH"]])
        self.env = os.environ | {"PATH": path, "FLWR_HOME": str(home)}
        self.running: list[subprocess.Popen[str]] = []
        self.reserved: list[Reserved] = []

    def port(self) -> int:
        """A port for a server that is to share it (`--reserved`)."""
        self.reserved.append(Reserved(""))
        return self.reserved[-1].port

    def run(self, command: str, folder: Path, seconds: float = PATIENCE) -> str:
        """Run a command to its end -> what it printed."""
        done = subprocess.run(
            shlex.split(command, comments=True), cwd=folder, env=self.env, timeout=seconds,
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        return done.stdout

    def leave(self, command: str, folder: Path) -> None:
        """Start a command that stays; its output goes to a file beside it."""
        words = shlex.split(command, comments=True)
        with (folder / f"{len(self.running)}.log").open("w") as log:
            self.running.append(
                subprocess.Popen(words, cwd=folder, env=self.env, stdout=log, stderr=log, text=True)
            )

    def close(self) -> None:
        """End what still runs, the sites first."""
        for process in reversed(self.running):
            process.terminate()
        for process in reversed(self.running):
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        for each in self.reserved:
            each.close()


@pytest.fixture
def terminals(tmp_path: Path) -> Iterator[Terminals]:
    made = Terminals(tmp_path / "flwr")
    yield made
    made.close()


def commands(page: str, changes: Mapping[str, str]) -> list[str]:
    """The lines of a page's code, with some words changed, each of which it must have."""
    text, found, fenced = (ROOT / "docs" / page).read_text(), [], False
    for line in text.splitlines():
        fenced ^= line.startswith("```")
        if (fenced and not line.startswith("```")) or line.startswith("    "):
            found.append(line.strip())
    for old, new in changes.items():
        assert any(old in line for line in found), old
        found = [line.replace(old, new) for line in found]
    return found


def starting(lines: Sequence[str], *words: str) -> list[str]:
    """The lines that start with one of these words, of which there must be some."""
    found = [line for line in lines if line.startswith(words)]
    assert found, words
    return found


@pytest.mark.nightly("docs/three-machines.md", "fedda/cli", "fedda/ops/keys.py")
def test_three_machines(terminals: Terminals, tmp_path: Path) -> None:
    """The server, a source and the target in folders of their own; both sites' data are ./scans."""
    port, admin = (terminals.port() for _ in range(2))
    ports = f"--port {port} --admin-port {admin} --reserved"
    changes = {"hub.example.org": "127.0.0.1", "0.0.0.0": "127.0.0.1"}
    changes |= {"--port 8443": ports, ":8443": f":{port}"}
    lines = commands("three-machines.md", changes)
    server, sites = tmp_path / "server", [tmp_path / "clinic-a", tmp_path / "clinic-b"]
    digits.build(tmp_path / "digits", seed=0, train=120, test=40)
    for folder, domain in zip([server, *sites], ("", "handwritten", "fonts"), strict=True):
        folder.mkdir()
        if domain:
            (tmp_path / "digits" / domain).rename(folder / "scans")
    (init,) = starting(lines, "fedda keys init")
    request, sign = starting(lines, "fedda keys request", "fedda keys sign")
    terminals.run(init, server)
    for folder in sites:
        said = terminals.run(request.replace("clinic-a", folder.name), folder)
        (own,) = re.findall(r"SHA256:\S{43}", said)
        asked = f"{folder.name}.pub"
        (server / asked).write_bytes((folder / asked).read_bytes())
        terminals.run(sign.replace("clinic-a", folder.name).replace("SHA256:...", own), server)
    (serve,) = starting(lines, "fedda superlink")
    terminals.leave(serve, server)
    check, join = starting(lines, "fedda data check", "fedda-client")
    for folder, role in zip(sites, ("source", "target"), strict=True):
        (folder / "ca.crt").write_bytes((server / "hub" / "ca.crt").read_bytes())
        of_role = {"--role source": f"--role {role}", "--key clinic-a": f"--key {folder.name}"}
        here = [check, join]
        for old, new in of_role.items():
            here = [line.replace(old, new) for line in here]
        assert "120" in terminals.run(here[0], folder)
        terminals.leave(here[1], folder)
    (run,) = starting(lines, "fedda run kd3a --server")
    terminals.run(f"{run} {QUICK} -c input.channels=1", server)
    made = server / "runs" / "kd3a"
    found = json.loads((made / "results.json").read_text())
    assert {site["name"] for site in found["sites"]} == {"clinic-a", "clinic-b"}
    for line in starting(lines, "fedda predict", "fedda export"):
        line = line.replace("./new-scans", str(sites[1] / "scans" / "data.npz"))
        terminals.run(line, made)
    assert len((made / "predictions.csv").read_text().splitlines()) > 40
    assert {path.suffix for path in made.iterdir()} >= {".onnx", ".html", ".png"}


def answers(port: int) -> bool:
    """Whether a server listens there."""
    try:
        socket.create_connection((LOOPBACK, port)).close()
    except OSError:
        return False
    return True


@pytest.mark.nightly("docs/flower.md", "fedda/ops/bundle.py", "clients/app.py", "server/app.py")
def test_flowers_own_superlink(terminals: Terminals, tmp_path: Path) -> None:
    """Flower's server, fedda's clients, then a run by `fedda run` and one by `flwr run`."""
    port, app = quiet_port(), stage(tmp_path / "app")  # flwr would walk through all of a checkout
    changes = {"9191": str(port), "fedda data digits ./digits": "", "APP": str(app)}
    lines = commands("flower.md", changes)
    digits.build(tmp_path / "digits", seed=0, train=120, test=40)
    (serve,) = starting(lines, "flower-superlink")
    terminals.leave(serve, tmp_path)
    wait_until(lambda: answers(port), "Flower's server does not answer")
    for line in starting(lines, "fedda-client"):
        terminals.leave(line, tmp_path)
    (run,) = starting(lines, "fedda run")
    terminals.run(f"{run} --baseline none {QUICK}", tmp_path)
    assert (tmp_path / "runs" / "kd3a" / "report.html").is_file()

    config = (ROOT / "docs" / "flower.md").read_text().partition("```toml\n")[2].partition("```")[0]
    (tmp_path / "flwr").mkdir(exist_ok=True)
    home = tmp_path / "flwr" / "config.toml"
    home.write_text(config.replace("9191", changes["9191"]))
    (submit,) = starting(lines, "flwr run")
    quick = " ".join(f"{key}={value}" for key, value in QUICK_TOML.items())
    terminals.run(submit.replace("input.size=16", quick), tmp_path)
    made = tmp_path / "runs" / "by-flwr"
    wait_until((made / "results.json").is_file, f"no results in {made}")
    (report,) = starting(lines, "fedda report")
    terminals.run(report, tmp_path)
    assert (made / "report.html").is_file()


@pytest.mark.nightly("README.md", "fedda/__init__.py", "fedda/library")
def test_the_python_of_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it stands, but with fewer rounds."""
    code = (ROOT / "README.md").read_text().partition("```python\n")[2].partition("```")[0]
    assert "rounds=2, " in code
    digits.build(tmp_path / "digits", seed=0, train=300, test=40)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(code.replace("rounds=2, ", "rounds=1, "), names)
    assert set(names["run"].results.accuracies) == {"fedavg", "kd3a"}


@pytest.mark.nightly("examples/fruda.py", "strategies/fruda.py", "clients/fruda.py")
def test_the_example_of_fruda(terminals: Terminals, tmp_path: Path) -> None:
    """With fewer images, of which it learns less."""
    program = ROOT / "examples" / "fruda.py"
    command = f"{sys.executable} {program} --images 300 --out {tmp_path / 'made'}"
    lines = terminals.run(command, tmp_path).splitlines()[-4:]
    told = r"(\d+) degrees learned from (\d+): ([\d.]+) % by"
    found = [re.match(told, line) for line in lines[:3]]
    assert [each and each[1] for each in found] == ["20", "40", "60"]
    assert all(each and each[2] in {"0", "20", "40"} - {each[1]} for each in found)
    assert Path(lines[3].removeprefix("page: ")).is_file()
