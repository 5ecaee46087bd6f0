"""The networks by name, each split into an encoder and a linear head.

x   (N, channels, H, W) images or (N, D) vectors, float in [0, 1]
z   (N, d) features, z = encoder(x)
    (N, C) logits, head(z)

digit-cnn   Feng et al., KD3A, ICML 2021, Table 4
lenet       Gan et al., FRUDA, appendix F.0.2: the LeNet of its Rotated MNIST
mlp         hidden layers of `model.sizes`; for Amazon Review KD3A has three linear layers in all
identity    no encoder: the inputs are features, such as vectors of a pretrained network
resnet18, resnet50, resnet101, alexnet   of torchvision, without their last linear layer

Other packages can add encoders (`fedda.plugins`); a site builds only those it has installed.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from fedda import plugins
from fedda.config import ModelConfig
from fedda.errors import FeddaError, ModelError
from fedda.train import seed_for

from .arithmetic import Arithmetic
from .extension import Extension
from .modes import evaluating
from .pretrained import IMAGENET_MEAN, IMAGENET_STD, LAST, load_pretrained

# An image smaller than this has no pixel left at the end of the network.
_SMALLEST = {"digit-cnn": 4, "lenet": 16, "alexnet": 63}

# The widest hidden layer of an mlp: a server must not make a site run out of memory.
_WIDEST = 100_000

# The learning rate of new layers, in units of that of pretrained ones, as in FADA.
_NEW_LAYERS = 10


class Model(nn.Module):
    """An encoder and a linear head; names in the state_dict start with `encoder.` or `head.`.

    A method may replace both by other layers, or add layers under names of its own.

    Attributes:
        extension: the layers that a method added; None if none did.
        fresh: names of the parameters that do not come from pretrained weights.
        arithmetic: how the encoder computes while it trains.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        encoder: nn.Module,
        head: nn.Linear,
        *,
        pretrained: bool = False,
        repeat: bool = False,
    ) -> None:
        """Join the two halves.

        Args:
            encoder: From inputs to features (N, d).
            head: From features to logits (N, C).
            pretrained: The encoder expects inputs normalised like those of ImageNet.
            repeat: The data have one channel and the encoder takes three.
        """
        super().__init__()
        self.encoder = encoder
        self.head = head
        self.pretrained = pretrained
        self.repeat = repeat
        self.extension: Extension | None = None
        self.arithmetic = Arithmetic()
        self.fresh = frozenset(f"head.{name}" for name, _ in head.named_parameters())
        # Constants stay out of the state_dict, which is sent: it holds only what is learnt.
        self.register_buffer("mean", torch.tensor(IMAGENET_MEAN).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(IMAGENET_STD).view(3, 1, 1), persistent=False)

    @property
    def width(self) -> int:
        """The number of features d."""
        return self.head.in_features

    def features(self, x: Tensor) -> Tensor:
        """Features, z = encoder(x), the input of the head -> (N, d)."""
        if self.repeat:
            x = x.expand(-1, 3, -1, -1)
        if self.pretrained:
            x = (x - self.mean) / self.std
        return self.arithmetic(self.encoder, x)

    def compute(self, arithmetic: Arithmetic) -> None:
        """Train in another precision, in another layout, or compiled."""
        self.arithmetic = arithmetic
        arithmetic.prepare(self.encoder)

    def forward(self, x: Tensor) -> Tensor:
        """Logits, head(encoder(x)) -> (N, C)."""
        return self.head(self.features(x))

    def groups(self, lr: float) -> list[dict[str, Any]]:
        """Parameter groups of an optimizer, with the learning rate of each.

        In a pretrained model, parameters that start from random values have ten times the learning
        rate, as in FADA.
        """
        if not self.pretrained:
            return [{"params": list(self.parameters()), "lr": lr}]
        named = list(self.named_parameters())
        return [
            {"params": [p for name, p in named if name not in self.fresh], "lr": lr},
            {"params": [p for name, p in named if name in self.fresh], "lr": _NEW_LAYERS * lr},
        ]

    def extend(self, extension: Extension, seed: int, device: str = "cpu") -> None:
        """Let a method add its layers; their random values depend on the seed alone."""
        pretrained = {id(p) for p in self.encoder.parameters()}
        with torch.random.fork_rng(devices=[]), torch.device(device):
            torch.default_generator.manual_seed(seed_for(seed, "extension"))
            extension.add_to(self)
        self.extension = extension
        self.fresh = frozenset(n for n, p in self.named_parameters() if id(p) not in pretrained)


def build(
    config: ModelConfig,
    shape: tuple[int, ...],
    classes: int,
    seed: int,
    extension: Extension | None = None,
) -> Model:
    """Make a new model on the CPU; its weights depend on the seed and on no global generator.

    Args:
        config: Which network, and where pretrained weights come from.
        shape: Of one input, (channels, H, W) or (D,).
        classes: Number of outputs C.
        seed: Seed of the weights that are not pretrained.
        extension: The layers that a method adds, or None.
    """
    model = _assemble(config, shape, classes, seed)
    if config.weights != "none":
        load_pretrained(model, config)
    if extension is not None:
        model.extend(extension, seed)
    return model


def blank(
    config: ModelConfig,
    shape: tuple[int, ...],
    classes: int,
    extension: Extension | None = None,
    device: str = "cpu",
) -> Model:
    """Make the model of `build` without reading weights, to be filled from a file or a server.

    It normalises inputs as the pretrained network does, so a site needs no pretrained file. On the
    device `meta` it has shapes only, and takes no memory.
    """
    model = _assemble(config, shape, classes, 0, device)
    if extension is not None:
        model.extend(extension, 0, device)
    return model


def parameter_count(model: nn.Module) -> int:
    """How many parameters a model has; BatchNorm's running statistics do not count."""
    return sum(p.numel() for p in model.parameters())


def as_inputs(x: Tensor, device: torch.device) -> Tensor:
    """Turn stored data into inputs of a model: bytes become floats in [0, 1]."""
    x = to_device(x, device)
    return x.float() / 255 if x.dtype == torch.uint8 else x.float()


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Move data to a device; to a GPU from pinned memory, so that nobody waits for the copy."""
    if device.type == "cuda" and x.device.type == "cpu":
        x = x.pin_memory()  # from other memory, a copy would wait in spite of `non_blocking`
    return x.to(device, non_blocking=True)


@torch.no_grad()
def predict(model: Model, x: Tensor, batch: int = 256) -> Tensor:
    """Class probabilities softmax(model(x)) in evaluation mode, on the CPU -> (N, C).

    Args:
        model: Afterwards it is in its former mode. Inside `batch_statistics` BatchNorm uses each
            batch's own statistics.
        x: Images as bytes (N, channels, H, W), or floats as the model takes them.
        batch: Inputs per forward pass.
    """
    device = next(model.parameters()).device
    with evaluating(model):
        parts = []
        for part in x.split(batch):
            parts.append(model(as_inputs(part, device)).softmax(dim=1).cpu())
    return torch.cat(parts)


def _assemble(
    config: ModelConfig, shape: tuple[int, ...], classes: int, seed: int, device: str = "cpu"
) -> Model:
    _check(config, shape, classes)
    with torch.random.fork_rng(devices=[]), torch.device(device):
        # torch.manual_seed would also seed the GPUs, and the fork above does not restore those.
        torch.default_generator.manual_seed(seed)
        encoder, width = _ENCODERS.get(config.name, _added)(config, shape)
        return Model(
            encoder,
            nn.Linear(width, classes),
            pretrained=config.weights != "none",
            repeat=config.name in LAST and shape[0] == 1,
        )


def _check(config: ModelConfig, shape: tuple[int, ...], classes: int) -> None:
    """Refuse settings from which no network can be built."""
    name = config.name
    if classes < 2:
        raise ModelError(f"There are {classes} classes; a classifier needs 2 or more.")
    if config.sizes and name in _ENCODERS and name != "mlp":
        raise ModelError(
            f"model.sizes is '{config.sizes}', but {name} has fixed sizes; leave it empty "
            "or set model.name to mlp."
        )
    if config.weights != "none" and name not in LAST:
        raise ModelError(
            f"model.weights is '{config.weights}', but {name} has no pretrained weights; "
            f"set model.weights to none or model.name to one of {', '.join(LAST)}."
        )
    if name in ("mlp", "identity") or name not in _ENCODERS:
        return
    if len(shape) != 3:
        raise ModelError(
            f"{name} takes images of shape (channels, height, width), but the inputs have shape "
            f"{shape}; set model.name to mlp for vectors."
        )
    if name in LAST and shape[0] not in (1, 3):
        raise ModelError(
            f"{name} takes images of 1 or 3 channels, but these have {shape[0]}; "
            "set input.channels to 3."
        )
    smallest = _SMALLEST.get(name, 1)
    if min(shape[1:]) < smallest:
        raise ModelError(
            f"{name} needs images of at least {smallest} x {smallest} pixels, but these are "
            f"{shape[1]} x {shape[2]}; set input.size to {smallest} or more."
        )


def _digit_cnn(config: ModelConfig, shape: tuple[int, ...]) -> tuple[nn.Module, int]:
    """KD3A, Table 4. Padded convolutions keep the size; each of the two poolings halves it."""
    channels, height, width = shape
    encoder = nn.Sequential(
        *(nn.Conv2d(channels, 64, 5, padding=2), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 64, 5, padding=2), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(64, 128, 5, padding=2), nn.BatchNorm2d(128), nn.ReLU()),
        nn.Flatten(),
    )
    return encoder, 128 * (height // 4) * (width // 4)


def _lenet(config: ModelConfig, shape: tuple[int, ...]) -> tuple[nn.Module, int]:
    """FRUDA, F.0.2: unpadded convolutions of 20 and 50 channels, each pooled, then 500 units."""
    channels, height, width = shape
    sides = [((side - 4) // 2 - 4) // 2 for side in (height, width)]
    encoder = nn.Sequential(
        *(nn.Conv2d(channels, 20, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(20, 50, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Linear(50 * sides[0] * sides[1], 500), nn.ReLU()),
    )
    return encoder, 500


def _mlp(config: ModelConfig, shape: tuple[int, ...]) -> tuple[nn.Module, int]:
    """Linear, BatchNorm and ReLU per hidden layer; some methods need the BatchNorm."""
    try:
        sizes = [int(size) for size in config.sizes.split(",")]
    except ValueError:
        sizes = []
    if not sizes or min(sizes) < 1 or max(sizes) > _WIDEST:
        raise ModelError(
            f"model.sizes is '{config.sizes}', but mlp needs the sizes of its hidden layers; "
            "set it to, for example, 1000,500,100."
        )
    layers: list[nn.Module] = [nn.Flatten()]
    for before, size in zip([math.prod(shape), *sizes[:-1]], sizes, strict=True):
        layers += [nn.Linear(before, size), nn.BatchNorm1d(size), nn.ReLU()]
    return nn.Sequential(*layers), sizes[-1]


def _identity(config: ModelConfig, shape: tuple[int, ...]) -> tuple[nn.Module, int]:
    """No encoder: the inputs are the features."""
    return nn.Flatten(), math.prod(shape)


def _torchvision(config: ModelConfig, shape: tuple[int, ...]) -> tuple[nn.Module, int]:
    """Everything before the last linear layer of a torchvision network."""
    # Here, as it takes as long to import as torch itself, and most networks need none of it.
    from torchvision.models import get_model

    encoder = get_model(config.name, weights=None)
    last = encoder.get_submodule(LAST[config.name])
    assert isinstance(last, nn.Linear)
    parent, _, name = LAST[config.name].rpartition(".")
    setattr(encoder.get_submodule(parent), name, nn.Identity())
    return encoder, last.in_features


def _added(config: ModelConfig, shape: tuple[int, ...]) -> tuple[nn.Module, int]:
    """Build an encoder of another package and check it on an input of this shape.

    Raises:
        ModelError: it is not installed on this machine, does not take these inputs, or gives
            another number of features than it says.
    """
    added = plugins.installed("models").get(config.name)
    if added is None:
        raise ModelError(
            f"The network '{config.name}' is not installed on this machine; install the package "
            f"that adds it, or set model.name to one of {', '.join([*_ENCODERS])}."
            f"{plugins.why_not('models', config.name)}"
        )
    called = f"The network {config.name} of {added.origin}"
    try:
        encoder, width = added.value(config, shape)
        with evaluating(encoder), torch.no_grad():
            given = tuple(encoder(torch.zeros(2, *shape)).shape)
    except FeddaError:
        raise
    except Exception as error:  # another package's code, on any shape of data
        why = " ".join(str(error).split())[:200]
        raise ModelError(
            f"{called} does not take inputs of shape {shape} ({type(error).__name__}: {why}); "
            "choose another network, or other settings of model and input."
        ) from error
    if given != (2, width):
        raise ModelError(
            f"{called} says that it gives {width} features per input, but for two inputs it gives "
            f"an array of shape {given}; correct the package."
        )
    return encoder, width


_ENCODERS: dict[str, Callable[[ModelConfig, tuple[int, ...]], tuple[nn.Module, int]]] = {
    "digit-cnn": _digit_cnn,
    "lenet": _lenet,
    "mlp": _mlp,
    "identity": _identity,
    **dict.fromkeys(LAST, _torchvision),
}
