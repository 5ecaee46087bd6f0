"""Federated unsupervised domain adaptation, on Flower."""

__version__ = "0.1.0"
