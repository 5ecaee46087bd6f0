"""Where the server of a folder of `fedda superlink` listens for operators, and what it has."""

import json
import ssl
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from fedda.errors import KeyFileError, RunError
from fedda.results.snapshot import Snapshot

ABOUT = "server.json"
OTHERWISE = "or name another by --server"
PATIENCE = 10.0  # seconds for an answer


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


@contextmanager
def looking(address: str, ca: Path | None) -> Iterator[Callable[[], Snapshot]]:
    """Give the `with` block what asks a server for its sites and runs at this moment.

    It raises a RunError if no server answers, or one of another version.

    Args:
        address: HOST:PORT where the server listens for operators.
        ca: the file of its authority; None without TLS.

    Raises:
        KeyFileError: that file cannot be read.
    """
    import httpx  # no other command needs an HTTP client

    try:
        trust = ssl.create_default_context(cafile=ca) if ca else False
    except (OSError, ssl.SSLError) as error:
        raise KeyFileError(
            f"{ca} is no certificate ({error}); give the folder that the server was started with."
        ) from error
    base = f"{'https' if ca else 'http'}://{address}"
    with httpx.Client(base_url=base, verify=trust, timeout=PATIENCE, trust_env=False) as client:

        def look() -> Snapshot:
            try:
                answer = client.get("/live/sites.json")
                answer.raise_for_status()
                return Snapshot.of(answer.json())
            except httpx.HTTPStatusError as error:
                raise RunError(
                    f"the server at {address} answers with {error.response.status_code}; start it "
                    "with this version of fedda."
                ) from error
            except (httpx.TransportError, ValueError) as error:
                raise RunError(
                    f"no server answers at {address} ({error}); start it with `fedda superlink`."
                ) from error

        yield look
