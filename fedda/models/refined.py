"""A refined model: several members, and on their mean prediction a Gaussian for each class.

    x             (N, ...)  inputs of the members, all of one network
    log p         (N, C)    log of the mean of the members' class probabilities, by weights
    features      (N, D)    the inputs themselves, or the last member's features
    logits        (N, C)    of `fedda.maths.refine`

It is a `Model` like all others: its encoder gives (log p, features), its head the logits. So it is
saved, loaded, exported and asked like them. Its extension, `refine`, belongs to no method.
"""

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Literal

import torch
from torch import Tensor, nn

from fedda.config import ModelConfig
from fedda.errors import ModelError
from fedda.maths.refine import LEAST_P, Gaussians, Space, logits

from .extension import EXTENDERS, Extension
from .networks import Model, blank

REFINE = "refine"
MOST_MEMBERS = 8

Of = Literal["inputs", "features"]


class Members(nn.Module):
    """Several models of one network -> (log p, features) as one row, (N, C + D)."""

    weights: Tensor

    def __init__(self, models: Sequence[Model], of: Of) -> None:
        super().__init__()
        self.models = nn.ModuleList(models)
        self.of = of
        self.register_buffer("weights", torch.full((len(models),), 1 / len(models)))

    @property
    def members(self) -> list[Model]:
        """The models."""
        return [m for m in self.models if isinstance(m, Model)]

    def forward(self, x: Tensor) -> Tensor:
        said, features = [], x.flatten(start_dim=1)
        for model in self.members:
            z = model.encoder(x)
            said.append(model.head(z).float().log_softmax(dim=1))
            if self.of == "features":
                features = z.float()  # the last member's, in the end
        log_p = (torch.stack(said) + self.weights.log()[:, None, None]).logsumexp(dim=0)
        return torch.cat([log_p, features], dim=1)


class GaussianHead(nn.Module):
    """What `fedda.maths.refine` has found, as a layer: (log p, features) -> logits (N, C)."""

    mean: Tensor
    scale: Tensor
    centre: Tensor
    axes: Tensor
    means: Tensor
    root: Tensor
    offset: Tensor

    def __init__(self, classes: int, features: int, components: int, w: float) -> None:
        super().__init__()
        self.in_features, self.out_features = classes + features, classes
        self.w = w
        shapes = {
            "mean": (features,),
            "scale": (features,),
            "centre": (features,),
            "axes": (features, components),
            "means": (classes, components),
            "root": (components, components),
            "offset": (classes,),
        }
        for name, shape in shapes.items():
            self.register_buffer(name, torch.zeros(shape))

    def forward(self, rows: Tensor) -> Tensor:
        log_p, x = rows.split([self.out_features, self.in_features - self.out_features], dim=1)
        space = Space(self.mean, self.scale, self.centre, self.axes)
        log_p = log_p.clamp_min(math.log(LEAST_P))
        return logits(space(x), log_p, self.means, self.root, self.offset, self.w)


def extend(model: Model, settings: Mapping[str, Any]) -> None:
    """Turn a model into a refined one, to be filled.

    Args:
        model: a network as the run's.
        settings: `members`, each one's extension or None; `of`, what the Gaussians are of; `width`
            and `components`, D and d; `w`, what log p counts.
    """
    added = [None if e is None else Extension(**e) for e in settings["members"]]
    if not 1 <= len(added) <= MOST_MEMBERS or any(e and e.method == REFINE for e in added):
        raise ModelError(f"A refined model has 1 to {MOST_MEMBERS} members, none of them refined.")
    members = [copy.deepcopy(model) for _ in added]
    for member, extension in zip(members, added, strict=True):
        if extension is not None:
            extension.add_to(member)
    width, of = int(settings["width"]), settings["of"]
    C, d, w = model.head.out_features, int(settings["components"]), float(settings["w"])
    model.encoder = Members(members, of)
    model.head = GaussianHead(C, width, d, w)  # type: ignore[assignment]


EXTENDERS[REFINE] = extend


def join(
    members: Sequence[Model],
    weights: Tensor,
    config: ModelConfig,
    shape: tuple[int, ...],
    of: Of,
    space: Space,
    found: Gaussians,
) -> Model:
    """Make the refined model of members and of what was found for them, on the CPU.

    Args:
        members: models of one network; they may have layers of their methods.
        weights: how much the prediction of each counts; they sum to 1.
        config: the network.
        shape: of one input.
        of: what the Gaussians are of.
        space: how features become points.
        found: the Gaussians of these points.
    """
    D, d = space.axes.shape
    settings = {
        "members": [m.extension and asdict(m.extension) for m in members],
        "of": of,
        "width": D,
        "components": d,
        "w": found.w,
    }
    made = blank(config, shape, len(found.offset), Extension(REFINE, settings))
    for copied, member in zip(members_of(made), members, strict=True):
        copied.load_state_dict(member.state_dict())
    made.encoder.get_buffer("weights").copy_(weights)
    held = {**asdict(space), **asdict(found)}
    made.head.load_state_dict({name: held[name] for name, _ in made.head.named_buffers()})
    return made.attach(members[-1].backbone).eval()


def members_of(model: Model) -> list[Model]:
    """The members of a refined model."""
    assert isinstance(model.encoder, Members)
    return model.encoder.members
