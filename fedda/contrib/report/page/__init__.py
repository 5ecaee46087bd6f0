"""A run as one HTML file that needs nothing else: no font, no network, one script of its own.

html.py        elements, which escape all text; tables, figures, legends
document.py    what surrounds the content: looks, script, what the browser may do
line.py        curves over the rounds, or over windows of an audit
series.py      results.json, in the form that the sections need
headline.py    the first screen
rounds.py      accuracy, weights, losses, gate
costs.py       bytes and time
conditions.py  sites, who learned from whom, troubles, settings
noted.py       the sites' own notes, if they are on this machine
inside.py      what these show: confusion matrix, features before and after adaptation
evidence.py    what `fedda audit` recovered, if it was run; and a page of its own about it
live_page.py   a run that goes on: its first screen, and the report of what there is
"""

from .page import page, write

__all__ = ["page", "write"]
