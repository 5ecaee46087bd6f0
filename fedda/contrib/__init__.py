"""What is built on the rest, which imports none of it: pyproject.toml names its parts.

audit    attacks on one's own data, and evidence of what they found
lab      comparing methods, choosing one by a few labels
report   HTML report, pictures of a run, live page
"""
