"""What a server tells those who watch it: reads only, changes nothing.

status   the sites and runs that the SuperLink knows
live     the live page, its events and the metrics, at the operator's port
metrics  what Prometheus asks for
console  what the server's console says
"""
