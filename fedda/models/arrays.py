"""Convert a model's state to named numpy arrays, the form that is sent, and back."""

import torch

from fedda.wire.packing import Arrays

from .networks import Model


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
