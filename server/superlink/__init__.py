"""Flower's SuperLink: which parts of it sites and operators reach, and how a run uses it.

gateway     one SuperLink behind two listeners
filter      the requests that sites may make
control     an operator's requests: sites' keys, the state of runs
lean_grid   a run's messages, in little memory
"""
