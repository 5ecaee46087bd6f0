"""Whether FADA's model III takes features apart: fresh networks probe the parts of one site.

    python examples/benchmarks/apart.py --data DATA

DATA holds `office_caltech10_googlenet1024/`. One source of FADA trains alone, without alignment, by
eqs. 6 to 8 as `clients/shared/disentangling.py` does: once with the defaults, once with the preset
`apart`. A third of its examples is held out, for the probes, which are trained on the others' parts
after the training has ended. The last line is one JSON object, by settings:

    confusion       entropy of CI's prediction on f_ds in nats; ln C = 2.30 is the most
    identifier      share of the held-out examples whose class CI tells from f_ds
    probe_specific  the same of a new logistic regression on f_ds
    probe_invariant and on f_di
    information     I(f_di; f_ds) in nats by a new estimator
    left            share of the features' variance that a new linear map does not rebuild from f_ds
    accuracy        share of the held-out examples that C has right
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression, Ridge
from torch import Tensor, nn
from torch.nn import functional as F

from fedda.adversarial import disentangle
from fedda.algorithms import fada
from fedda.config.sections import unflatten, validate

WIDTH, BATCH, LR = 256, 64, 0.02
KINDS = {"defaults": {}, "apart": fada.PRESETS["apart"]}


def features(path: Path) -> tuple[Tensor, Tensor]:
    """One domain's standardised features and its labels -> (N, d), (N,)."""
    with np.load(path) as file:
        x, y = torch.from_numpy(file["x"].astype(np.float32)), torch.from_numpy(file["y"])
    return (x - x.mean(dim=0)) / (x.std(dim=0) + 1e-3), y


class Site:
    """The networks of one source, and their steps."""

    def __init__(self, d: int, classes: int, options: fada.Config, seed: int) -> None:
        torch.manual_seed(seed)
        layers, self.options = options.layers, options
        widths, specific = layers.widths, layers.specific_widths
        m, s = widths[-1], specific[-1]
        self.G = nn.Sequential(nn.Linear(d, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU())
        self.C = nn.Linear(m, classes)
        self.D_i = disentangle.branch(WIDTH, widths, layers.dropout, layers.dropout_first)
        self.D_s = disentangle.branch(WIDTH, specific, layers.dropout, layers.dropout_first)
        self.CI = disentangle.class_identifier(s, classes, layers.class_norm)
        self.M = disentangle.Estimator(m, s, layers.estimator)
        self.R = nn.Linear(m + s, WIDTH)
        self.own = {net: self._sgd([net], LR * options.pace) for net in self.stay()}
        self.model = self._sgd([self.G, self.C], LR)

    def stay(self) -> list[nn.Module]:
        return [self.D_i, self.D_s, self.CI, self.M, self.R]

    def _sgd(self, networks: list[nn.Module], lr: float) -> torch.optim.Optimizer:
        return torch.optim.SGD([p for net in networks for p in net.parameters()], lr=lr)

    def parts(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        z = self.G(x)
        return z, self.D_i(z), self.D_s(z)

    def descend(self, loss: Tensor, *moved: torch.optim.Optimizer) -> None:
        for each in (self.model, *self.own.values()):
            each.zero_grad()
        loss.backward()
        for each in moved:
            each.step()

    def step(self, x: Tensor, y: Tensor, shuffle: Tensor) -> None:
        """Eq. 6, CI's further steps, M, then eqs. 7 and 8 and R."""
        options, weights, own = self.options, self.options.weights, self.own
        z, f_di, f_ds = self.parts(x)
        seen = f_ds.detach() if options.identifier == "alone" else f_ds
        loss = F.cross_entropy(self.C(f_di), y) + F.cross_entropy(self.CI(seen), y)
        self.descend(loss, self.model, own[self.D_i], own[self.D_s], own[self.CI])
        z = z.detach()
        for _ in range(options.identifier_steps - 1):
            self.descend(F.cross_entropy(self.CI(self.D_s(z).detach()), y), own[self.CI])
        f_di, f_ds = self.D_i(z), self.D_s(z)
        told = disentangle.information(self.M, f_di.detach(), f_ds.detach(), shuffle)
        self.descend(-told, own[self.M])
        loss = weights.information * disentangle.information(self.M, f_di, f_ds, shuffle)
        loss = loss + weights.reconstruction * disentangle.reconstruction(self.R, f_di, f_ds, z)
        loss = loss + weights.confusion * disentangle.negative_entropy(self.CI(f_ds))
        self.descend(loss, own[self.D_i], own[self.D_s], own[self.R])


def fresh_information(p: Tensor, q: Tensor, train: Tensor, held: Tensor) -> float:
    """Eq. 8 by an estimator of its own, trained on some rows and measured on others, in nats."""
    p, q = ((f - f.mean(dim=0)) / (f.std(dim=0) + 1e-6) for f in (p, q))
    M = disentangle.Estimator(p.shape[1], q.shape[1], 512)
    adam = torch.optim.Adam(M.parameters(), lr=1e-3)
    for _ in range(400):
        rows = train[torch.randint(len(train), (BATCH * 4,))]
        adam.zero_grad()
        (-disentangle.information(M, p[rows], q[rows], torch.randperm(len(rows)))).backward()
        adam.step()
    with torch.no_grad():
        orders = [torch.randperm(len(held)) for _ in range(5)]
        told = [float(disentangle.information(M, p[held], q[held], order)) for order in orders]
    return float(np.mean(told))


def measure(x: Tensor, y: Tensor, options: fada.Config, steps: int, seed: int) -> dict[str, float]:
    """Train one site, and probe what it has made."""
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    held, train = order[: len(x) // 3], order[len(x) // 3 :]
    site = Site(x.shape[1], int(y.max()) + 1, options, seed)
    for _ in range(steps):
        rows = train[torch.randint(len(train), (BATCH,))]
        site.step(x[rows], y[rows], torch.randperm(BATCH))
    for each in (site.G, site.C, *site.stay()):
        each.eval()
    with torch.no_grad():
        z, f_di, f_ds = site.parts(x)
        logits, right = site.CI(f_ds[held]), site.C(f_di[held]).argmax(dim=1) == y[held]
    f_s, f_i = (((f - f[train].mean(0)) / (f[train].std(0) + 1e-6)).numpy() for f in (f_ds, f_di))
    told = {}
    for name, f in (("probe_specific", f_s), ("probe_invariant", f_i)):
        probe = LogisticRegression(max_iter=300, C=0.1).fit(f[train], y[train])
        told[name] = float(probe.score(f[held], y[held]))
    rebuilt = Ridge().fit(f_s[train], z[train]).predict(f_s[held])
    left = (z[held] - torch.from_numpy(rebuilt)).square().mean() / z[held].var(dim=0).mean()
    return told | {
        "confusion": -float(disentangle.negative_entropy(logits)),
        "identifier": float((logits.argmax(dim=1) == y[held]).double().mean()),
        "information": fresh_information(f_di, f_ds, train, held),
        "left": float(left),
        "accuracy": float(right.double().mean()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets")
    parser.add_argument("--domain", default="amazon")
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--seeds", type=int, default=3, help="how many")
    args = parser.parse_args()
    x, y = features(args.data / "office_caltech10_googlenet1024" / f"{args.domain}.npz")
    figures: dict[str, Any] = {}
    for name, settings in KINDS.items():
        options = validate(fada.Config, unflatten(settings))
        found = [measure(x, y, options, args.steps, seed) for seed in range(args.seeds)]
        figures[name] = {k: round(float(np.mean([f[k] for f in found])), 3) for k in found[0]}
        print(name, figures[name], flush=True)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
