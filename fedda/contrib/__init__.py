"""What is built on the rest, which imports none of it: pyproject.toml names its parts.

audit       attacks on one's own data, and evidence of what they found
benchmarks  importers of published sets
lab         beginning a study, comparing methods, choosing one by a few labels
methods     methods that plug in as those of other packages do
readers     DICOM, HDF5, data sets of Hugging Face
report      HTML report, pictures of a run, live page
"""
