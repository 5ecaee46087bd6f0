"""The ServerApp with clocks on it: it records the time of each wave of messages, and the memory.

`live.stage` puts this module into the Flower app that a benchmark submits. It runs the same server
program and writes `measured.json` into the run's folder. Nothing here is needed to run fedda.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.serverapp import Grid, ServerApp

from fedda import plugins
from fedda.settings import RunConfig
from server import app as served
from server import checkpoint, training
from strategies.sites.mail import Mail

FILE = "measured.json"

app = ServerApp()


class Meter:
    """Records waves of messages, and the peak of resident memory in each phase of a training."""

    def __init__(self) -> None:
        self.waves: list[dict[str, Any]] = []
        self.phases: list[dict[str, Any]] = []

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Time a phase and record the highest resident memory in it, as the kernel counts it."""
        began, before = time.perf_counter(), memory("VmRSS")
        # Reset the kernel's peak. Where that is refused, the peak is that since the process began.
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5")
        yield
        self.phases.append(
            {
                "phase": name,
                "seconds": time.perf_counter() - began,
                "before": before,
                "peak": memory("VmHWM"),
                "after": memory("VmRSS"),
            }
        )

    def phased(self, name: str, work: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function so that each call is measured as a phase."""

        def wrapped(*args: Any, **more: Any) -> Any:
            with self.phase(name):
                return work(*args, **more)

        return wrapped

    def deliver(self, mail: Mail, requests: Iterable[Message], wait: float) -> Iterator[Message]:
        """Do as `Mail.deliver`, and record how long the wave took and how long its sites worked."""
        requests = list(requests)
        wave: dict[str, Any] = {
            "kind": requests[0].metadata.message_type if requests else "",
            "sites": len(requests),
            "began": time.perf_counter(),
            "waited": 0.0,
            "worked": [],
        }
        replies = DELIVER(mail, requests, wait)
        del requests
        try:
            while True:
                asked = time.perf_counter()
                reply = next(replies, None)
                wave["waited"] += time.perf_counter() - asked
                if reply is None:
                    return
                if reply.has_content() and "metrics" in reply.content:
                    wave["worked"].append(dict(reply.content["metrics"]).get("seconds", 0.0))
                yield reply
                del reply  # as in the original, which holds no reply while it waits for the next
        finally:  # a caller that needs one reply closes this generator instead of exhausting it
            wave["seconds"] = time.perf_counter() - wave["began"]
            self.waves.append(wave)


DELIVER = Mail.deliver


def memory(what: str) -> int:
    """A line of the kernel's report on this process, in bytes; 0 if it has no such line."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith(what)).split()[1])
    return 0


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Run as the real program does, with clocks."""
    meter = Meter()
    Mail.deliver = lambda self, requests, wait: meter.deliver(self, requests, wait)
    for name in ("_initial", "_train_round", "_test", "_finish"):
        wrapped = meter.phased(name.strip("_"), getattr(training.TrainingRounds, name))
        setattr(training.TrainingRounds, name, wrapped)
    checkpoint.write = meter.phased("checkpoint", checkpoint.write)
    start: list[int] = []
    run = training.TrainingRounds.run

    def note_then_run(self: training.TrainingRounds) -> dict[str, Any]:
        plugins.strategy(self.method)  # import it now: its memory is not that of a model
        start.append(memory("VmRSS"))
        return run(self)

    training.TrainingRounds.run = note_then_run
    served.main(grid, context)
    config = RunConfig.parse(context.run_config)
    content = {"start": start[0], "waves": meter.waves, "phases": meter.phases}
    path = Path(config.run.dir) / config.run.name / FILE
    path.write_text(json.dumps(content, indent=1))
