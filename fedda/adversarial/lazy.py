"""Lazy synchronisation of a discriminator's copies, as in DILS.

Gan et al., FRUDA, https://arxiv.org/abs/2112.13381, algorithm 1, lines 5 and 8 to 11, and eq. 27
(numbers as in the manuscript of 2020).

    p       int    steps of a window; the window's sum is exchanged in the last of them
    g       (P,)   gradient of this site's half of the loss in one step, flat
    G       (P,)   buffer: the sum of g over the window so far
    g_sync  (P,)   the gradient that moves every copy: the sum of all members' G / (halves p)
    n       int    steps so far, over all rounds

Every site applies the latest g_sync in every step, also between exchanges, and never its own g. So
copies that start equal stay equal. With overlap, a sum travels while the next window is computed,
and is used from the last step of that window on: one window later, but no site waits for it.

A gradient over few examples reveals their features, and so does one over many if all but a few
have the same features. So a window over too few examples is never sent, nor one that `spread`
refuses. G / p is clipped in length and may carry noise; after that it is multiplied by the share
that this site's half has in its side of the loss, 1/K for one of K sources. So the same length is
left to each half, and clipping does not let the sources outweigh the target.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedda.errors import ExchangeError, NotFiniteError

Flat = NDArray[np.float32]


class LazySum(Protocol):
    """The connection of a site to the exchange (`fedda.exchange.Stream`)."""

    def send(self, group: str, gradient: Flat, examples: int) -> None:
        """Send a gradient; its sum is received later."""
        ...

    def receive(self, group: str) -> Flat:
        """Wait for the sum of the gradient sent last."""
        ...


def syncs(done: int, steps: int, p: int) -> int:
    """How many of the `steps` that follow the first `done` are sync-up steps, n % p == 0 -> int."""
    return (done + steps) // p - done // p


def protect(
    g: Tensor, clip: float = 0.0, noise: float = 0.0, draws: torch.Generator | None = None
) -> Tensor:
    """Abadi et al., 2016: g / max(1, |g| / clip) + N(0, (noise clip)^2) -> (P,).

    Args:
        g: (P,) the gradient that is to leave the site.
        clip: its greatest length; 0: any length.
        noise: standard deviation per value, in units of `clip`.
        draws: makes the noise repeatable; None: fresh noise, seeded by the operating system. It
            must be None for a gradient that leaves: whoever knows the seed can subtract the noise,
            and only 32 bits of torch's seeds count, few enough to try them all.
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
    """One site's part in one group: buffers gradients, and gives the one to move its copy by.

    Args:
        stream: to the exchange; it may be replaced by another between two steps.
        group: name of the group.
        p: steps per window, at least 1.
        halves: how many halves of a loss the members' sum has: 2, a source's and a target's.
        overlap: let a sum travel while the next window is computed.
        clip: greatest length of a window's mean gradient; 0: any length.
        noise: on that gradient, in units of `clip`.
        share: what the clipped gradient is multiplied by before it is sent.
        min_examples: that a window must be over, counted over its p steps.
        spread: called with a window's features (N, d) before its gradient is sent; it may refuse.
        draws: of the noise, for tests; by default the noise cannot be repeated (`protect`).

    Attributes:
        heard: called with what the other members' part of each sum is (P,), when it has come.
    """

    def __init__(
        self,
        stream: LazySum,
        group: str,
        p: int,
        *,
        halves: int = 2,
        overlap: bool = False,
        clip: float = 0.0,
        noise: float = 0.0,
        share: float = 1.0,
        min_examples: int = 1,
        spread: Callable[[Tensor], object] = len,
        draws: torch.Generator | None = None,
    ) -> None:
        assert p >= 1 and halves >= 1
        assert clip or not noise, "noise is measured in units of clip"
        self.stream = stream
        self.group = group
        self.heard: Callable[[Tensor], None] | None = None
        self.p = p
        self._halves = halves
        self._overlap = overlap
        self._clip = clip
        self._noise = noise
        self._share = share
        self._sums, self._clipped = 0, 0
        self._min_examples = min_examples
        self._spread = spread
        self._draws = draws
        self._n = 0
        self._buffer: Tensor | None = None
        self._z: Tensor | None = None  # the features that the buffer is computed from
        self._g_sync: Tensor | None = None
        self._arrived: Tensor | None = None  # g_sync that only the next sync-up step may use
        self._travelling = False
        self._own: Flat | None = None  # what this site has added to the sum that travels
        self._like = torch.empty(0)  # has the device and type of the last buffer

    @property
    def steps(self) -> int:
        """N, the steps so far."""
        return self._n

    @property
    def clipped(self) -> float | None:
        """Share of this object's sums so far whose gradient was longer than `clip`.

        None if there were no sums, or if there is noise: this share would tell of the length that
        the noise hides.
        """
        return None if self._noise or not self._sums else self._clipped / self._sums

    def step(self, g: Tensor, z: Tensor) -> Tensor | None:
        """Lines 5 and 8 to 11: buffer this step's gradient -> g_sync (P,), None before the first.

        Args:
            g: (P,), on any device.
            z: (N, d) the features of the examples that g is over.

        Raises:
            ExchangeError: the window is over too few examples, or the exchange ended.
            WireError: a few examples alone have most of the features' variance.
            NotFiniteError: the window's gradient is not finite, and carries no noise.
        """
        self.put(g, z)
        return self.take()

    def put(self, g: Tensor, z: Tensor) -> None:
        """Begin a step: buffer its gradient, and in a sync-up step send the buffer.

        A site of several groups begins its step in each before it takes any sum, so that it waits
        once for all and not once per group. Arguments and errors are those of `step`.
        """
        g, z = g.detach(), z.detach()
        self._buffer = g.clone() if self._buffer is None else self._buffer + g
        self._z = z if self._z is None else torch.cat([self._z, z])
        self._n += 1
        if self._n % self.p == 0:
            self._send(self._buffer, self._z)
            self._buffer = self._z = None

    def take(self) -> Tensor | None:
        """End the step, without overlap by waiting for the sum -> g_sync (P,) as from `step`."""
        if self._travelling and not self._overlap:
            self._g_sync = self._part(self.stream.receive(self.group)).to(self._like)
            self._travelling = False
        return self._g_sync

    def _send(self, G: Tensor, z: Tensor) -> None:
        if len(z) < self._min_examples:
            raise ExchangeError(
                f"A sum of gradients over {len(z)} examples would have left this site, but "
                f"it takes {self._min_examples}: fewer reveal their features. Raise exchange.p or "
                "train.batch-size."
            )
        mean = G / self.p
        length = float(mean.norm())
        if not math.isfinite(length):
            if not self._noise:
                raise NotFiniteError(
                    "The discriminator's gradient is not finite; lower the learning rates."
                )
            mean = torch.zeros_like(mean)  # a refusal would tell of one example, through any noise
        self._spread(z)
        self._sums += 1
        self._clipped += bool(self._clip) and length > self._clip
        mean = self._share * protect(mean, self._clip, self._noise, self._draws)
        frame = mean.to("cpu", torch.float32).numpy()
        self._like = G
        if self._overlap:
            self.settle()
            if self._arrived is not None:
                self._g_sync, self._arrived = self._arrived.to(G), None
        self.stream.send(self.group, frame, len(z))
        self._own = frame if self.heard else None
        self._travelling = True

    def settle(self) -> None:
        """Wait for the sum that still travels; the next sync-up step will use it."""
        if self._travelling:
            self._arrived = self._part(self.stream.receive(self.group))
            self._travelling = False

    def _part(self, total: Flat) -> Tensor:
        if self.heard and self._own is not None:
            self.heard(torch.from_numpy(total - self._own))
        return torch.tensor(total) / self._halves

    @property
    def latest(self) -> Tensor | None:
        """The g_sync of the last sum, from which another site goes on.

        With overlap no step here has used it yet.
        """
        return self._g_sync if self._arrived is None else self._arrived

    def begin(self, g_sync: Tensor) -> None:
        """Use an earlier g_sync until the first sum of this object arrives."""
        self._g_sync = g_sync

    def state(self) -> dict[str, Tensor]:
        """All that the next round needs, as tensors on the CPU; first waits for a sum on its way.

        Training that stops here and goes on elsewhere from this state gives the same result.
        """
        self.settle()
        tensors = {"buffer": self._buffer, "features": self._z, "sync": self._g_sync}
        tensors |= {"steps": torch.tensor(self._n), "arrived": self._arrived}
        return {name: t.cpu().clone() for name, t in tensors.items() if t is not None}

    def restore(self, state: Mapping[str, Tensor], device: Any = "cpu") -> None:
        """Go on from an earlier `state`."""
        self._n = int(state["steps"])
        tensors = {name: t.to(device, copy=True) for name, t in state.items()}
        self._buffer, self._z = tensors.get("buffer"), tensors.get("features")
        self._g_sync = tensors.get("sync")
        self._arrived = tensors.get("arrived")
        self._travelling = False
