"""Where the server of a folder of `fedda superlink` listens for operators."""

import json
from pathlib import Path

from fedda.errors import RunError, typed

ABOUT = "server.json"
OTHERWISE = "or name another by --server"


def server_of(folder: Path, otherwise: str = OTHERWISE) -> tuple[str, Path | None]:
    """Return HOST:PORT where a folder's server listens for operators, and its authority's file.

    Args:
        folder: what `fedda superlink` was given as --dir.
        otherwise: what else the user can do if no server runs.

    Raises:
        RunError: no server runs from the folder.
    """
    try:
        about = json.loads((folder / ABOUT).read_text())
        return about["admin"], Path(about["ca"]) if about["ca"] else None
    except (OSError, ValueError, KeyError):
        raise RunError(
            f"No server runs from {folder}; start one with "
            f"{typed('fedda', 'superlink', '--dir', folder)}, {otherwise}."
        ) from None
