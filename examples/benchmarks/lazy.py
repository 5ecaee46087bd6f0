"""DILS over real processes: what exchanging every 4 steps saves against every step.

`adversarial.py --table lazy` runs this. A collaborator and a target, each a process of its own, the
server another; TLS and node keys. The delay is that of a relay between the sites and the exchange:
Linux answers on all of 127.0.0.0/8, so the exchange listens on one address and is announced at
another, where the relay holds everything back for as long in either direction. Flower's messages
do not pass it, and neither do TLS's checks notice it.
"""

import contextlib
import math
import os
import queue
import socket
import statistics
import threading
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, NamedTuple, Self

import live

from fedda.compare.tables import markdown
from fedda.config import Flat
from fedda.ops.federation import Deployment
from fedda.ops.spawn import LOOPBACK, free_port
from fedda.results.read import load

ANNOUNCED = "127.0.0.2"
CHUNK = 1 << 16


class Delay:
    """Passes bytes between sites and a server on this machine, each after the same time."""

    def __init__(self, server: int, seconds: float) -> None:
        self._server, self._seconds = server, seconds
        self._listener = socket.create_server((ANNOUNCED, server))
        threading.Thread(target=self._accept, daemon=True).start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._listener.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._listener.accept()
                far = socket.create_connection((LOOPBACK, self._server))
                for end in (near, far):
                    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._pass_on(near, far)
                self._pass_on(far, near)

    def _pass_on(self, one: socket.socket, other: socket.socket) -> None:
        """Two threads, so that what follows is read while what came waits."""
        waiting: queue.SimpleQueue[tuple[float, bytes]] = queue.SimpleQueue()

        def read() -> None:
            with contextlib.suppress(OSError):
                while data := one.recv(CHUNK):
                    waiting.put((time.monotonic() + self._seconds, data))
            waiting.put((time.monotonic() + self._seconds, b""))

        def write() -> None:
            with contextlib.suppress(OSError):
                while True:
                    due, data = waiting.get()
                    time.sleep(max(0.0, due - time.monotonic()))
                    if not data:
                        break
                    other.sendall(data)
                other.shutdown(socket.SHUT_WR)

        for work in (read, write):
            threading.Thread(target=work, daemon=True).start()


class Row(NamedTuple):
    """One setting of DILS, and the delay it is run at."""

    p: int
    batch: int
    delay: float  # seconds one way

    @property
    def examples(self) -> int:
        return self.p * self.batch

    @property
    def name(self) -> str:
        return f"p = {self.p}, batches of {self.batch}"

    def flat(self, port: int) -> Flat:
        """Its settings; below 256 examples a gradient leaves only with the explicit switch."""
        found: Flat = {"exchange.p": self.p, "train.batch-size": self.batch}
        if self.examples < 256:
            found |= {"exchange.min-examples": self.examples, "exchange.expose-features": True}
        if self.delay:
            found |= {"exchange.host": ANNOUNCED, "exchange.bind": LOOPBACK, "exchange.port": port}
        return found


def rows(delay: float) -> list[Row]:
    """On loopback, and beside it with a delay, if there is one."""
    settings = [(4, 64), (1, 64), (1, 256)]
    return [Row(p, b, seconds) for seconds in sorted({0.0, delay}) for p, b in settings]


def measure(
    folder: Path, files: Mapping[str, Path], settings: Flat, delay: float, repeats: int
) -> list[dict[str, Any]]:
    """Run all rows on one deployment, in turns -> what each took, sent and reached.

    Args:
        folder: keys, logs and results go here.
        files: the collaborator's, then the target's, by name.
        settings: all rows share these.
        delay: seconds one way.
        repeats: of every row. All come to the same model, so they are about time alone.
    """
    roles = ("source", "target")
    sites = {name: (role, path) for role, (name, path) in zip(roles, files.items(), strict=True)}
    app, port, found = live.stage(folder / "app"), free_port(), []
    live.say("starting a server, a collaborator and a target")
    few = ["--min-examples", str(min(row.examples for row in rows(delay)))]
    options = dict.fromkeys(sites, few)
    deployed = Deployment(folder / "server", sites, client_options=options)
    with deployed as deployment, Delay(port, delay):
        for repeat in range(repeats):
            for number, row in enumerate(rows(delay)):
                name = f"row-{number}-{repeat}"
                flat = {"method": "dils", **settings, **row.flat(port)}
                waves = live.run(deployment, app, name, flat)
                results = load(deployment.directory / "runs" / name)
                told = figures(row, waves, results, settings) | {
                    "date": f"{datetime.now(UTC):%Y-%m-%d}",
                    "load": round(os.getloadavg()[0], 1),
                }
                if repeat:
                    told["rounds_s"] = [*found[number]["rounds_s"], *told["rounds_s"]]
                    found[number] = told
                else:
                    found.append(told)
                live.say(f"{row.name}, delay {row.delay:g} s: {told}")
    for told in found:
        told["round_s"] = round(statistics.median(told["rounds_s"]), 2)
        told["fastest_s"] = min(told["rounds_s"])
    return found


def figures(
    row: Row, measured: live.Measured, results: Mapping[str, Any], settings: Flat
) -> dict[str, Any]:
    """Sums over the rounds that adapt."""
    pretrain, training = int(settings["dils.pretrain"]), results["trainings"]["dils"][0]
    adapting = training["rounds"][pretrain:]
    waves = [w for w in measured.waves if w.kind == "train"][pretrain:]
    sent = [sum(n for k, n in r["bytes"].items() if k.endswith(" gradient")) for r in adapting]
    images = max(site["examples"] for site in results["sites"])
    a_round = math.ceil(images / row.batch / float(settings["train.rounds-per-epoch"]))
    return {
        "p": row.p,
        "batch": row.batch,
        "examples": row.examples,
        "delay_ms": 1000 * row.delay,
        "steps": a_round * len(adapting),
        "source_only": round(training["rounds"][pretrain - 1]["accuracy"], 4),
        "accuracy": round(training["final_accuracy"], 4),
        "accuracy_selected": round(training["selected_accuracy"], 4),
        "rounds_s": [round(w.seconds, 2) for w in waves],
        "gradient_mb": round(sum(sent) / 1e6, 3),
    }


def _share(mine: float, base: float) -> str:
    return "" if mine == base else f"{mine / base:.2f}"


def report(found: list[dict[str, Any]], settings: Flat, heading: str, command: str) -> str:
    """Markdown: how it was run, and a line per row with its share of p = 1's time."""
    base = {(f["batch"], f["delay_ms"]): f for f in found if f["p"] == 1}
    heads = ["", "examples a sum", "one way, ms", "steps", "before", "last", "selected"]
    heads += ["median round, s", "of p = 1", "fastest, s", "of p = 1", "gradients, MB"]
    lines = [
        [
            f"p = {f['p']}, batches of {f['batch']}",
            str(f["examples"]),
            f"{f['delay_ms']:g}",
            str(f["steps"]),
            *(f"{100 * f[k]:.1f}" for k in ("source_only", "accuracy", "accuracy_selected")),
            *(
                text
                for k in ("round_s", "fastest_s")
                for text in (f"{f[k]:.1f}", _share(f[k], base[f["batch"], f["delay_ms"]][k]))
            ),
            f"{f['gradient_mb']:.2f}",
        ]
        for f in found
    ]
    own = ", ".join(f"`{k}={str(v).lower()}`" for k, v in settings.items())
    loads = [f["load"] for f in found if f["load"]]
    rounds = len(found[0]["rounds_s"])
    when = f"- measured: {found[0]['date']} (UTC), {rounds} rounds of every row"
    when += f", while the load average was {min(loads)} to {max(loads)}"
    text = [heading, "", f"    {command}", "", f"- settings: {own}", when, *NOTES]
    return "\n".join([*text, "", *markdown(heads, lines)]) + "\n"


NOTES = (
    "- pen digits, 0 to 30 degrees, seed 0; real processes on loopback with TLS, two shared cores",
    "- `before`, `last`, `selected`: accuracy in % after the pretraining, after the last round, "
    "and of the round with the highest infomax",
    "- `round`: one training wave after the pretraining, Flower's own messages included; the "
    "gradients are the bytes of that kind over all of them, both ways and of both sites",
    "- every row sees the same images as often; batches of 256 make a quarter of the steps, and "
    "the pretraining's too",
    "- rows below 256 examples a sum need `exchange.expose-features=true` and both sites' "
    "`--min-examples`, and give features away",
)
