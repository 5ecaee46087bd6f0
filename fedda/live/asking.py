"""Asks a server who is there, and which runs it has."""

import ssl
from pathlib import Path
from typing import Self

import httpx

from fedda.errors import KeyFileError, RunError

from .snapshot import Snapshot

PATIENCE = 10.0  # seconds for an answer


class Watching:
    """Asks a server for its sites and runs, inside its `with` block."""

    def __init__(self, address: str, ca: Path | None) -> None:
        """Prepare to ask.

        Args:
            address: HOST:PORT where the server listens for operators.
            ca: the file of its authority; None without TLS.

        Raises:
            KeyFileError: that file cannot be read.
        """
        self.address = address
        try:
            trust = ssl.create_default_context(cafile=ca) if ca else False
        except (OSError, ssl.SSLError) as error:
            raise KeyFileError(
                f"{ca} is no certificate ({error}); give the folder that the server was started "
                "with."
            ) from error
        scheme = "https" if ca else "http"
        base = f"{scheme}://{address}"
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
