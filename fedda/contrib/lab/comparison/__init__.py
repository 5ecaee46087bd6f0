"""Comparing methods on the same domains, targets and seeds, with statistics of the differences.

variants    what is compared: a method, its preset and the settings that differ
cells       the trainings: each has a variant, a target and a seed
plan        all cells; each is trained once and its results are kept
workers     training the cells, in this process or in several
headway     the display of their progress
statistics  means over seeds, and differences from the baseline pair by pair
tables      CSV and Markdown
about       the text above the tables: data, settings, versions, dates
figure      a picture of the results
"""

from .cells import Cell
from .plan import Plan, Score
from .variants import Variant, parse

__all__ = ["Cell", "Plan", "Score", "Variant", "parse"]
