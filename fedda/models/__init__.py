"""Classification models: an encoder and a linear head, built by name, and methods' own layers.

build(config, shape, classes, seed, extension)   a new model, pretrained where settings say so
blank(config, shape, classes, extension)         the same without weights, to be filled later
Extension                                        the layers that a method adds to a model
backbone(config, shape)     the part that stays as pretrained, if there is one
inputs(input, model)                             the shape of images that the weights were made for
Arithmetic, layout_of       in which precision and layout a model trains, and whether compiled
to_arrays, load_arrays      a model's state as numpy arrays and back, for the wire
save, load, describe        a finished model as a safetensors file that explains itself
predict(model, x, batch)    class probabilities
batchnorms, batch_statistics, inputs_of, own_statistics   tools for work on BatchNorm layers
refined                     several models, and Gaussians of a target's images, as one model
weight_normed(model)        a head that trains with weight normalisation
"""

from . import refined  # its layers are known by name, as those of methods are
from .arithmetic import (
    Arithmetic,
    BatchNorm,
    batch_statistics,
    batchnorms,
    evaluating,
    inputs_of,
    own_statistics,
)
from .backbone import Backbone, backbone, digest
from .extension import Extension
from .networks import (
    Model,
    as_inputs,
    blank,
    build,
    layout_of,
    load_arrays,
    parameter_count,
    predict,
    to_arrays,
    to_device,
)
from .ready import has_weights, inputs
from .saved import Meta, describe, load, save
from .weight_norm import weight_normed
from .weights import is_file

__all__ = [
    "Arithmetic",
    "Backbone",
    "BatchNorm",
    "Extension",
    "Meta",
    "Model",
    "as_inputs",
    "backbone",
    "batch_statistics",
    "batchnorms",
    "blank",
    "build",
    "describe",
    "digest",
    "evaluating",
    "has_weights",
    "inputs",
    "inputs_of",
    "is_file",
    "layout_of",
    "load",
    "load_arrays",
    "own_statistics",
    "parameter_count",
    "predict",
    "refined",
    "save",
    "to_arrays",
    "to_device",
    "weight_normed",
]
