"""Gray of more than 8 bits by `input.window`, and DICOM files, of which only pixels are read."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest
import torch
from PIL import Image
from pydicom.pixels.decoders.base import get_decoder
from pydicom.uid import JPEGLosslessSV1, RLELossless

import fedda
from clients.site.memory import Site
from fedda import data, models
from fedda.config import ModelConfig
from fedda.config.inputs import Inputs
from fedda.data.cache import Cache
from fedda.errors import ConfigError, DataError
from fedda.settings import RunConfig, Task
from tests.command_lines import call
from tests.dicom_files import CANARY, dicom

SCAN = np.array([[0, 100, 300, 500], [900, 1000, 4095, 65535]], np.uint16)


def only(folder: Path, window: str = "") -> list[list[int]]:
    """The pixels of the only image of a target's folder."""
    return data.load_target(folder, reading=data.Reading(window=window)).x[0, 0].tolist()


def naive(values: np.ndarray, low: int, high: int) -> list[list[int]]:
    """255 parts of a window, rounded half up, by integers alone."""
    span = high - low
    kept = [[min(max(int(v) - low, 0), span) for v in row] for row in values]
    return [[(2 * 255 * v + span) // (2 * span) for v in row] for row in kept]


@pytest.mark.parametrize("ending", ["png", "tif"])
def test_16_bits_are_brought_to_a_window_and_not_clipped_at_255(
    tmp_path: Path, ending: str
) -> None:
    Image.fromarray(SCAN).save(tmp_path / f"1.{ending}")
    # By hand: 300 of 100 to 900 is a quarter, 63.75 of 255; all above 900 is white.
    assert only(tmp_path, "100,900") == [[0, 0, 64, 128], [255, 255, 255, 255]]
    for low, high in ((0, 4095), (0, 65535), (250, 1000)):
        assert only(tmp_path, f"{low},{high}") == naive(SCAN, low, high)
    assert only(tmp_path) == naive(SCAN, 0, 65535)  # without one: all values of 16 bits
    assert len(np.unique(only(tmp_path, "0,1100"))) > 5  # Pillow's own conversion gives 3


def test_images_of_8_bits_and_colour_stay_as_they_are(tmp_path: Path) -> None:
    eight = np.arange(8, dtype=np.uint8).reshape(2, 4)
    Image.fromarray(eight).save(tmp_path / "1.png")
    assert only(tmp_path, "0,4095") == eight.tolist()


@pytest.mark.parametrize(
    "values", [np.array([[-1000, 0, 40, 3000]], np.int32), np.array([[-1, 0, 0.5, 1]], np.float32)]
)
def test_gray_without_a_scale_needs_a_window(tmp_path: Path, values: np.ndarray) -> None:
    site = tmp_path / "site"
    for i in range(16):
        (site / "train" / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(values).save(site / "train" / "ab"[i % 2] / f"{i}.tif")
    low, high = int(values.min()), int(values.max())
    found = data.load_target(site, reading=data.Reading(window=f"{low},{high}")).x
    expected = np.floor(255 * (values - low) / (high - low) + 0.5).astype(int)
    assert found[0, 0].tolist() == expected.tolist()
    with pytest.raises(DataError, match=r"signed or of 32 bits.*input\.window=low,high"):
        data.load_target(site)
    # A site does not know the run's window when it starts: the files are tried all the same.
    described = data.verify(site, "source")
    assert described.needs_window and "need input.window" in described.gray
    (site / "train" / "a" / "0.tif").write_bytes(b"II*\0")
    with pytest.raises(DataError, match=r"a/0\.tif cannot be read"):
        data.verify(site, "source")
    with pytest.raises(DataError, match=r"input\.window=low,high"):
        described.check_fit(("a", "b"), "")
    described.check_fit(("a", "b"), "0,1")


def test_values_that_are_not_finite_are_refused(tmp_path: Path) -> None:
    Image.fromarray(np.array([[0, np.nan]], np.float32)).save(tmp_path / "1.tif")
    with pytest.raises(DataError, match=r"1\.tif has values that are not finite"):
        only(tmp_path, "0,1")


@pytest.mark.parametrize("text", ["5", "1,1", "2,1", "a,b", "1,2,3", "nan,1", "0,inf", "1, 2" * 40])
def test_what_is_no_window_is_refused_in_words(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^input\.window is .*, which cannot be: (give|low)"):
        RunConfig.parse({"input.window": text})
    with pytest.raises(ConfigError):
        Task.parse(task().flat() | {"window": text})
    with pytest.raises(ConfigError, match="The window is"):
        data.Reading().within(text)


def task(window: str = "") -> Task:
    config = RunConfig.parse({"input.window": window, "model.name": "mlp", "model.hidden": "4"})
    return config.task("fedavg", 0, (1, 4, 4), ["a", "b"], 3)


def test_the_window_reaches_sites_models_and_caches(tmp_path: Path) -> None:
    assert task("-160,240").window == Task.parse(task("-160,240").flat()).window == "-160,240"
    site, square = tmp_path / "site", np.vstack([SCAN, SCAN // 2])
    for i in range(4):
        (site / "train" / "ab"[i % 2]).mkdir(parents=True, exist_ok=True)
        Image.fromarray(square).save(site / "train" / "ab"[i % 2] / f"{i}.png")
    node = {"role": "source", "name": "s", "data": str(site)}
    here = Site(node)
    for window in ("", "0,4095", "100,900"):
        low, high = map(int, (window or "0,65535").split(","))
        assert here.learnt_from(task(window)).x[0, 0].tolist() == naive(square, low, high)
        reading = data.Reading(window=window)
        cached = data.load_source(site, cache=Cache(tmp_path / "cache", True), reading=reading)
        assert cached.x[0, 0].tolist() == naive(square, low, high)
    config = ModelConfig(name="mlp", hidden="4")
    for window in ("", "100,900"):
        about: Any = {"config": config, "inputs": Inputs((1, 2, 4), window=window), "classes": "ab"}
        models.save(tmp_path / "m", models.blank(config, (1, 2, 4), 2), **about)
        assert models.describe(tmp_path / "m").inputs.window == window


def test_a_frozen_network_computes_anew_for_another_window(tmp_path: Path) -> None:
    pytest.importorskip("efficientnet_lite_pytorch")
    kept = {"model.name": "efficientnet-lite0", "model.train": "bottleneck", "input.size": 32}
    kept |= {"model.weights": "package"}
    kept |= {"model.bottleneck": 4, "input.channels": 3}
    deep = np.random.default_rng(0).integers(0, 4096, (2, 32, 32)).astype(np.uint16)
    for i, image in enumerate(deep):
        (tmp_path / "ab"[i]).mkdir()
        Image.fromarray(image).save(tmp_path / "ab"[i] / "1.png")
    site = Site({"role": "source", "name": "s", "data": str(tmp_path)})
    found = []
    for window in ("0,4095", "0,65535"):
        config = RunConfig.parse(kept | {"input.window": window})
        made = config.task("fedavg", 0, (3, 32, 32), ["a", "b"], 2)
        digest = models.digest(made.model, made.dims)
        found.append(site.learnt_from(made.model_copy(update={"frozen": digest})).x)
    assert not torch.equal(*found)


def test_a_file_is_read_by_its_rescaling_and_its_own_window(tmp_path: Path) -> None:
    stored = np.array([[0, 1000, 1024, 4095]], np.uint16)
    about: dict[str, Any] = {"BitsStored": 12, "RescaleSlope": 1, "RescaleIntercept": -1024}
    dicom(tmp_path / "a" / "1.dcm", stored, **about)
    units = stored.astype(int) - 1024
    assert only(tmp_path / "a") == naive(units, -1024, 3071)  # all that 12 bits can hold
    assert only(tmp_path / "a", "-160,240") == naive(units, -160, 240)
    # PS3.3, C.11.2.1.2: of centre 40 and width 401, -161 and below is black, 240 and above white.
    dicom(tmp_path / "b" / "1.dcm", stored, **about, WindowCenter=[40.5, 9], WindowWidth=[401, 9])
    assert only(tmp_path / "b") == naive(units, -160, 240)
    assert only(tmp_path / "b", "-1024,3071") == naive(units, -1024, 3071)


def test_monochrome1_is_inverted_signed_values_and_compressed_files_are_read(
    tmp_path: Path,
) -> None:
    eight = np.array([[0, 10, 200, 255]], np.uint8)
    dicom(tmp_path / "a" / "1.dcm", eight, PhotometricInterpretation="MONOCHROME1")
    assert only(tmp_path / "a") == [[255, 245, 55, 0]]
    signed = np.array([[-2048, 0, 2047, 5]], np.int16)
    dicom(tmp_path / "b" / "1.DCM", signed, BitsStored=12, compress=RLELossless)
    assert only(tmp_path / "b") == naive(signed, -2048, 2047)
    colour = np.random.default_rng(0).integers(0, 256, (2, 4, 3), np.uint8)
    dicom(tmp_path / "c" / "1.dcm", colour)
    assert data.load_target(tmp_path / "c").x[0].tolist() == colour.transpose(2, 0, 1).tolist()
    assert data.describe(tmp_path / "c", "target").shape == (3, 2, 4)


def test_check_says_how_gray_is_read(tmp_path: Path) -> None:
    stored = np.array([[0, 1000]], np.uint16)
    for i in range(2):
        dicom(tmp_path / "own" / f"{i}.dcm", stored, WindowCenter=40 + i, WindowWidth=400)
        dicom(tmp_path / "none" / f"{i}.dcm", stored, BitsStored=12)
    own = data.describe(tmp_path / "own", "target").gray
    assert own.startswith("of DICOM each file's own window (2 different ones, such as -160 to 239)")
    assert data.describe(tmp_path / "none", "target").gray == (
        "of DICOM all values that its bits can hold (0 to 4095) becomes 0 to 255"
    )
    words = ("data", "check", tmp_path / "own", "--role", "target", "--min-images", 2)
    done = call(*words, "--window=-160,240", columns=200)
    assert "-160 to 240 (the window) become 0 to 255" in done.output


def test_what_cannot_be_read_is_refused_in_a_sentence_without_the_header(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gray = np.array([[1, 2]], np.uint16)
    # A decoder that is not installed: the bytes need not be such a JPEG.
    lossless = dicom(tmp_path / "d" / "1.dcm", gray, compress=RLELossless)
    meta = pydicom.dcmread(lossless)
    meta.file_meta.TransferSyntaxUID = JPEGLosslessSV1
    meta.save_as(lossless)
    dicom(tmp_path / "a" / "1.dcm", np.zeros((5, 2, 2), np.uint16), NumberOfFrames=5)
    palette = {"PhotometricInterpretation": "PALETTE COLOR"}
    dicom(tmp_path / "b" / "1.dcm", np.zeros((2, 2), np.uint8), **palette)
    whole = dicom(tmp_path / "c" / "1.dcm", gray).read_bytes()
    (tmp_path / "c" / "1.dcm").write_bytes(whole[:-2])
    (tmp_path / "e").mkdir()
    (tmp_path / "e" / "1.dcm").write_bytes(CANARY.encode() * 40)
    dicom(tmp_path / "f" / "1.dcm", gray, RescaleSlope="0")
    for name, text in {
        "a": "holds 5 frames, but one image is needed",
        "b": "has neither gray nor RGB pixels",
        "c": "cannot be read as a DICOM file: replace or remove it",
        "d": r"is compressed as JPEG Lossless.*pip install python-gdcm",
        "e": "cannot be read as a DICOM file",
        "f": "cannot be read as a DICOM file",
    }.items():
        if name == "d" and get_decoder(JPEGLosslessSV1).is_available:
            continue
        with pytest.raises(DataError, match=rf"1\.dcm {text}") as error:
            data.verify(tmp_path / name, "target")
        assert CANARY not in str(error.value) and error.value.__cause__ is None
    skipped = data.Reading(skip_broken=True)
    dicom(tmp_path / "e" / "2.dcm", gray)
    assert data.describe(tmp_path / "e", "target", skipped).train == 1

    def without(module: str) -> None:
        raise ImportError(module)

    monkeypatch.setattr("fedda.data.optional.import_module", without)
    with pytest.raises(DataError, match=r"\.dcm is a DICOM file.*pip install 'fedda\[dicom\]'"):
        data.load_target(tmp_path / "e")


@pytest.mark.nightly("fedda/contrib/readers")
def test_a_run_over_dicom_files_keeps_nothing_of_their_headers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """The run's model takes predictions by the same window, in the library as on the command."""
    caplog.set_level("DEBUG")
    draw = np.random.default_rng(0)
    for site in ("north", "south", "town"):
        for i in range(20):
            gray = draw.normal(1000 + 800 * (i % 2), 60, (8, 8)).astype(np.uint16)
            label = ("train", "test")[i > 15], ("ill", "well")[i % 2]
            dicom(tmp_path / "sites" / site / "/".join(label) / f"{i}.dcm", gray, BitsStored=12)
    few = {"rounds": 1, "model_name": "mlp", "model_hidden": "8", "input_window": "900,1900"}
    done = fedda.simulate(
        tmp_path / "sites", "town", "fedavg", dir=tmp_path / "runs" / "one", train_lr=0.1, **few
    )
    town, table = tmp_path / "sites" / "town", tmp_path / "runs" / "town.csv"
    call("predict", tmp_path / "runs" / "one", town, "--out", table)
    given = done.model.predict(town)
    assert given == [line.split(",")[1] for line in table.read_text().splitlines()[1:]]
    x = np.stack([np.asarray(image) for image in data.load_target(town).x])
    assert x.max() < 130  # without the window the same files are dark: 1800 of 4095
    window = models.describe(tmp_path / "runs" / "one" / "model.safetensors").inputs.window
    out = data.load_target(town, reading=data.Reading(window=window)).x
    assert int(out.max()) == 255 and int(out.min()) == 0
    said = capfd.readouterr()
    assert CANARY not in said.out + said.err + caplog.text
    files = [file for file in (tmp_path / "runs").rglob("*") if file.is_file()]
    assert len(files) > 5 and not [f for f in files if CANARY.encode() in f.read_bytes()]
    config = json.loads((tmp_path / "runs" / "one" / "config.json").read_text())
    assert config["input.window"] == "900,1900"


def test_dicom_is_known_by_its_content_and_nifti_is_named(tmp_path: Path) -> None:
    for name in ("IM0001", "1.2.840.5", "scan.dcm"):
        (tmp_path / "site" / "ill").mkdir(parents=True, exist_ok=True)
        dicom(tmp_path / "site" / "ill" / name, SCAN)
    (tmp_path / "site" / "ill" / "notes").write_text("no image")
    found = data.describe(tmp_path / "site", "source")
    assert found.train == 3 and "notes" in " ".join(found.warnings)
    assert len(data.load_source(tmp_path / "site")) == 3
    brain = tmp_path / "brains" / "ill"
    brain.mkdir(parents=True)
    (brain / "s0.nii.gz").write_bytes(b"0")
    for role in ("source", "target"):
        with pytest.raises(DataError, match=r"s0\.nii\.gz is NIfTI, a volume of many images"):
            data.describe(brain.parent, role)
