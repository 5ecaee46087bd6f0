"""The base of clients that sum gradients with other sites in mid-round."""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from torch import Tensor

from fedda import exchange
from fedda.adversarial.lazy import LazySync
from fedda.errors import ConfigError, WireError
from fedda.exchange import Stream
from fedda.exchange.masked import GradientPoint, MaskedGroup
from fedda.train import joined, seed_for, windows

from ..base import Client
from ..site.request import Exchange, Numbers
from .shared_discriminator import Copy


class Summing(Client):
    """A client whose part sums gradients."""

    _seeds: Mapping[str, Mapping[bytes, bool]]  # of this site's masks, by masked group

    @property
    def exchange(self) -> Exchange:
        """Where and how gradients are summed in this round.

        Raises:
            WireError: the request has no invitation.
        """
        if self.request.exchange is None:
            raise WireError("The request came without an invitation to the exchange of gradients.")
        return self.request.exchange

    @contextmanager
    def stream(self) -> Iterator[Stream]:
        """Connect this site to the round's exchange of gradients.

        Raises:
            WireError: the request has no invitation, or one to too many groups.
            SecureError: gradients are to be masked, and the members did not agree on keys.
            ExchangeError: the exchange cannot be reached, refused this site, or ended early.
        """
        invitation = self.exchange.invitation
        # Gradients of many discriminators over one window reveal more about it than those of one.
        asked = len(self.exchange.groups)
        most = 1 if self.side == "source" else max(1, self.task.sites - 1)
        if asked > most:
            raise WireError(
                f"The request asks this {self.side} for gradients in {asked} groups, but it may "
                f"take part in {most} at most."
            )
        trail = self.site.trail
        trail.joins(self.request)
        stream = exchange.connect(invitation, self.site.config.server)
        try:
            if self.exchange.lazy.masked:
                self._seeds = self.site.summed.meet(self.request, stream)
            yield stream
        finally:
            stream.close()
            trail.summed(self.request, stream)

    def lazy(
        self, stream: Stream, group: str, halves: int = 2, share: float = 1.0, p: int = 0
    ) -> LazySync:
        """Make this site's part in one group; the stricter of the run's and the site's limits hold.

        Args:
            stream: to the exchange.
            group: name of the group.
            halves: how many halves of a loss the members' sum has.
            share: of this site's half in its side of the loss: 1/K for one of K sources.
            p: steps per window; 0: the run's.

        Raises:
            ConfigError: this site has fewer images than a gradient must be over.
        """
        config, least = self.exchange.lazy, self._least
        summing: Stream | MaskedGroup = stream
        if config.masked:
            seeds = self._seeds[group]
            summing = MaskedGroup(
                stream, seeds, GradientPoint(config.clip, config.noise, len(seeds) + 1)
            )
        if (images := sum(map(len, self.site.blocks.groups))) < least:
            raise ConfigError(
                f"This site has {images} images, but its gradients must be computed from "
                f"{least} or more; add images, or lower exchange.min-examples and --min-examples."
            )
        return LazySync(
            summing,
            group,
            p or config.p,
            halves=halves,
            overlap=config.overlap,
            clip=min(config.clip, self.site.clip),
            noise=max(config.noise, self.site.noise),
            share=share,
            min_examples=least,
            # Through noise a refusal would tell of single images.
            spread=len if self.site.noise else partial(self.spread, summed=True),
        )

    def windows(self, first: int, count: int) -> Iterator[Tensor]:
        """Mini-batches of indices for steps first + 1 to first + count of a discriminator.

        A site takes the requested steps, however few images it has. A gradient that leaves it is
        over whole groups of its images, as many different ones as it states (`train.windows`).

        Raises:
            ConfigError: this site has too few images for so many steps.
        """
        config = self.exchange.lazy
        groups = joined(self.site.blocks.groups, self._least)
        if sum(map(len, groups)) < (least := self.site.least_batch) * config.p:
            raise ConfigError(
                f"This site has {len(self.data)} images, but each of the {config.p} steps of a "
                f"window (exchange.p) needs {least}; lower exchange.p, or add images."
            )
        seed, size = seed_for(*self.site.chance(self.task)), self.task.train.batch_size
        yield from windows(groups, size, config.p, seed, first, count)

    def clipped(self, copies: Iterable[Copy]) -> Numbers:
        """Share of this round's sums in which exchange.clip shortened this site's gradient."""
        shares = [share for copy in copies if (share := copy.sync.clipped) is not None]
        return {"clipped": sum(shares) / len(shares)} if shares else {}

    @property
    def _least(self) -> int:
        """Examples that a gradient must be over: the stricter of the run's limit and the site's."""
        return max(self.exchange.lazy.min_examples, self.site.min_examples)
