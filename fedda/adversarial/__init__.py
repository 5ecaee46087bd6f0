"""Training against a discriminator of which only gradients are shared.

discriminators   the discriminators and their losses, each in the halves that two sites compute
lazy             how a discriminator's copies stay equal while sums are exchanged every p steps
critic_estimate  what gradients say of a critic's mean
travelling       the state of a discriminator that travels with the round's model
"""
