"""Files of DICOM that tests write, each of a patient whose name is nobody's business."""

from pathlib import Path
from typing import Any

import numpy as np
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import UID, ExplicitVRLittleEndian

CANARY = "CANARY"


def dicom(path: Path, pixels: np.ndarray, compress: str = "", **more: Any) -> Path:
    """Write a file of a patient whose name is nobody's business."""
    found = Dataset()
    found.file_meta = FileMetaDataset()
    found.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    found.file_meta.MediaStorageSOPClassUID = UID("1.2.840.10008.5.1.4.1.1.2")
    found.file_meta.MediaStorageSOPInstanceUID = UID("1.2.3")
    found.PatientName, found.PatientID = f"{CANARY}^NAME", f"{CANARY}-ID"
    found.StudyDescription, found.InstitutionName = f"{CANARY} study", f"{CANARY} hospital"
    colour = pixels.shape[-1] == 3
    found.Rows, found.Columns = pixels.shape[:2] if colour else pixels.shape[-2:]
    found.SamplesPerPixel = 3 if colour else 1
    found.PhotometricInterpretation = "RGB" if colour else "MONOCHROME2"
    if colour:
        found.PlanarConfiguration = 0
    found.BitsAllocated = found.BitsStored = 8 * pixels.dtype.itemsize
    found.PixelRepresentation = int(pixels.dtype.kind == "i")
    for name, value in more.items():
        setattr(found, name, value)
    found.HighBit = more.get("HighBit", found.BitsStored - 1)
    found.PixelData = pixels.tobytes()
    found["PixelData"].VR = "OW" if found.BitsAllocated > 8 else "OB"
    if compress:
        found.compress(compress, generate_instance_uid=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    found.save_as(path, enforce_file_format=True)
    return path
