"""Data of other forms than those of the core.

dicom      images in DICOM files
hdf5       arrays in HDF5 files
hub        data sets of Hugging Face, and their command in fetching
"""
