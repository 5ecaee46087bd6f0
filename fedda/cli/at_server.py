"""The server that a folder of `fedda superlink` belongs to, and what it tells those who watch."""

import json
import ssl
from pathlib import Path
from typing import Self

import httpx

from fedda.errors import KeyFileError, RunError
from fedda.live.snapshot import Snapshot

ABOUT = "server.json"
OTHERWISE = "or name another by --server"
PATIENCE = 10.0


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
            f"No server runs from {folder}; start one with fedda superlink --dir, {otherwise}."
        ) from None


class Watching:
    """Asks a server for its sites and runs, inside its `with` block."""

    def __init__(self, folder: Path) -> None:
        """Find the server of a folder.

        Raises:
            RunError: no server runs from the folder.
            KeyFileError: the file of its authority cannot be read.
        """
        self.address, ca = server_of(folder)
        try:
            trust = ssl.create_default_context(cafile=ca) if ca else False
        except (OSError, ssl.SSLError) as error:
            raise KeyFileError(
                f"{ca} is no certificate ({error}); give the folder that the server was started "
                "with."
            ) from error
        scheme = "https" if ca else "http"
        base = f"{scheme}://{self.address}"
        self._client = httpx.Client(base_url=base, verify=trust, timeout=PATIENCE, trust_env=False)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def look(self) -> Snapshot:
        """Return the sites and runs at this moment.

        Raises:
            RunError: no server answers, or it is one of another version.
        """
        try:
            answer = self._client.get("/live/sites.json")
            answer.raise_for_status()
            return Snapshot.of(answer.json())
        except httpx.HTTPStatusError as error:
            raise RunError(
                f"the server at {self.address} answers with {error.response.status_code}; start "
                "it with this version of fedda."
            ) from error
        except (httpx.TransportError, ValueError) as error:
            raise RunError(
                f"no server answers at {self.address} ({error}); start it with `fedda superlink`."
            ) from error
