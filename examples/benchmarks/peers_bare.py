"""The limit that peers.py measures against: TLS sockets that move the same bytes and nothing else.

    python peers_bare.py serve HOME PORT CLIENTS MEGABYTES ROUNDS STAMPS
    python peers_bare.py client HOME PORT CLIENTS MEGABYTES ROUNDS STAMPS

HOME holds the certificates of a server. In each round the server sends a model to all clients at
once, a thread for each, and takes it back; it computes nothing, and nobody checks anything but the
certificate. It writes to STAMPS when each round begins and the last one ends.
"""

import socket
import ssl
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HOST = "127.0.0.1"


def whole(line: ssl.SSLSocket, into: memoryview) -> None:
    """Fill a buffer from a connection."""
    while len(into):
        into = into[line.recv_into(into) or sys.exit("The other side has closed.") :]


def serve(home: Path, port: int, clients: int, size: int, rounds: int, stamps: Path) -> None:
    """Send a model to all clients and take it back, round after round."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(home / "server.pem", home / "server.key")
    model, back = bytes(size), [bytearray(size) for _ in range(clients)]
    with socket.create_server((HOST, port)) as listening:
        lines = [
            context.wrap_socket(listening.accept()[0], server_side=True) for _ in range(clients)
        ]

    def wave(line: ssl.SSLSocket, into: bytearray) -> None:
        line.sendall(model)
        whole(line, memoryview(into))

    times = []
    with ThreadPoolExecutor(clients) as threads:
        for _ in range(rounds):
            times.append(time.time())
            list(threads.map(wave, lines, back))
    stamps.write_text("\n".join(map(str, [*times, time.time()])))


def client(home: Path, port: int, size: int, rounds: int) -> None:
    """Take a model and send it back, round after round."""
    context = ssl.create_default_context(cafile=str(home / "ca.crt"))
    model = memoryview(bytearray(size))
    with context.wrap_socket(socket.create_connection((HOST, port)), server_hostname=HOST) as line:
        for _ in range(rounds):
            whole(line, model)
            line.sendall(model)


def main() -> None:
    role, home, port, clients, mb, rounds, stamps = sys.argv[1:]
    size = round(float(mb) * 1e6)
    if role == "serve":
        serve(Path(home), int(port), int(clients), size, int(rounds), Path(stamps))
    else:
        client(Path(home), int(port), size, int(rounds))


if __name__ == "__main__":
    main()
