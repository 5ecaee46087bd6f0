"""A baton for participants that are threads of one process: exactly one computes at a time.

A simulation in one process is then as repeatable as one site after the other: the baton goes on
only where a participant waits for a sum, to the first in order who can go on, and everybody finds
torch's random numbers where they were left, as if alone.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, TypeVar

from fedda.errors import ExchangeError

T = TypeVar("T")

# Guards all that participants inside this process share: batons, and the sums of `local`.
CHANGED = threading.Condition()
_mine = threading.local()


class Turns:
    """One baton."""

    def __init__(self, names: Sequence[str]) -> None:
        """Describe who takes turns; the first of them begins."""
        self._order = tuple(names)
        self._ready: dict[str, Callable[[], bool]] = dict.fromkeys(names, _now)
        self._holder: str | None = next(iter(names), None)
        self._random = dict.fromkeys(names, random_state())
        self._stopped = False

    def together(self, works: Mapping[str, Callable[[], T]]) -> dict[str, Future[T]]:
        """Run one piece of work for every name, each in a thread -> their futures, all done."""
        before = random_state()
        with ThreadPoolExecutor(max(1, len(works)), "participant") as pool:
            futures = {name: pool.submit(self._run, name, work) for name, work in works.items()}
            try:
                wait(futures.values())
            except BaseException:
                self.stop()  # the pool waits for its threads, and they for one another
                raise
        restore_random(before)
        return futures

    @contextlib.contextmanager
    def turn(self, name: str) -> Iterator[None]:
        """What this thread does as one of the names; it holds the baton unless it waits."""
        _mine.turns, _mine.name = self, name
        try:
            with CHANGED:
                self._get(name)
            yield
        finally:
            _mine.turns = None
            with CHANGED:
                del self._ready[name]
                if self._holder == name:
                    self._random.pop(name)
                    self._pass_on()

    @property
    def stuck(self) -> bool:
        """Whether nobody can go on; CHANGED is held."""
        return self._holder is None

    def stop(self) -> None:
        """Have everybody who waits fail."""
        with CHANGED:
            self._stopped = True
            CHANGED.notify_all()

    def pause(self, name: str, ready: Callable[[], bool], every: float) -> bool:
        """Give the baton on until it comes back, which it does when ready; CHANGED is held.

        Returns False, without the baton, after so many seconds; then call it again.
        """
        if self._holder == name:
            self._random[name] = random_state()
            self._ready[name] = ready
            self._pass_on()
        elif self._holder is None:  # nobody could go on when it was last asked
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
    """Wait, CHANGED held, until `ready`; a thread that has a turn gives the baton on meanwhile.

    `tick` looks for those who are late. Nobody is who only waits for his turn.
    """
    turns: Turns | None = getattr(_mine, "turns", None)
    if turns is None:
        while not ready():
            CHANGED.wait(every)
            tick()
    elif not ready():
        while not turns.pause(_mine.name, ready, every):
            if turns.stuck:
                tick()


def random_state() -> list[Any]:
    """Where torch's global generators are."""
    import torch

    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return [torch.get_rng_state(), *cuda]


def restore_random(state: list[Any]) -> None:
    """Set them back; a device that came into use only later keeps its own."""
    import torch

    cpu, *cuda = state
    torch.set_rng_state(cpu)
    if cuda:
        torch.cuda.set_rng_state_all(cuda)


def _now() -> bool:
    return True
