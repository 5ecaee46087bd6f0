"""What a site has, whatever the method: data and models in memory, and what it keeps on its disk.

memory                 its data, its models and their optimizers, and what stays from round to round
request                what it is asked, read from a message
state                  what outlives a restart
notes                  what it notes of a training, for itself
before_after           a picture of these notes
dictionary             its part of a dictionary of atoms
exchanging             what clients share that sum gradients with other sites in mid-round
shared_discriminator   its copy of a discriminator that all sites move together
"""
