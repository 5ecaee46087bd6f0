"""How a site stands with its server, in a file that its health check reads."""

import json
import time
from pathlib import Path

FILE = "standing.json"
# Events of `resident.serve` after which a site stands otherwise; all others leave it as it is.
STANDS = {
    "waiting": "waiting",
    "lost": "waiting",
    "connected": "connected",
    "back": "connected",
    "refused": "refused",
    "stopped": "stopped",
}


class Standing:
    """Keeps `standing.json` in a site's state folder.

    The file has `standing` (waiting, connected, refused or stopped), `text` (the sentence that the
    log has, too) and `since` (seconds since 1970).
    """

    def __init__(self, state: Path) -> None:
        self.path = state / FILE

    def tell(self, kind: str, text: str) -> None:
        """Keep what an event says about how the site stands; other events change nothing."""
        if kind not in STANDS:
            return
        now = {"standing": STANDS[kind], "text": text, "since": round(time.time())}
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(now) + "\n")
        part.replace(self.path)  # a health check never reads half a file
