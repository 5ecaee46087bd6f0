"""Classification models: an encoder and a linear head, built by name.

build(config, shape, classes, seed)   a new model, pretrained where `model.weights` says so
blank(config, shape, classes)         the same network for weights that arrive later
to_arrays, load_arrays                its state as numpy arrays and back, for the wire
save, load                            a finished model as a safetensors file that explains itself
predict(model, x, batch)              class probabilities
batchnorms, batch_statistics, inputs_of   what the BatchNorm methods need
"""

from .arrays import load_arrays, to_arrays
from .files import Meta, load, save
from .mixture import Mixture
from .modes import BatchNorm, batch_statistics, batchnorms, evaluating, inputs_of
from .networks import Model, blank, build, parameter_count, predict

__all__ = [
    "BatchNorm",
    "Meta",
    "Mixture",
    "Model",
    "batch_statistics",
    "batchnorms",
    "blank",
    "build",
    "evaluating",
    "inputs_of",
    "load",
    "load_arrays",
    "parameter_count",
    "predict",
    "save",
    "to_arrays",
]
