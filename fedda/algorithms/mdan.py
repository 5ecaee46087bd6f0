"""MDAN: f-DANN with one discriminator per source; the worst sources have the largest weights.

Zhao et al., NeurIPS 2018, https://arxiv.org/abs/1705.09684; federated by the exchange.

    CE, d      (K,)   cross entropy of each source j, and the loss of its discriminator,
                      d_j = -E log DI_j(z_j) - E log(1 - DI_j(z_T))
    f, w       (K,)   each source's term in the maximum, and its weight; float64
    mu, gamma  float  weight of d, and sharpness of the soft maximum

Section 4 minimises a maximum over sources of f = CE - mu min_DI d: max_j f_j (hard), or
log(sum_j exp(gamma f_j)) / gamma (soft). The gradient is sum_j w_j (grad CE_j - mu grad d_j), with
w = 1 at the largest f (hard) or w = softmax(gamma f) (soft). The authors' code reverses the
gradient of d but not its value: w is computed from f = CE + mu d, so a source that differs from the
target counts less, not more. Its hard form takes max CE and min d, perhaps of two sources; the hard
form here is the limit of the soft one.

Federated: source j trains its model on CE_j - mu times its half of d_j, and the target on
-mu sum_j w_j times its half of d_j. In the average of models, w divides the sources' share. Unlike
in one place, w comes from the last round, and DI_j is trained on d_j, not on w_j mu d_j; a source
without numbers gets the mean f of the others, and one that reports too large a loss gains weight.
"""

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from fedda.adversarial.discriminators import Deceived, Deception, DiscriminatorConfig
from fedda.algorithms import fdann, fedavg
from fedda.config.sections import Scalar
from fedda.methods import Method, Phase
from fedda.wire import MODEL, Number, Part, Rule
from fedda.wire.packing import Kind

Max = Literal["soft", "hard"]
Sign = Literal["code", "paper"]


class Config(fedavg.Config):
    """MDAN's settings, and FedAvg's for the weight of the target."""

    discriminator: DiscriminatorConfig = DiscriminatorConfig()
    max: Max = Field(default="soft", description="over sources; hard: only the worst one counts")
    sign: Sign = Field(default="code", description="of mu d in a term; code: plus, paper: minus")
    gamma: float = Field(default=10.0, gt=0, le=1000, description="sharpness of the soft maximum")
    mu: float = Field(
        default=0.01, ge=0, le=100, description="weight of d and of its reversed gradient"
    )
    loss: Deception = Field(
        default="inverted",
        description="what encoders minimise: the discriminator's loss on exchanged labels "
        "(inverted), or minus its loss (reversal)",
    )
    pairs: ClassVar[bool] = True

    @property
    def reversal(self) -> Deceived:
        return Deceived(strength=self.mu, schedule="constant", loss=self.loss)


# Settings of the authors' code for reviews, which trains everything by Adadelta, in one go: 15
# epochs of a network with layers of 1000, 500 and 100.
CODE: dict[str, Scalar] = {"max": "soft", "sign": "code", "gamma": 10.0, "mu": 0.01}
CODE |= {"loss": "reversal", "discriminator.sizes": ""}
CODE |= {"discriminator.optimizer": "adadelta", "discriminator.lr": 1.0}
CODE |= {"train.optimizer": "adadelta", "train.lr": 1.0, "train.schedule": "constant"}
CODE |= {"train.batch-size": 20, "train.carry-momentum": True}
PRESETS: dict[str, dict[str, Scalar]] = {"paper": CODE | {"sign": "paper"}, "official": CODE}


def domain_losses(CE: Tensor, d: Tensor, mu: float, sign: Sign = "code") -> Tensor:
    """Section 4: CE - mu d; in the authors' code CE + mu d -> f (K,)."""
    return CE - mu * d if sign == "paper" else CE + mu * d


def weights(f: Tensor, gamma: float, max: Max = "soft") -> Tensor:
    """Section 4, gradient of the maximum: softmax(gamma f), or 1 at the largest f -> w (K,)."""
    f = f.nan_to_num(nan=float(f.nanmean().nan_to_num()))  # an unknown f: the mean of the others
    below = f - f.max()  # so that no exponential is above 1
    e = (below > -1e-12).double() if max == "hard" else (gamma * below).exp()
    return e / e.sum()


PAIRS, GROUPS = {"discriminator/*": Kind.MODEL}, frozenset({"gradient/*"})
STEPS, OWN = frozenset({"steps"}), fdann.NUMBERS | {Number("discriminator-loss/*", 0.001)}
SENT = Rule(MODEL, STEPS, PAIRS)
SOURCE = Part(SENT, Rule(MODEL, fdann.NUMBERS), GROUPS, labels=True, needed="mean")
TARGET = Part(Rule(MODEL, STEPS | {"weight/*"}, PAIRS), Rule(MODEL, OWN, PAIRS), GROUPS)
ALIGN = Phase("align", {"align": {"source": SOURCE, "target": TARGET}}, layouts=fdann.layouts)

# On features .01 cost 1.3 points (amazon, seeds 10 and 11).
METHOD = Method(
    "mdan", "MDAN", Config, (ALIGN,), PRESETS, on_features={"mu": 1.0}, loss=fdann.reverses
)
