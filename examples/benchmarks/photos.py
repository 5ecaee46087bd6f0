"""Office-Caltech10 with pretrained networks: every method, each domain as the target.

    python examples/benchmarks/photos.py --data DATA --table frozen

DATA holds `office_caltech10_photos/` (images/DOMAIN/CLASS/*.jpg) and, for the table googlenet,
`office_caltech10_googlenet1024/` (one .npz per domain); they are not part of fedda. As is usual
with this benchmark, a target is tested on the same images that it adapts to without their labels.
Every accuracy is that of the last round, or of the round with the highest infomax, which needs no
labels. Trainings are kept in --out, so the same command continues where it was stopped. The last
line is one JSON object: table -> variant -> target -> [mean, standard deviation].

Tables:
    frozen       all methods but the adversarial ones; features of EfficientNet-Lite0 at 224 pixels,
                 under a bottleneck that learns (--preset photos); needs fedda[pretrained]
    finetuned    FedAvg, AdaBN, FedProx and KD3A; the whole network learns, at 96 pixels; beside
                 them the same methods with the frozen network at 96 pixels
    googlenet    the same methods; GoogLeNet's features (--preset vectors)
    adversarial  f-DANN, f-WDGRL, f-DAN and MDAN, as `frozen`
    source-free  SHOT and DECISION, whose sources may leave after the first round, and FACT, beside
                 FedAvg, AdaBN and KD3A, as `googlenet`
    fada         the models of FADA beside f-DANN, f-DAN and MDAN, as `googlenet`
    dils         DILS, as `frozen`, with caltech as the only source
    blocks       what it costs that no step is over fewer images than `--min-images`: FedAvg and
                 KD3A as `googlenet`, at sites that allow 16 and at sites that allow 64, the latter
                 also with four times the epochs in a round, so that it has as many steps. Learning
                 rates were chosen on seed 100, with amazon as the target

dslr has 157 images, too few to sum a gradient over (exchange.min-examples), so it is no target of
adversarial, fada and dils, and as a source it trains on its labels alone.

Controls below the tables frozen and googlenet, which no federation could train:
    pooled      one linear head on the sources' pooled features, each source weighing the same; its
                regularisation is the best one for sources held out in turn, without the target
    oracle      the same with the target's labels, in five folds of the target's own images
"""

import argparse
import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import accuracy
import numpy as np
import torch
from adversarial import Part
from adversaries import FADA
from sklearn.linear_model import LogisticRegression
from sklearn.model_selection import StratifiedKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from fedda import data, models, plugins
from fedda.config.sections import Flat
from fedda.contrib.benchmarks.common import Options
from fedda.contrib.benchmarks.registry import import_benchmark
from fedda.contrib.lab.comparison import Cell, Plan, Variant
from fedda.contrib.lab.comparison.about import header
from fedda.contrib.lab.comparison.plan import BENCHMARK, CELLS
from fedda.contrib.lab.comparison.statistics import by_target
from fedda.contrib.lab.comparison.tables import as_markdown
from fedda.errors import ConfigError
from fedda.halves import load
from fedda.results.escaping import markdown
from fedda.settings import RunConfig, presets

BASELINE = Variant("fedavg", label="FedAvg (source-only)")
# DILS begins as FedAvg does, and adapts in the last 20 of the 60 rounds.
BOTH: list[Flat] = [
    {"dils.loss": loss, "dils.lr": 2e-4, "dils.pretrain": 40} for loss in ("adda", "wassda")
]
FIRST = [
    BASELINE,
    Variant("adabn", label="AdaBN"),
    Variant("fedprox", label="FedProx"),
    Variant("kd3a", label="KD3A"),
]
ALL = [
    *FIRST,
    Variant("kd3a", "paper", label="KD3A paper"),
    Variant("kd3a", "official", label="KD3A official"),
    Variant("feddadil", label="FedDaDiL-R"),
    Variant("feddadil", settings={"feddadil.predict": "ensemble"}, label="FedDaDiL-E"),
]
JOINT = [
    Variant("fdann", label="f-DANN"),
    Variant("fwdgrl", label="f-WDGRL"),
    Variant("fdan", label="f-DAN"),
    Variant("mdan", label="MDAN"),
]
FREE = [
    *(v for v in FIRST if v.method != "fedprox"),
    Variant("shot", label="SHOT"),
    Variant("decision", label="DECISION"),
    Variant("fact", label="FACT"),
]
ONE, SMALL = "caltech", "dslr"  # the only source in the table dils; too small for a gradient
PAIR = [
    *FIRST[:2],
    *(Variant("dils", settings=b, label=f"DILS {b['dils.loss']}") for b in BOTH),
]
CHANGED: Flat = {"input.size": 96}  # of the preset photos, in the table finetuned
WHOLE: Flat = {
    "model.train": "all",
    "rounds": 4,
    "train.batch-size": 32,
    "train.lr": 0.002,  # that of new layers is ten times as high
    "train.lr-end": 0.0002,
    "train.momentum": 0.9,
    "train.layout": "channels-last",
}
TUNED = [
    *(Variant(v.method, settings=WHOLE, label=f"{v.label}, all learns") for v in FIRST),
    *(Variant(v.method, label=f"{v.label}, frozen") for v in FIRST),
]


def stepped(method: str, label: str, batch: int, rate: float, epochs: int = 1) -> Variant:
    """A variant of the table blocks."""
    own: Flat = {"train.batch-size": batch, "train.rounds-per-epoch": 1 / epochs}
    own |= {"train.lr": rate, "train.lr-end": rate / 50}
    text = f"{label}, steps over {batch}" + f", {epochs} epochs" * (epochs > 1)
    return Variant(method, settings=own, label=text)


STEPS = [
    stepped("fedavg", "FedAvg", 16, 0.02),
    stepped("fedavg", "FedAvg", 64, 0.05),
    stepped("fedavg", "FedAvg", 64, 0.05, 4),
    stepped("kd3a", "KD3A", 16, 0.05),
    stepped("kd3a", "KD3A", 64, 0.1),
    stepped("kd3a", "KD3A", 64, 0.05, 4),
]
# table -> folder of the data, preset, changes of the preset, variants, baseline
TABLES: dict[str, tuple[str, str, Flat, list[Variant], str]] = {
    "frozen": ("office_caltech10_photos", "photos", {}, ALL, BASELINE.name),
    "finetuned": ("office_caltech10_photos", "photos", CHANGED, TUNED, TUNED[0].name),
    "googlenet": ("office_caltech10_googlenet1024", "vectors", {}, ALL, BASELINE.name),
    "source-free": (
        "office_caltech10_googlenet1024",
        "vectors",
        {},
        FREE,
        BASELINE.name,
    ),
    "adversarial": (
        "office_caltech10_photos",
        "photos",
        {},
        [*FIRST[:2], *JOINT],
        BASELINE.name,
    ),
    "fada": (
        "office_caltech10_googlenet1024",
        "vectors",
        {},
        [*FIRST[:2], *(v for v in JOINT if v.method != "fwdgrl"), *FADA],
        BASELINE.name,
    ),
    "dils": ("office_caltech10_photos", "photos", {}, PAIR, BASELINE.name),
    "blocks": ("office_caltech10_googlenet1024", "vectors", {}, STEPS, STEPS[0].name),
}
BATCH = 50  # with which the published tables were made; the presets have 64
STRENGTHS = (0.001, 0.01, 0.1, 1.0)  # C of the controls' heads
FOLDS = 5

Features = dict[str, tuple[np.ndarray, np.ndarray]]  # by domain: (N, d), (N,)


@dataclass(frozen=True)
class Blocked(Part):
    """A plan whose sites let no step be over fewer images than the run's are."""

    def sites(self, cell: Cell) -> list[dict[str, Any]]:
        least = self.config(cell).train.batch_size
        return [site | {"min-images": least} for site in super().sites(cell)]


def prepare(source: Path, out: Path) -> list[str]:
    """Write the domains where the trainings read them, unless they are there -> their names."""
    if not (out / BENCHMARK).is_file():
        if any(source.glob("*.npz")):
            out.mkdir(parents=True)
            for path in accuracy.domains(source):
                with np.load(path) as file:
                    x, y = file["x"].astype(np.float32), file["y"]
                np.savez(out / path.name, x_train=x, y_train=y, x_test=x, y_test=y)
            (out / BENCHMARK).write_text(json.dumps({"options": {"transductive": True}}))
        else:
            options = Options(transductive=True, files="link")
            import_benchmark("office-caltech10", source, out, options)
    return list(data.domains(out))


def plan(args: argparse.Namespace, table: str) -> Plan:
    """The trainings of one table."""
    folder, preset, changes, variants, _ = TABLES[table]
    domains = prepare(args.data / folder, args.out / folder)
    chosen = presets.for_all(preset, plugins.methods())
    flat = {key: given.value for key, given in chosen.items()} | {"train.batch-size": BATCH}
    flat |= changes
    if odd := set(args.target or ()) - set(domains):
        raise ConfigError(f"There is no domain {min(odd)}; they are {', '.join(domains)}.")
    sources = (ONE,) if table == "dils" else ()
    never = (*sources, SMALL) if table in ("adversarial", "fada", "dils") else ()
    targets = tuple(t for t in args.target or domains if t not in never)
    flat |= {"rounds": args.rounds} if args.rounds else {}
    place = args.out / folder, args.out / table
    kind = Blocked if table == "blocks" else Part
    return kind(*place, variants, targets, args.seeds, flat, sources=sources)


def features(made: Plan) -> Features:
    """What the trainings learn from: a frozen network's outputs, or the vectors themselves."""
    config = RunConfig.parse({"method": "fedavg", "run.name": "features", **made.settings})
    found: Features = {}
    names = data.domains(made.data)
    for name, path in names.items():
        if config.model.freezes:
            size = models.inputs(config.input, config.model).size
            dims = (config.input.channels, size, size)
            images = data.load_source(path, channels=dims[0], size=size)
            task = config.task("fedavg", 0, dims, images.classes, len(names) - 1)
            task = task.model_copy(update={"frozen": models.digest(config.model, dims)})
            kept = made.out / CELLS / "features"
            images = (
                load("clients", "site.frozen")
                .Frozen(torch.device("cpu"), kept, "")
                .outputs("train", task, images)
            )
        else:
            images = data.load_source(path, channels=0, size=0)
        found[name] = images.x.numpy(), images.y.numpy()
    return found


def head(strength: float) -> Any:
    """A linear head on standardised features."""
    return make_pipeline(StandardScaler(), LogisticRegression(C=strength, max_iter=300))


def fitted(known: Features, sources: Sequence[str], strength: float) -> Any:
    """A head on the pooled features of sources that weigh the same."""
    x, y = (np.concatenate(part) for part in zip(*(known[s] for s in sources), strict=True))
    alike = np.concatenate([np.full(len(known[s][1]), 1 / len(known[s][1])) for s in sources])
    weights = alike * len(alike) / alike.sum()
    return head(strength).fit(x, y, logisticregression__sample_weight=weights)


def controls(known: Features) -> dict[str, dict[str, float]]:
    """Accuracy of the pooled head and of the oracle, with each domain as the target."""
    rows: dict[str, dict[str, float]] = {"pooled": {}, "oracle": {}}
    for target in known:
        sources = [s for s in known if s != target]

        def held_out(strength: float, sources: list[str] = sources) -> float:
            others = ((s, [o for o in sources if o != s]) for s in sources)
            return float(np.mean([fitted(known, o, strength).score(*known[s]) for s, o in others]))

        best = max(STRENGTHS, key=held_out)
        rows["pooled"][target] = fitted(known, sources, best).score(*known[target])
        folds = StratifiedKFold(FOLDS, shuffle=True, random_state=0)
        scores = cross_val_score(head(best), *known[target], cv=folds)
        rows["oracle"][target] = float(scores.mean())
    return rows


def kept_controls(made: Plan) -> dict[str, dict[str, float]]:
    """The same, from the file of an earlier call if there is one."""
    path = made.out / "controls.json"
    if not path.is_file():
        path.write_text(json.dumps(controls(features(made))))
    rows = json.loads(path.read_text())
    return {name: {t: row[t] for t in made.targets} for name, row in rows.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets")
    parser.add_argument("--table", choices=TABLES, action="append", help="default: all")
    parser.add_argument("--target", action="append", help="default: all domains")
    parser.add_argument("--rounds", type=int, default=0, help="default: those of the preset")
    parser.add_argument("--seeds", type=accuracy.seeds, default=[0, 1, 2], help="default: 0,1,2")
    out = Path("runs/photos")
    parser.add_argument("--out", type=Path, default=out, help=f"for all trainings; default: {out}")
    parser.add_argument("--results", type=Path, help="also write the tables and CSV files here")
    jobs = 1 if torch.cuda.is_available() else os.cpu_count() or 1
    parser.add_argument("--jobs", type=int, default=jobs, help="trainings at the same time")
    args = parser.parse_args(arguments)

    answer: dict[str, Any] = {}
    for table in args.table or TABLES:
        made = plan(args, table)
        failed = made.run(args.jobs, accuracy.note)
        scores = made.scores()
        command = f"python examples/benchmarks/photos.py --data DATA --table {table}"
        command += accuracy.typed(parser, args, "target", "rounds", "seeds")
        text = header(made, f"photos-{table}", command)
        text += as_markdown(scores, TABLES[table][4], made.targets)
        answer[table] = accuracy.figures(by_target(scores))
        if table in ("frozen", "googlenet"):
            rows = kept_controls(made)
            cells = [[name, *(f"{100 * v:.1f}" for v in r.values())] for name, r in rows.items()]
            lines = ["", "### Controls", "", *markdown(["", *made.targets], cells)]
            text += "\n".join(lines) + "\n"
            answer[table] |= {n: {t: [v, None] for t, v in row.items()} for n, row in rows.items()}
        accuracy.publish(f"photos-{table}", text, scores, failed, made.out, args.results)
    print(json.dumps(answer))


if __name__ == "__main__":
    with accuracy.plainly():
        main()
