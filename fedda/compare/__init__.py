"""Comparing methods on the same domains, targets and seeds, and what the difference is worth.

variants    what is compared: a method, its preset and the settings that differ
cells       one training each (variant, target, seed), kept and never repeated
workers     where they are trained: in this process, or several at a time
progress    how far they are
statistics  means over seeds, and differences from the baseline pair by pair
tables      CSV and Markdown
about       what stands above the tables
figure      a picture of it
"""

from .cells import Cell, Plan, Score
from .variants import Variant, parse

__all__ = ["Cell", "Plan", "Score", "Variant", "parse"]
