"""Comparing methods, and choosing one for a target by a few labels of its images.

compare, choose, label   the commands
comparison               what `fedda compare` does
comparing                the same in a program: `fedda.compare`
labelled                 which images to label, and what labels say of models
measured                 which of several trained methods they rank first
"""
