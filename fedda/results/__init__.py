"""Read a run's results and show them in a terminal; a browser needs `fedda.contrib.report`.

read      results.json, and its means and standard deviations over the seeds
remarks   what there is to say of a run besides, in sentences
terminal  the results as tables
story     what the journal of a run has said so far, and how many seconds it still takes; no torch
sofar     the same in the form of results.json, so that the report's sections can draw it
progress  the progress of a run that is going on
snapshot  the sites and runs of a server
"""
