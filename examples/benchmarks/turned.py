"""How far turned digits are from upright ones, and whether their distance says what a model loses.

    python examples/benchmarks/turned.py --data DATA/digits --set mnist --set usps

FRUDA's chain of turned digits, without the chain: LeNet learns upright digits, and its features of
the same digits, turned, are compared with those of the upright ones. A target's neighbour 30
degrees away which had adapted without a fault would be to it what upright digits are to those at 30
degrees. So where the labelled domain is no farther from a target than the row of 30 degrees says,
no neighbour can be chosen by that measure, however good it is.

Measures, all without labels but the last two:
    bound    2 theta W1, the part of FRUDA's bound that is no error; W1 by a critic as in fruda
    pad      proxy A-distance, by a discriminator as in fruda
    w1       W1 of 800 examples a side, by optimal transport
    infomax  of the model's probabilities; higher is better
    classes  the same W1 between examples of one class, mean over the classes
    right    accuracy of the model, in %

The last line is one JSON object: set -> angle -> measure -> mean over the seeds; and set -> `told`
-> in how many seeds a measure says that 30 degrees are nearer than 180.
"""

import argparse
import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import accuracy
import numpy as np
import ot
import torch
from torch import Tensor
from torch.nn import functional as F

from fedda import models
from fedda.adversarial.discriminators import (
    Discriminator,
    bound,
    called_source,
    called_target,
    high,
    low,
)
from fedda.algorithms.fruda import Measure
from fedda.config import ModelConfig
from fedda.data import rotate
from fedda.halves import load
from fedda.maths import ocs
from fedda.maths.spectral import Spectra
from fedda.results.escaping import markdown

SETS = ("mnist", "usps")
NEAR, FAR = 30, 180  # degrees
ANGLES = range(0, 360, NEAR)
MEASURES = ("bound", "pad", "w1", "infomax", "classes", "right")
POINTS, OF_CLASS, BATCH = 800, 300, 256  # most examples of a transport; of a critic's step
MEASURE = Measure()
CPU = torch.device("cpu")
SIZE, STEM = 28, "turned"


def digits(file: Path, images: int) -> tuple[Tensor, Tensor]:
    """The first training images of a file as x (N, 1, 28, 28), and their classes y (N,)."""
    with np.load(file) as held:
        x = torch.from_numpy(held["x_train"][:images]).unsqueeze(1)
        y = torch.from_numpy(held["y_train"][:images])
    if x.shape[2:] != (SIZE, SIZE):
        x = F.interpolate(x.float(), (SIZE, SIZE), mode="bilinear").round().byte()
    return x, y


def learnt(x: Tensor, y: Tensor, seed: int, epochs: int, most: float) -> models.Model:
    """LeNet after some epochs of upright digits, its layers' norms at most `most`, if not 0."""
    config = ModelConfig(name="lenet", hidden="")
    model = models.build(config, tuple(x.shape[1:]), int(y.max()) + 1, seed)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    draws = torch.Generator().manual_seed(seed)
    spectra = Spectra(model, draws) if most else None
    for _ in range(epochs):
        model.train()
        for i in torch.randperm(len(x), generator=draws).split(64):
            loss = F.cross_entropy(model(models.as_inputs(x[i], CPU)), y[i])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if spectra:
                spectra.project(most)
    return model.eval()


def critic(z: Tensor, t: Tensor, seed: int, wasserstein: bool) -> float:
    """The distance of features z and t (N, d) that FRUDA's critic, or a discriminator, finds."""
    DI = Discriminator(z.shape[1], MEASURE.hidden, seed)
    betas = (MEASURE.beta1, MEASURE.beta2)
    optimizer = torch.optim.Adam(DI.parameters(), lr=MEASURE.lr, betas=betas)
    draws = torch.Generator().manual_seed(seed)
    upright, turned = (high, low) if wasserstein else (called_source, called_target)
    for _ in range(MEASURE.steps):
        i, j = (torch.randint(len(side), (BATCH,), generator=draws) for side in (z, t))
        loss = upright(DI(z[i])) + turned(DI(t[j]))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if wasserstein:
            bound(DI)
    with torch.no_grad():
        of_z, of_t = DI(z), DI(t)
    if wasserstein:
        return float(of_z.mean() - of_t.mean())
    return float(2 * (1 - (of_z <= 0).float().mean() - (of_t > 0).float().mean()))


def transport(z: Tensor, t: Tensor, most: int) -> float:
    """W1 of the first features z and the last t, by exact optimal transport -> float."""
    sides = z[:most].double(), t[-most:].double()
    n, m = map(len, sides)
    cost = torch.cdist(*sides).numpy()
    return float(np.asarray(ot.emd2(np.full(n, 1 / n), np.full(m, 1 / m), cost)))


def measured(x: Tensor, y: Tensor, seed: int, args: argparse.Namespace) -> dict[int, Any]:
    """Train one model -> by angle, its measures; the error and theta stand at angle 0."""
    model = learnt(x, y, seed, args.epochs, args.lipschitz)
    theta = ocs.theta_of(model.head.weight.detach())
    z, p = {}, {}
    for angle in ANGLES:
        turned = models.as_inputs(rotate.rotate(x, angle), CPU)
        with torch.no_grad():
            z[angle] = torch.cat([model.features(part) for part in turned.split(BATCH)])
            p[angle] = model.head(z[angle]).softmax(dim=1)
    found: dict[int, Any] = {0: {"eps": ocs.l1_error(p[0], y), "theta": theta}}
    for angle in ANGLES[1:]:
        t = z[angle]
        each = [transport(z[0][y == c], t[y == c], OF_CLASS) for c in range(int(y.max()) + 1)]
        found[angle] = {
            "bound": 2 * theta * critic(z[0], t, seed, wasserstein=True),
            "pad": critic(z[0], t, seed, wasserstein=False),
            "w1": transport(z[0], t, POINTS),
            "infomax": load("clients", "site.output_privacy").infomax(p[angle]),
            "classes": statistics.fmean(each),
            "right": 100 * float((p[angle].argmax(dim=1) == y).float().mean()),
        }
        said = {key: round(value, 3) for key, value in found[angle].items()}
        print(f"seed {seed}, {angle} degrees: {said}", flush=True)
    return found


def nearer(found: Any, measure: str) -> bool:
    """Whether a measure says that 30 degrees are nearer than 180."""
    near, far = found[NEAR][measure], found[FAR][measure]
    return near > far if measure in ("infomax", "right") else near < far


def table(runs: Sequence[Any]) -> list[str]:
    """A row per angle, means over the seeds; the last one says what each measure tells."""
    rows = []
    for angle in ANGLES[1:]:
        mean = {m: statistics.fmean(run[angle][m] for run in runs) for m in MEASURES}
        rows.append([str(angle), *(f"{mean[m]:.{1 if m == 'right' else 2}f}" for m in MEASURES)])
    told = [f"{sum(nearer(run, m) for run in runs)} of {len(runs)}" for m in MEASURES]
    return markdown(["degrees", *MEASURES], [*rows, [f"{NEAR} nearer than {FAR}", *told]])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of mnist.npz, usps.npz")
    parser.add_argument("--set", choices=SETS, action="append", help="default: mnist")
    parser.add_argument("--images", type=int, default=4000, help="default: 4000")
    parser.add_argument("--epochs", type=int, default=6, help="default: 6")
    parser.add_argument("--lipschitz", type=float, default=0.0, help="most of each layer's norm")
    parser.add_argument("--seeds", type=accuracy.seeds, default=[0, 1, 2], help="default: 0,1,2")
    parser.add_argument("--results", type=Path, help="write the table here")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)

    command = f"python examples/benchmarks/{STEM}.py --data DATA/digits"
    command += accuracy.typed(parser, args, "set", "images", "epochs", "lipschitz", "seeds")
    lines, summary = [f"## {STEM}", "", f"    {command}", ""], {}
    for name in args.set or SETS[:1]:
        x, y = digits(args.data / f"{name}.npz", args.images)
        runs = [measured(x, y, seed, args) for seed in args.seeds]
        eps, theta = (statistics.fmean(run[0][key] for run in runs) for key in ("eps", "theta"))
        lines += [f"### {name}", "", f"eps {eps:.3f}, theta {theta:.2f}.", "", *table(runs), ""]
        summary[name] = {
            str(a): {m: round(statistics.fmean(run[a][m] for run in runs), 3) for m in MEASURES}
            for a in ANGLES[1:]
        } | {"told": {m: sum(nearer(run, m) for run in runs) for m in MEASURES}}
    if args.results:
        args.results.mkdir(parents=True, exist_ok=True)
        (args.results / f"{STEM}.md").write_text("\n".join(lines).rstrip() + "\n")
    print(*lines, sep="\n")
    print(json.dumps(summary))


if __name__ == "__main__":
    with accuracy.plainly():
        main()
