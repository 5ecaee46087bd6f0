"""Ask a warm process for a fork that runs a program, and stand in for it until it ends.

    python -I -S forked.py SOCKET PROGRAM [ARGUMENT ...]

PROGRAM is a script of Python. If no warm process answers at SOCKET, this process becomes PROGRAM.
The fork ends when this process does. See `warm`; nothing but the standard library is imported here,
so that this takes no time.
"""

import array
import json
import os
import socket
import struct
import sys
from collections.abc import Mapping, Sequence
from typing import Any

HEAD = struct.Struct("!I")  # the length of a job
NUMBER = struct.Struct("!i")  # a process id, an exit code
TRUNCATED = "the warm process hung up"


def ask(address: str, job: Mapping[str, Any], files: Sequence[int]) -> socket.socket:
    """Connect to a warm process and hand it a job, with the fork's stdin, stdout and stderr.

    Raises:
        OSError: no warm process answers.
    """
    link = socket.socket(socket.AF_UNIX)
    try:
        link.connect(address)
        body = json.dumps(job).encode()
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", files))
        link.sendmsg([HEAD.pack(len(body))], [rights])
        link.sendall(body)
    except BaseException:
        link.close()
        raise
    return link


def number(link: socket.socket) -> int:
    """The next number that a warm process sends: a fork's process id, then its exit code.

    Raises:
        ConnectionError: it hung up.
    """
    data = b""
    while len(data) < NUMBER.size:
        data += (piece := link.recv(NUMBER.size - len(data)))
        if not piece:
            raise ConnectionError(TRUNCATED)
    return NUMBER.unpack(data)[0]


def main() -> None:
    """Let the fork run the program, or run it here -> never."""
    address, program, *arguments = sys.argv[1:]
    job = {"path": program, "arguments": arguments, "env": dict(os.environ), "cwd": os.getcwd()}
    try:
        link = ask(address, job, (0, 1, 2))
        number(link)
    except OSError:
        os.execv(program, [program, *arguments])
    try:
        code = number(link)
    except ConnectionError:
        code = 1  # the warm process was killed, and with it its forks
    sys.exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
