"""A run's lane: one stream of gRPC between its program and each site, for all that they exchange.

invitation   what a site is told of a lane, in one ordinary message of Flower
parcels      messages of Flower as frames, and back
lane_end     one end of a lane, over as many connections as it takes
"""
