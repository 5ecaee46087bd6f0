"""Importing the literature's benchmarks: their authors' files become one folder per site.

importing   the commands
registry    which benchmarks there are
"""
