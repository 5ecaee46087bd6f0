"""FedDaDiL on real data: -R and -E beside the FedAvg head, parallelism, distillation, memory.

    python examples/benchmarks/dictionary.py --data DATA --table heads --set surf --set googlenet

DATA holds the domains as `.npz` files in folders (see `dictionaries.py`); they are not part of
fedda, and `embedded` needs none. Every accuracy is that of the last round. Trainings are kept in
--out, so the same command continues where it was stopped. With --results each table is written
there, and a `.csv` with one line per row, column and seed. The last line is one JSON object:
table -> set -> row -> column -> [mean, standard deviation].

Tables:
    heads      -R, -E and the FedAvg head of the same run, two controls that pool the sources'
               points, and the largest coordinate (1 is a vertex of the simplex)
    parallel   FedDaDiL and KD3A with E local epochs in a round and 1/E as many rounds; bytes of a
               round's training, without the bytes sent to the target for its test
    distil     heads fitted on SPC samples per class: distilled, or drawn from the sources in turn;
               and the better control of `heads`, fitted on all samples of the sources
    memory     distances of training and of held-out features to the nearest point of the atoms,
               and the AUC of an attack that tells the two apart by this distance
"""

import argparse
import csv
import io
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import accuracy
import numpy as np
import torch
import torch.nn.functional as F
from dictionaries import SETS, After, Bench, Cell, Set
from sklearn.metrics import roc_auc_score
from torch import Tensor

from fedda.algorithms import feddadil
from fedda.config.sections import Flat
from fedda.contrib.lab.comparison.statistics import Values
from fedda.contrib.lab.comparison.tables import columns
from fedda.errors import ConfigError
from fedda.maths import atom_heads
from fedda.results.escaping import markdown
from fedda.settings import overrides

ROUNDS = 20  # of the dictionary; the rounds of the encoder come before (Set.encoder)
SPC = (1, 5, 10, 20)
LOCAL = (1, 2, 4, 5, 10)  # E


def settings(chosen: Set, epochs: int = 1) -> Flat:
    """FedDaDiL's settings on a data set, with E epochs a round and 1/E as many rounds."""
    rounds = chosen.encoder + ROUNDS // epochs
    return {
        "method": "feddadil",
        "rounds": rounds,
        "feddadil.encoder-share": (chosen.encoder + 0.5) / rounds,
        "feddadil.epochs": epochs,
        "run.evaluate": False,  # heads are fitted here, once, as the target fits them
    }


def cells(args: argparse.Namespace, name: str) -> list[tuple[str, int]]:
    """Targets and seeds of the trainings.

    Raises:
        ConfigError: the set has none of the targets given as --target.
    """
    known = SETS[name].targets
    targets = [t for t in known if t in (args.target or known)]
    if not targets:
        raise ConfigError(f"The targets of {name} are {', '.join(known)}; give one as --target.")
    return list(itertools.product(targets, args.seeds))


def one_target(args: argparse.Namespace, name: str) -> list[tuple[str, int]]:
    """All seeds of the first target."""
    return cells(args, name)[: len(args.seeds)]


class Rows(dict[str, dict[str, Values]]):
    """Values by row, column and seed."""

    def add(self, row: str, column: str, seed: int, value: float) -> None:
        self.setdefault(row, {}).setdefault(column, {})[seed] = value


POOLED_DECAY = 1e-4  # weight decay of a head on many points
POOLED = "control: a head on all points of the sources, pooled"
ALIKE_TOO = "each source weighing the same"
ALIKE = f"control: the same, {ALIKE_TOO}"


def pooled(after: After, target: str, alike: bool = False) -> float:
    """Accuracy of a head on all sources' points, without a dictionary.

    Each site's points are in its own scaling. With `alike` every source weighs the same.
    """
    sources = [after.points(site)[:2] for site in after.sites() if site != target]
    z, known = (torch.cat(part) for part in zip(*sources, strict=True))
    _, _, tests, labels = after.points(target)
    y = F.one_hot(known, after.task.classes).float()
    if alike:  # cross entropy is linear in the labels, so labels can carry weights
        weights = [torch.full((len(x), 1), len(z) / len(sources) / len(x)) for x, _ in sources]
        y = y * torch.cat(weights)
    return right(z, y, tests, labels, POOLED_DECAY)


def heads(bench: Bench, args: argparse.Namespace, name: str) -> Rows:
    rows = Rows()
    for target, seed in cells(args, name):
        cell = Cell(args.label, name, target, seed, settings(SETS[name]) | args.more)
        after = bench.after(bench.run(cell)[1], cell)
        for row, value in after.scores(target).items():
            rows.add(row, target, seed, value)
        rows.add(POOLED, target, seed, pooled(after, target))
        rows.add(ALIKE, target, seed, pooled(after, target, alike=True))
        largest = {site: float(after.coordinates(site).max()) for site in after.sites()}
        rows.add("largest coordinate, target", target, seed, largest[target])
        rows.add("largest coordinate, any site", target, seed, max(largest.values()))
    return rows


def parallel(bench: Bench, args: argparse.Namespace, name: str) -> Rows:
    rows, chosen = Rows(), SETS[name]
    for epochs in LOCAL:
        column = f"E = {epochs}"
        for target, seed in one_target(args, name):
            own = settings(chosen, epochs) | args.more
            label = args.label if epochs == 1 else f"{args.label}-e{epochs}"
            cell = Cell(label, name, target, seed, own)
            results, folder = bench.run(cell)
            for row, value in bench.after(folder, cell).scores(target).items():
                rows.add(row, column, seed, value)
            last = results["trainings"]["feddadil"][0]["rounds"][-1]  # this run tests nothing
            sent = sum(n for k, n in last["bytes"].items() if k.endswith(("atoms", "model")))
            rows.add("bytes of a round, FedDaDiL", column, seed, sent)
            other: Flat = {
                "method": "kd3a",
                "rounds": ROUNDS // epochs,
                "train.rounds-per-epoch": 1 / epochs,
            }
            results, _ = bench.run(Cell(f"kd3a-e{epochs}", name, target, seed, other))
            last = results["trainings"]["kd3a"][0]["rounds"][-1]
            rows.add("KD3A", column, seed, last["accuracy"])
            sent = sum(n for k, n in last["bytes"].items() if k.endswith("model"))
            rows.add("bytes of a round, KD3A", column, seed, sent)
    return rows


def right(z: Tensor, y: Tensor, points: Tensor, labels: Tensor, decay: float) -> float:
    """Accuracy of a head fitted on (z, y)."""
    W, b = atom_heads.fit_heads(z[None], y[None], decay)
    return float(((points @ W[0].T + b[0]).argmax(dim=1) == labels).float().mean())


def some(
    sources: Sequence[tuple[Tensor, Tensor]], C: int, spc: int, draws: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw `spc` points of every class from the sources in turn -> (M, d), (M, C)."""
    z, y = [], []
    for c in range(C):
        heaps = [points[known == c] for points, known in sources]
        heaps = [heap[torch.randperm(len(heap), generator=draws)] for heap in heaps]
        order = torch.randperm(len(heaps), generator=draws).tolist()
        # A source without further points of the class is skipped.
        z.append(torch.cat([heaps[s][i : i + 1] for i in range(spc) for s in order])[:spc])
        y.append(torch.full((len(z[-1]),), c))
    return torch.cat(z), F.one_hot(torch.cat(y), C).float()


def distil(bench: Bench, args: argparse.Namespace, name: str) -> Rows:
    rows = Rows()
    for target, seed in one_target(args, name):
        cell = Cell(args.label, name, target, seed, settings(SETS[name]) | args.more)
        after = bench.after(bench.run(cell)[1], cell)
        decay, alpha = after.task.options.head_decay, after.coordinates(target)
        _, _, points, labels = after.points(target)
        sources = [after.points(site)[:2] for site in after.sites() if site != target]
        draws = torch.Generator().manual_seed(seed)
        for spc in SPC:
            column = f"SPC {spc}"
            made = feddadil.distilled(after.z, after.y, alpha, spc)
            rows.add("distilled", column, seed, right(*made, points, labels, decay))
            drawn = (some(sources, after.task.classes, spc, draws) for _ in range(5))
            score = statistics.fmean(right(*d, points, labels, decay) for d in drawn)
            rows.add("samples of the sources, drawn", column, seed, score)
        rows.add(f"{POOLED}, {ALIKE_TOO}", "all", seed, pooled(after, target, alike=True))
    return rows


def memory(bench: Bench, args: argparse.Namespace, name: str) -> Rows:
    rows = Rows()
    for target, seed in one_target(args, name):
        own = settings(SETS[name]) | args.more
        cell = Cell(args.label, name, target, seed, own, split=True)
        after = bench.after(bench.run(cell)[1], cell)
        every = after.z.flatten(end_dim=1)
        for site in after.sites():
            train, _, held, _ = after.points(site)
            near = [torch.cdist(x, every).amin(dim=1).numpy() for x in (train, held)]
            truth = np.repeat([1, 0], [len(near[0]), len(near[1])])
            rows.add(site, "AUC", seed, float(roc_auc_score(truth, -np.concatenate(near))))
            for what, distances in zip(("training", "held out"), near, strict=True):
                for share in (10, 50, 90):
                    distance = float(np.percentile(distances, share))
                    rows.add(site, f"{what}, {share} %", seed, distance)
    return rows


TABLES = {"heads": heads, "parallel": parallel, "distil": distil, "memory": memory}


def text_of(table: str, row: str, mean: float, std: float | None) -> str:
    """A mean and its deviation; accuracies and shares in %."""
    if "bytes" in row:
        return f"{mean:,.0f}"
    factor, form = (1, ".3f") if "coordinate" in row or table == "memory" else (100, ".1f")
    return f"{factor * mean:{form}}" + ("" if std is None else f" ± {factor * std:{form}}")


def as_markdown(table: str, figures: dict[str, dict[str, list[Any]]]) -> str:
    heads = columns(figures)
    body = [
        [row, *(text_of(table, row, *values[h]) if h in values else "–" for h in heads)]
        for row, values in figures.items()
    ]
    return "\n".join(markdown(["", *heads], body)) + "\n"


def as_csv(rows: Rows) -> str:
    """One line per row, column and seed; accuracies between 0 and 1."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["row", "column", "seed", "value"])
    for row, by_column in rows.items():
        for column, values in by_column.items():
            writer.writerows([row, column, seed, value] for seed, value in values.items())
    return text.getvalue()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder of the data sets")
    usual = "default: all with this --data and --target"
    parser.add_argument("--set", choices=SETS, action="append", help=usual)
    parser.add_argument("--table", choices=TABLES, action="append", help="default: all")
    parser.add_argument("--target", action="append", help="default: the set's targets")
    parser.add_argument("--seeds", type=accuracy.seeds, default=[0, 1, 2], help="default: 0,1,2")
    out = Path("runs/dictionary")
    parser.add_argument("--out", type=Path, default=out, help=f"for all trainings; default: {out}")
    parser.add_argument("--results", type=Path, help="also write the tables and CSV files here")
    parser.add_argument("-c", action="append", default=[], metavar="KEY=VALUE", dest="changes")
    args = parser.parse_args(arguments)
    args.more = overrides("feddadil", args.changes)
    args.label = "-".join(["feddadil", *(pair.replace("=", "-") for pair in args.changes)])
    asked = set(args.target or ())
    sets = args.set or [
        name
        for name, chosen in SETS.items()
        if (args.data or not chosen.folder) and (not asked or asked & set(chosen.targets))
    ]
    for name in sets:
        cells(args, name)
    known = {target for name in sets for target in SETS[name].targets}
    if odd := sorted(asked - known):
        possible = ", ".join(sorted(known))
        parser.error(f"no target {odd[0]}; the targets of {', '.join(sets)} are {possible}")
    if not args.data and any(SETS[name].folder for name in sets):
        missing = " and ".join(n for n in sets if SETS[n].folder)
        parser.error(f"no data for {missing}; give the folder of the data sets as --data")
    torch.set_num_threads(1)

    bench = Bench(args.data, args.out.absolute())
    answer: dict[str, dict[str, Any]] = {}
    for name in sets:
        for table in args.table or TABLES:
            rows = TABLES[table](bench, args, name)
            figures = accuracy.figures(rows)
            command = "python examples/benchmarks/dictionary.py"
            command += " --data DATA" * bool(SETS[name].folder)
            command += f" --set {name} --table {table}"
            command += accuracy.typed(parser, args, "target", "seeds", "changes")
            stem = f"{name}-{table}{args.label.removeprefix('feddadil')}"
            about = f"Seeds {', '.join(map(str, args.seeds))}; mean ± standard deviation over them."
            if table != "heads":  # the columns of `heads` are the targets
                about = f"Target {one_target(args, name)[0][0]}. {about}"
            about += f" Put together on {time.strftime('%Y-%m-%d')}."
            text = f"## {stem}\n\n    {command}\n\n{about}\n\n{as_markdown(table, figures)}"
            print(text, flush=True)
            if args.results:
                args.results.mkdir(parents=True, exist_ok=True)
                (args.results / f"dictionary-{stem}.md").write_text(text)
                (args.results / f"dictionary-{stem}.csv").write_text(as_csv(rows))
            answer.setdefault(table, {})[name] = figures
    print(json.dumps(answer))


if __name__ == "__main__":
    with accuracy.plainly():
        main()
