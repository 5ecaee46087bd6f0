"""A run as one HTML file that needs nothing else: no script, no font, no network.

html.py        elements; all text is escaped there
style.py       colours and sizes, for light and dark, narrow and wide
parts.py       tables, figures, legends
axes.py        around a drawing that stretches
line.py        curves over the rounds
bars.py        stacked bars over the rounds
series.py      results.json, as the sections ask for it
headline.py    the first screen
rounds.py      accuracy, weights, losses, gate
costs.py       bytes and time
conditions.py  sites, troubles, settings
noted.py       what sites noted for themselves, where it can be read
confusion.py   of the target's test
features.py    of all sites, before and after
recovered.py   what gradients would give away, if it was tried
windows.py     its curves
"""

from .page import page, write

__all__ = ["page", "write"]
