"""f-WDGRL's server: f-DANN's, with critic-steps sums of gradients per training step.

Shen et al., AAAI 2018, https://arxiv.org/abs/1707.01217; federated by the exchange.
"""

from .fdann import FDANN


class FWDGRL(FDANN):
    """Per round: what f-DANN sends, and p times critic-steps as many gradients."""

    def steps_of_discriminators(self, steps: int) -> int:
        """Return `critic-steps` whole windows per step of the encoders."""
        return steps * max(1, self.options.critic_steps * self.setup.summing.p)


STRATEGY = FWDGRL
