"""MDAN: f-DANN with a discriminator per source, where the sources that do worst count most.

Zhao et al., NeurIPS 2018, https://arxiv.org/abs/1705.09684; federated by the exchange.

    CE, d     (K,)   cross entropy of each source, and -E log DI_j(z_j) - E log(1 - DI_j(z_T))
    f, w      (K,)   each source's term in the maximum, and its weight; float64
    gamma, mu float  sharpness of the soft maximum; weight of d and of its reversed gradient

The bound of section 3 adds to a source's error 1 - min over DI_j of DI_j's two errors. So section 4
minimises max_j f_j (hard) or log(sum_j exp(gamma f_j)) / gamma (soft) of f = CE - mu min_DI d, by
sum_j w_j (grad CE_j - mu grad d_j), w = 1 at the largest f or softmax(gamma f). The authors' code
reverses d's gradient but not its value: the same sum, w by f = CE + mu d, so that to be told apart
counts less, not more. Its hard form, max CE + mu min d, may mix two sources; ours is soft's limit.

Federated: source j trains its model on CE_j - mu times its half of d_j, the target on -mu sum_j w_j
times its half. In the mean w divides what all sources count in f-DANN. Unlike in one place w is of
the last round, each site moves its own model within a round, and DI_j learns d_j, not w_j mu d_j.
A source without numbers of the last round, in the first or after an absence, has the others' mean f
(if none has any, all count alike). Nobody can check a loss: who overstates it gains weight.
"""

from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor

from fedda.adversarial.discriminators import Network, Reversal
from fedda.algorithms import fdann, fedavg
from fedda.methods import Method, Phase
from fedda.wire import MODEL, Kind, Part, Rule

Max = Literal["soft", "hard"]
Sign = Literal["code", "paper"]


class Config(fedavg.Config):
    """MDAN's choices beside how much the target counts."""

    discriminator: Network = Network()
    max: Max = Field(default="soft", description="over sources; hard: only the worst one counts")
    sign: Sign = Field(default="code", description="of mu d in a source's term: code +, paper -")
    gamma: float = Field(default=10.0, gt=0, description="of the soft maximum; large: nearly hard")
    mu: float = Field(default=0.01, ge=0, description="weight of d and of its reversed gradient")
    pairs: ClassVar[bool] = True

    @property
    def reversal(self) -> Reversal:
        return Reversal(strength=self.mu, schedule="constant")


# The authors' code, which moves everything by Adadelta.
CODE = {"max": "soft", "sign": "code", "gamma": 10.0, "mu": 0.01, "discriminator.sizes": ""}
PRESETS = {"paper": CODE | {"sign": "paper"}, "official": CODE}


def domain_losses(CE: Tensor, d: Tensor, mu: float, sign: Sign = "code") -> Tensor:
    """Section 4: CE - mu d, in the code CE + mu d -> f (K,)."""
    return CE - mu * d if sign == "paper" else CE + mu * d


def weights(f: Tensor, gamma: float, max: Max = "soft") -> Tensor:
    """Section 4, the maximum's gradient: softmax(gamma f), or 1 at the largest f -> w (K,)."""
    f = f.nan_to_num(nan=float(f.nanmean().nan_to_num()))  # not known: the mean of the others
    below = f - f.max()  # so that no exponential is above 1
    e = (below > -1e-12).double() if max == "hard" else (gamma * below).exp()
    return e / e.sum()


PAIRS, GROUPS = {"discriminator/*": Kind.MODEL}, frozenset({"gradient/*"})
STEPS, OWN = frozenset({"steps"}), fdann.NUMBERS | {"discriminator-loss/*"}
SOURCE = Part(Rule(MODEL, STEPS, PAIRS), Rule(MODEL, fdann.NUMBERS), GROUPS, labels=True)
TARGET = Part(Rule(MODEL, STEPS | {"weight/*"}, PAIRS), Rule(MODEL, OWN, PAIRS), GROUPS)
ALIGN = Phase("align", {"align": {"source": SOURCE, "target": TARGET}}, layouts=fdann.layouts)

METHOD = Method("mdan", "MDAN", Config, (ALIGN,), PRESETS)
