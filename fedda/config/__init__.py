"""The settings that all methods share: typed, frozen, and sent as a flat table.

Flower's run configuration is a flat table of text and numbers with dotted keys. So every setting
has a dotted kebab-case key, such as `train.lr-end` or `kd3a.gate.low`. A method's own settings are
in its `Config`; `fedda.settings` puts them together with the sections here.
"""

import math
import re
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator

from fedda.config.inputs import REFUSE, Missing, Resize, categories_of, window_of
from fedda.config.sections import Section

DEFAULT = "kd3a"  # the method of a run that names none
# Networks of fedda itself; other packages can add more (`fedda.plugins`).
SMALL = ("digit-cnn", "lenet", "mlp", "identity")
PRETRAINED = ("efficientnet-lite0", "resnet18", "resnet50", "resnet101", "alexnet")
NETWORKS = (*SMALL, *PRETRAINED)
TIMM = "timm:"  # prefix of a network of the package timm

# The learning rate of new layers, in units of that of pretrained ones, as in FADA.
NEW_LAYERS = 10
MOST_SHRINKING = 0.1  # share of a weight that one step may take away for no gradient's sake
MOST_PASSES = 10  # over a site's images in a round, for the sake of `train.steps`
LEAST_NOISE = 0.01  # of a step; with less, epsilon is in the thousands and cannot be computed
LEAST_CLIP = 1e-6  # of an example's gradient; far below it float32 knows whole steps only
LEAST_LIPSCHITZ = 0.5  # a smaller bound would wipe the weights after each step
WIDEST = 100_000  # units of a layer: a server must not make a site run out of memory
# Augmentations of fedda itself; other packages can add more.
AUGMENTATIONS = ("none", "flip-crop", "digits", "photo")


def checked(read: Callable[[str], object]) -> AfterValidator:
    """Refuse a setting's text that cannot be read; it stays as it is."""

    def check(text: str) -> str:
        read(text)
        return text

    return AfterValidator(check)


Window = Annotated[str, checked(window_of)]


class InputConfig(Section):
    """The shape to which all sites convert their images; 0 keeps the shape they have."""

    channels: Literal[0, 1, 3] = 0
    """1: grayscale, 3: RGB, 0: as in the data"""
    size: int = Field(default=0, ge=0, le=4096)
    """height and width in pixels, 0: as in the data, or as pretrained weights want"""
    resize: Resize = "stretch"
    """stretch: width and height become input.size; crop: the shorter side becomes input.size *
    256/224, then the square in the middle is kept, as torchvision evaluates on ImageNet"""
    window: Window = ""
    """low,high: the values of gray of more than 8 bits (PNG, TIFF, DICOM) that become black and
    white, the same at all sites, such as -160,240; empty: all values that the file's bits can hold,
    or a DICOM file's own window; 12 bits: of image files, 0 to 4095; own: of vectors, each site's
    own mean and deviation become 0 and 1; age=54/9, chol=240/50: of tables, the same mean and
    deviation of a column at all sites do"""

    missing: Missing = REFUSE
    """gaps (NaN) in vectors: refuse; mean or median: filled with that of the column at the site
    itself; indicator: with its mean, and each column gets another that is 1 at its gaps, at all
    sites, so vectors are twice as long"""
    categories: Annotated[str, checked(categories_of)] = Field(default="", max_length=10_000)
    """the values of tables' columns of texts, the same at all sites, such as sex=female|male,
    thal=normal|fixed|reversible: two become 0 and 1, more a column each; ways to write one value at
    different sites stand with a slash between, sex=female/f|male/m; a value that is not listed is
    refused, or missing where input.missing fills"""


class ModelConfig(Section):
    """The network, the source of its first weights, and how much of it learns."""

    name: str = Field(
        default="digit-cnn",
        pattern=r"^[\w.:-]{1,100}$",
        description=f"architecture: {', '.join(NETWORKS)}, timm:NAME, or one that an installed "
        "package adds",
    )
    hidden: str = Field(default="", max_length=200)
    """widths of hidden layers between the network and the head, such as 512,256, each linear with
    BatchNorm, ReLU and, between two, dropout; the mlp consists of them; empty: none"""
    weights: str = "none"
    """none, package (the weights that an installed package holds), default, a name of torchvision's
    weights, or a local weights file"""
    bottleneck: int = Field(default=0, ge=0, le=WIDEST)
    """width of a layer right before the head, linear with BatchNorm; 0: none"""
    # Beyond .75, a value is left in for a single image of a batch.
    dropout: float = Field(default=0.0, ge=0, le=0.75)
    """share of the values of hidden layers and bottleneck that are left out of a step"""
    norm: Literal["batch", "group"] = "batch"
    """group: GroupNorm (for vectors LayerNorm) in place of BatchNorm, which mixes a batch's
    examples, in what learns"""
    train: Literal["all", "last-block", "bottleneck"] = "all"
    """what learns, besides the head: all, the network's last-block with hidden layers and the
    bottleneck, or these alone; the rest stays as pretrained and is not sent"""

    @property
    def widths(self) -> tuple[int, ...]:
        """The widths of the hidden layers."""
        return tuple(int(width) for width in self.hidden.split(",") if width)

    @property
    def freezes(self) -> bool:
        """Whether a part of the network stays as pretrained, and does not travel."""
        return self.train != "all"

    @field_validator("hidden")
    @classmethod
    def _are_widths(cls, text: str) -> str:
        if text and not all(re.fullmatch(r" *[1-9]\d{0,5} *", w) for w in text.split(",")):
            raise ValueError("give the widths of the layers with commas, such as 512,256")
        if any(int(width) > WIDEST for width in text.split(",") if width):
            raise ValueError(f"a layer has {WIDEST} units at most")
        return text.replace(" ", "")


Precision = Literal["float32", "bfloat16"]
Layout = Literal["auto", "channels-first", "channels-last"]


class TrainConfig(Section):
    """Local training at every site."""

    batch_size: int = Field(default=64, ge=2, le=65_536)
    """images per step; a site refuses fewer than its --min-images"""
    rounds_per_epoch: float = Field(default=1.0, ge=0.01, le=1000)
    """below 1: several epochs per round; above 1: part of an epoch"""
    steps: int = Field(default=0, ge=0, le=100_000)
    """a site takes at least so many steps in a round: with few images it passes over them more
    often, ten times at most; 0: as often as train.rounds-per-epoch says"""
    optimizer: Literal["sgd", "adam", "adadelta"] = "sgd"
    """sgd, as in most papers; adam; or adadelta, as in MDAN's code"""
    lr: float = Field(default=0.02, gt=0, le=1)
    """learning rate of the first round"""
    lr_end: float = Field(default=0.001, ge=0, le=1)
    """learning rate of the last round"""
    schedule: Literal["cosine", "linear", "constant", "ganin"] = "cosine"
    """how the learning rate goes from lr to lr-end over the rounds; ganin: it falls to a sixth of
    lr as (1 + 10 q)^-.75, whatever lr-end is"""
    momentum: float = Field(default=0.9, ge=0, le=0.999)
    """momentum of sgd"""
    nesterov: bool = False
    """Nesterov's momentum in place of sgd's own, as in SHOT's code"""
    carry_momentum: bool = False
    """each site keeps the optimizer's state from round to round"""
    weight_decay: float = Field(default=0.0, ge=0, le=1)
    """L2 penalty of the optimizer; a step may shrink weights by a tenth at most"""
    clip: float = Field(default=0.0, ge=0, le=1e6)
    """largest norm of a model's gradient; 0: any"""
    lipschitz: float = Field(default=0.0, ge=0, le=1000)
    """after each step the spectral norm of every linear, convolution and BatchNorm layer is at most
    this (Gouk et al.), from 0.5 on; 0: any"""
    accumulate: int = Field(default=1, ge=1, le=1000)
    """the model moves once per so many steps, by the mean of their gradients; the last ones of a
    round may be fewer"""
    precision: Precision = "float32"
    """of the encoder's products in training; weights, losses, votes and tests stay in float32"""
    layout: Layout = "auto"
    """of images in memory; auto: channels-last, (N, H, W, C), for the networks of fedda and
    torchvision, and on a processor for timm's; else channels-first, as where a processor's step has
    more than 2 million pixels, which torch's BatchNorm would add up too coarsely"""
    augment: str = Field(default="none", pattern=r"^[\w.:, -]{1,200}$")
    """random changes of the images that are trained on: none, flip-crop (shift, mirror), digits
    (turn, shift, scale), photo (cut out, mirror, recolour), those that an installed package adds,
    or several in order: digits,mine"""
    views: int = Field(default=4, ge=1, le=64)
    """if a part of the network is frozen: how many augmented views of each image its features are
    computed of, once"""
    sampler: Literal["shuffle", "balanced"] = "shuffle"
    """balanced: sources repeat images of rare classes until all classes are equally frequent in an
    epoch; steps whose gradients are summed stay as they are"""

    def rounds_per_epoch_of(self, images: int) -> float:
        """Rounds in which a site of so many images passes over them once; `steps` lowers it."""
        passes = min(self.steps * self.batch_size / max(images, 1), MOST_PASSES)
        return min(self.rounds_per_epoch, 1 / passes) if passes else self.rounds_per_epoch

    def steps_of(self, images: int) -> int:
        """Steps of a round at a site of so many images."""
        return max(1, math.ceil(images / self.batch_size / self.rounds_per_epoch_of(images)))

    @field_validator("lipschitz")
    @classmethod
    def _leaves_the_weights(cls, most: float) -> float:
        if 0 < most < LEAST_LIPSCHITZ:
            raise ValueError(f"set it to 0, or to {LEAST_LIPSCHITZ} or more")
        return most


class PrivacyConfig(Section):
    """Differential privacy of each example of a source, by DP-SGD (Abadi et al., CCS 2016)."""

    noise: float = Field(default=0.0, ge=0, le=1000)
    """noise on each step's sum of a source's clipped gradients, in units of the clip; 0: none, else
    .01 or more (needs model.norm=group and the extra privacy)"""
    clip: float = Field(default=1.0, gt=0, le=1e6)
    """largest norm of the gradient of one example, from .000001 on"""

    @field_validator("clip")
    @classmethod
    def _is_representable(cls, clip: float) -> float:
        if clip < LEAST_CLIP:
            raise ValueError(
                f"{clip:g} is so little that noise of its size would be rounded away; set it to "
                f"{LEAST_CLIP:f} or more"
            )
        return clip

    @field_validator("noise")
    @classmethod
    def _is_computable(cls, noise: float) -> float:
        if 0 < noise < LEAST_NOISE:
            raise ValueError(
                f"{noise:g} is so little that its epsilon, beyond all use, cannot be computed; "
                "set it to 0, or to .01 or more"
            )
        return noise


Secure = Literal["none", "sum"]  # whether the server sees single models, or sums alone


Asked = Literal["auto", "none", "sum"]  # auto: sum where the method and all sites allow it


Refine = Literal["careful", "strong", "none"]  # how far the local last step may go
Shares = Literal["auto", "even", "estimated"]  # whether it counts how frequent classes seem to be


class RefineConfig(Section):
    """The local last step of a target (`fedda.refining`); `run.refine` says how far it goes."""

    shares: Shares = "auto"
    """how frequent each class seems at the target: auto: counts by the evidence that they
    differ; even: never counts; estimated: always, which loses points where a model merely
    overlooks a class"""


class WireConfig(Section):
    """How models are sent."""

    dtype: Literal["float32", "float16", "bfloat16", "int8"] = "float32"
    """type of floating-point values on the wire; bfloat16 has the range of float32, float16 more
    digits; int8: whole numbers with a scale per output channel for a model's arrays of two axes or
    more, float32 for all else, and sites send the change of the model that they got; with any
    but float32 a masked value of such an array has 32 bits in place of 64"""


class WaitConfig(Section):
    """How long the server waits, in seconds, and for how many sites."""

    min_sources: int = Field(default=1, ge=1, description="least number of sources in a round")
    sites: float = Field(default=120.0, gt=0, description="wait for sites to join, or to come back")
    settle: float = Field(
        default=1.0, ge=0, description="wait for more sites after enough have joined"
    )
    train: float = Field(default=3600.0, gt=0, description="wait for a reply to a training request")
    evaluate: float = Field(
        default=600.0, gt=0, description="wait for a reply to an evaluation request"
    )

    tries: int = Field(default=3, ge=1, description="tries of a round before the run ends")


Rule = Literal["weighted", "bounded", "median", "trimmed", "krum"]  # `fedda.maths.average`


class GuardConfig(Section):
    """What protects a run from single sites: bounds on what they send, and robust means."""

    max_change: float = Field(default=5.0, ge=0)
    """largest change of a model, in units of the norm of the model sent, or of weights of 0.2 if
    that is more; 0: any"""
    max_update: float = Field(default=1.5, ge=0)
    """of three or more sources, an update longer than so many times the longest of the others' is
    scaled down to that, and so is a gradient of a sum; 0: none. If f sources may lie, which is
    `liars` of all, the f-th longest of the others' counts: of up to five by default the longest"""
    max_statistics: float = Field(default=1e6, ge=0)
    """largest growth of BatchNorm's running statistics in a round; 0: any"""
    max_examples: float = Field(default=2.0, ge=0)
    """a site counts at most this many times the median examples of the other sources; 0: any"""
    mean: Rule = "weighted"
    """the mean of the sites' models: weighted (by the method's weights), bounded (updates no longer
    than their median), or for sites that may lie median or trimmed (of each parameter), or krum
    (multi-Krum)"""
    liars: float = Field(default=0.2, gt=0, lt=0.5)
    """share of the sites that may lie, for max-update, trimmed and krum; krum needs 3 sources and 2
    more for each that may lie"""


LEAST_HIDDEN = 3  # sources of a sum: from a sum of two, each knows the other's model
IMAGES_HIDE = 64  # a model that was trained on fewer images reveals too much about each of them
FEATURES_HIDE = 256  # from a gradient over fewer examples, their features can be computed


def steps_per_window(examples: int, batch: int) -> int:
    """How many steps, of a batch each, a sum over so many examples takes -> p."""
    return -(-examples // batch)


class LazyConfig(Section):
    """How often gradients are exchanged, and over how many examples; sent to sites."""

    p: int = Field(default=0, ge=0, le=100_000)
    """steps per exchange; 0: as few as exchange.min-examples allows"""
    overlap: bool = False
    """compute the next steps while a sum is on its way; sums are then p steps older"""
    min_examples: int = Field(default=FEATURES_HIDE, ge=1, le=10_000_000)
    """a gradient leaves a site only as a sum over at least so many examples"""
    expose_features: bool = False
    """allow exchange.min-examples below 256, where features can be computed"""
    clip: float = Field(default=10.0, gt=0, le=1e9)
    """largest norm of a site's mean gradient"""
    noise: float = Field(default=0.0, ge=0, le=1000)
    """Gaussian noise on that gradient, in multiples of exchange.clip"""
    masked: bool = False
    """hide each site's gradients from the server, which sees their sum alone (sites need the
    others' keys: fedda-client --peers)"""


class ExchangeConfig(LazyConfig):
    """The settings of the exchange: those sent to sites, and those of its server."""

    join: float = Field(default=60.0, gt=0)
    """seconds for all sites to connect"""
    wait: float = Field(default=120.0, gt=0)
    """seconds to wait for the last site's gradient"""
    rejoin: float = Field(default=30.0, ge=0)
    """seconds for a site to reconnect; 0: none"""

    @property
    def lazy(self) -> LazyConfig:
        """The settings that are sent to sites."""
        return LazyConfig.model_validate(self.model_dump(include=set(LazyConfig.model_fields)))


class RunSection(Section):
    """The run as a whole; a site learns no more of it than its trainings say."""

    name: str = Field(default="run", pattern=r"^[\w-][\w.-]*$")
    """name of the run, of letters, digits, _, - and .; results go to DIR/NAME"""
    dir: str = "runs"
    """folder of all runs, on the server"""
    seeds: str = Field(default="0", pattern=r"^\d+(,\d+)*$")
    """one training per seed: 0,1,2"""
    start_from: str = ""
    """a finished run's folder, or a model file, to start from; phases that only prepare a model are
    skipped"""
    target: str = ""
    """name of the target to adapt to; empty: each target that has joined, in turn"""
    sources: str = ""
    """names of the sources that take part, separated by commas; empty: all that have joined"""
    baseline: str = ""
    """another method to train with the same seeds, to compare, such as fedavg"""
    resume: bool = False
    """go on with the run in DIR/NAME"""
    transport: Literal["lane", "flower"] = "lane"
    """How models and numbers reach the sites: on one stream to each, or in Flower's own messages,
    as sites need that run Flower's SuperNode; that needs Flower's own SuperLink, too."""
    listen: str = Field(default="127.0.0.1:0", pattern=r"^\S+:\d{1,5}$")
    """HOST:PORT where sites reach the run if the SuperLink is Flower's own, such as 0.0.0.0:8444;
    port 0: any free one. fedda's server needs none: it passes the streams on."""
    expect: int = Field(default=0, ge=0)
    """wait for this many sites; 0: as few as the run needs"""
    look: bool = False
    """train nothing, and ask the sites what their data look like; for `fedda look`"""
    evaluate: bool = True
    """let the target test each round, if it has labels"""
    refine: Refine = "careful"
    """how far a target's last step goes, which refines the mean of the run's models by its own
    images and stays there; none: it takes no such step"""
    patience: int = Field(default=0, ge=0)
    """end a training early: after so many tests of its last phase without a higher infomax, which
    needs no labels, one more round is the last; 0: never"""

    @field_validator("baseline")
    @classmethod
    def _may_be_none(cls, name: str) -> str:
        return "" if name == "none" else name


class TrackSection(Section):
    """Where a run's curves are written besides its results; never sent to a site."""

    tensorboard: bool = True
    """curves for TensorBoard in each training's folder"""


def is_site_name(name: str) -> bool:
    """Whether a name can be used in array names, file names and one-line messages."""
    plain = name.isprintable() and "/" not in name and not name.startswith(".")
    return plain and 1 <= len(name) <= 64
