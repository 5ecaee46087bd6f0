"""One loop for DILS, with a loss that moves the target's encoder alone (see `loop`)."""

import copy
from collections.abc import Iterator

import torch
from loop import Loop
from torch.nn import functional as F

from fedda.adversarial import discriminators as D
from fedda.errors import ConfigError
from fedda.train import batches, round_images, seed_for


class Couple(Loop):
    """DILS: a source whose encoder stays, and a target whose encoder learns to look like it."""

    def rounds(self) -> Iterator[int]:
        o, seed, (source,) = self.options, self.seed, self.sources
        moving, staying = (D.HALVES[o.loss, side] for side in ("target", "source"))
        if staying.mapping or moving.critic:
            raise ConfigError(f"The loop of DILS cannot do dils.loss={o.loss}; use adda or grl.")
        for t in range(1, o.pretrain + 1):
            self.pretrain(source, t)
            yield t
        fixed = copy.deepcopy(self.model).eval()
        DI = D.Discriminator(self.model.head.in_features, o.discriminator.hidden, seed)
        moves = D.make_optimizer(DI, o.discriminator)
        betas = (o.beta1, o.beta2)
        encoder = torch.optim.Adam(self.model.encoder.parameters(), lr=o.lr, betas=betas)
        count = self.steps * o.epochs
        for t in range(o.pretrain + 1, self.config.rounds + 1) if self.aligned else ():
            torch.manual_seed(seed_for(seed, self.target, t))
            first = (t - o.pretrain - 1) * count
            feeds = [self.feed(name, first, count) for name in (source, self.target)]
            self.model.train()
            for of_source, of_target in zip(*feeds, strict=True):
                with torch.no_grad():
                    z_S = fixed.features(self.x(source, of_source))
                z_T = self.model.features(self.x(self.target, of_target))
                encoder.zero_grad()
                D.mapping_loss(moving, DI, z_T).backward()
                encoder.step()
                halves = [D.discriminator_loss(staying, DI, z_S)]
                halves.append(D.discriminator_loss(moving, DI, z_T))
                moves.zero_grad()
                (torch.stack(halves).sum() / 2).backward()
                moves.step()
            yield t

    def pretrain(self, source: str, t: int) -> None:
        """A round of the source's training on its labels."""
        torch.manual_seed(seed_for(self.seed, source, t))
        optimizer, train = self.paced(t), self.config.train
        blocks, seed = self.sites[source].blocks.blocks, seed_for(self.seed, source)
        shares = round_images(blocks, t, train.rounds_per_epoch, seed)
        self.model.train()
        for indices in batches(shares, train.batch_size):
            loss = F.cross_entropy(self.model(self.x(source, indices)), self.y(source, indices))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
