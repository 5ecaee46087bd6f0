"""Adversarial methods on rotated and real digits; what less frequent exchange of gradients saves.

    python examples/benchmarks/adversarial.py --table rotations
    python examples/benchmarks/adversarial.py --table digits --data DATA/digits
    python examples/benchmarks/adversarial.py --table lazy

DATA/digits holds mnist, mnistm, svhn and usps as `.npz`; it is not part of fedda. Trainings are
kept in --out, so the same command continues where it was stopped. With other options the command
never shows results of earlier ones. `--table` can be given more than once.
The last line is one JSON object: for accuracies table -> part -> variant -> target -> [mean,
standard deviation] of the last round, for `lazy` one object per row.

Tables:
    rotations         pen digits that scikit-learn ships, from 0 degrees to 30 and to 60
    mnist-rotations   the same with digits of mnist; needs --data
    digits            from mnist to usps and to mnistm, then from all others to each; needs --data
    lazy              DILS with p = 16, 4 and 1 over real processes

`adversaries.py` holds the settings and says how they were chosen.
"""

import argparse
import json
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import accuracy
import lazy
from adversaries import (
    BASELINE,
    BEGIN,
    CONTROL,
    DILS,
    EVERY_STEP,
    FADA,
    JOINT,
    LIVE,
    SETTINGS,
    TRIED,
    WITH_BATCHNORM,
)

from fedda import plugins
from fedda.config.sections import Flat
from fedda.contrib.lab.comparison import Cell, Plan, Score, Variant
from fedda.contrib.lab.comparison.about import header
from fedda.contrib.lab.comparison.statistics import by_target
from fedda.contrib.lab.comparison.tables import (
    as_csv,
    as_markdown,
    columns,
    difference_text,
    differences,
)
from fedda.data import digits, rotate
from fedda.results.escaping import markdown
from fedda.settings import overrides

DRAW = 0  # seed of each domain's images; the same for every training
IMAGES, TESTS = 600, 500  # per domain
ANGLES = (0, 30, 60)


@dataclass(frozen=True)
class Part(Plan):
    """A plan in which only the named domains are sources, or all others if none is named."""

    sources: Sequence[str] = ()

    def sites(self, cell: Cell) -> list[dict[str, Any]]:
        chosen = (*self.sources, cell.target)
        return [s for s in super().sites(cell) if not self.sources or s["name"] in chosen]


def of(images: int) -> str:
    """The suffix of a folder's name: the number of images, if it is not the default."""
    return f"-{images}" * (images != IMAGES)


def pens(out: Path, images: int) -> Path:
    """Pen digits by angle: no image is in two domains, but two images can show one pen digit."""
    made, rotated = out / f"digits{of(images)}", out / f"rotated{of(images)}"
    if not rotated.is_dir():
        sizes = {name: 10 for name in digits.DOMAINS}
        sizes["handwritten"] = images * len(ANGLES)
        digits.build(made, seed=DRAW, train=sizes, test=TESTS * len(ANGLES))
        rotate.build(made / "handwritten", rotated, ANGLES, seed=DRAW)
    return rotated


def mnist(data: Path, out: Path, images: int) -> Path:
    """Images of mnist by angle: no image is in two domains."""
    made, rotated = out / f"drawn{of(images)}", out / f"rotated{of(images)}"
    count = len(ANGLES)
    accuracy.prepare(data, made, images * count, TESTS * count)
    if not rotated.is_dir():
        rotate.build(made / "mnist.npz", rotated, ANGLES, seed=DRAW)
    return rotated


def drawn(data: Path, out: Path, images: int) -> Path:
    """Draw `images` training images of every domain -> the folder that holds them."""
    made = out / f"drawn{of(images)}"
    accuracy.prepare(data, made, images, TESTS)
    return made


def changed_by(variant: Variant, changes: Flat) -> Variant:
    """The variant with the settings of the command line, which win over its own settings."""
    others = tuple(f"{method}." for method in plugins.methods() if method != variant.method)
    apply = {k: v for k, v in changes.items() if not k.startswith(others)}
    return replace(variant, settings={**variant.settings, **apply})


def parts(args: argparse.Namespace, table: str) -> dict[str, Part]:
    """The plans of one table, by heading."""
    out = args.out / table

    def part(
        data: Path, variants: Sequence[Variant], targets: Sequence[str], *sources: str
    ) -> Part:
        name = ("-".join(sources) or "all") + of(args.images)
        targets = args.target or targets
        changed = [changed_by(v, args.settings) for v in variants]
        shared = SETTINGS | ({"input.channels": 3} if table == "digits" else {})
        return Part(data, out / name, changed, targets, args.seeds, shared, sources=sources)

    if table == "digits":
        data, targets = drawn(args.data, out, args.images), ("usps", "mnistm")
        return {
            "from mnist": part(data, [BASELINE, BEGIN, *DILS, *WITH_BATCHNORM], targets, "mnist"),
            "from all others": part(data, [BASELINE, *JOINT, *FADA], targets),
        }
    images = args.images
    data = pens(out, images) if table == "rotations" else mnist(args.data, out, images)
    variants = [BASELINE, BEGIN, *CONTROL, *DILS, *EVERY_STEP[:1], *WITH_BATCHNORM, *JOINT]
    targets = [str(angle) for angle in ANGLES[1:]]
    return {"from 0 degrees": part(data, variants, targets, "0")}


def against_begin(scores: Sequence[Score]) -> str:
    """DILS minus the model with which it begins, if a part of the table has both."""
    table = by_target([s for s in scores if s.variant.startswith((BEGIN.name, "DILS"))])
    if BEGIN.name not in table or len(table) < 2:
        return ""
    paired, heads = differences(table, BEGIN.name), columns(table)
    rows = [
        [name, *(difference_text(row[h]) if h in row else "–" for h in heads)]
        for name, row in paired.items()
    ]
    lines = ["", f"### Minus {BEGIN.name}, paired by seed", "", *markdown(["", *heads], rows)]
    return "\n".join(lines) + "\n"


def discriminators(plan: Plan) -> str:
    """How well discriminators separated the two sides, over the rounds; means over the seeds."""
    curves: dict[str, dict[str, list[list[float]]]] = {}
    for cell in plan.cells():
        results = plan.results(cell)
        if results is None:
            continue
        rounds = results["trainings"][cell.variant.method][0]["rounds"]
        curve = [r["discriminator-accuracy"] for r in rounds if "discriminator-accuracy" in r]
        if curve:
            curves.setdefault(cell.variant.name, {}).setdefault(cell.target, []).append(curve)
    if not curves:
        return ""
    rows = [
        [name, *(_course(row.get(target, [])) for target in plan.targets)]
        for name, row in curves.items()
    ]
    lines = ["", "### Discriminator accuracy", "", COURSE, ""]
    return "\n".join([*lines, *markdown(["", *plan.targets], rows)]) + "\n"


COURSE = (
    "In the first, the middle and the last round that has a discriminator, in %, mean over the "
    "seeds; 50 is chance. It is measured on each step's batch, before that step's own gradient."
)


def _course(runs: Sequence[Sequence[float]]) -> str:
    if not runs:
        return "–"
    places = (0, len(runs[0]) // 2, -1)
    return " ".join(f"{100 * statistics.fmean(run[i] for run in runs):.0f}" for i in places)


def measure(args: argparse.Namespace, table: str) -> dict[str, Any]:
    """Run the missing trainings of a table and write the table -> its figures."""
    command = f"python examples/benchmarks/adversarial.py --table {table}"
    command += " --data DATA/digits" * (table != "rotations")
    command += args.typed("target", "seeds", "images", "changes")
    stem = f"adversarial-{table}{plain(args.typed('images', 'changes'))}"
    text, lines, answer = f"{TRIED}\n\n", [], {}
    for name, plan in parts(args, table).items():
        failed = plan.run(1, accuracy.note)
        scores = plan.scores()
        text += header(plan, f"{stem}: {name}", command)
        text += as_markdown(scores, BASELINE.name, plan.targets)
        text += against_begin(scores) + discriminators(plan) + "\n"
        top, *below = as_csv(scores).splitlines()
        lines += [] if lines else [f"part,{top}"]
        lines += [f"{name},{line}" for line in below]
        answer[name] = accuracy.figures(by_target(scores))
        for cell, error in failed.items():
            print(f"FAILED {cell.name}: {error}", flush=True)
    for folder in filter(None, (args.out, args.results)):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{stem}.md").write_text(text.rstrip() + "\n")
        (folder / f"{stem}.csv").write_text("\n".join(lines) + "\n")
    print(text)
    return answer


def real(args: argparse.Namespace) -> list[dict[str, Any]]:
    """DILS over processes, on the pen digits from 0 to 30 degrees."""
    options = args.typed("images", "repeats", "changes")
    stem = f"adversarial-lazy{plain(options)}"
    out = args.out / stem.removeprefix("adversarial-")
    path, data = out / "figures.json", pens(args.out / "rotations", args.images)
    settings = {**LIVE, **args.settings}
    if not path.is_file():
        files = {name: data / name / "data.npz" for name in ("0", "30")}
        measured = lazy.measure(out, files, settings, args.repeats)
        path.write_text(json.dumps(measured, indent=1))
    measured = json.loads(path.read_text())
    command = f"python examples/benchmarks/adversarial.py --table lazy{options}"
    text = lazy.report(measured, settings, f"## {stem}", command)
    for folder in filter(None, (args.out, args.results)):
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{stem}.md").write_text(text)
    print(text)
    return measured


def plain(options: str) -> str:
    """The options, in a form that fits into a file's name."""
    return re.sub(r"[^\w.]+", "-", options).rstrip("-")


TABLES = ("rotations", "mnist-rotations", "digits", "lazy")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    usual = "default: all, without --data those that need none"
    parser.add_argument("--table", choices=TABLES, action="append", help=usual)
    parser.add_argument("--data", type=Path, help="folder of mnist.npz and the other domains")
    parser.add_argument("--target", action="append", help="default: the table's targets")
    parser.add_argument("--seeds", type=accuracy.seeds, default=[0, 1, 2], help="default: 0,1,2")
    parser.add_argument("--images", type=int, default=IMAGES, help="per domain")
    parser.add_argument("--repeats", type=int, default=3, help="of each row of `lazy`")
    parser.add_argument("-c", action="append", default=[], metavar="KEY=VALUE", dest="changes")
    out = Path("runs/adversarial")
    parser.add_argument("--out", type=Path, default=out, help=f"for all trainings; default: {out}")
    parser.add_argument("--results", type=Path, help="also write the tables and CSV files here")
    args = parser.parse_args(arguments)
    args.typed = partial(accuracy.typed, parser, args)
    args.settings = overrides("dils", args.changes)
    tables = args.table or [t for t in TABLES if args.data or t in ("rotations", "lazy")]
    if not args.data and {"digits", "mnist-rotations"} & set(tables):
        parser.error("the tables digits and mnist-rotations need a folder of data: give --data")
    answer = {t: real(args) if t == "lazy" else measure(args, t) for t in tables}
    print(json.dumps(answer))


if __name__ == "__main__":
    with accuracy.plainly():
        main()
