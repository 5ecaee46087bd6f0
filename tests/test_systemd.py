"""deploy/systemd/: the units' commands exist, services are confined, systemd accepts the files."""

import re
import shlex
import shutil
import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from fedda.cli.exits import KEY_TROUBLE, USAGE
from tests.command_lines import parse
from tests.test_deploy import DEPLOY, ENV, apart_from, services

ROOT = DEPLOY / "systemd"
CLIENT, SERVER = "fedda-client@.service", "fedda-superlink.service"
UNITS = (CLIENT, SERVER)
PROGRAMS = "/opt/fedda/bin"
# What systemd tells a service of the client's unit for the site clinic-a.
GIVEN = {
    "CREDENTIALS_DIRECTORY": "/run/credentials/fedda-client@clinic-a.service",
    "STATE_DIRECTORY": "/var/lib/fedda-client/clinic-a",
}


def unit(name: str) -> dict[str, list[str]]:
    """The settings of a unit's [Service], each with all its values."""
    text = (ROOT / name).read_text().replace("\\\n", " ")
    text = text.partition("[Service]")[2].partition("\n[")[0]
    found: dict[str, list[str]] = defaultdict(list)
    for line in text.splitlines():
        if line and line[0] not in "#;":
            key, _, value = line.partition("=")
            found[key].append(value)
    return found


def environment(path: Path) -> dict[str, str]:
    """The variables of an EnvironmentFile."""
    lines = [line for line in path.read_text().splitlines() if line and line[0] != "#"]
    return dict(line.split("=", 1) for line in lines)


def command(name: str, env: dict[str, str]) -> list[str]:
    """The words of ExecStart: ${NAME} is one word, $NAME as many as it holds, %i the site."""
    (line,) = unit(name)["ExecStart"]
    words: list[str] = []
    for word in shlex.split(line.replace("%i", "clinic-a")):
        if whole := re.fullmatch(r"\$(\w+)", word):
            words += env.get(whole[1], "").split()
        else:
            words.append(re.sub(r"\$\{(\w+)\}", lambda found: env[found[1]], word))
    program, *rest = words
    assert Path(program).parent == Path(PROGRAMS)
    return [Path(program).name, *rest]


def test_a_sites_command_is_that_of_compose() -> None:
    env = environment(ROOT / "clinic-a.env") | GIVEN
    params = parse(command(CLIENT, env))
    like = parse(services("compose.client.yml", {**ENV, "ROLE": "source"})["client"]["command"])
    moved = {"data", "ca", "key", "state_dir", "policy", "peers", "threads"}
    assert apart_from(moved, params) == apart_from(moved, like)
    # Each credential is one that the unit loads, from a file that only root need be able to read.
    loaded = dict(each.split(":", 1) for each in unit(CLIENT)["LoadCredential"])
    assert loaded == {"key": "/etc/fedda/%i.key", "ca.crt": "/etc/fedda/%i.ca.crt"}
    folder = Path(GIVEN["CREDENTIALS_DIRECTORY"])
    assert (params["ca"], params["key"]) == (folder / "ca.crt", folder / "key")
    assert unit(CLIENT)["StateDirectory"] == ["fedda-client/%i"]
    assert params["state_dir"] == Path(GIVEN["STATE_DIRECTORY"])
    # Without OPTIONS, too.
    parse(command(CLIENT, {k: v for k, v in env.items() if k != "OPTIONS"}))


@pytest.mark.parametrize("name", UNITS)
def test_units_are_confined(name: str) -> None:
    found = unit(name)
    for key in (
        *("NoNewPrivileges", "PrivateTmp", "PrivateDevices", "PrivateUsers", "ProtectHome"),
        *("ProtectKernelTunables", "ProtectKernelModules", "ProtectControlGroups"),
        *("RestrictNamespaces", "RestrictSUIDSGID", "LockPersonality"),
    ):
        assert found[key] == ["yes"], key
    assert found["ProtectSystem"] == ["strict"]
    assert found["CapabilityBoundingSet"] == found["AmbientCapabilities"] == [""]
    assert found["SystemCallFilter"] == ["@system-service", "~@privileged"]
    assert found["RestrictAddressFamilies"] == ["AF_INET AF_INET6 AF_UNIX"]
    assert found["UMask"] == ["0077"] and found["StateDirectoryMode"] == ["0700"]
    assert "ReadWritePaths" not in found
    assert found["DynamicUser"] == (["yes"] if name == CLIENT else [])
    # Without the instance's name all sites of a host would share a user.
    assert found["User"] == ["fedda-%i" if name == CLIENT else "fedda"]


@pytest.mark.parametrize("name", UNITS)
def test_restarts_heed_exit_codes_and_a_stop_is_graceful(name: str) -> None:
    found = unit(name)
    assert found["Restart"] == ["on-failure"]
    assert found["RestartPreventExitStatus"] == [f"{USAGE} {KEY_TROUBLE}"]
    assert found["KillSignal"] == ["SIGTERM"]
    # As long as a container gets.
    assert found["TimeoutStopSec"] == ["30"]
    assert services("compose.client.yml")["client"]["stop_grace_period"] == "30s"


def verify(folder: Path, name: str) -> Any:
    """Let systemd read a unit, with programs that exist."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no"]
    command.append(str(folder / name))
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.fixture
def units(tmp_path: Path) -> Path:
    """The units and the drop-in files of the site clinic-a, where systemd looks for them."""
    for program in ("fedda", "fedda-client"):
        (tmp_path / program).write_text("#!/bin/sh\n")
        (tmp_path / program).chmod(0o755)
    for name, own in ((SERVER, SERVER), (CLIENT, "fedda-client@clinic-a.service")):
        (tmp_path / own).write_text((ROOT / name).read_text().replace(PROGRAMS, str(tmp_path)))
    drop_in = tmp_path / "fedda-client@clinic-a.service.d"
    drop_in.mkdir()
    for file in ("drop-in.conf", "gpu.conf"):
        (drop_in / file).write_text((ROOT / file).read_text())
    return tmp_path


@pytest.mark.parametrize("name", ["fedda-client@clinic-a.service", SERVER])
def test_systemd_accepts_the_units(units: Path, name: str) -> None:
    done = verify(units, name)
    assert (done.returncode, done.stderr) == (0, "")
