"""What the clients of several methods are made of, or that of one which is too much for its file.

exchanging            the base of clients that sum gradients with other sites in mid-round
shared_discriminator  a site's copy of a discriminator that all sites move together
side_by_side          several models at a target, with one optimizer
disentangling         a site's part in FADA's model III
dictionary            a site's part of FedDaDiL's dictionary of atoms
"""
