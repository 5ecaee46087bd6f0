"""Choosing a method for a target by a few labels of its images.

labelled   which images to label, and what labels say of models
measured   which of several trained methods they rank first
"""
