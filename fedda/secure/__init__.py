"""What hides a site's models, gradients and examples from the server, under every method.

hiding       how models reach the server: as they are, summed under masks, or sealed; noise
masks        sums of models or gradients of which nobody sees a single term
seal         models that the server relays and only the target reads
agree        keys on which sites agree behind a server that they do not trust
accountant   epsilon of differential privacy, over all steps that a site has taken
"""
