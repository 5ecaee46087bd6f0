"""Spectrograms of keywords recorded by several microphones: like Mic2Mic's, but not its files.

    usb/yes/0001.npy   a spectrogram (H, W) of finite numbers, or
    usb/yes/0001.wav   16-bit PCM, which becomes a log-mel spectrogram (mels, frames);
                       usb/train/yes/... and usb/test/yes/... where there is a split

    x       (samples,)       the recording, mean of its channels, in [-1, 1), cut or padded
    P       (F, T)           power |STFT|^2 over Hann windows of 25 ms every 10 ms
    M       (mels, F)        triangles, equally wide on the mel scale m(f) = 2595 log10(1 + f / 700)
    image   (mels, T)        log(M P + 1e-6), low notes at the top

Each microphone's lowest training value becomes 0 and its highest 255, as a site can do that alone.
Test values beyond that range are clipped. FRUDA, too, scales spectrograms to [0, 1].
"""

import wave
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedda.contrib.benchmarks.common import (
    Arrays,
    ByClass,
    ImportRequest,
    Lazy,
    Options,
    Sites,
    count,
)
from fedda.contrib.benchmarks.splits import complete, shuffled, split_rows
from fedda.data.image_folder import listing
from fedda.data.naming import listed
from fedda.errors import ConfigError, DataError, reason

WINDOW, HOP = 0.025, 0.010  # seconds
MELS = 40
SECONDS = 1.0
FLOOR = 1e-6
_SOUNDS = {".npy", ".wav"}


class SpectrogramReader:
    """Reads the files of one import; all its recordings must have one sampling rate."""

    def __init__(self, options: Options) -> None:
        self.seconds = options.seconds or SECONDS
        self.mels = options.mels or MELS
        self._first: tuple[int, Path] | None = None

    def stack(self, files: Sequence[Path], step: Callable[[], None]) -> np.ndarray:
        """Read files, which must give one shape -> float32 (N, H, W)."""
        images: list[np.ndarray] = []
        for file in files:
            images.append(_npy(file) if file.suffix.lower() == ".npy" else self._wav(file))
            if images[-1].shape != images[0].shape:
                raise DataError(
                    f"{file} is a spectrogram of {images[-1].shape} and {files[0]} of "
                    f"{images[0].shape}: one shape is needed"
                )
            step()
        return np.stack(images)

    def _wav(self, file: Path) -> np.ndarray:
        try:
            with wave.open(str(file)) as sound:
                width, channels = sound.getsampwidth(), sound.getnchannels()
                rate, data = sound.getframerate(), sound.readframes(sound.getnframes())
        except (OSError, EOFError, wave.Error) as error:
            raise DataError(
                f"{file} cannot be read ({reason(error)}): PCM .wav files are needed"
            ) from error
        if width != 2 or len(data) % (2 * channels) or not data:
            raise DataError(
                f"{file} has {8 * width} bits per sample and {len(data)} bytes of them: 16-bit PCM "
                f"is needed"
            )
        # Another rate would give the same shape, as windows are in seconds, but other frequencies.
        self._first = self._first or (rate, file)
        if rate != self._first[0]:
            raise DataError(
                f"{file} has {rate} samples a second and {self._first[1]} has {self._first[0]}: "
                f"one rate for all microphones is needed; resample the recordings"
            )
        samples = np.frombuffer(data, "<i2").reshape(-1, channels).mean(axis=1) / 2**15
        x = torch.zeros(round(rate * self.seconds), dtype=torch.float64)
        recorded = torch.from_numpy(samples[: len(x)])
        x[: len(recorded)] = recorded
        return log_mel(x, rate, self.mels).float().numpy()


def read(request: ImportRequest) -> Sites:
    """Every folder is a microphone, every folder in it a keyword."""
    microphones = listing(request.source).folders
    if not microphones:
        raise request.wrong(f"{request.source} holds no folders of microphones")
    files = {m.name: _halves(request, m) for m in microphones}
    names = sorted({name for halves in files.values() for half in halves for name in half})
    for microphone, halves in files.items():
        if missing := [name for name in names if not halves[0].get(name)]:
            raise DataError(
                f"{request.source / microphone} has no training recording of {listed(missing)}, "
                f"which another microphone has: all need the same keywords"
            )
    reader = SpectrogramReader(request.options)
    return {
        m: Lazy(partial(_microphone, request, reader, m, halves, names), sum(map(count, halves)))
        for m, halves in files.items()
    }


def _halves(request: ImportRequest, folder: Path) -> list[ByClass]:
    """A microphone's files by keyword: of train/ and of test/, or all if it has no such folders."""
    inner = {f.name: f for f in listing(folder).folders}
    split = set(inner) == {"train", "test"}
    if split and request.options.given & {"test_share", "transductive"}:
        raise ConfigError(
            f"{folder} has train/ and test/: leave out --test-share and --transductive"
        )
    halves: list[ByClass] = []
    others: list[Path] = []
    for half in (inner["train"], inner["test"]) if split else (folder,):
        by_class: ByClass = {}
        for keyword in listing(half).folders:
            images, folders, strays = listing(keyword)
            files = [f for f in strays if f.suffix.lower() in _SOUNDS]
            others += [*images, *folders, *(f for f in strays if f.suffix.lower() not in _SOUNDS)]
            if not files:
                raise request.wrong(f"{keyword} holds no .npy or .wav files")
            by_class[keyword.name] = files
        if not by_class:
            raise request.wrong(f"{half} holds no folders of keywords")
        halves.append(by_class)
    request.passed_over(folder, others, _SOUNDS)
    return halves


def _microphone(
    request: ImportRequest,
    reader: SpectrogramReader,
    name: str,
    halves: list[ByClass],
    classes: list[str],
    step: Callable[[], None],
) -> Arrays:
    read_half = []
    for by_class in halves:
        files = [(file, classes.index(c)) for c, each in by_class.items() for file in each]
        x = reader.stack([file for file, _ in files], step)
        read_half.append((x, np.array([c for _, c in files], np.int64)))
    if len(read_half) == 1:
        (x, y) = read_half[0]
        train, test = split_rows(request, name, y)
        pairs = ((x[train], y[train]), (x[test], y[test]))
    else:
        rows = shuffled(request, name, *(len(y) for _, y in read_half))
        pairs = tuple((x[r], y[r]) for (x, y), r in zip(read_half, rows, strict=True))
    (x_train, y_train), (x_test, y_test) = pairs
    if x_train.shape[1:] != x_test.shape[1:]:
        raise DataError(
            f"{request.source / name}: spectrograms are {x_train.shape[1:]} in train/ and "
            f"{x_test.shape[1:]} in test/: one shape is needed"
        )
    low, high = float(x_train.min()), float(x_train.max())
    arrays = {"x_train": to_bytes(x_train, low, high), "y_train": y_train}
    arrays |= {"x_test": to_bytes(x_test, low, high), "y_test": y_test}
    return complete(arrays, str(request.source / name), tuple(classes))


def to_bytes(x: np.ndarray, low: float, high: float) -> np.ndarray:
    """Scale `low` to 0 and `high` to 255, and clip values beyond them -> uint8."""
    scaled = (x - low) / max(high - low, 1e-12)
    return np.round(scaled.clip(0, 1) * 255).astype(np.uint8)


def _npy(file: Path) -> np.ndarray:
    try:
        image = np.load(file, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise DataError(
            f"{file} cannot be read ({reason(error)}): write it with numpy.save"
        ) from error
    good = isinstance(image, np.ndarray) and image.dtype.kind in "fiu"
    if good and image.ndim == 3 and image.shape[2] == 1:
        image = image[..., 0]
    if not good or image.ndim != 2 or not image.size or not np.isfinite(image).all():
        raise DataError(f"{file} is no spectrogram: finite numbers (H, W) are needed")
    return image.astype(np.float32)


def log_mel(x: Tensor, rate: int, mels: int) -> Tensor:
    """log(M P + 1e-6) -> (mels, frames)."""
    window, hop = round(rate * WINDOW), round(rate * HOP)
    n_fft = 1 << (window - 1).bit_length()
    frames = torch.stft(
        x, n_fft, hop, window, torch.hann_window(window, dtype=x.dtype), return_complex=True
    )
    return (mel_bank(mels, n_fft, rate).to(x.dtype) @ frames.abs().square() + FLOOR).log()


def mel_bank(mels: int, n_fft: int, rate: int) -> Tensor:
    """Triangles that rise from one corner to the next and fall to the one after -> (mels, F)."""
    top = 2595 * np.log10(1 + rate / 2 / 700)
    corners = 700 * (10 ** (torch.linspace(0, top, mels + 2, dtype=torch.float64) / 2595) - 1)
    f = torch.linspace(0, rate / 2, n_fft // 2 + 1, dtype=torch.float64)  # (F,)
    left, middle, right = (corners[i : i + mels, None] for i in range(3))  # (mels, 1) each
    return torch.minimum((f - left) / (middle - left), (right - f) / (right - middle)).clamp(min=0)
