"""What a site has with every method: data and models in memory, and files on its disk.

memory                 its data, its models and their optimizers, and what stays from round to round
blocks                 how it divides its images, so that no server can single one out
tested                 what a test tells the server
request                what it is asked, read from a message
state                  the files that outlive a restart
notes                  its notes about a training, which stay at the site
before_after           a picture of these notes
dictionary             its part of a dictionary of atoms
exchanging             the base of clients that sum gradients with other sites in mid-round
shared_discriminator   its copy of a discriminator that all sites move together
"""
