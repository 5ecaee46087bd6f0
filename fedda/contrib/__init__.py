"""What is built on the rest, which imports none of it: pyproject.toml names its parts.

lab   comparing methods, choosing one by a few labels
"""
