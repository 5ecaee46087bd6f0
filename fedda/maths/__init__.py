"""Formulas of arrays alone, without sites or messages: means, distances, transport, projections.

coarse              values in fewer bytes: bfloat16, and whole numbers with a scale per row
average             means of models, also such as lying sites cannot move far
focus               the quality of each team's consensus, for KD3A's consensus focus
atom_heads          linear heads fitted on labelled points, for FedDaDiL
gap                 how tightly features cluster, for FADA's gap statistic
fourier             multi-kernel MMD by random Fourier features
optimal_transport   plans and barycenters of labelled points
ocs                 which domain to adapt from: FRUDA's bound, from errors and distances
embed               features as points on paper
schedule            numbers that follow from the round alone: KD3A's gate
class_shares        how frequent a target's classes are, by what models predict there
"""
