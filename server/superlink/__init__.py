"""Flower's SuperLink: which parts of it sites and operators reach, and how a run uses it.

gateway         one SuperLink behind two listeners
listener        limits on connections: how many, how slow
filter          the paths that sites and operators may call
port_owner      of which account of this machine an operator's connection is
authentication  who calls: the check of a site's signature
site_calls      the calls that a site may make
rejections      sites that were refused, for the console
relay           streams of runs, passed through the public port
waiting         sites that wait for work instead of asking again and again
control         an operator's requests: sites' keys, the state of runs
registered      which site each node is, for the programs of runs
"""
