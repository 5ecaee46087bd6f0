"""Read a run's results and show them in a terminal; `fedda.page` shows them in a browser.

read       results.json, and its means and standard deviations over the seeds
terminal   the results as tables
picture    the results as a plot
progress   the progress of a run that is going on
"""
