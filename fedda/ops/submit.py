"""Starting a run on a SuperLink by the command `flwr run`, as an operator would."""

import json
import os
import subprocess
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedda.errors import RunError

OFFLINE = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
}
CONNECTION = "fedda"


def write_connection(home: Path, address: str, ca: Path | None) -> None:
    """Write the FLWR_HOME with which flwr's commands reach a SuperLink.

    Args:
        home: the folder to write to.
        address: HOST:PORT where the server listens for operators.
        ca: the authority of the server's certificate, or None for plain HTTP.
    """
    trust = "insecure = true" if ca is None else f"root-certificates = {json.dumps(str(ca))}"
    home.mkdir(parents=True, exist_ok=True)
    (home / "config.toml").write_text(
        f'[superlink]\ndefault = "{CONNECTION}"\n\n'
        f"[superlink.{CONNECTION}]\naddress = {json.dumps(address)}\n{trust}\n"
    )


def submit(app: Path, run_config: Mapping[str, Any], home: Path, seconds: float = 60.0) -> int:
    """Start a run of the Flower app in a folder -> Flower's id of the run.

    Args:
        app: a folder with the app's pyproject.toml.
        run_config: overrides of the app's configuration.
        home: a folder that `write_connection` wrote.
        seconds: to wait for flwr to answer.

    Raises:
        RunError: flwr refused; with its output.
    """
    scripts = sysconfig.get_path("scripts")
    env = os.environ | OFFLINE | {"FLWR_HOME": str(home)}
    env["PATH"] = os.pathsep.join([scripts, env.get("PATH", "")])
    # The settings go into a file: of several options `key.part=value`, flwr keeps only the last one
    # of each `key`.
    changes = home / "run-config.toml"
    lines = (
        f"{key} = {json.dumps(value, ensure_ascii=False)}\n" for key, value in run_config.items()
    )
    changes.write_text("".join(lines))
    command = ["flwr", "run", str(app), CONNECTION, "--run-config", str(changes)]
    command += ["--format", "json"]
    try:
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=seconds, check=False
        )
    except subprocess.TimeoutExpired:
        raise RunError(
            f"flwr did not start the run in {seconds:.0f} s: check that the server in "
            f"{home / 'config.toml'} is up"
        ) from None
    try:
        return int(json.loads(done.stdout)["run-id"])
    except (ValueError, KeyError, TypeError) as error:
        output = " ".join((done.stdout + done.stderr).split())[-800:]
        raise RunError(f"flwr did not start the run; it said: {output}") from error
