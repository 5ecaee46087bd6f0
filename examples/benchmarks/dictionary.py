"""FedDaDiL on real data: -R and -E beside the FedAvg head, parallelism, distillation, memory.

    python examples/benchmarks/dictionary.py --data DATA --table heads --set surf --set googlenet

DATA holds the domains as `.npz` files in folders (see SETS); they are not part of fedda, and
`embedded` needs none. Every accuracy is the last round's. Trainings are kept in --out, so the same
command goes on where it was stopped. The last line is one JSON object: table -> set -> row ->
column -> [mean, standard deviation].

Tables:
    heads      -R, -E and the FedAvg head of the same run, controls that pool the sources' points,
               and how near coordinates are to a vertex
    parallel   E local epochs in a round and as many rounds fewer, KD3A beside it, bytes of a round
    distil     heads fitted on SPC samples per class: distilled, or drawn from the sources
    memory     distances of training and of held-out features to the nearest point of the atoms,
               and the AUC of an attack that tells them apart by it
"""

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from sklearn.metrics import roc_auc_score
from torch import Tensor

from fedda import data, models, transport
from fedda.algorithms import feddadil
from fedda.config import Flat, RunConfig, overrides
from fedda.data import digits
from fedda.folders import load

ROUNDS = 20  # of the dictionary, after as many epochs of the encoder as the set says
SPC = (1, 5, 10, 20)
LOCAL = (1, 2, 4, 5, 10)  # E

# A single layer of small first weights: what KD3A makes of it is many norms away.
IDENTITY: Flat = {"model.name": "identity", "train.lr": 0.05, "guard.max-change": 0.0}
CNN: Flat = {
    "model.name": "digit-cnn",
    "input.channels": 3,
    "input.size": 16,
    "train.lr": 0.01,
    "train.lr-end": 0.0005,
}


@dataclass(frozen=True)
class Set:
    """One data set, reduced for a CPU."""

    folder: str  # within DATA; empty: drawn by fedda
    targets: tuple[str, ...]
    encoder: int  # rounds of stage 1
    settings: Flat
    images: int = 0  # per domain, drawn once; 0: all
    settle: Callable[[np.ndarray], np.ndarray] = field(default=lambda x: x)


def histograms(x: np.ndarray) -> np.ndarray:
    """Counts as shares of each image, then every one standardised within its domain.

    What is usual for these features; it takes no label.
    """
    x = x.astype(np.float32)
    x = x / np.maximum(x.sum(axis=1, keepdims=True), 1)
    return (x - x.mean(axis=0)) / (x.std(axis=0) + 1e-8)


SETS = {
    "embedded": Set("", ("fonts", "blended"), 12, CNN | {"input.channels": 1}),
    "googlenet": Set(
        "office_caltech10_googlenet1024",
        ("webcam", "dslr", "amazon"),
        10,
        IDENTITY,
        settle=lambda x: x.astype(np.float32),
    ),
    "surf": Set(
        "office_caltech10_surf800",
        ("webcam", "dslr", "amazon", "caltech10"),
        10,
        IDENTITY,
        settle=histograms,
    ),
    "images64": Set(
        "office_caltech10_images64", ("webcam", "amazon"), 12, CNN | {"input.size": 24}, images=300
    ),
    "digits": Set("digits", ("usps", "mnistm"), 12, CNN, images=600),
}


@dataclass(frozen=True)
class Cell:
    """One training."""

    name: str
    set: str
    target: str
    seed: int
    settings: Flat
    split: bool = False  # half of every source's examples is held out


class Bench:
    """Trainings in a folder, and what they left."""

    def __init__(self, data: Path, out: Path) -> None:
        self.data = data
        self.out = out

    def run(self, cell: Cell) -> tuple[dict[str, Any], Path]:
        """Train, unless it was done before -> results.json's content, the run's folder."""
        place = self.out / cell.set / ("half" if cell.split else "all")
        source = self._prepared(cell)
        folder = place / "runs" / f"{cell.name}-{cell.target}-{cell.seed}"
        if not (folder / "results.json").is_file():
            flat: Flat = {
                **SETS[cell.set].settings,
                **cell.settings,
                "run.name": folder.name,
                "run.dir": str(folder.parent),
                "run.seeds": str(cell.seed),
                "run.resume": (folder / "config.json").is_file(),
                "track.tensorboard": False,
                "wait.settle": 0.0,
            }
            start = time.perf_counter()
            local, journal = load("server", "local"), load("server", "journal")
            sites = [s | {"notes": False} for s in local.folders(source, cell.target, {}, 1)]
            local.simulate(RunConfig.parse(flat), sites, journal.Journal(), "process")
            seconds = time.perf_counter() - start
            print(f"{cell.set}: {folder.name} took {seconds:.0f} s", flush=True)
        return json.loads((folder / "results.json").read_text()), folder

    def _prepared(self, cell: Cell) -> Path:
        """The domains as the trainings read them.

        Where nothing is split, the target trains on all examples without labels, and is tested on
        the same; in `half` every domain is split by a draw that is the same for all trainings.
        """
        chosen, out = SETS[cell.set], self.out / cell.set / ("half" if cell.split else "all")
        if (out / "data").is_dir():
            return out / "data"
        if not chosen.folder:
            digits.build(out / "data", seed=0, train=400)
            return out / "data"
        part = out / "data.part"
        part.mkdir(parents=True, exist_ok=True)
        for path in sorted((self.data / chosen.folder).glob("*.npz")):
            with np.load(path) as found:
                both = "x_train" in found
                x, y = (found[k + "_train"] if both else found[k] for k in "xy")
                test = (found["x_test"], found["y_test"]) if both else None
            order = np.random.default_rng(0).permutation(len(y))
            x, y = chosen.settle(x), y
            most = order[: chosen.images or None]
            train, tests = most, most
            if cell.split:
                train, tests = np.sort(most[::2]), np.sort(most[1::2])
                test = None
            x_test, y_test = (x[tests], y[tests]) if test is None else test
            held = np.arange(len(y_test))[:1000]
            arrays = {"x_train": x[train], "y_train": y[train]}
            np.savez(part / path.name, **arrays, x_test=x_test[held], y_test=y_test[held])
        part.rename(out / "data")
        return out / "data"

    def after(self, folder: Path, cell: Cell) -> "After":
        """What a finished training left at the server and its sites."""
        return After(folder, self._prepared(cell), cell)


class After:
    """A finished training: atoms, and the sites' points as they saw them."""

    def __init__(self, folder: Path, data: Path, cell: Cell) -> None:
        state = load("server", "checkpoint").read(folder / f"feddadil-{cell.seed}")
        assert state is not None
        atoms = state.kept["atoms"]
        self.z, self.y = (torch.from_numpy(atoms[name].copy()) for name in "zy")
        self.folder, self.data, self.cell = folder, data, cell
        self.model, about = models.load(folder / "model.safetensors")
        flat = json.loads((folder / "config.json").read_text())
        config = RunConfig.parse({k: v for k, v in flat.items() if not k.startswith("run.")})
        config = config.model_copy(
            update={"run": config.run.model_copy(update={"name": folder.name})}
        )
        self.task = config.task("feddadil", cell.seed, about.shape, about.classes, 4)

    def coordinates(self, site: str) -> Tensor:
        pattern = f"*.{self.task.rounds}.coordinates.safetensors"
        (path,) = (self.folder / "sites" / site).glob(pattern)
        return load_file(path)["alpha"]

    def scores(self, target: str) -> dict[str, float]:
        """Accuracy of the heads, as the target fits and tests them after the last round."""
        o, alpha = self.task.options, self.coordinates(target)
        _, _, tests, labels = self.points(target)
        b = transport.barycenter(self.z, self.y, alpha, most=o.fixed_points, entropy=o.entropy)
        W, bias = feddadil.fit_heads(b.z[None], b.y[None], o.head_decay)
        heads = feddadil.fit_heads(self.z, self.y, o.head_decay)
        p = {
            "FedAvg head": models.predict(self.model, self.tests(target)),
            "FedDaDiL-R": feddadil.ensemble(tests, W, bias, alpha.new_ones(1)),
            "FedDaDiL-E": feddadil.ensemble(tests, *heads, alpha),
        }
        return {row: float((q.argmax(dim=1) == labels).float().mean()) for row, q in p.items()}

    def tests(self, name: str) -> Tensor:
        """A domain's test inputs, as they are kept."""
        test = self._load(name)[1]
        return test.x

    def _load(self, name: str) -> tuple[data.Labelled, data.Labelled]:
        path = next(p for p in self.data.iterdir() if name in (p.stem, p.name))
        shape = self.task.dims
        channels, size = (shape[0], shape[1]) if len(shape) == 3 else (0, 0)
        train = data.load_source(path, channels=channels, size=size)
        test = data.load_evaluation(path, channels=channels, size=size)
        assert test is not None
        return train, test

    def sites(self) -> list[str]:
        return sorted(p.stem if p.suffix else p.name for p in self.data.iterdir())

    def points(self, name: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Training and test points of a domain, in its own scaling, with their labels."""
        train, test = self._load(name)
        site = load("clients", "site").Site(
            {"role": "source", "name": name, "data": "", "device": "cpu"}
        )
        made = load("clients", "dictionary").Dictionary(site, self.task, self.model, train)
        return made.points, train.y, made.scaling(made.encoded(test.x)), test.y


def settings(chosen: Set, epochs: int = 1) -> Flat:
    """FedDaDiL's on a set; E epochs a round in as many rounds fewer."""
    rounds = chosen.encoder + ROUNDS // epochs
    return {
        "method": "feddadil",
        "rounds": rounds,
        "feddadil.encoder-share": (chosen.encoder + 0.5) / rounds,
        "feddadil.epochs": epochs,
        "run.evaluate": False,  # heads are fitted here, once, as the target fits them
    }


def cells(args: argparse.Namespace, name: str) -> list[tuple[str, int]]:
    targets = args.target or SETS[name].targets
    return list(itertools.product((t for t in SETS[name].targets if t in targets), args.seeds))


def summary(values: Sequence[float]) -> list[float | None]:
    """Mean and standard deviation over the seeds."""
    spread = statistics.stdev(values) if len(values) > 1 else None
    return [round(statistics.fmean(values), 4), None if spread is None else round(spread, 4)]


Table = dict[str, dict[str, list[Any]]]


def gathered(found: Mapping[str, Mapping[str, list[float]]]) -> Table:
    return {row: {t: summary(v) for t, v in columns.items()} for row, columns in found.items()}


class Rows(dict[str, dict[str, list[float]]]):
    """Values by row and column, seed by seed."""

    def add(self, row: str, column: str, value: float) -> None:
        self.setdefault(row, {}).setdefault(column, []).append(value)


POOLED_DECAY = 1e-4  # of many points
POOLED = "control: a head on all points of the sources, pooled"


ALIKE = "control: the same, each source weighing the same"


def pooled(after: After, target: str, alike: bool = False) -> float:
    """What points of every site in its own scaling are worth without any dictionary."""
    sources = [after.points(site)[:2] for site in after.sites() if site != target]
    z, known = (torch.cat(part) for part in zip(*sources, strict=True))
    _, _, tests, labels = after.points(target)
    y = F.one_hot(known, after.task.classes).float()
    if alike:  # cross entropy is linear in labels, so that they can carry weights
        weights = [torch.full((len(x), 1), len(z) / len(sources) / len(x)) for x, _ in sources]
        y = y * torch.cat(weights)
    return accuracy(z, y, tests, labels, POOLED_DECAY)


def heads(bench: Bench, args: argparse.Namespace, name: str) -> Table:
    rows = Rows()
    for target, seed in cells(args, name):
        cell = Cell(args.label, name, target, seed, settings(SETS[name]) | args.more)
        after = bench.after(bench.run(cell)[1], cell)
        for row, value in after.scores(target).items():
            rows.add(row, target, value)
        rows.add(POOLED, target, pooled(after, target))
        rows.add(ALIKE, target, pooled(after, target, alike=True))
        alphas = {site: after.coordinates(site) for site in after.sites()}
        rows.add("largest coordinate, target", target, float(alphas[target].max()))
        rows.add(
            "largest coordinate, any site", target, max(float(a.max()) for a in alphas.values())
        )
    return gathered(rows)


def parallel(bench: Bench, args: argparse.Namespace, name: str) -> Table:
    rows, chosen = Rows(), SETS[name]
    for epochs in LOCAL:
        column = f"E = {epochs}"
        for target, seed in cells(args, name)[: len(args.seeds)]:
            own = settings(chosen, epochs) | args.more
            label = args.label if epochs == 1 else f"{args.label}-e{epochs}"
            cell = Cell(label, name, target, seed, own)
            results, folder = bench.run(cell)
            for row, value in bench.after(folder, cell).scores(target).items():
                rows.add(row, column, value)
            last = results["trainings"]["feddadil"][0]["rounds"][-1]
            sent = sum(n for k, n in last["bytes"].items() if k.endswith(("atoms", "model")))
            rows.add("bytes of a round, FedDaDiL", column, sent)
            other: Flat = {
                "method": "kd3a",
                "rounds": ROUNDS // epochs,
                "train.rounds-per-epoch": 1 / epochs,
            }
            results, _ = bench.run(Cell(f"kd3a-e{epochs}", name, target, seed, other))
            last = results["trainings"]["kd3a"][0]["rounds"][-1]
            rows.add("KD3A", column, last["accuracy"])
            sent = sum(n for k, n in last["bytes"].items() if k.endswith("model"))
            rows.add("bytes of a round, KD3A", column, sent)
    return gathered(rows)


def accuracy(z: Tensor, y: Tensor, points: Tensor, labels: Tensor, decay: float) -> float:
    """Of a head fitted on (z, y)."""
    W, b = feddadil.fit_heads(z[None], y[None], decay)
    return float(((points @ W[0].T + b[0]).argmax(dim=1) == labels).float().mean())


def distil(bench: Bench, args: argparse.Namespace, name: str) -> Table:
    rows = Rows()
    for target, seed in cells(args, name)[: len(args.seeds)]:
        cell = Cell(args.label, name, target, seed, settings(SETS[name]) | args.more)
        after = bench.after(bench.run(cell)[1], cell)
        decay, alpha = after.task.options.head_decay, after.coordinates(target)
        _, _, points, labels = after.points(target)
        sources = [after.points(site)[:2] for site in after.sites() if site != target]
        pool, known = (torch.cat(part) for part in zip(*sources, strict=True))
        C = after.task.classes
        draws = torch.Generator().manual_seed(seed)
        for spc in SPC:
            z, y = feddadil.distilled(after.z, after.y, alpha, spc)
            rows.add("distilled", f"SPC {spc}", accuracy(z, y, points, labels, decay))
            scores = []
            for _ in range(5):
                order = torch.randperm(len(known), generator=draws)
                i = torch.cat([order[known[order] == c][:spc] for c in range(C)])
                one_hot = F.one_hot(known[i], C).float()
                scores.append(accuracy(pool[i], one_hot, points, labels, decay))
            rows.add("random samples of the sources", f"SPC {spc}", statistics.fmean(scores))
        every = F.one_hot(known, C).float()
        rows.add("all samples of the sources", "all", accuracy(pool, every, points, labels, decay))
    return gathered(rows)


def memory(bench: Bench, args: argparse.Namespace, name: str) -> Table:
    rows = Rows()
    for target, seed in cells(args, name)[: len(args.seeds)]:
        own = settings(SETS[name]) | args.more
        cell = Cell(args.label, name, target, seed, own, split=True)
        after = bench.after(bench.run(cell)[1], cell)
        every = after.z.flatten(end_dim=1)
        for site in after.sites():
            train, _, held, _ = after.points(site)
            near = [torch.cdist(x, every).amin(dim=1).numpy() for x in (train, held)]
            truth = np.repeat([1, 0], [len(near[0]), len(near[1])])
            rows.add(site, "AUC", float(roc_auc_score(truth, -np.concatenate(near))))
            for what, distances in zip(("training", "held out"), near, strict=True):
                for share in (10, 50, 90):
                    rows.add(site, f"{what}, {share} %", float(np.percentile(distances, share)))
    return gathered(rows)


TABLES = {"heads": heads, "parallel": parallel, "distil": distil, "memory": memory}


def markdown(title: str, command: str, found: Table) -> str:
    """A table of means and deviations; accuracies and shares in %."""
    columns = list(dict.fromkeys(c for row in found.values() for c in row))

    def text(row: str, value: list[Any] | None) -> str:
        if value is None:
            return "–"
        mean, std = value
        if "bytes" in row:
            return f"{mean:,.0f}"
        if "coordinate" in row or "memory" in title:
            return f"{mean:.3f}" + ("" if std is None else f" ± {std:.3f}")
        return f"{100 * mean:.1f}" + ("" if std is None else f" ± {100 * std:.1f}")

    lines = [f"# {title}", "", command, "", f"| | {' | '.join(columns)} |"]
    lines.append(f"| --- {'| --- ' * len(columns)}|")
    for row, values in found.items():
        lines.append(f"| {row} | {' | '.join(text(row, values.get(c)) for c in columns)} |")
    return "\n".join(lines) + "\n"


def pairs(text: str) -> list[int]:
    return [int(s) for s in text.split(",")]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=Path(), help="folder of the data sets")
    parser.add_argument("--set", choices=SETS, action="append", help="default: all")
    parser.add_argument("--table", choices=TABLES, action="append", help="default: all")
    parser.add_argument("--target", action="append", help="default: the set's")
    parser.add_argument("--seeds", type=pairs, default=[0, 1, 2], help="default: 0,1,2")
    parser.add_argument("--out", type=Path, default=Path("runs/dictionary"), help="kept here")
    parser.add_argument("--results", type=Path, help="also write the Markdown tables here")
    parser.add_argument("-c", action="append", default=[], help="a setting, of all trainings")
    args = parser.parse_args(arguments)
    args.more = overrides("feddadil", args.c)
    args.label = "-".join(["feddadil", *(pair.replace("=", "-") for pair in args.c)])
    torch.set_num_threads(1)

    bench = Bench(args.data, args.out.absolute())
    answer: dict[str, dict[str, Table]] = {}
    for name in args.set or SETS:
        for table in args.table or TABLES:
            found = TABLES[table](bench, args, name)
            command = "    python examples/benchmarks/dictionary.py --data DATA"
            command += f" --set {name} --table {table}"
            command += "".join(f" --target {t}" for t in args.target or ())
            command += "".join(f" -c {pair}" for pair in args.c)
            stem = f"{name}-{table}{args.label.removeprefix('feddadil')}"
            seeds = ", ".join(map(str, args.seeds))
            said = f"{command}\n\nSeeds {seeds}, {time.strftime('%Y-%m-%d')}; mean ± deviation."
            text = markdown(stem, said, found)
            print(text, flush=True)
            if args.results:
                args.results.mkdir(parents=True, exist_ok=True)
                (args.results / f"dictionary-{stem}.md").write_text(text)
            answer.setdefault(table, {})[name] = found
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
