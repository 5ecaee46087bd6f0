"""A run while it goes on: what its journal has said so far, as numbers and as a page.

story.py     the journal's events, gathered; no torch, as the server reads it
sofar.py     the same in the form of results.json, so that the report's sections can draw it
snapshot.py  the sites and runs of a server
asking.py    asks a server for them
now.py       the first screen: the state, who is there and who trains, the last troubles
live_page.py the live page: the first screen, and the report of what there is
maker.py     the process in which a server makes it
"""
