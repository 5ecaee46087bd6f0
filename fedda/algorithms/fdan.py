"""f-DAN: as f-DANN, but sources and target are brought together in multi-kernel MMD.

Long et al., DAN, ICML 2015, https://arxiv.org/abs/1502.02791; federated by the exchange, with
random Fourier features of the kernels (`fedda.maths.fourier`).

    w        (2M,)   the discriminator: linear in the Fourier features, mu_S - mu_T by its gradients
    MMD^2    float   |w|^2, with mu_S the mean over the sources
    scale    float   of the bandwidths: given, or the median distance of the target's features

DAN penalises several layers, and chooses the kernels' weights anew in every step. Here there is one
layer, the features that enter the classifier, and the kernels count alike.
"""

import re
from collections.abc import Mapping

from pydantic import Field, field_validator

from fedda.adversarial.discriminators import Reversal
from fedda.algorithms import fedavg
from fedda.config import Scalar
from fedda.methods import Method, Phase
from fedda.wire import MODEL, Entry, Kind, Manifest, Part, Rule


class Config(fedavg.Config):
    """f-DAN's choices beside how sites are weighed."""

    frequencies: int = Field(
        default=512, ge=1, le=65536, description="M; a gradient has twice as many values"
    )
    multiples: str = Field(
        default="0.25,0.5,1,2,4",
        description="bandwidths of the kernels, in units of the scale",
    )
    scale: float = Field(
        default=0.0,
        ge=0,
        description="of the bandwidths; 0: the median distance of the target's features after a "
        "first round without alignment",
    )
    reversal: Reversal = Reversal()
    pairs: bool = Field(
        default=False, description="an MMD per source and the target, not one of all sources' mean"
    )

    @field_validator("multiples")
    @classmethod
    def _positive(cls, value: str) -> str:
        parts = value.split(",")
        if not all(re.fullmatch(r"\d+(\.\d+)?", part) and float(part) for part in parts):
            raise ValueError("it takes numbers above 0 with commas between them, such as 0.5,1,2")
        return value

    @property
    def bandwidths(self) -> tuple[float, ...]:
        return tuple(float(multiple) for multiple in self.multiples.split(","))


# DAN's weight is chosen by cross validation and does not grow.
PRESETS: dict[str, dict[str, Scalar]] = {
    "paper": {"reversal.strength": 1.0, "reversal.schedule": "constant"}
}


def layouts(options: Config, model: Manifest) -> Mapping[str, Manifest]:
    """The witness, whose gradients, mean embeddings, are summed; it travels as their last sum."""
    entry = Entry("w", "float32", (2 * options.frequencies,))
    return {"witness": Manifest(Kind.GRADIENT, "float32", (entry,))}


# One for all, or per pair one named after the source.
WITNESSES = {"witness": Kind.GRADIENT, "witness/*": Kind.GRADIENT}
SENT = Rule(MODEL, frozenset({"steps", "scale"}), WITNESSES)
GROUPS = frozenset(WITNESSES)
ALIGNED = frozenset({"steps", "seconds", "mmd"})

METHOD = Method(
    "fdan",
    "f-DAN",
    Config,
    (
        # Under the mean of the sources' models the target finds the median of its distances.
        Phase(
            "scale",
            {
                "train": fedavg.TRAIN,
                "measure": {
                    "target": Part(
                        Rule(MODEL), Rule(numbers=frozenset({"steps", "seconds", "median"}))
                    )
                },
            },
            rounds=lambda options, rounds: 0 if options.scale else 1,
        ),
        Phase(
            "align",
            {
                "align": {
                    "source": Part(SENT, Rule(MODEL, ALIGNED | {"loss"}), GROUPS, labels=True),
                    "target": Part(SENT, Rule(MODEL, ALIGNED, WITNESSES), GROUPS),
                }
            },
            layouts=layouts,
        ),
    ),
    PRESETS,
)
