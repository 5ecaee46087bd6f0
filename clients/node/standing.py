"""How a site stands with its server, in a file that its health check reads."""

import json
import time
from pathlib import Path

from fedda.files import replacing

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

    def refused(self, text: str) -> None:
        """Keep that the server takes this site's key no longer, or never did."""
        self._keep("refused", text)

    def _keep(self, standing: str, text: str) -> None:
        self.text = text
        now = {"standing": standing, "text": text, "since": round(time.time())}
        with replacing(self.path) as part:  # a health check never reads half a file
            part.write_text(json.dumps(now) + "\n")
