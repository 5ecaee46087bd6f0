"""Attacks on what leaves a site, tried on the site's own data.

attacks       the command
attacker      tries them on one run and one site, and writes what they find
prove         the evidence that it writes
gradients     features from the gradients of a discriminator
privacy       the differential privacy that noise on exchanged gradients gives
update        images from the change that training makes to a model, and pictures of them
membership    whether an example was trained on, from a model, or from atoms
shares        how many examples of each class a site has, from the change of a model's head
properties    the same from moments, numbers and coordinates, without any label at the site
subject       the data and the run that are attacked
finding       the rows that all of them return, their words, and the file that holds them

Each says beside its figures what somebody recovers who knows nothing of the run. All of them are
lower bounds: better attacks find more.
"""
