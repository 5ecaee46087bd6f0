"""Exit 0 if a server's public listener answers: python health.py https://HOST:PORT CA_FILE."""

import ssl
import sys
import urllib.request


def main() -> None:
    """Ask once; any failure raises an exception, so that the exit code is not 0."""
    address, ca = sys.argv[1:]
    context = ssl.create_default_context(cafile=ca)
    with urllib.request.urlopen(f"{address}/health", timeout=5, context=context) as reply:
        if reply.status != 200:
            sys.exit(f"{address} answered {reply.status}")


if __name__ == "__main__":
    main()
