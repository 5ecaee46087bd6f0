"""Records all that crosses between sites and server, at the server's end; for the live tests.

    python -m tests.recorder FOLDER superlink ...

Each request to the public listener, with its answer, is a line of FOLDER/requests.jsonl; each frame
of the exchange is a line of FOLDER/frames.jsonl, and each frame of a lane one of
FOLDER/lanes.jsonl, once the server's program calls `record_frames`.
"""

import json
import sys
from base64 import b64decode, b64encode
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fedda.exchange import frames as exchanged
from fedda.exchange.host import RemoteSession
from fedda.exchange.sums import Sums
from fedda.lane.lane_host import LaneHost
from fedda.lane.tls import TICKET
from server.superlink.filter import FleetOnly

REQUESTS, FRAMES, LANES = "requests.jsonl", "frames.jsonl", "lanes.jsonl"


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
    """Record the frames of the exchange and of lanes from now on."""
    honest, take, send = LaneHost._serve, RemoteSession._take, RemoteSession._send

    def opened(name: str) -> Any:
        file = (folder / name).open("a", buffering=1)

        def note(way: str, whose: str, data: bytes) -> bytes:
            file.write(json.dumps([way, whose, b64encode(data).decode()]) + "\n")
            return data

        return note

    frame, crossed = opened(FRAMES), opened(LANES)

    def serving(self: Any, incoming: Iterator[bytes], context: Any) -> Iterator[bytes]:
        whose = dict(context.invocation_metadata())[TICKET]
        for data in honest(self, (crossed("from", whose, each) for each in incoming), context):
            yield crossed("to", whose, data)

    def taking(self: RemoteSession, site: str, data: bytes) -> None:
        take(self, site, frame("from", site, data))

    def sending(self: RemoteSession, sums: Sums) -> None:
        assert sums.last is not None
        for member in sums.group.members:
            frame("to", member, exchanged.total(sums.group.name, sums.index - 1, sums.last))
        send(self, sums)

    LaneHost._serve = serving  # type: ignore[method-assign]
    RemoteSession._take = taking  # type: ignore[method-assign]
    RemoteSession._send = sending  # type: ignore[method-assign]


def requests(folder: Path) -> Iterator[dict[str, Any]]:
    """What `record_requests` wrote."""
    for line in _lines(folder / REQUESTS):
        entry = json.loads(line)
        for way in ("headers", "answered"):
            entry[way] = {b64decode(k).decode(): b64decode(v).decode() for k, v in entry[way]}
        yield entry | {way: b64decode(entry[way]) for way in ("body", "answer")}


def frames(folder: Path) -> Iterator[tuple[str, str, bytes]]:
    """What `record_frames` wrote: to or from, the site, the frame."""
    yield from _frames(folder / FRAMES)


def lanes(folder: Path) -> Iterator[tuple[str, str, bytes]]:
    """What `record_frames` wrote of lanes: to or from, the ticket, the frame."""
    yield from _frames(folder / LANES)


def _frames(file: Path) -> Iterator[tuple[str, str, bytes]]:
    for line in _lines(file):
        way, whose, data = json.loads(line)
        yield way, whose, b64decode(data)


def _lines(path: Path) -> list[str]:
    """The whole lines of a file; sites go on asking, so the last one may be half written."""
    whole, _, _ = path.read_text().rpartition("\n")
    return whole.splitlines()


if __name__ == "__main__":
    from fedda import cli

    record_requests(Path(sys.argv[1]))
    sys.argv = ["fedda", *sys.argv[2:]]
    cli.main()
