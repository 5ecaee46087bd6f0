"""A baton for sites that are threads of one process: only the thread that holds it computes.

So a simulation in one process is as repeatable as if its sites computed one after the other. A
thread hands the baton on only when it waits for a sum or has finished; the first thread in the
order of sites that can go on gets it. Each thread finds torch's random generators as it left them,
as if it were alone.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from fedda.errors import ExchangeError

T = TypeVar("T")

# Guards all that the threads share: batons, and the sessions of `in_process`.
CHANGED = threading.Condition()
_current = threading.local()  # the baton of this thread, and its name


class Turns:
    """One baton, and the threads that take turns with it."""

    def __init__(self, names: Sequence[str]) -> None:
        """Name the threads in their order; the first of them begins."""
        self._order = tuple(names)
        self._ready: dict[str, Callable[[], bool]] = dict.fromkeys(names, lambda: True)
        self._holder: str | None = next(iter(names), None)
        self._random = dict.fromkeys(names, random_state())
        self._stopped = False

    def together(self, works: Mapping[str, Callable[[], T]]) -> dict[str, Future[T]]:
        """Run the work of every name in a thread of its own -> their futures, all done."""
        before = random_state()
        with ThreadPoolExecutor(max(1, len(works)), "participant") as pool:
            futures = {name: pool.submit(self._run, name, work) for name, work in works.items()}
            try:
                wait(futures.values())
            except BaseException:
                self.stop()  # the pool waits for its threads, which wait for one another
                raise
        restore_random(before)
        return futures

    @contextlib.contextmanager
    def turn(self, name: str) -> Iterator[None]:
        """Run a `with` block of this thread under a name; it holds the baton unless it waits."""
        _current.turns, _current.name = self, name
        try:
            with CHANGED:
                self._get(name)
            yield
        finally:
            _current.turns = None
            with CHANGED:
                del self._ready[name]
                if self._holder == name:
                    self._random.pop(name)
                    self._pass_on()

    @property
    def stuck(self) -> bool:
        """Whether no thread can go on; the caller holds CHANGED."""
        return self._holder is None

    def stop(self) -> None:
        """Make every thread that waits fail."""
        with CHANGED:
            self._stopped = True
            CHANGED.notify_all()

    def pause(self, name: str, ready: Callable[[], bool], every: float) -> bool:
        """Hand the baton on, and wait until this thread is ready and gets it back.

        The caller holds CHANGED.

        Args:
            name: of this thread.
            ready: whether the thread can go on.
            every: seconds after which this returns False, without the baton; then call it again.
        """
        if self._holder == name:
            self._random[name] = random_state()
            self._ready[name] = ready
            self._pass_on()
        elif self._holder is None:  # no thread could go on when they were last asked
            self._pass_on()
        return self._get(name, every)

    def _run(self, name: str, work: Callable[[], T]) -> T:
        with self.turn(name):
            return work()

    def _get(self, name: str, seconds: float | None = None) -> bool:
        CHANGED.wait_for(lambda: self._holder == name or self._stopped, seconds)
        if self._stopped:
            raise ExchangeError("The simulation was stopped.")
        if self._holder != name:
            return False
        restore_random(self._random[name])
        return True

    def _pass_on(self) -> None:
        able = (name for name in self._order if name in self._ready and self._ready[name]())
        self._holder = next(able, None)
        CHANGED.notify_all()


def wait_until(ready: Callable[[], bool], every: float, tick: Callable[[], None]) -> None:
    """Wait until `ready`; a thread with a baton hands it on meanwhile. The caller holds CHANGED.

    `tick` looks for sites that are late. Waiting for the baton does not count as late.
    """
    turns: Turns | None = getattr(_current, "turns", None)
    if turns is None:
        while not ready():
            CHANGED.wait(every)
            tick()
    elif not ready():
        while not turns.pause(_current.name, ready, every):
            if turns.stuck:
                tick()


def random_state() -> list[Any]:
    """The states of torch's global generators: the CPU's, then those of CUDA devices in use."""
    import torch

    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *cuda]


def restore_random(state: list[Any]) -> None:
    """Set the generators back; a device that came into use later keeps its state."""
    import torch

    cpu, *cuda = state
    torch.set_rng_state(cpu)
    if cuda:
        torch.cuda.set_rng_state_all(cuda)
