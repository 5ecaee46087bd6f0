"""DECISION's server: SHOT's, which reports the weights that the target has learnt.

Ahmed et al., CVPR 2021, https://arxiv.org/abs/2104.01845.
"""

from fedda.strategies.shot import SHOT
from fedda.strategies.sites.replies import Reply


class DECISION(SHOT):
    """The same messages as SHOT's, and a number per source."""

    def shares(self, reply: Reply) -> dict[str, float]:
        """Return the learnt weights; those of SHOT if no source has trained a model."""
        return {
            name: float(reply.numbers.get(f"weight/{name}", share))
            for name, share in self.equal().items()
        }


STRATEGY = DECISION
