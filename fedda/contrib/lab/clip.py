"""Class probabilities of images from a network that knows pictures and words, by open_clip.

Radford et al., ICML 2021, https://arxiv.org/abs/2103.00020, section 3.1: no training, but a
sentence for each class; an image has the classes whose sentences are near it.

    t_c   (d,)   mean of the unit vectors of a class's sentences, of unit length
    v_i   (d,)   unit vector of an image
    p_ic         softmax over c of  scale v_i' t_c, with the network's own scale

Images are cropped as in fedda's runs, to the middle 7/8 of their shorter side.
"""

import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedda.data import Reading, batches
from fedda.data.optional import needed
from fedda.errors import ModelError
from fedda.models.answers import Answers
from fedda.models.networks import as_inputs
from fedda.models.ready import first_line

Sentences = Sequence[Sequence[str]]  # of each class


def zero_shot(
    network: str,
    weights: str,
    sentences: Sentences,
    data: Path,
    batch: int,
    device: torch.device,
    reading: Reading,
) -> Iterator[Answers]:
    """What such a network says of the images at a path, batch by batch.

    Raises:
        DataError: open_clip is not installed, or the images cannot be read.
        ModelError: there is no such network, or no such weights.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # else open_clip would fetch what is not here
    open_clip = needed("open_clip", "clip", "A teacher that knows pictures and words")
    if network not in open_clip.list_models():
        raise ModelError(
            f"open_clip has no network '{network}'; give --network as open_clip.list_models() has "
            "it, such as ViT-B-32."
        )
    try:
        model = open_clip.create_model(network, weights, device=device, require_pretrained=True)
    except Exception as error:  # files, caches and networks each raise their own
        raise ModelError(
            f"The weights '{weights}' of {network} cannot be loaded ({first_line(error)}); give "
            "--weights a file that lies here, or fetch them once with HF_HUB_OFFLINE=0 in the "
            "environment."
        ) from error
    asked = open_clip.get_model_preprocess_cfg(model)
    mean, std = (torch.tensor(asked[k], device=device).view(3, 1, 1) for k in ("mean", "std"))
    t = _texts(model.eval(), open_clip.get_tokenizer(network), sentences, device)
    shape = (3, *asked["size"])
    for some in batches(data, shape, batch, "crop", reading):
        with torch.inference_mode():
            x = (as_inputs(some.examples.x, device) - mean) / std
            v = F.normalize(model.encode_image(x), dim=-1)
            p = (model.logit_scale.exp() * v @ t.T).softmax(dim=1)
        yield Answers(some.names, p.float().cpu(), some.keys)


@torch.inference_mode()
def _texts(model: Any, tokenizer: Any, sentences: Sentences, device: torch.device) -> Tensor:
    """T -> (C, d)."""
    means = []
    for of_class in sentences:
        z = F.normalize(model.encode_text(tokenizer(list(of_class)).to(device)), dim=-1)
        means.append(F.normalize(z.mean(dim=0), dim=-1))
    return torch.stack(means)
