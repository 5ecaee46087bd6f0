"""How flwr's own commands, and the programs it starts, find a SuperLink and stay offline."""

import json
from pathlib import Path

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
