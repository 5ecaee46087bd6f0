"""f-WDGRL's server: f-DANN's, with critic-steps / p sums of gradients per training step.

Shen et al., AAAI 2018, https://arxiv.org/abs/1707.01217; federated by the exchange.
"""

from .fdann import FDANN


class FWDGRL(FDANN):
    """Per round: what f-DANN sends, and critic-steps times as many gradients."""

    def steps_of_discriminators(self, steps: int) -> int:
        return steps * self.options.critic_steps


STRATEGY = FWDGRL
