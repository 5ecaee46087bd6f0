"""A run's lanes: streams of gRPC between its program and each site, for all that they exchange.

invitation   what a site is told of a lane, in one ordinary message of Flower
parcels      messages of Flower as frames, and back; a request that is open
posts        notes as frames, and back: what is small and often, gradients and their sums
lane_end     one end of a lane, over as many connections as it takes
dialer       the end at a site, which connects
lane_host    the end at the run's program, where sites come
"""
