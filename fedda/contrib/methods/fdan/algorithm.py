"""f-DAN: like f-DANN, but it lowers the multi-kernel MMD between sources and target.

Long et al., DAN, ICML 2015, https://arxiv.org/abs/1502.02791; federated by the exchange, with
random Fourier features of the kernels (`fedda.maths.fourier`).

    w        (2M,)   the witness, a discriminator linear in the Fourier features: w = mu_S - mu_T,
                     the mean embeddings of sources and target, which are its gradients
    MMD^2    float   |w|^2, with mu_S the mean over the sources
    scale    float   unit of the bandwidths: given, or the median distance of the target's features
                     when the round before ended
    phi      (2M,)   Fourier features of an image, sigma their bandwidths: `fdan.multiples` of scale
    lambda   float   weight of the distance (`fdan.reversal.strength`, growing with the training)

Encoders grow and shrink features while they learn. A scale that was measured once would soon be far
from their distances, and kernels that are too narrow or too wide have no gradient. If features and
scale grow by the same factor, the Fourier features stay the same, so the last witness still holds.

DAN penalises several layers and recomputes the kernels' weights in every step. Here only one layer
counts, the features that enter the classifier, and all kernels have the same weight.
"""

import re
from collections.abc import Mapping

from pydantic import Field, field_validator

from fedda.adversarial.discriminators import CLIPPED, Reversal
from fedda.algorithms import fdann, fedavg
from fedda.config.sections import Scalar
from fedda.methods import Method, Phase
from fedda.wire import LOSS, MODEL, SECONDS, STEPS, Number, Part, Rule
from fedda.wire.packing import Entry, Kind, Manifest


class Config(fedavg.Config):
    """f-DAN's settings, and FedAvg's for the weights of sites."""

    frequencies: int = Field(default=512, ge=1, le=65536)
    """M, random frequencies; a gradient has 2M values"""
    multiples: str = "0.25,0.5,1,2,4"
    """bandwidths of the kernels, in units of fdan.scale"""
    scale: float = Field(default=0.0, ge=0, le=1e6)
    """unit of the bandwidths; 0: the median distance of the target's features, measured after a
    first round without alignment and then in every round"""
    reversal: Reversal = Reversal()
    pairs: bool = False
    """one MMD per source, instead of one for the sources' mean"""

    @field_validator("multiples")
    @classmethod
    def _positive(cls, value: str) -> str:
        parts = value.split(",")
        if not all(re.fullmatch(r"\d+(\.\d+)?", part) and float(part) for part in parts):
            raise ValueError("it takes numbers above 0 with commas between them, such as 0.5,1,2")
        return value

    @property
    def bare(self) -> str:
        """What is told of models without noise on tests, and what to do; empty: nothing."""
        return "" if self.scale else "the median distance of features as it is; set fdan.scale"

    @property
    def bandwidths(self) -> tuple[float, ...]:
        return tuple(float(multiple) for multiple in self.multiples.split(","))


# DAN chooses its weight by cross validation and keeps it constant.
PRESETS: dict[str, dict[str, Scalar]] = {
    "paper": {"reversal.strength": 1.0, "reversal.schedule": "constant"}
}


def layouts(options: Config, model: Manifest) -> Mapping[str, Manifest]:
    """The layout of the witness: its gradients are summed, and the last sum is sent."""
    entry = Entry("w", "float32", (2 * options.frequencies,))
    return {"witness": Manifest(Kind.GRADIENT, "float32", (entry,))}


# One witness for all sources, or with `pairs` one per source, named after it.
WITNESSES = {"witness": Kind.GRADIENT, "witness/*": Kind.GRADIENT}
SENT = Rule(MODEL, frozenset({"steps", "scale"}), WITNESSES)
GROUPS = frozenset(WITNESSES)
ALIGNED = frozenset({STEPS, SECONDS, Number("mmd"), CLIPPED})
MEDIAN = Number("median")

SOURCE = Part(SENT, Rule(MODEL, ALIGNED | {LOSS}), GROUPS, labels=True, needed="mean")

METHOD = Method(
    "fdan",
    "f-DAN",
    Config,
    (
        # The target measures the median distance of its features under the sources' mean model,
        # and again at the end of every round that aligns, for the round after it.
        Phase(
            "scale",
            {
                "train": fedavg.AVERAGED,
                "measure": {
                    "target": Part(Rule(MODEL), Rule(numbers=frozenset({STEPS, SECONDS, MEDIAN})))
                },
            },
            rounds=lambda options, rounds: 0 if options.scale else 1,
        ),
        Phase(
            "align",
            {
                "align": {
                    "source": SOURCE,
                    "target": Part(SENT, Rule(MODEL, ALIGNED | {MEDIAN}, WITNESSES), GROUPS),
                }
            },
            layouts=layouts,
        ),
    ),
    PRESETS,
    on_features=fdann.ON_FEATURES,
)
