"""Co-MDA's server: DECISION's, which also hands on the model that the target's networks begin from.

Liu et al., IEEE TCSVT 2023, https://doi.org/10.1109/TCSVT.2023.3277135.
"""

from collections.abc import Iterable

from flwr.app import Message

from fedda.contrib.methods.decision.strategy import DECISION
from fedda.strategies.base import Numbers
from fedda.wire.packing import Arrays, Packed


class CoMDA(DECISION):
    """The same messages as DECISION's, and the run's first model beside those of the sources."""

    def collected(self, replies: Iterable[Message]) -> tuple[Arrays, Numbers]:
        """Remember each source's model, and the one from which they began."""
        found = super().collected(replies)
        self.memory.arrays["model"] = self.global_model
        return found

    def tested(self) -> dict[str, Packed]:
        """Return the sources' models; in the adaptation nothing."""
        return {name: packed for name, packed in super().tested().items() if name != "model"}


STRATEGY = CoMDA
