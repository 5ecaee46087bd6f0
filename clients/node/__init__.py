"""The site's process: how it reaches a server, answers its requests and waits out failures.

resident   the process that keeps a site in memory and answers requests
lanes      a stream to each run that invites the site
fleet      the server's Fleet API, as a node uses it
failures   what can go wrong between a node and its server
patience   trying again, with growing pauses
ending     leaving between two rounds, when asked to
interrupt  ending work that nobody waits for any more
"""
