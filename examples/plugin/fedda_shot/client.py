"""SHOT-IM's clients: FedAvg's sources, and a target that moves its encoder under a fixed head."""

from fedda.clients.base import Client
from fedda.clients.fedavg import Source
from fedda.clients.site.request import Numbers

from .algorithm import information_loss

__all__ = ["Source", "Target"]


class Target(Client):
    """The target: it has no labels, and needs no source in the phase `adapt`."""

    def adapt(self) -> Numbers:
        """Minimise L_IM over the encoder's parameters, batch by batch."""
        optimizer = self.optimizer(self.model.encoder.parameters())
        total, steps = 0.0, 0
        for indices in self.batches():
            loss = information_loss(self.model(self.inputs(indices)), self.options.diversity)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            total, steps = total + loss.item(), steps + 1
        return {"loss": total / max(steps, 1), "steps": steps}
