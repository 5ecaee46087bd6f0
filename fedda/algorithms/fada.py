"""FADA: dynamic attention over the sources, adversarial alignment, and disentangled features.

Peng et al., ICLR 2020, https://arxiv.org/abs/1911.02054; federated by the exchange. No code of the
authors is public. "The parent code" is that of DAL, which FADA builds on (`disentangle`).

    K                   size      sources; each has a model, and the target has one
    G, C                networks  feature extractor and classifier, averaged after every round
    DI_i                network   domain identifier of source i and the target: copies at both
    D, CI, M, R         networks  disentangler, class identifier, estimator and reconstructor of one
                                  site, which never leave it (`fedda.adversarial.disentangle`)
    theta_0, theta_i    models    at the start of a round; source i's after the round
    gain                (K,)      gap statistic before minus after source i's update at the target
    w                   (K,)      dynamic attention, softmax of the gains
    f_di, f_ds          (N, d)    domain-invariant and domain-specific part of the features

`fada.parts` chooses among the paper's three models: `attention` (I), `adversarial` (I and II) and
`all` (I, II and III).

I    After the sources have trained, the target compares k-means clusters of its features under
     theta_T and under theta_T + theta_i - theta_0, where theta_T is its own model. It reports the
     gains alone, in steps of a thousandth of the statistic before, because the server chooses the
     models and could read images from exact gains. Eq. 3 measures distances in the features' own
     unit, and features grow as a network learns; so by default the statistic is divided by their
     scatter (`fada.gain`). Then the weights hardly differ, and I is a mean. The next model is
     theta_T + sum_i w_i (theta_i - theta_0): "the target model is updated with the aggregation of
     source gradients". The paper does this in every iteration, here it is done once per round.
II   In every step DI_i learns eq. 4, and the feature extractors learn eq. 5. Each side computes its
     half on its own features, so that only sums of DI_i's gradients cross.
III  C classifies f_di, the invariant branch of D. Sources also learn to predict the class from f_ds
     (eq. 6), then D learns to deceive CI about it (eq. 7). M raises its estimate of I(f_di; f_ds),
     then D lowers it (eq. 8), and R rebuilds z from both parts. The last three move D alone (and M,
     R), as in line 12 of algorithm 1; CI is frozen in eq. 7, where the paper's text moves D alone.

The target has no class identifier, as it has no labels for one. Its disentangler learns from three
losses instead: by alignment f_di comes to look as a source's f_di does, which is what C was trained
on; reconstruction forbids D to throw away what differs, and mutual information forbids it to keep
the same in both parts, so what only the target has ends in f_ds. All disentanglers begin equal. The
paper does not say how the target's learns, nor whether it is averaged (`fada.disentanglers`).

Where the paper leaves a choice there is a setting. Differences without one: DI has ReLU where
tables 6 to 8 have LeakyReLU, and one logit in place of two; table 7's DI has 64 inputs, as if it
saw both parts, and here the 32 of f_di.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from pydantic import Field

from fedda.adversarial.discriminators import (
    DiscriminatorConfig,
    Half,
    called_source,
    called_target,
)
from fedda.adversarial.disentangle import Layers, extend
from fedda.algorithms import fdann, fedavg
from fedda.config.sections import Scalar, Section
from fedda.maths.gap import Unit
from fedda.maths.schedule import Growth, growth
from fedda.methods import Hop, Method, Phase
from fedda.wire import MODEL, SECONDS, STEPS, Number, Part, Role, Rule
from fedda.wire.packing import Kind

Parts = Literal["attention", "adversarial", "all"]


class LossWeights(Section):
    """Weights of the losses beside the cross entropy on labels; the paper gives none."""

    alignment: float = Field(default=0.01, ge=0, le=100, description="weight of eq. 5")
    schedule: Growth = Field(
        default="ganin", description="ganin: fada.weights.alignment grows from 0; constant"
    )
    confusion: float = Field(default=1.0, ge=0, le=100, description="weight of eq. 7")
    information: float = Field(default=0.0001, ge=0, le=100, description="weight of eq. 8 in D")
    reconstruction: float = Field(default=0.01, ge=0, le=100, description="weight of R's loss")

    def alignment_at(self, q: float) -> float:
        """The weight of eq. 5 when a share q of the training is over -> float."""
        return self.alignment * growth(q, self.schedule)


class Config(Section):
    """FADA's settings."""

    parts: Parts = "all"
    """the paper's models: attention (I), adversarial (II, with I), all (III)"""
    weighting: Literal["attention", "examples", "uniform"] = "attention"
    """weights of sources: eq. 3, or without attention by examples, or equal"""
    gain: Unit = "share"
    """gap statistic as a share of the features' scatter, whose weights hardly differ, so that it is
    a mean and no attention; or the sum that eq. 3 prints, which calls features tight that are
    small: the source whose features grow least has the largest weight"""
    gain_images: int = Field(default=1000, ge=0, le=1_000_000)
    """eq. 3 is measured on so many of the target's images, the same ones in every round (rounded up
    to whole blocks of the site's); 0: all of the round's"""
    discriminator: DiscriminatorConfig = DiscriminatorConfig(sizes="256")
    disentanglers: Literal["stay", "mean"] = "stay"
    """stay: no part of D leaves its site; mean: the branch of f_di is sent and averaged with G and
    C"""
    layers: Layers = Layers()
    pace: float = Field(default=0.1, gt=0, le=10)
    """learning rate of D, CI, M and R, in units of the model's new layers, on which they can
    diverge"""
    weights: LossWeights = LossWeights()
    pairs: ClassVar[bool] = True

    @property
    def bare(self) -> str:
        """What is told of models without noise on tests, and what to do; empty: nothing."""
        sums = self.gain == "sum"
        return "gains in the features' own unit; set fada.gain to share" if sums else ""

    @property
    def adapts(self) -> bool:
        """Whether the target trains: in models II and III."""
        return self.parts != "attention"

    @property
    def disentangles(self) -> bool:
        """Whether features are disentangled: in model III."""
        return self.parts == "all"

    @property
    def keeps(self) -> bool:
        """Whether each site has a disentangler of its own, which the model that is sent lacks."""
        return self.disentangles and self.disentanglers == "stay"


# Optimization: SGD; tables 6 to 8; the weights are the parent code's, as the paper gives none.
PAPER: dict[str, Scalar] = {
    "model.hidden": "",  # D and C have the layers that other methods' networks have there
    "parts": "all",
    "weighting": "attention",
    "gain": "sum",
    "disentanglers": "stay",
    "discriminator.sizes": "256",
    "discriminator.optimizer": "sgd",
    "discriminator.lr": 0.01,
    "pace": 1.0,
    "weights.alignment": 0.01,
    "weights.schedule": "constant",
    "weights.confusion": 1.0,
    "weights.information": 0.0001,
    "weights.reconstruction": 0.01,
    "layers.class-norm": True,
    "layers.dropout": 0.5,
}
PRESETS: dict[str, dict[str, Scalar]] = {
    # Table 6, digits: 8192 features of 32 x 32 pixels
    "paper": PAPER | {"layers.disentangler": "3072,2048", "layers.estimator": 512},
    # Table 7, Amazon Review: 128 features
    "paper-amazon": PAPER
    | {"layers.disentangler": "64,32", "layers.estimator": 16, "discriminator.sizes": "32"},
    # Table 8, Office-Caltech10 and DomainNet: 2048 features of ResNet101
    "paper-photos": PAPER
    | {
        "layers.disentangler": "2048,2048",
        "layers.estimator": 512,
        "layers.dropout-first": True,
    },
}


# Each side's half of DI's loss, eq. 4 = -E log DI(z_S) - E log(1 - DI(z_T)), and of the features'
# loss, eq. 5 = -E log DI(z_S) - E log DI(z_T), as functions of v: a source helps DI to know it, and
# the target learns to be called a source.
HALVES: dict[Role, Half] = {
    "source": Half(called_source, called_source),
    "target": Half(called_target, called_source),
}


def extension(options: Config) -> Mapping[str, Any] | None:
    """Model III's classifier takes f_di; D is no part of what is sent, if it stays."""
    if not options.disentangles:
        return None
    return {**options.layers.model_dump(), "whole": options.disentanglers == "mean"}


PAIRS, GROUPS = {"discriminator/*": Kind.MODEL}, frozenset({"gradient/*"})
DISENTANGLED = frozenset(
    Number(name, 0.01) for name in ("information", "reconstruction", "confusion")
)
NUMBERS = fdann.NUMBERS | DISENTANGLED
SENT = Rule(MODEL, frozenset({"steps"}), PAIRS)

# Under theta_T and under theta_T with each source's update the target clusters its features.
ATTEND: Hop = {
    "target": Part(
        Rule(MODEL | {"candidate/*": Kind.MODEL}),
        Rule(numbers=frozenset({Number("gain/*"), STEPS, SECONDS})),
        judges=True,
    )
}

METHOD = Method(
    "fada",
    "FADA",
    Config,
    (
        Phase(
            "attention",
            {"train": fedavg.TRAIN, "attend": ATTEND},
            rounds=lambda options, rounds: 0 if options.adapts else rounds,
        ),
        Phase(
            "adversarial",
            {
                "align": {
                    "source": Part(SENT, Rule(MODEL, NUMBERS), GROUPS, labels=True),
                    "target": Part(SENT, Rule(MODEL, NUMBERS, PAIRS), GROUPS),
                },
                "attend": ATTEND,
            },
            layouts=fdann.layouts,
        ),
    ),
    PRESETS,
    on_features={"weights.alignment": 1.0},  # .01 cost 1.5 points (amazon, seed 10)
    stays=lambda options: options.keeps,
    sums=lambda options: options.adapts,
    extend=extend,
    extension=extension,
    loss=fdann.reverses,  # its halves of eq. 4 are those of gradient reversal
)
