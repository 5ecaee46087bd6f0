"""The process that makes live pages, one after the other, for the server that started it.

Its input has a line of JSON per page: the snapshot, which run to show, and the version. Its output
has eight bytes with the page's length, then the page. It ends with its input or its parent.
"""

import json
import os
import signal
import sys

from fedda.ops.spawn import die_with_parent

LENGTH = 8  # bytes


def main() -> None:
    """Make pages until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the server's, which then ends this
    die_with_parent()
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as out:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # whatever else is printed
        from fedda.page.live_page import made  # after the above, as it takes time

        for line in sys.stdin.buffer:
            page = made(*json.loads(line)).encode()
            out.write(len(page).to_bytes(LENGTH, "big") + page)
            out.flush()


if __name__ == "__main__":
    main()
