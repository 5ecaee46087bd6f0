"""Records all that crosses between sites and server, at the server's end; for the live tests.

    python -m tests.recorder FOLDER superlink ...

Each request to the public listener, with its answer, is a line of FOLDER/requests.jsonl; each frame
of the exchange is a line of FOLDER/frames.jsonl, once the server's program calls `record_frames`.
"""

import json
import sys
from base64 import b64decode, b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedda.exchange.connections import Connections
from server.superlink.filter import FleetOnly

REQUESTS, FRAMES = "requests.jsonl", "frames.jsonl"


def record_requests(folder: Path) -> None:
    """Record what passes the public listener from now on."""
    honest = FleetOnly.__call__
    file = (folder / REQUESTS).open("a", buffering=1)

    async def recording(self: Any, scope: Any, receive: Any, send: Any) -> None:
        body, answer, heads = [], [], []

        async def taken() -> Any:
            event = await receive()
            body.append(event.get("body", b""))
            return event

        async def sent(event: Any) -> None:
            heads.extend(event.get("headers", ()))
            answer.append(event.get("body", b""))
            await send(event)

        await honest(self, scope, taken, sent)
        line = {"path": scope["path"], "headers": scope["headers"], "answered": heads}
        line |= {"body": b"".join(body), "answer": b"".join(answer)}
        file.write(json.dumps(line, default=lambda data: b64encode(data).decode()) + "\n")

    FleetOnly.__call__ = recording


def record_frames(folder: Path) -> None:
    """Record the frames of the exchange from now on."""
    honest = Connections.serve
    file = (folder / FRAMES).open("a", buffering=1)

    def note(way: str, site: str | None, data: bytes) -> bytes:
        file.write(json.dumps([way, site, b64encode(data).decode()]) + "\n")
        return data

    def recording(self: Any, site: str | None, incoming: Iterator[bytes]) -> Iterator[bytes]:
        read = (note("from", site, data) for data in incoming)
        for data in honest(self, site, read):
            yield note("to", site, data)

    Connections.serve = recording


def requests(folder: Path) -> Iterator[dict[str, Any]]:
    """What `record_requests` wrote."""
    for line in _lines(folder / REQUESTS):
        entry = json.loads(line)
        for way in ("headers", "answered"):
            entry[way] = {b64decode(k).decode(): b64decode(v).decode() for k, v in entry[way]}
        yield entry | {way: b64decode(entry[way]) for way in ("body", "answer")}


def frames(folder: Path) -> Iterator[tuple[str, str, bytes]]:
    """What `record_frames` wrote: to or from, the site, the frame."""
    for line in _lines(folder / FRAMES):
        way, site, data = json.loads(line)
        yield way, site, b64decode(data)


def _lines(path: Path) -> list[str]:
    """The whole lines of a file; sites go on asking, so the last one may be half written."""
    whole, _, _ = path.read_text().rpartition("\n")
    return whole.splitlines()


if __name__ == "__main__":
    from fedda import cli

    record_requests(Path(sys.argv[1]))
    sys.argv = ["fedda", *sys.argv[2:]]
    cli.main()
