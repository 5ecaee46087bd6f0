"""Federated unsupervised domain adaptation, on Flower."""

from fedda import halves

__version__ = "0.1.0"

halves.name_as_in_wheel()
