"""What a site has with every method: data and models in memory, files on its disk, its boundary.

memory           its data, and the policy that it obeys
workspace        a training's model, optimizers, and what stays from round to round; a test's model
trainer          what a method trains with: data, model, batches, optimizers, states
blocks           how it divides its images, so that no server can single one out
reading          progress of its long work before it can train
frozen           the frozen part of a pretrained network, run once per image
state            the files that outlive a restart
notes            its notes about a training, which stay at the site
before_after     a picture of these notes
request          what it is asked, read from a message
boundary         what may come in and what may leave; a model as it is, under masks or sealed
crafted          refuses models that were made to read images
sealed           models that only the target reads
summed           its part in sums under masks
remembered       to which groups of sites it has added, over all runs
identity         who it is to the other sites, whatever the server says
noised           DP-SGD, where the run or the site's policy asks for noise
output_privacy   what a test tells the server
last_step        the last step of a training, at the target alone
teacher          a teacher that a target already has
site_statistics  what it tells of its data before any training
"""
