"""The table of benchmarks of federated and multi-source unsupervised domain adaptation."""

from pathlib import Path

from fedda.contrib.benchmarks import (
    class_folders,
    digit_five,
    feature_files,
    lists,
    reviews,
    rotated_mnist,
    spectrograms,
)
from fedda.contrib.benchmarks.common import Benchmark, ImportRequest, Options
from fedda.contrib.benchmarks.write import Result, write
from fedda.data.naming import listed
from fedda.data.sets import Progress
from fedda.errors import ConfigError, DataError

_ALWAYS = frozenset({"limit", "test_limit"})
_IMAGES = _ALWAYS | {"domains", "files", "test_share", "transductive"}
_SHARE = "20% of every class is for testing, drawn with seed {seed}"

_TABLE = (
    Benchmark(
        name="digit5",
        title="Digit-Five",
        domains={"mnist": (), "mnist-m": (), "svhn": (), "syn": (), "usps": ()},
        classes=digit_five.DIGITS,
        layout="a folder with mnist_data.mat, mnistm_with_label.mat, svhn_train_32x32.mat, "
        "svhn_test_32x32.mat, synth_train_32x32.mat, synth_test_32x32.mat (or syn_number.mat) and "
        "usps_28x28.mat",
        url="http://ai.bu.edu/M3SDA/ (all files: https://drive.google.com/file/d/"
        "1QvC6mDVN25VArmTuSHqgd7Cf9CoiHvVt, linked by https://github.com/FengHZ/KD3A)",
        used_by="M3SDA, FADA, KD3A, Co-MDA, FRUDA; they draw 25,000 and 9,000 images per domain "
        "(--limit 25000 --test-limit 9000), FRUDA takes all",
        split="the published training and test sets",
        takes=_ALWAYS | {"domains"},
        read=digit_five.read_digits,
    ),
    Benchmark(
        name="office31",
        title="Office-31",
        domains={"amazon": (), "dslr": (), "webcam": ()},
        classes=31,
        layout="amazon/images/<class>/*.jpg, dslr/..., webcam/... (images/ may be missing)",
        url="https://faculty.cc.gatech.edu/~judy/domainadapt/",
        used_by="FedDaDiL, with folds of its own; SHOT, on every image (--transductive)",
        split=_SHARE,
        takes=_IMAGES,
        read=class_folders.read,
    ),
    Benchmark(
        name="office-caltech10",
        title="Office-Caltech10",
        domains={"amazon": (), "caltech": ("caltech10", "caltech256"), "dslr": (), "webcam": ()},
        classes=(
            *("back_pack", "bike", "calculator", "headphones", "keyboard"),
            *("laptop_computer", "monitor", "mouse", "mug", "projector"),
        ),
        layout="amazon/<class>/*.jpg, caltech/..., dslr/..., webcam/..., or one .mat of features "
        "per domain (amazon_SURF_L10.mat, GoogleNet1024/amazon.mat, amazon_decaf.mat, ...)",
        url="https://github.com/redhat12345/OfficeCaltechDomainAdaptation, or "
        "https://github.com/jindongwang/transferlearning/blob/master/data/dataset.md",
        used_by="FADA, KD3A, Co-MDA, FedDaDiL (images); FRUDA (DeCAF features)",
        split=_SHARE,
        takes=_IMAGES | {"features"},
        read=feature_files.read_office_caltech,
        aliases={
            "touringbike": "bike",
            "computerkeyboard": "keyboard",
            "laptop": "laptopcomputer",
            "computermonitor": "monitor",
            "computermouse": "mouse",
            "coffeemug": "mug",
            "videoprojector": "projector",
        },
    ),
    Benchmark(
        name="office-home",
        title="Office-Home",
        domains={"art": (), "clipart": (), "product": (), "real-world": ("real",)},
        classes=65,
        layout="Art/<class>/*.jpg, Clipart/..., Product/..., 'Real World'/... (or RealWorld)",
        url="https://www.hemanthdv.org/officeHomeDataset.html",
        used_by="FedDaDiL, Co-MDA; SHOT, on every image (--transductive)",
        split=_SHARE,
        takes=_IMAGES,
        read=class_folders.read,
    ),
    Benchmark(
        name="domainnet",
        title="DomainNet",
        domains={
            **{"clipart": (), "infograph": (), "painting": ()},
            **{"quickdraw": (), "real": (), "sketch": ()},
        },
        classes=345,
        layout="clipart/<class>/*.jpg, infograph/..., painting/..., quickdraw/..., real/..., "
        "sketch/..., and <domain>_train.txt and <domain>_test.txt with lines "
        "`clipart/zebra/clipart_343_000001.jpg 343`",
        url="http://ai.bu.edu/M3SDA/",
        used_by="M3SDA, FADA, KD3A, Co-MDA",
        split="the published lists <domain>_train.txt and <domain>_test.txt",
        takes=_IMAGES,
        read=lists.read_domainnet,
    ),
    Benchmark(
        name="imageclef",
        title="ImageCLEF-DA",
        domains={"b": ("bing",), "c": ("caltech",), "i": ("imagenet",), "p": ("pascal",)},
        classes=(
            *("aeroplane", "bike", "bird", "boat", "bottle", "bus"),
            *("car", "dog", "horse", "monitor", "motorbike", "people"),
        ),
        layout="b/, c/, i/, p/ and list/bList.txt, cList.txt, iList.txt, pList.txt with lines "
        "`c/056.dog/056_0021.jpg 7`, or <domain>/<class>/*.jpg",
        url="https://www.imageclef.org/2014/adaptation (lists: https://github.com/thuml/CDAN)",
        used_by="FedDaDiL, with folds of its own",
        split=_SHARE,
        takes=_IMAGES,
        read=lists.read_imageclef,
    ),
    Benchmark(
        name="adaptiope",
        title="Adaptiope",
        domains={"product_images": (), "real_life": (), "synthetic": ()},
        classes=123,
        layout="product_images/<class>/*.jpg, real_life/..., synthetic/...",
        url="https://gitlab.com/tringwald/adaptiope",
        used_by="FedDaDiL, with folds of its own",
        split=_SHARE,
        takes=_IMAGES,
        read=class_folders.read,
    ),
    Benchmark(
        name="pacs",
        title="PACS",
        domains={"art_painting": (), "cartoon": (), "photo": (), "sketch": ()},
        classes=("dog", "elephant", "giraffe", "guitar", "horse", "house", "person"),
        layout="art_painting/<class>/*.jpg, cartoon/..., photo/..., sketch/..., and "
        "<domain>_train_kfold.txt and <domain>_crossval_kfold.txt with lines "
        "`art_painting/dog/pic_001.jpg 1`",
        url="https://dali-dl.github.io/project_iccv2017.html",
        used_by="multi-source adaptation and domain generalisation, which test on every image of "
        "the target (--transductive)",
        split="the published lists: train_kfold trains, crossval_kfold tests",
        takes=_IMAGES,
        read=lists.read_pacs,
        # This file is damaged; loaders of PACS leave it out.
        broken=frozenset({"sketch/dog/n02103406_4068-1.png"}),
    ),
    Benchmark(
        name="amazon-review",
        title="Amazon Review",
        domains={"books": (), "dvd": (), "electronics": ("elec",), "kitchen": ()},
        classes=reviews.CLASSES,
        layout="books_train.svmlight, books_test.svmlight, dvd_..., electronics_..., kitchen_..., "
        "or amazon.npz or amazon.mat with xx, yy, offset, or books_400.mat, dvd_400.mat, ...",
        url="https://github.com/GRAAL-Research/domain_adversarial_neural_network (svmlight), "
        "https://github.com/KeiraZhao/MDAN (amazon.npz)",
        used_by="DANN, MDAN, FADA, KD3A; 5,000 terms (--features 5000) or 400",
        split="2,000 reviews train and the rest tests (20% of those with 400 terms)",
        takes=_ALWAYS | {"domains", "features", "test_share", "transductive"},
        read=reviews.read,
    ),
    Benchmark(
        name="rotated-mnist",
        title="Rotated MNIST",
        domains={str(angle): () for angle in rotated_mnist.FRUDA},
        classes=rotated_mnist.DIGITS,
        layout="train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte and "
        "t10k-labels-idx1-ubyte, each perhaps with .gz",
        url="https://yann.lecun.com/exdb/mnist/ (copies: https://ossci-datasets.s3.amazonaws.com/mnist/)",
        used_by="FRUDA, with all digits in every domain; here each digit is in one domain only",
        split="MNIST's training digits train, its test digits test; dealt with seed {seed}",
        takes=_ALWAYS | {"angles"},
        read=rotated_mnist.read,
    ),
    Benchmark(
        name="mic2mic-like",
        title="spectrograms like Mic2Mic",
        domains={},
        classes=31,
        layout="<microphone>/<keyword>/*.npy or *.wav, or <microphone>/train/<keyword>/... and "
        "<microphone>/test/<keyword>/...",
        url="https://arxiv.org/abs/2003.12425 (Mic2Mic's recordings: ask its authors)",
        used_by="FRUDA, with Mic2Mic's own spectrograms of 4 microphones; these are alike, not "
        "the same",
        split="train/ and test/ where a microphone has them, else " + _SHARE,
        takes=_ALWAYS | {"test_share", "transductive", "mels", "seconds"},
        read=spectrograms.read,
    ),
)
BENCHMARKS = {benchmark.name: benchmark for benchmark in _TABLE}


def find(name: str) -> Benchmark:
    """The benchmark of that name."""
    if name not in BENCHMARKS:
        raise ConfigError(
            f"there is no benchmark {name!r}: choose from {listed(list(BENCHMARKS), 20)}"
        )
    return BENCHMARKS[name]


def import_benchmark(
    name: str,
    source: Path,
    out: Path,
    options: Options | None = None,
    progress: Progress | None = None,
) -> Result:
    """Turn a benchmark's published files into one site folder per domain in OUT.

    Args:
        name: one of BENCHMARKS.
        source: the folder with the files, or one up to two levels above it. It is only read.
        out: a folder that is new or empty.
        options: what to import, and how to split it.
        progress: called with the number of files written so far and of all; for arrays, of domains.

    Raises:
        ConfigError: this benchmark does not take an option, or its value is wrong.
        DataError: files are missing, damaged or contradict each other; OUT is left as it was.
    """
    request = ImportRequest(find(name), source, options or Options(), [])
    if not source.is_dir():
        raise request.wrong(f"{source} is not a folder")
    if out.resolve() == source.resolve():
        raise DataError(f"{out} is the folder to read from: give another folder to write to")
    return write(request, request.benchmark.read(request), out, progress)
