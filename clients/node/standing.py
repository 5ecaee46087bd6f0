"""How a site stands with its server, in a file that its health check reads."""

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedda.errors import KeyFileError
from fedda.files import put

FILE = "standing.json"
# Events of `resident.serve` after which a site stands otherwise; all others leave it as it is, such
# as a message that the site refuses.
STANDS = {
    "waiting": "waiting",
    "lost": "waiting",
    "connected": "connected",
    "back": "connected",
    "stopped": "stopped",
}


class Standing:
    """Keeps `standing.json` in a site's state folder.

    The file has `standing` (waiting, connected, refused or stopped), `text` (the sentence that the
    log has, too) and `since` (seconds since 1970).
    """

    def __init__(self, state: Path) -> None:
        self.path = state / FILE
        self.text = ""  # of the newest standing

    def tell(self, kind: str, text: str) -> None:
        """Keep what an event says about how the site stands; other events change nothing."""
        if kind in STANDS:
            self._keep(STANDS[kind], text)

    @contextmanager
    def until_it_fails(self) -> Iterator[None]:
        """Keep why the `with` block fails: the server refuses this site's key, or anything else."""
        try:
            yield
        except Exception as error:
            self._keep("refused" if isinstance(error, KeyFileError) else "stopped", str(error))
            raise

    def _keep(self, standing: str, text: str) -> None:
        self.text = text
        now = {"standing": standing, "text": text, "since": round(time.time())}
        put(self.path, json.dumps(now) + "\n")  # a health check never reads half a file
