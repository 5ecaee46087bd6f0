"""Lazy synchronisation of a discriminator's copies, as in DILS.

Gan et al., FRUDA, https://arxiv.org/abs/2112.13381, algorithm 1, lines 5 and 8 to 11, and eq. 27
(numbers as in the manuscript of 2020).

    p       int    steps of a window; its sum is exchanged in the last of them
    g       (P,)   gradient of this site's half of the loss in one step, flat
    G       (P,)   buffer: the sum of g over the window so far
    g_sync  (P,)   what every copy is moved by: the sum of all members' G / (halves p)
    n       int    steps so far, over all rounds

Everybody applies the latest g_sync in every step, also between exchanges and never its own g, so
copies that start alike stay alike. With overlap a sum travels while the next window is computed and
is used from that window's last step on: one window later, and nobody waits for it.

A gradient over few examples gives their features away. So a window over too few is never sent, and
what is sent, G / p, is bounded in length and may be blurred.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedda.errors import ExchangeError, NotFiniteError

Flat = NDArray[np.float32]


class Summing(Protocol):
    """A participant's end of the exchange."""

    def swap(self, group: str, gradient: Flat, examples: int) -> Flat:
        """Send, and wait for the sum over all members."""
        ...

    def send(self, group: str, gradient: Flat, examples: int) -> None:
        """Send; the sum is received later."""
        ...

    def receive(self, group: str) -> Flat:
        """Wait for the sum of what was sent last."""
        ...


def syncs(done: int, steps: int, p: int) -> int:
    """How many of the `steps` that follow the first `done` are sync-up steps, n % p == 0 -> int."""
    return (done + steps) // p - done // p


def protect(
    g: Tensor, clip: float = 0.0, noise: float = 0.0, draws: torch.Generator | None = None
) -> Tensor:
    """Abadi et al., 2016: g / max(1, |g| / clip) + N(0, (noise clip)^2) -> (P,).

    Args:
        g: (P,) what is to leave.
        clip: longest it may be; 0: any length.
        noise: standard deviation per value, in units of `clip`.
        draws: the noise, to repeat it; None: fresh from the operating system. What leaves must have
            None: who knows the seed subtracts the noise, and of torch's seeds 32 bits count, few
            enough to try them all.
    """
    if not clip:
        return g
    g = g * (clip / g.norm().clamp(min=clip))
    if noise:
        if draws is None:
            blur = torch.from_numpy(np.random.default_rng().standard_normal(g.shape, np.float32))
        else:
            blur = torch.randn(g.shape, generator=draws)
        g = g + noise * clip * blur.to(g)
    return g


class LazySync:
    """One site's part in one group: buffers gradients and says what to move its copy by.

    Args:
        stream: of the exchange; another may take its place between two steps.
        group: name of the group.
        p: steps per window, at least 1.
        halves: losses that the members' sum is made of: 2, a source's and a target's.
        overlap: let a sum travel while the next window is computed.
        clip: longest a window's mean gradient may be; 0: any length.
        noise: of what is sent, in units of `clip`.
        least: examples that a window needs, counted over its p steps.
        draws: of the noise, for tests; by default nobody can have them (`protect`).
    """

    def __init__(
        self,
        stream: Summing,
        group: str,
        p: int,
        *,
        halves: int = 2,
        overlap: bool = False,
        clip: float = 0.0,
        noise: float = 0.0,
        least: int = 1,
        draws: torch.Generator | None = None,
    ) -> None:
        assert p >= 1 and halves >= 1
        assert clip or not noise, "noise is measured in units of clip"
        self.stream = stream
        self.group = group
        self.p = p
        self._halves = halves
        self._overlap = overlap
        self._clip = clip
        self._noise = noise
        self._least = least
        self._draws = draws
        self._n = 0
        self._examples = 0
        self._buffer: Tensor | None = None
        self._g_sync: Tensor | None = None
        self._arrived: Tensor | None = None  # g_sync that only the next sync-up step may use
        self._travelling = False

    @property
    def steps(self) -> int:
        """N, the steps so far."""
        return self._n

    def step(self, g: Tensor, examples: int) -> Tensor | None:
        """Lines 5 and 8 to 11: take in this step's gradient -> g_sync (P,), None before the first.

        Args:
            g: (P,), on any device.
            examples: how many g is over.

        Raises:
            ExchangeError: the window is over too few examples, or the exchange ended.
            NotFiniteError: the window's gradient is not finite.
        """
        g = g.detach()
        self._buffer = g.clone() if self._buffer is None else self._buffer + g
        self._examples += examples
        self._n += 1
        if self._n % self.p == 0:
            self._exchange(self._buffer)
            self._buffer, self._examples = None, 0
        return self._g_sync

    def _exchange(self, G: Tensor) -> None:
        if self._examples < self._least:
            raise ExchangeError(
                f"A sum of gradients over {self._examples} examples would have left this site, but "
                f"it takes {self._least}: fewer give features away. Raise exchange.p or "
                "train.batch-size."
            )
        mean = G / self.p
        if not mean.norm().isfinite():
            raise NotFiniteError(
                "The discriminator's gradient is not finite; lower the learning rates."
            )
        mean = protect(mean, self._clip, self._noise, self._draws)
        frame = mean.to("cpu", torch.float32).numpy()
        if not self._overlap:
            self._g_sync = self._share(self.stream.swap(self.group, frame, self._examples)).to(G)
            return
        self.settle()
        if self._arrived is not None:
            self._g_sync, self._arrived = self._arrived.to(G), None
        self.stream.send(self.group, frame, self._examples)
        self._travelling = True

    def settle(self) -> None:
        """Wait for the sum that still travels; the next sync-up step will use it."""
        if self._travelling:
            self._arrived = self._share(self.stream.receive(self.group))
            self._travelling = False

    def _share(self, total: Flat) -> Tensor:
        return torch.tensor(total) / self._halves

    @property
    def latest(self) -> Tensor | None:
        """The freshest g_sync, which overlap does not use yet; for who starts anew from it."""
        return self._g_sync if self._arrived is None else self._arrived

    def begin(self, g_sync: Tensor) -> None:
        """Move by an earlier training's g_sync until there is one of this."""
        self._g_sync = g_sync

    def state(self) -> dict[str, Tensor]:
        """All that the next round needs, as tensors on the CPU; first waits for what travels.

        Training that is stopped here and restored elsewhere goes on as if it had not been.
        """
        self.settle()
        kept = {"buffer": self._buffer, "sync": self._g_sync, "arrived": self._arrived}
        counts = torch.tensor([self._n, self._examples])
        return {"counts": counts} | {k: t.cpu().clone() for k, t in kept.items() if t is not None}

    def restore(self, state: Mapping[str, Tensor], device: Any = "cpu") -> None:
        """Go on from what `state` gave."""
        self._n, self._examples = (int(n) for n in state["counts"])
        found = {k: t.to(device, copy=True) for k, t in state.items()}
        self._buffer = found.get("buffer")
        self._g_sync = found.get("sync")
        self._arrived = found.get("arrived")
        self._travelling = False
