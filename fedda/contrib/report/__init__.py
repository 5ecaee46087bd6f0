"""A run as a page and a picture.

report    the command, and what is written when a run has ended
page      one HTML file of a run, of one that goes on, and of what attacks found
picture   accuracy and weights as a PNG
"""
