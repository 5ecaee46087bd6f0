"""A run's model: an encoder and a linear head, built by name.

x   (N, channels, H, W) images or (N, D) vectors, float in [0, 1]
z   (N, d) features, z = encoder(x)
    (N, C) logits, head(z)

The encoder is a small network (`encoders`), or one that has pretrained weights (`ready`). Hidden
layers follow if `model.hidden` says so, as in KD3A's code, and a bottleneck if `model.bottleneck`
does: linear and BatchNorm, as in Liang et al., SHOT, ICML 2020.
What `model.train` freezes is no part of the model (`backbone`).
"""

import math
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from fedda.config import NETWORKS, NEW_LAYERS, PRETRAINED, TIMM, Layout, ModelConfig
from fedda.errors import ModelError
from fedda.train import seed_for
from fedda.wire.packing import Arrays

from .arithmetic import Arithmetic, evaluating
from .backbone import Backbone, Normalise, outputs
from .encoders import encoder as small
from .encoders import hidden
from .extension import Extension
from .ready import cut, has_weights, ready
from .weights import fill

# An image smaller than this has no pixel left at the end of the network.
_SMALLEST = {"digit-cnn": 4, "lenet": 16, "alexnet": 63}

NEW = ("head.", "encoder.hidden.", "encoder.bottleneck.")  # never pretrained
EXACT = 2_000_000  # pixels of a step, from which on torch's sums are too coarse: `layout_of`


class Model(nn.Module):
    """An encoder and a linear head; names in the state_dict start with `encoder.` or `head.`.

    A method may replace both by other layers, or add layers under names of its own.

    Attributes:
        extension: the layers that a method added; None if none did.
        fresh: names of the parameters that do not come from pretrained weights.
        arithmetic: how the encoder computes while it trains.
    """

    def __init__(
        self,
        encoder: nn.Module,
        head: nn.Linear,
        normalise: Normalise | None = None,
        pretrained: bool = False,
    ) -> None:
        """Join the two halves.

        Args:
            encoder: From inputs to features (N, d).
            head: From features to logits (N, C).
            normalise: What brings images to the form that the encoder expects, if it needs any.
            pretrained: The encoder's network starts from pretrained weights.
        """
        super().__init__()
        self.encoder = encoder
        self.head = head
        self.normalise = normalise
        self.pretrained = pretrained
        self.extension: Extension | None = None
        names = [name for name, _ in self.named_parameters()]
        self.fresh = frozenset(n for n in names if n.startswith(NEW))
        self.arithmetic = Arithmetic()  # `_assemble` gives it the network's layout
        self._frozen: tuple[Backbone, ...] = ()  # in a tuple, torch does not count it as a part

    @property
    def width(self) -> int:
        """The number of features d."""
        return self.head.in_features

    @property
    def backbone(self) -> Backbone | None:
        """The frozen part, which the model needs only for images; None if there is none."""
        return self._frozen[0] if self._frozen else None

    def attach(self, backbone: Backbone | None) -> Self:
        """Let the model take images, too, and not only a frozen part's outputs for them."""
        self._frozen = () if backbone is None else (backbone,)
        return self

    def features(self, x: Tensor) -> Tensor:
        """Features, z = encoder(x), the input of the head -> (N, d).

        Args:
            x: Inputs of the encoder, or images, if the model's frozen part is attached.
        """
        if self._frozen and tuple(x.shape[1:]) == self._frozen[0].shape:
            x = self._frozen[0](x)
        if self.normalise is not None:
            x = self.normalise(x)
        return self.arithmetic(self.encoder, x)

    def compute(self, arithmetic: Arithmetic) -> None:
        """Compute in another precision, in another layout, or compiled."""
        self.arithmetic = arithmetic
        arithmetic.prepare(self.encoder)

    def forward(self, x: Tensor) -> Tensor:
        """Logits, head(encoder(x)) -> (N, C)."""
        return self.head(self.features(x))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move the frozen part along, as `to` does with all others."""
        for part in self._frozen:
            part._apply(fn, recurse)
        return super()._apply(fn, recurse)

    def groups(self, lr: float) -> list[dict[str, Any]]:
        """Parameter groups of an optimizer, with the learning rate of each.

        In a pretrained model, parameters that start from random values have ten times the learning
        rate, as in FADA. Parameters that a layer names in its `undecayed` have no weight decay.
        """
        plain = [getattr(m, n) for m in self.modules() for n in getattr(m, "undecayed", ())]
        apart = [{"params": plain, "lr": lr, "weight_decay": 0.0}] if plain else []
        ids = {id(p) for p in plain}
        named = [(name, p) for name, p in self.named_parameters() if id(p) not in ids]
        if not self.pretrained:
            return [{"params": [p for _, p in named], "lr": lr}, *apart]
        return [
            {"params": [p for name, p in named if name not in self.fresh], "lr": lr},
            {"params": [p for name, p in named if name in self.fresh], "lr": NEW_LAYERS * lr},
            *apart,
        ]

    def extend(self, extension: Extension, seed: int, device: str = "cpu") -> None:
        """Let a method add its layers; their random values depend on the seed alone."""
        pretrained = {id(p) for name, p in self.named_parameters() if name not in self.fresh}
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
    fetch: bool = True,
) -> Model:
    """Make a new model on the CPU; its weights depend on the seed and on no global generator.

    Args:
        config: Which network, and where pretrained weights come from.
        shape: Of one input, (channels, H, W) or (D,).
        classes: Number of outputs C.
        seed: Seed of the weights that are not pretrained.
        extension: The layers that a method adds, or None.
        fetch: Whether pretrained weights are downloaded if this machine has no copy.
    """
    weights = config.weights != "none"
    return _assemble(config, shape, classes, extension, seed, weights=weights, fetch=fetch)


def blank(
    config: ModelConfig,
    shape: tuple[int, ...],
    classes: int,
    extension: Extension | None = None,
    device: str = "cpu",
    seed: int = 0,
) -> Model:
    """Make the model of `build` without reading weights, to be filled from a file or a server.

    It normalises inputs as the pretrained network does, so a site needs no pretrained file. On the
    device `meta` it has shapes only, and takes no memory. What the seed draws is the same as of
    `build`, but for the pretrained layers.
    """
    return _assemble(config, shape, classes, extension, seed, device)


def layout_of(config: ModelConfig, asked: Layout = "auto", pixels: int = 0) -> Layout:
    """The layout of a network's images, if `auto` is asked: the one that is faster, where it works.

    The networks of fedda and torchvision are channels-last; those of timm only on a processor, as
    a DenseNet took a quarter longer on a GPU. In other packages' networks, a `view` of what a
    convolution gives is common, and fails where channels are last.

    Args:
        config: the network.
        asked: the setting `train.layout`.
        pixels: of all images of a training step on a processor, where torch's BatchNorm adds them
            up one by one if channels are last. Its standard deviation is off by up to 0.4 % with
            2 million, as much as bfloat16 rounds, and by 2 % with 16 million; channels-first by
            1e-7. 0: of a model that does not train on a processor.
    """
    if asked != "auto":
        return asked
    if pixels > EXACT:
        return "channels-first"
    if config.name in NETWORKS or config.name in PRETRAINED:
        return "channels-last"
    return "auto" if has_weights(config.name) else "channels-first"


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
    config: ModelConfig,
    shape: tuple[int, ...],
    classes: int,
    extension: Extension | None,
    seed: int,
    device: str = "cpu",
    weights: bool = False,
    fetch: bool = True,
) -> Model:
    _check(config, shape, classes)
    with torch.random.fork_rng(devices=[]), torch.device(device):
        # torch.manual_seed would also seed the GPUs, and the fork above does not restore those.
        torch.default_generator.manual_seed(seed)
        network, width, normalise = _network(config, shape, weights, fetch)
        widths = () if config.name == "mlp" else config.widths  # the mlp has them already
        encoder = network
        if widths or config.bottleneck or config.freezes:
            encoder = nn.Sequential(OrderedDict(network=network))
        if widths:
            encoder.add_module("hidden", hidden(width, widths, config.dropout))
            width = widths[-1]
        if config.bottleneck:
            encoder.add_module("bottleneck", _bottleneck(config, width))
            width = config.bottleneck
        head = nn.Linear(width, classes)
        pretrained = config.weights != "none" and config.train != "bottleneck"
        model = Model(encoder, head, normalise, pretrained)
        model.arithmetic = Arithmetic(layout=layout_of(config)).suit(encoder)
    if weights and not config.freezes:
        own = not (config.hidden or config.bottleneck)  # then the head may be pretrained, too
        fill(network, head if own else None, config, shape[1:], fetch)
    if config.norm == "group":
        group_norms(model)
    if extension is not None:
        model.extend(extension, seed, device)
    return model


def group_norms(module: nn.Module) -> None:
    """Put GroupNorm in place of each BatchNorm, with its scale and shift, in 32 groups at most.

    Wu and He, ECCV 2018: each example is normalised by itself. A vector's features are one group,
    which is LayerNorm; torch's GroupNorm refuses a batch of a single vector.
    """
    for name, child in module.named_children():
        if isinstance(child, (nn.BatchNorm1d, nn.BatchNorm2d)):
            channels = child.num_features
            device = None if child.weight is None else child.weight.device
            norm: nn.GroupNorm | nn.LayerNorm
            if isinstance(child, nn.BatchNorm1d):
                norm = nn.LayerNorm(channels, child.eps, child.affine, device=device)
            else:
                groups = math.gcd(32, channels)
                norm = nn.GroupNorm(groups, channels, child.eps, child.affine, device)
            if child.affine:
                norm.weight, norm.bias = child.weight, child.bias
            setattr(module, name, norm)
        else:
            group_norms(child)


def _network(
    config: ModelConfig, shape: tuple[int, ...], weights: bool, fetch: bool
) -> tuple[nn.Module, int, Normalise | None]:
    """The part of the network that learns, its number of features, and what comes before it."""
    if not has_weights(config.name):
        return *small(config, shape), None
    if config.train == "bottleneck":
        return nn.Flatten(), math.prod(outputs(config, shape)), None
    made = ready(config.name, shape[1:])
    if config.freezes:
        if weights:
            fill(made.network, None, config, shape[1:], fetch)
        return cut(config.name, made.network)[1], made.width, None
    repeat = shape[0] == 1
    if config.weights != "none":
        return made.network, made.width, Normalise(made.mean, made.std, repeat)
    return made.network, made.width, Normalise((0.0,) * 3, (1.0,) * 3, True) if repeat else None


def _bottleneck(config: ModelConfig, width: int) -> nn.Module:
    """SHOT's bottleneck: linear, BatchNorm, and dropout if there is any."""
    units = config.bottleneck
    layers: dict[str, nn.Module] = {
        "linear": nn.Linear(width, units),
        "norm": nn.BatchNorm1d(units),
    }
    if config.dropout:
        layers["dropout"] = nn.Dropout(config.dropout)
    return nn.Sequential(OrderedDict(layers))


def _check(config: ModelConfig, shape: tuple[int, ...], classes: int) -> None:
    """Refuse settings from which no network can be built."""
    name = config.name
    if classes < 2:
        raise ModelError(f"A classifier needs 2 classes or more, not {classes}.")
    if config.weights != "none" and not has_weights(name):
        raise ModelError(
            f"model.weights is '{config.weights}', but {name} has no pretrained weights; "
            f"set model.weights to none or model.name to {TIMM}NAME or one of "
            f"{', '.join(PRETRAINED)}."
        )
    if config.freezes and config.weights == "none":
        raise ModelError(
            f"model.train is {config.train}, so the rest of {name} would keep random weights; set "
            "model.weights, or set model.train to all."
        )
    if name in ("mlp", "identity") or not (name in NETWORKS or has_weights(name)):
        return
    if len(shape) != 3:
        raise ModelError(
            f"{name} takes images of shape (channels, height, width), but the inputs have shape "
            f"{shape}; set model.name to mlp for vectors."
        )
    if has_weights(name) and shape[0] not in (1, 3):
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


def to_arrays(model: Model) -> Arrays:
    """Parameters and buffers; on the CPU they are views: pack them before training goes on."""
    return {name: t.detach().cpu().numpy() for name, t in model.state_dict().items()}


@torch.no_grad()
def load_arrays(model: Model, arrays: Arrays) -> None:
    """Copy arrays of the same names and shapes into the model, on any device."""
    for name, tensor in model.state_dict().items():
        if tensor.device.type == "cpu":
            tensor.numpy()[...] = arrays[name]
        else:
            tensor.copy_(torch.tensor(arrays[name]))
