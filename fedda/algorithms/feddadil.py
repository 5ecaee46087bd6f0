"""FedDaDiL: each site's data as a Wasserstein barycenter of shared atoms, at coordinates it keeps.

Fernandes Montesuma et al., https://arxiv.org/abs/2407.11647; equations are numbered as there. The
transport itself is `fedda.maths.optimal_transport`.

    N, K, C, d      sizes      sites, atoms, classes, features
    n, n_b          sizes      points of an atom, and of a mini-batch of an atom
    z, y            (K, n, d), (K, n, C)  the atoms' points and soft labels; these are sent
    v               (K, n, C)  logits of y; a site trains these
    alpha           (K,)       a site's coordinates, in the simplex; never sent
    W, b            (K, C, d), (K, C)  heads, one per atom
    T_c, T_2        floats     transport costs by eq. 6, and by features alone
    Q_l             (n_b, d)   features of a mini-batch of site l; the target is site N

No message holds alpha, but with SGD a reply nearly reveals it: a site moves atom k in proportion to
alpha_k (the gradient of eq. 11), so the lengths of these moves have the ratios of its coordinates.
Each point moves straight to the example that the plan matches it with, so from both the server has
that example's features. The mean of all versions hides little of this: where features are often 0,
the shares of the sites in it can be told apart, by any site that gets it. A site's policy decides
whether atoms leave (`leaving.atoms`).
"""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from fedda.algorithms import fedavg
from fedda.config.sections import Scalar
from fedda.errors import ConfigError, WireError
from fedda.maths import atom_heads, optimal_transport
from fedda.maths.mixture import Mixture
from fedda.methods import Method, Phase, Signature
from fedda.wire import LOSS, MODEL, SECONDS, STEPS, TEST, Number, Part, Rule, accuracy_of
from fedda.wire.packing import Arrays, Entry, Kind, Manifest

Head = Literal["reconstruction", "ensemble"]

MISSED = 0.01  # allowed difference of a label's sum from 1: float16 rounds
CERTAIN = 1e-6  # least probability of a class in a label, so that logits are finite
BETWEEN = 0.3  # share of the initial atoms' variance that lies between classes
DRAWN = 0.3  # share of the initial coordinates that is drawn uniformly from the simplex
REACHED = 30  # steps of `reached_coordinates`
POINTS = 60  # of each atom and of the site, in such a step
APART = 0.1  # share of the initial atoms' variance in which points of one index differ


class Config(fedavg.Config):
    """FedDaDiL's settings, and FedAvg's for the encoder."""

    encoder_share: float = Field(default=0.5, ge=0, le=1)
    """share of the rounds, at the beginning, that train the encoder by FedAvg"""
    atoms: int = Field(default=3, ge=1, le=64)
    """K, atoms of the dictionary"""
    samples: int = Field(default=500, ge=2, le=100_000)
    """n, points of each atom"""
    batch_size: int = Field(default=100, ge=0, le=100_000)
    """n_b, points of each atom in a step; 0: the whole dictionary at a time, which is slower, but
    points keep their partners and the barycenter more of its variance"""
    travel: Literal["dictionary", "batch"] = "dictionary"
    """what a round sends: all points, or n_b points drawn anew"""
    mean: Literal["uniform", "examples", "random"] = "uniform"
    """the next atoms: the sites' mean (eq. 12), that weighted by examples, or those of a random
    site (authors' code), which then reach all sites as they are"""
    epochs: int = Field(default=1, ge=1, le=1000)
    """E, passes over the atoms in a round"""
    optimizer: Literal["sgd", "adam"] = "sgd"
    """sgd: steps along the transport; or adam"""
    lr: float = Field(default=0.5, gt=0, le=10)
    """learning rate of points and labels"""
    target_pace: float = Field(default=0.2, ge=0, le=10)
    """the target's learning rate in units of lr, lower as it has no labels"""
    lr_coordinates: float = Field(default=0.02, ge=0, le=100)
    """learning rate of alpha"""
    scaling: Literal["scalar", "dimension", "none"] = "scalar"
    """a site divides its features by one number, standardises each, or neither"""
    balanced: bool = True
    """sources draw equally many examples of each class for a step (not in the paper), as if the
    target's classes were equally frequent; false: as they come"""
    entropy: float = Field(default=0.0, ge=0, le=100)
    """Sinkhorn's entropy, in units of the mean cost; 0: exact plans"""
    fixed_points: int = Field(default=10, ge=1, le=1000)
    """most iterations for a barycenter"""
    predict: Head = "reconstruction"
    """the head that predicts: reconstruction (-R) or ensemble (-E)"""
    head_decay: float = Field(default=1e-3, ge=0, le=1)
    """weight decay of heads fitted on atoms"""
    head_anchor: Literal["zero", "encoder"] = "zero"
    """where these heads start and decay to: zero, or the head trained with the encoder (needs
    rounds of the encoder, or run.start-from)"""
    distil: int = Field(default=10, ge=1, le=10_000)
    """samples per class of the distilled set that a target stores"""

    def encoder_rounds(self, rounds: int) -> int:
        """How many rounds of the run train the encoder."""
        return math.floor(self.encoder_share * rounds)

    @property
    def travelling(self) -> int:
        """Points of each atom in a training request."""
        return self.step_size if self.travel == "batch" else self.samples

    @property
    def step_size(self) -> int:
        """Points of each atom in a step."""
        return min(self.batch_size or self.samples, self.samples)


def initial_atoms(
    model: Mapping[str, np.ndarray], options: Config, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """Line 1 of Alg. 1: atoms near the features that a model probably gives -> z, y.

    The features of a class are assumed to lie in the direction of its row of the head. Mean and
    deviation of each feature are known if it comes out of a BatchNorm and a ReLU; otherwise all
    features are assumed to have the same. Point i of every atom belongs to class i mod C and begins
    at nearly the same place, so that the atoms are aligned from the start. The mean |z|^2 is 1, as
    sites scale their features.
    """
    w = model["head.weight"].astype(np.float64)
    C, d = w.shape
    K, n = options.atoms, options.samples
    if n < C:
        raise ConfigError(
            f"feddadil.samples is {n}, but there are {C} classes; set it to {C} or more, so "
            "that atoms have a point of each class."
        )
    rng = np.random.default_rng(seed)
    mean, std = _feature_moments(model, d)
    toward = w - w.mean(axis=0)
    toward *= math.sqrt(d) / np.maximum(np.linalg.norm(toward, axis=1, keepdims=True), 1e-12)
    label = np.arange(n) % C
    within = rng.standard_normal((n, d)) * math.sqrt(1 - BETWEEN - APART)
    own = rng.standard_normal((K, n, d)) * math.sqrt(APART)
    z = mean + std * (math.sqrt(BETWEEN) * toward[label] + within + own)
    z /= math.sqrt((z**2).sum(axis=2).mean())
    y = np.full((K, n, C), 0.1 / C)
    y[:, np.arange(n), label] += 0.9
    return z.astype(np.float32), y.astype(np.float32)


def _feature_moments(model: Mapping[str, np.ndarray], d: int) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation of max(0, gamma u + delta) with normal u, of the last BatchNorm -> (d,).

    The order of features after that layer is not known. Each of its channels is assumed to give the
    same number of consecutive features. Without such a layer, or if d is not a multiple of its
    channels, the means are 0 and the deviations 1.
    """
    names = [name for name in model if name.endswith("running_mean")]
    layer = names[-1].removesuffix("running_mean") if names else ""
    if not names or d % len(model[names[-1]]):
        return np.zeros(d), np.ones(d)
    delta, gamma = (model[layer + part].astype(np.float64) for part in ("bias", "weight"))
    s = np.maximum(np.abs(gamma), 1e-12)
    t = delta / s
    density = np.exp(-(t**2) / 2) / math.sqrt(2 * math.pi)
    below = np.array([(1 + math.erf(u / math.sqrt(2))) / 2 for u in t])
    mean = s * (t * below + density)
    second = s**2 * ((t**2 + 1) * below + t * density)
    each = d // len(mean)
    std = np.sqrt(np.maximum(second - mean**2, 1e-12))
    return np.repeat(mean, each), np.repeat(std, each)


def mean_atoms(versions: list[Arrays], weights: list[float]) -> Arrays:
    """Eq. 12: the mean of the sites' versions of the atoms, index by index -> z, y.

    Args:
        versions: z and y of each site.
        weights: weights of the sites; 1 / N each in the paper.
    """
    mean = {name: np.zeros(a.shape) for name, a in versions[0].items()}
    for version, weight in zip(versions, weights, strict=True):
        for name, total in mean.items():
            total += weight / sum(weights) * version[name]
    return {name: total.astype(np.float32) for name, total in mean.items()}


def drawn_atoms(versions: list[Arrays], generator: torch.Generator) -> Arrays:
    """The authors' form of eq. 12: the atoms of one site, drawn uniformly -> z, y.

    A mean of points that sites have moved onto different partners lies between these; one site's
    points keep their variance.
    """
    place = int(torch.randint(len(versions), (), generator=generator))
    return {name: a.astype(np.float32) for name, a in versions[place].items()}


def check_labels(y: np.ndarray, where: str) -> None:
    """Refuse labels of atoms (K, n, C) that are not probabilities.

    Raises:
        WireError: a label is negative or does not sum to 1; the error names the sender.
    """
    if (y < 0).any() or (np.abs(y.sum(axis=2) - 1) > MISSED).any():
        raise WireError(f"The labels of the atoms from {where} are not probabilities.")


def logits_of(y: Tensor) -> Tensor:
    """Logits v with softmax(v) = y, except for probabilities below CERTAIN -> shape of y."""
    return y.clamp(min=CERTAIN).log()


def logit_gradient(y: Tensor, g: Tensor) -> Tensor:
    """Turn a gradient g for y into the gradient for its logits: y (g - <g, y>) -> shape of y."""
    return y * (g - (g * y).sum(dim=-1, keepdim=True))


def first_coordinates(K: int, generator: torch.Generator) -> Tensor:
    """Line 2 of Alg. 1: alpha drawn around the middle of the simplex -> (K,).

    If all sites began with the same alpha, they would move all atoms in the same way, and the atoms
    would not learn to differ. A site that began at a vertex would train a single atom.
    """
    e = -torch.rand(K, generator=generator).clamp(min=1e-12).log()
    return DRAWN * e / e.sum() + (1 - DRAWN) / K


def reached_coordinates(
    x: Tensor, z: Tensor, y: Tensor, options: Config, draws: torch.Generator
) -> Tensor:
    """Alpha that an unlabelled site reaches from the middle, with the atoms held fixed -> (K,).

    Args:
        x: (N, d) the site's points.
        z: (K, n, d) the atoms' points.
        y: (K, n, C) their labels.
        options: the settings.
        draws: of the mini-batches.
    """
    alpha = x.new_full((len(z),), 1 / len(z))
    spread = x.var(dim=0, correction=0).sum().clamp(min=1e-12)
    for _ in range(REACHED):
        i = torch.randperm(z.shape[1], generator=draws)[:POINTS]
        j = torch.randperm(len(x), generator=draws)[:POINTS]
        gradients, _, _ = optimal_transport.reconstruction(
            z[:, i], y[:, i], alpha, x[j], None, options.fixed_points, options.entropy
        )
        step = options.lr_coordinates * gradients.alpha / spread
        alpha = optimal_transport.project_simplex(alpha - step).to(x)
    return alpha.cpu()


def signature(
    options: Config, features: Tensor, z: Tensor, y: Tensor, draws: torch.Generator
) -> Signature:
    """`reached_coordinates` of some of the features (N, d), scaled as a site's own -> (K,)."""
    points = atom_heads.scaling(features, options.scaling)(features)
    return lambda chosen: reached_coordinates(points[chosen], z, y, options, draws)


def distilled(
    z: Tensor, y: Tensor, alpha: Tensor, spc: int, most: int = 10, entropy: float = 0.0
) -> tuple[Tensor, Tensor]:
    """B(alpha; atoms) on SPC points per class -> (C spc, d), soft labels (C spc, C).

    For each class the iteration begins at the points of the index-wise mean that have the highest
    probability of the class.
    """
    start_z, start_y = (torch.einsum("k,knc->nc", alpha, a) for a in (z, y))
    chosen = torch.cat(
        [
            start_y[:, c].sort(descending=True, stable=True).indices.repeat(spc)[:spc]
            for c in range(y.shape[2])
        ]
    )
    label = torch.eye(y.shape[2], dtype=y.dtype, device=y.device).repeat_interleave(spc, dim=0)
    b = optimal_transport.barycenter(z, y, alpha, (start_z[chosen], label), most, entropy)
    return b.z, b.y


ATOMS = {"atoms": Kind.ATOMS}
SENT = frozenset({LOSS, Number("reconstruction", 0.01), STEPS, SECONDS})

PRESETS: dict[str, dict[str, Scalar]] = {
    "paper": {"weighting": "uniform", "target-pace": 1.0, "mean": "uniform", "entropy": 0.0}
}


def layout(options: Config, model: Manifest, whole: bool) -> Manifest:
    """The layout of the atoms: of those that training sends in a round, or of the whole atoms."""
    C, d = next(e.shape for e in model.entries if e.name == "head.weight")
    K, n = options.atoms, options.samples if whole else options.travelling
    entries = (Entry("z", "float32", (K, n, d)), Entry("y", "float32", (K, n, C)))
    return Manifest(Kind.ATOMS, model.floats, entries)


def layouts(options: Config, model: Manifest) -> dict[str, Manifest]:
    """The layout of the atoms in training requests and replies."""
    return {"atoms": layout(options, model, whole=False)}


def test_layouts(options: Config, model: Manifest) -> dict[str, Manifest]:
    """The layout of the atoms that the target is sent to test: all points."""
    return {"atoms": layout(options, model, whole=True)}


def extend(model: Any, settings: Mapping[str, Any]) -> None:
    """Replace the model's head by `heads` heads, which the target fits on the atoms."""
    model.head = Mixture(settings["heads"], model.width, model.head.out_features)


# The encoder is sent to a site that does not have it yet; only atoms are sent back.
LEARN = Rule(ATOMS, optional=MODEL)
HEADS = frozenset(map(accuracy_of, ("reconstruction", "ensemble", "encoder")))

METHOD = Method(
    "feddadil",
    "FedDaDiL",
    Config,
    (
        Phase(
            "encoder",
            {"train": fedavg.TRAIN},
            rounds=lambda options, rounds: options.encoder_rounds(rounds),
            prepares=True,
        ),
        Phase(
            "dictionary",
            {
                "learn": {
                    "source": Part(LEARN, Rule(ATOMS, SENT), labels=True),
                    "target": Part(LEARN, Rule(ATOMS, SENT)),
                }
            },
            layouts=layouts,
            test=Part(
                replace(LEARN, numbers=TEST.enters.numbers),
                replace(TEST.leaves, numbers=TEST.leaves.numbers | HEADS),
            ),
            test_layouts=test_layouts,
        ),
    ),
    PRESETS,
    extend=extend,
    coordinates=signature,
)
