"""A `fedda-client` that misbehaves as a file tells it to; for the live tests.

    python -m tests.actor FILE client --role source ...

FILE is read at every request. It is JSON such as {"2": ["sleep", 8], "offer": {"examples": 400}}:
what to do in round 2, and facts to offer instead of the true ones; "2 distil" is one hop of that
round. "join": "hold" keeps the site from joining. "early": true makes it confirm its work before it
has it. "gone": true makes it answer questions as the server does for a node that is gone. "loss":
0.3 loses so many of its requests to the server, or their answers. A reply is changed after the
site's own checks, as a site with another program could; in a round of "half" its pieces never
follow.

It asks for work less often than a real site: the more often sites ask, the more of its time a
waiting server spends on answering that there is no work.
"""

import json
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import httpx
from flwr.app import Error, Message
from flwr.app.message import make_message
from flwr.common.constant import ErrorCode
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ObjectTree,
    PushObjectResponse,
)

from clients.node import bridge, resident
from clients.node.failures import ask
from clients.node.fleet import Fleet
from clients.site.memory import Site
from fedda import cli, records
from fedda.wire import Arrays
from tests.local_grid import reshaped

FILE = Path(sys.argv[1])
POLL = 0.2  # seconds between two requests for work, while a run is going on


def act(key: str) -> Any:
    """Return what FILE says under a key; None if there is no such file."""
    return json.loads(FILE.read_text()).get(key) if FILE.exists() else None


def train(message: Message, site: Site, honest: Any = bridge.train) -> Message:
    """Run the bridge's `train` and misbehave as FILE says for this round."""
    asked = records.read(message.content)[1]["step"]
    step = str(asked["round"])
    step = step if act(step) else f"{step} {asked['hop']}"
    misdeed: Any = act(step) or ["", 0]
    what, value = misdeed
    if not what:
        return honest(message, site)
    print(f"acting: {what} in round {step}", flush=True)
    if what == "sleep":
        time.sleep(value)
    if what == "hold":
        while (act(step) or [""])[0] == "hold":
            time.sleep(0.1)
    if what == "half":
        Hostile.half = True
    if what == "raise":
        raise ValueError(value)
    reply = honest(message, site)
    if what == "scale":
        reply = reshaped(lambda model: scaled(model, float(value)))(message, reply)[0]
    return reply


def scaled(model: Arrays, by: float) -> Arrays:
    """Multiply every weight and bias by a number, which may be NaN."""
    return {n: a * by if n.endswith(("weight", "bias")) else a for n, a in model.items()}


class Hostile(Fleet):
    """A connection that uses the server as its own program never would."""

    half = False  # whether the next reply is only announced

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._draw = Random(0)
        self._honest = self._client._client.send
        self._client._client.send = self._lossy  # type: ignore[method-assign]

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

    def fetch(self, head: Message, tree: ObjectTree) -> Message:
        if act("early") and head.metadata.message_type == "train":
            print("acting: confirm early", flush=True)
            meta = head.metadata
            request = ConfirmMessageReceivedRequest(
                node=self._node, run_id=meta.run_id, message_object_id=meta.message_id
            )
            ask(self._client.ConfirmMessageReceived, request)
        return super().fetch(head, tree)

    def send(self, reply: Message) -> None:
        if act("gone") and reply.metadata.message_type == "query":
            print("acting: gone", flush=True)
            gone = Error(ErrorCode.NODE_UNAVAILABLE)
            reply = make_message(metadata=reply.metadata, error=gone)
        half, Hostile.half = Hostile.half, False
        real = self._client.PushObject
        if half:
            stored = PushObjectResponse(stored=True)
            self._client.PushObject = lambda request: stored  # type: ignore[method-assign]
        super().send(reply)
        self._client.PushObject = real  # type: ignore[method-assign]


def offer(self: Site, honest: Any = Site.offer) -> dict[str, Any]:
    """Return the site's offer, with FILE's facts in place of its own."""
    return honest(self) | (act("offer") or {})


def serve(*args: Any, honest: Any = resident.serve, **options: Any) -> None:
    """Run the site's `serve` once FILE lets it join."""
    while act("join") == "hold":
        time.sleep(0.1)
    honest(*args, poll=POLL, **options)


if __name__ == "__main__":
    bridge.train, Site.offer, resident.serve = train, offer, serve
    resident.Fleet = Hostile  # pyright: ignore[reportPrivateImportUsage]
    sys.argv = ["fedda", *sys.argv[2:]]
    cli.main()
