"""Exit 0 if a server answers and, at a site, if the site has joined it.

    python health.py https://HOST:PORT CA_FILE [STATE_DIR]

STATE_DIR is that of the site's fedda-client. Whatever is wrong is printed as one sentence, which
`docker inspect` shows: a server that cannot be reached is not a key that the server refuses.
"""

import json
import os
import ssl
import sys
import urllib.error
import urllib.request
from pathlib import Path


def main() -> None:
    """Ask the server once, then look up how the site stands with it."""
    address, ca, *state = sys.argv[1:]
    for name in ("no_proxy", "NO_PROXY"):  # this machine is reached through no proxy
        os.environ[name] = ",".join([os.environ.get(name, ""), "localhost", "127.0.0.1"])
    try:
        context = ssl.create_default_context(cafile=ca)
    except OSError as error:
        sys.exit(f"{ca} cannot be read as the server's authority: {error.strerror or error}")
    try:
        with urllib.request.urlopen(f"{address}/health", timeout=5, context=context) as reply:
            status = reply.status
    except urllib.error.HTTPError as error:
        status = error.code
    except (OSError, ValueError) as error:
        sys.exit(f"{address} cannot be reached: {error}")
    if status != 200:
        sys.exit(f"{address} answers {status}: it is no fedda server, or not ready")
    for folder in state:
        try:
            stands = json.loads((Path(folder) / "standing.json").read_text())
        except FileNotFoundError:
            sys.exit(f"{address} answers, but this site's client has not started yet")
        if stands["standing"] != "connected":
            how = f"{stands['standing']}: {stands['text']}"
            sys.exit(f"{address} answers, but this site has not joined ({how})")


if __name__ == "__main__":
    main()
