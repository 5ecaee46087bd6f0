"""A run as one HTML file that needs nothing else: no font, no network, one script of its own.

html.py        elements; escapes all text
style.py       colours and sizes, for light and dark, narrow and wide
script.py      values under the pointer, figures as files
parts.py       tables, figures, legends
axes.py        axes around a drawing that stretches
line.py        curves over the rounds, or over windows of an audit
series.py      results.json, in the form that the sections need
headline.py    the first screen
rounds.py      accuracy, weights, losses, gate
costs.py       bytes and time
conditions.py  sites, troubles, settings
noted.py       the sites' own notes, if they are on this machine
confusion.py   confusion matrix of the target's test
features.py    features of all sites, before and after adaptation
recovered.py   what `fedda audit` recovered, if it was run
evidence.py    a page of its own: what crossed, attacks and what is not protected
live_page.py   a run that goes on: its first screen, and the report of what there is
now.py         that first screen: the state, who is there and who trains, the last troubles
"""

from .page import page, write

__all__ = ["page", "write"]
