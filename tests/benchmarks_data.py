"""Tiny made-up copies of the literature's benchmarks, laid out as their authors publish them."""

import gzip
import math
import struct
import wave
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.io import savemat
from scipy.sparse import csc_matrix

N_TRAIN, N_TEST = 40, 20  # of every digit domain
KEYWORDS = ("go", "no", "yes")
OFFICE10 = (
    *("back_pack", "bike", "calculator", "headphones", "keyboard"),
    *("laptop_computer", "monitor", "mouse", "mug", "projector"),
)
CALTECH10 = (
    *("backpack", "touring-bike", "calculator", "head-phones", "computer-keyboard"),
    *("laptop-101", "computer-monitor", "computer-mouse", "coffee-mug", "video-projector"),
)
PACS = ("dog", "elephant", "giraffe", "guitar", "horse", "house", "person")
CLEF = (
    *("aeroplane", "bike", "bird", "boat", "bottle", "bus"),
    *("car", "dog", "horse", "monitor", "motorbike", "people"),
)
GOODS = ("books", "dvd", "electronics", "kitchen")


def picture(path: Path, value: int) -> Path:
    """Write a grayscale picture; its value tells it apart from others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("L", (8, 8), value % 256).save(path)
    return path


def class_folders(root: Path, classes: Sequence[str], each: int = 5) -> Path:
    for c, name in enumerate(classes):
        for i in range(each):
            picture(root / name / f"{i:04}.png", 20 * c + i)
    return root


def office31(root: Path) -> Path:
    for domain in ("amazon", "dslr", "webcam"):
        class_folders(root / "domain_adaptation_images" / domain / "images", ("bike", "mug"))
    return root


def office_home(root: Path) -> Path:
    for domain in ("Art", "Clipart", "Product", "Real World"):
        class_folders(root / domain, ("Alarm_Clock", "TV"))
    return root


def adaptiope(root: Path) -> Path:
    for domain in ("product_images", "real_life", "synthetic"):
        class_folders(root / domain, ("alarm clock", "rc car"))
    return root


def office_caltech(root: Path) -> Path:
    for domain in ("amazon", "dslr", "webcam"):
        class_folders(root / domain, OFFICE10, 2)
    class_folders(root / "Caltech10", CALTECH10, 2)
    return root


def write_list(path: Path, lines: Iterable[tuple[str, int]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(f"{file} {label}\n" for file, label in lines))
    return path


def listed(
    domain: str, classes: Sequence[str], numbers: Iterable[int], first: int = 0
) -> list[tuple[str, int]]:
    """The images of a domain with these numbers, and their labels."""
    named = [*enumerate(classes, first)]
    return [(f"{domain}/{n}/{i:04}.png", c) for c, n in named for i in numbers]


def domainnet(root: Path) -> Path:
    classes = ("aircraft_carrier", "zebra")
    for domain in ("clipart", "infograph", "painting", "quickdraw", "real", "sketch"):
        class_folders(root / domain, classes, 4)
        for split, numbers in (("train", (0, 1, 2)), ("test", (3,))):
            write_list(root / "splits" / f"{domain}_{split}.txt", listed(domain, classes, numbers))
    return root


def pacs(root: Path) -> Path:
    for domain in ("art_painting", "cartoon", "photo", "sketch"):
        class_folders(root / "kfold" / domain, PACS, 4)
        for split, numbers in (("train", (0, 1, 2)), ("crossval", (3,)), ("test", range(4))):
            lines = listed(domain, PACS, numbers, 1)
            write_list(root / "pacs_label" / f"{domain}_{split}_kfold.txt", lines)
    return root


def imageclef(root: Path) -> Path:
    """Class folders: with other names in b (Bing), two per class in c (Caltech), none in i, p."""
    for domain in "bcip":
        lines = []
        for c, name in enumerate(CLEF):
            for i in range(3):
                inner = {"b": f"{c:03}.{name}-101/", "c": f"{c}.{'ab'[i % 2]}-{name}/"}
                name_ = "0001" if domain == "c" and i < 2 else f"{c}_{i}"
                file = f"{domain}/{inner.get(domain, '')}{name_}.JPEG"
                picture(root / file, 20 * c + i)
                lines.append((file, c))
        write_list(root / "list" / f"{domain}List.txt", lines)
    return root


def digit_labels(n: int) -> np.ndarray:
    return np.arange(n) % 10


def digit_images(n: int, side: int, channels: int, seed: int) -> np.ndarray:
    """uint8 (N, H, W, C): random, and the first pixel of image i is i."""
    x = np.random.default_rng(seed).integers(0, 256, (n, side, side, channels), np.uint8)
    x[:, 0, 0, :] = np.arange(n)[:, None]
    return x


def digit5(root: Path) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    eye = np.eye(10)
    one_hot = {
        f"label_{s}": eye[digit_labels(n)] for s, n in (("train", N_TRAIN), ("test", N_TEST))
    }
    mnist = {s: digit_images(n, 32, 1, 0)[..., 0] for s, n in (("32", N_TRAIN), ("test", N_TEST))}
    small = digit_images(N_TRAIN, 28, 1, 1), digit_images(N_TEST, 28, 1, 2)
    arrays = {"train_32": mnist["32"], "test_32": mnist["test"]}
    arrays |= {"train_28": small[0], "test_28": small[1]}
    savemat(root / "mnist_data.mat", arrays | one_hot)
    mnistm = {"train": digit_images(N_TRAIN, 28, 3, 3), "test": digit_images(N_TEST, 28, 3, 4)}
    savemat(root / "mnistm_with_label.mat", mnistm | one_hot)
    for s, n in (("train", N_TRAIN), ("test", N_TEST)):
        x, y = digit_images(n, 32, 3, 5).transpose(1, 2, 3, 0), digit_labels(n)[:, None]
        svhn = np.where(y == 0, 10, y).astype(np.uint8)
        savemat(root / f"svhn_{s}_32x32.mat", {"X": x, "y": svhn})
        savemat(root / f"synth_{s}_32x32.mat", {"X": x, "y": y.astype(np.uint8)})
    cells = np.empty((2, 2), dtype=object)
    for row, n in enumerate((N_TRAIN, N_TEST)):
        cells[row, 0] = digit_images(n, 28, 1, 6).transpose(0, 3, 1, 2) / 255
        cells[row, 1] = digit_labels(n)[:, None].astype(np.uint8)
    savemat(root / "usps_28x28.mat", {"dataset": cells})
    return root


def syn_number(root: Path) -> Path:
    """Write digit5 with the older form of the synthetic digits in place of the newer one."""
    digit5(root)
    arrays = {}
    for s, n in (("train", N_TRAIN), ("test", N_TEST)):
        (root / f"synth_{s}_32x32.mat").unlink()
        arrays |= {f"{s}_data": digit_images(n, 32, 3, 5), f"{s}_label": digit_labels(n)[:, None]}
    savemat(root / "syn_number.mat", arrays)
    return root


def features(root: Path, names: Mapping[str, str], classes: int, key: str = "fts") -> Path:
    """Write four examples of every class, one class after the other; column 0 is the class."""
    root.mkdir(parents=True, exist_ok=True)
    y = np.repeat(np.arange(classes), 4)
    for seed, file in enumerate(names.values()):
        x = np.random.default_rng(seed).random((len(y), 6))
        x[:, 0] = y
        savemat(root / file, {key: x, "labels": y[:, None] + 1})
    return root


def surf(root: Path) -> Path:
    names = {d: f"{d}_SURF_L10.mat" for d in ("amazon", "Caltech10", "dslr", "webcam")}
    features(root, names, 10)
    savemat(root / "amazon_SURF_L10_imgs.mat", {"imgNames": np.zeros(3)})
    return root


def decaf(root: Path) -> Path:
    names = {d: f"{d}_decaf.mat" for d in ("amazon", "caltech", "dslr", "webcam")}
    return features(root / "features", names, 10, "feas").parent


def counts(n: int, d: int, seed: int) -> np.ndarray:
    """Draw word counts of reviews, most of them 0; column 0 numbers the reviews of a domain."""
    x = np.random.default_rng(seed).integers(-6, 4, (n, d)).clip(0)
    x[:, 0] = np.arange(1, n + 1)
    x[:, -1] = 1
    return x


def review_labels(n: int) -> np.ndarray:
    return np.where(np.arange(n) % 2, 1, -1)


def svmlight(root: Path, first: int = 0) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    for seed, domain in enumerate(GOODS):
        for split, n in (("train", 12), ("test", 6)):
            lines = [
                " ".join([str(y), *(f"{c + first}:{v}" for c, v in enumerate(row) if v)])
                for row, y in zip(counts(n, 7, seed), review_labels(n), strict=True)
            ]
            (root / f"{domain}_{split}.svmlight").write_text("\n".join(lines) + "\n")
    return root


def svmlight_from_1(root: Path) -> Path:
    return svmlight(root, 1)


def coordinates(root: Path) -> Path:
    """Write amazon.npz of MDAN and KD3A: transposed, 12 reviews per domain."""
    root.mkdir(parents=True, exist_ok=True)
    x = np.concatenate([counts(12, 7, seed) for seed in range(4)])
    reviews, terms = x.nonzero()
    pieces = {"xx_data": x[reviews, terms], "xx_row": terms, "xx_col": reviews}
    pieces |= {"xx_shape": np.array(x.shape[::-1]), "offset": np.arange(5)[None] * 12}
    np.savez(root / "amazon.npz", allow_pickle=False, yy=review_labels(48)[:, None], **pieces)
    return root


def msda(root: Path) -> Path:
    root.mkdir(parents=True, exist_ok=True)
    x = np.concatenate([counts(12, 7, seed) for seed in range(4)])
    whole = {"xx": csc_matrix(x.T.astype(float)), "yy": review_labels(48)[None]}
    savemat(root / "amazon.mat", whole | {"offset": np.arange(5)[:, None] * 12})
    return root


def terms400(root: Path) -> Path:
    return features(root, {d: f"{d}_400.mat" for d in ("books", "dvd", "elec", "kitchen")}, 2)


def idx(array: np.ndarray) -> bytes:
    head = struct.pack(f">I{array.ndim}I", 0x800 + array.ndim, *array.shape)
    return head + array.astype(np.uint8).tobytes()


def mnist(root: Path) -> Path:
    """Write 240 and 120 digits; digit i's middle has value i; only image files are compressed."""
    root.mkdir(parents=True, exist_ok=True)
    for name, n in (("train", 240), ("t10k", 120)):
        x = np.zeros((n, 28, 28), np.uint8)
        x[:, 10:18, 10:18] = np.arange(n)[:, None, None]
        x[:, 0, :14] = 255  # the top left edge
        (root / f"{name}-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(x)))
        (root / f"{name}-labels.idx1-ubyte").write_bytes(idx(np.arange(n) // 2 % 10))
    return root


def sound(path: Path, hertz: float, rate: int = 8000, channels: int = 1) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    samples = [round(20000 * math.sin(2 * math.pi * hertz * t / rate)) for t in range(rate // 4)]
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(b"".join(struct.pack("<h", s) * channels for s in samples))
    return path


def recordings(root: Path) -> Path:
    for m, microphone in enumerate(("ReSpeaker", "USB")):
        for k, keyword in enumerate(KEYWORDS):
            for i in range(3):
                place = root / microphone / keyword / f"{i}.wav"
                sound(place, 300 + 500 * k + 20 * i, channels=m + 1)
    return root


def spectrograms(root: Path) -> Path:
    """Write two microphones with splits; values of class k lie between k and k + 1."""
    rng = np.random.default_rng(0)
    for microphone in ("Creator", "Voice"):
        for split, n in (("train", 4), ("test", 2)):
            for k, keyword in enumerate(KEYWORDS):
                for i in range(n):
                    path = root / microphone / split / keyword / f"{i}.npy"
                    path.parent.mkdir(parents=True, exist_ok=True)
                    np.save(path, (k + rng.random((10, 12))).astype(np.float32))
    return root


def mel_bank_twin(mels: int, n_fft: int, rate: int) -> list[list[float]]:
    """Compute the triangles with loops, from the definition of the mel scale."""
    top = 2595 * math.log10(1 + rate / 2 / 700)
    corner = [700 * (10 ** (top * i / (mels + 1) / 2595) - 1) for i in range(mels + 2)]
    bank = []
    for m in range(mels):
        row = []
        for b in range(n_fft // 2 + 1):
            f = b * rate / n_fft
            if corner[m] < f <= corner[m + 1]:
                row.append((f - corner[m]) / (corner[m + 1] - corner[m]))
            elif corner[m + 1] < f < corner[m + 2]:
                row.append((corner[m + 2] - f) / (corner[m + 2] - corner[m + 1]))
            else:
                row.append(0.0)
        bank.append(row)
    return bank


# Every layout: name, builder, domains, examples of one domain in training and test, classes.
Layout = tuple[str, Callable[[Path], Path], str, int, int, int]
DIGITS = "mnist mnist-m svhn syn usps"
SIX = "clipart infograph painting quickdraw real sketch"
LAYOUTS: dict[str, Layout] = {
    "digit5": ("digit5", digit5, DIGITS, N_TRAIN, N_TEST, 10),
    "syn-number": ("digit5", syn_number, DIGITS, N_TRAIN, N_TEST, 10),
    "office31": ("office31", office31, "amazon dslr webcam", 8, 2, 2),
    "office-home": ("office-home", office_home, "art clipart product real-world", 8, 2, 2),
    "adaptiope": ("adaptiope", adaptiope, "product_images real_life synthetic", 8, 2, 2),
    "caltech": ("office-caltech10", office_caltech, "amazon caltech dslr webcam", 10, 10, 10),
    "surf": ("office-caltech10", surf, "amazon caltech dslr webcam", 30, 10, 10),
    "decaf": ("office-caltech10", decaf, "amazon caltech dslr webcam", 30, 10, 10),
    "domainnet": ("domainnet", domainnet, SIX, 6, 2, 2),
    "pacs": ("pacs", pacs, "art_painting cartoon photo sketch", 21, 7, 7),
    "imageclef": ("imageclef", imageclef, "b c i p", 24, 12, 12),
    "svmlight": ("amazon-review", svmlight, "books dvd electronics kitchen", 12, 6, 2),
    "svmlight-1": ("amazon-review", svmlight_from_1, "books dvd electronics kitchen", 12, 6, 2),
    "amazon.npz": ("amazon-review", coordinates, "books dvd electronics kitchen", 8, 4, 2),
    "amazon.mat": ("amazon-review", msda, "books dvd electronics kitchen", 8, 4, 2),
    "terms400": ("amazon-review", terms400, "books dvd electronics kitchen", 6, 2, 2),
    "mnist": ("rotated-mnist", mnist, " ".join(str(a) for a in range(0, 360, 30)), 20, 10, 10),
    "recordings": ("mic2mic-like", recordings, "ReSpeaker USB", 6, 3, 3),
    "spectrograms": ("mic2mic-like", spectrograms, "Creator Voice", 12, 6, 3),
}
