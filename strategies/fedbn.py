"""FedBN's server: AdaBN's, as what the sources keep stays with them.

Li et al., ICLR 2021, https://arxiv.org/abs/2102.07623.
"""

from .adabn import AdaBN


class FedBN(AdaBN):
    """Per round: 1 model to each source and back, then 1 to the target and back."""


STRATEGY = FedBN
