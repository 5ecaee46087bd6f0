"""A `fedda-client` that misbehaves as a file tells it to; for the live tests.

    python -m tests.actor FILE client --role source ...

FILE is read at every request. It is JSON such as {"2": ["hold", 0]}: what to do when training in
round 2. "2 distil" is one hop of that round; "2 test" is the target's test of its model.

    hold        waits, before it works, until FILE no longer says so
    hold push   waits like this within its reply, of which the first piece is at the server
    drip        sends the pieces of its reply one by one, that many seconds apart

"join": "hold" keeps the site from joining. "early": true makes it confirm its work before it has
it. "gone": true makes it answer questions as the server does for a node that is gone. "loss": 0.3
loses so many of its requests to the server, or their answers, and breaks its stream before so many
pieces of a reply.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
from flwr.app import Error, Message

from clients import app
from clients.node import lanes, resident
from clients.node.fleet import Fleet
from clients.site.memory import Site
from fedda import cli, records
from fedda.flower import ErrorCode, make_message
from fedda.lane import lane_end, parcels

FILE = Path(sys.argv[1])
PIECE = 2**12  # bytes of a reply that are sent at once, so that even a small one has several


def act(key: str) -> Any:
    """Return what FILE says under a key; None if there is no such file."""
    return json.loads(FILE.read_text()).get(key) if FILE.exists() else None


def held(key: str, what: str = "hold") -> None:
    """Wait as long as FILE says so."""
    while (act(key) or [""])[0] == what:
        time.sleep(0.1)


def train(message: Message, site: Site, honest: Any = app.train) -> Message:
    """Run the app's `train` and misbehave as FILE says for this round."""
    asked = records.read(message.content)[1]["step"]
    step = str(asked["round"])
    step = step if act(step) else f"{step} {asked['hop']}"
    return misbehave(message, site, step, honest)


def evaluate(message: Message, site: Site, honest: Any = app.evaluate) -> Message:
    """Run the app's `evaluate` and misbehave as FILE says for this hop of the round."""
    asked = records.read(message.content)[1]["step"]
    return misbehave(message, site, f"{asked['round']} {asked['hop']}", honest)


def say(what: str, step: str, run: int) -> None:
    """Say what is done wrong now, and in which run: another one has the same rounds."""
    print(f"acting: {what} in round {step} of run {run}.", flush=True)


def misbehave(message: Message, site: Site, step: str, honest: Any) -> Message:
    """Answer a request, with what FILE says for this step."""
    misdeed: Any = act(step) or ["", 0]
    what, value = misdeed
    if not what:
        return honest(message, site)
    if what in PUSHES:
        HostileEnd.of_reply = (what, step, float(value))  # which says so when it is on its way
    else:
        say(what, step, message.metadata.run_id)
    if what == "hold":
        held(step)
    return honest(message, site)


def drip(step: str, pause: float) -> None:
    """Wait before the next piece, unless FILE no longer says so."""
    if (act(step) or [""])[0] == "drip":
        time.sleep(pause)


PUSHES: dict[str, Callable[[str, float], None]] = {
    "drip": drip,
    "hold push": lambda step, pause: held(step, "hold push"),
}


class HostileEnd(lane_end.LaneEnd):
    """An end of a lane whose replies hang, and whose connections break."""

    # How to send the next reply, of which step, with what pauses.
    of_reply: tuple[str, str, float] = ("", "", 0.0)
    doing: tuple[str, str, float] = of_reply  # the same for the reply that is on its way
    slow = ""  # its request
    run = 0  # of that reply
    _draw = Random(0)

    def frames(self, number: int) -> Iterator[bytes]:
        going, said = "", False
        for frame in super().frames(number):
            what, step, pause = HostileEnd.doing
            is_part = frame[0] == parcels.PART
            if frame[0] == parcels.BEGIN:
                going = parcels.Incoming.parse(frame[1 + parcels.OFFSET :]).answers
            slow = what and is_part and going == HostileEnd.slow
            if slow and said:
                PUSHES[what](step, pause)
            if is_part and self._draw.random() < (act("loss") or 0.0):
                print("acting: loss", flush=True)
                self.cut()
                return
            yield frame
            if slow and not said:
                said = True
                say(what, step, HostileEnd.run)

    def _begin(self, number: int, frame: bytes) -> None:
        """Confirm what has only begun to come, as FILE says."""
        if act("early") and b'"kind":"train"' in frame:
            print("acting: confirm early", flush=True)
            name = parcels.Incoming.parse(frame[1 + parcels.OFFSET :]).name
            with self.lock:
                self._control.append(parcels.control(parcels.WHOLE, name))
                self.lock.notify_all()
        super()._begin(number, frame)


class HostileLanes(lanes.Lanes):
    """Sends replies as its own program never would."""

    def send(self, reply: Message) -> None:
        if HostileEnd.of_reply[0]:
            HostileEnd.doing, HostileEnd.of_reply = HostileEnd.of_reply, ("", "", 0.0)
            HostileEnd.slow = reply.metadata.reply_to_message_id
            HostileEnd.run = reply.metadata.run_id
        if act("gone") and reply.metadata.message_type == "query":
            print("acting: gone", flush=True)
            gone = Error(ErrorCode.NODE_UNAVAILABLE)
            reply = make_message(metadata=reply.metadata, error=gone)
        super().send(reply)


class Hostile(Fleet):
    """A session that loses requests to the server, or their answers."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._draw = Random(0)
        self._honest = self._client.send
        self._client.send = self._lossy  # type: ignore[method-assign]

    def _lossy(self, request: httpx.Request, **options: Any) -> httpx.Response:
        """Make a request, which is lost now and then: on its way, or its answer is."""
        lost = self._draw.random() < (act("loss") or 0.0)
        if not lost or self._draw.random() < 0.5:
            answer = self._honest(request, **options)
            if not lost:
                return answer
            answer.close()
        print("acting: loss", flush=True)
        raise httpx.ReadError("lost", request=request)


def serve(*args: Any, honest: Any = resident.serve, **options: Any) -> None:
    """Run the site's `serve` once FILE lets it join."""
    while act("join") == "hold":
        time.sleep(0.1)
    honest(*args, **options)


if __name__ == "__main__":
    app.train, app.evaluate = train, evaluate
    resident.serve = serve
    resident.Fleet = Hostile  # pyright: ignore[reportPrivateImportUsage]
    resident.Lanes = HostileLanes  # pyright: ignore[reportPrivateImportUsage]
    lanes.LaneEnd = HostileEnd  # pyright: ignore[reportPrivateImportUsage]
    parcels.PIECE = PIECE
    lanes.GONE_S = 10.0  # a site whose run was killed is to serve the next one soon
    sys.argv = ["fedda", *sys.argv[2:]]
    cli.main()
