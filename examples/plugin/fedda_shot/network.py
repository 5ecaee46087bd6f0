"""small-cnn: two convolutions, each of which halves the image."""

from torch import nn

from fedda.config import ModelConfig

WIDTHS = (16, 32)


def build(config: ModelConfig, shape: tuple[int, ...]) -> tuple[nn.Module, int]:
    """Convolution, BatchNorm, ReLU and pooling per width, then the mean of each quarter."""
    layers: list[nn.Module] = []
    for before, width in zip([shape[0], *WIDTHS], WIDTHS, strict=False):
        layers += [nn.Conv2d(before, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        layers += [nn.MaxPool2d(2, ceil_mode=True)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(2), nn.Flatten()), 4 * WIDTHS[-1]
