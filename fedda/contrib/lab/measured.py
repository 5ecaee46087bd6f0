"""Which of several trained methods to take, by a few labels of the target's images.

The reference is what needs no choice: FedAvg's model and the same with BatchNorm statistics of the
target, averaged and refined by its last step. Another method is taken if its refined model has more
of the labelled images right, and labels tell the two apart (`TELLS`).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedda.contrib.lab.comparison import Cell, Plan, Variant
from fedda.results.escaping import markdown
from fedda.results.read import counted, model_file, printable

from .labelled import Interval, Labels, differ, interval

TELLS = 0.5  # McNemar's p below which a method is taken in place of the reference
HALF = 0.5


@dataclass(frozen=True)
class Choice:
    """What labels say of trained methods."""

    plan: Plan  # the trainings, of one target; FedAvg is the first variant
    labels: Labels  # of the target's images
    # which labelled images most of a variant's seeds have right
    right: Mapping[Variant, Sequence[bool]]
    command: Mapping[Variant, str]  # words of `fedda run` that train a variant
    classes: int  # of the models

    @property
    def reference(self) -> Variant:
        """FedAvg."""
        return self.plan.variants[0]

    @property
    def chosen(self) -> Variant:
        """The best by the labels, if they tell it from the reference."""
        best = max(self.right, key=lambda v: (sum(self.right[v]), v == self.reference))
        return best if self.differs(best) < TELLS else self.reference

    def differs(self, variant: Variant) -> float:
        """McNemar's p of no difference from the reference."""
        return differ(self.right[variant], self.right[self.reference])

    def interval(self, variant: Variant) -> Interval:
        """A variant's accuracy on the labelled images, which holds for all looks together."""
        right = self.right[variant]
        return interval(sum(right), len(right), self.labels.drawn.looks)

    @property
    def folders(self) -> list[Path]:
        """The chosen method's trainings, one per seed."""
        (target,) = self.plan.targets
        return [self.plan.folder(Cell(self.chosen, target, seed)) for seed in self.plan.seeds]


def refined_model(folder: Path) -> Path:
    """The file of what a finished training's last step has made, or of its model without one."""
    found = (folder / "sites").glob("*/*.refined.safetensors")
    return next(found, None) or model_file(folder)


def most(answers: Sequence[Sequence[bool]]) -> list[bool]:
    """Which images most of several models have right."""
    return [sum(image) > HALF * len(image) for image in zip(*answers, strict=True)]


def as_json(choice: Choice) -> dict[str, Any]:
    """The content of choice.json."""
    taken, drawn = choice.chosen, choice.labels.drawn
    rows = []
    for variant, right in choice.right.items():
        found = choice.interval(variant)
        row = {"name": variant.name, "method": variant.method, "settings": dict(variant.settings)}
        row |= {"right": sum(right), "low": found.low, "high": found.high}
        rows.append(row | {"p": choice.differs(variant), "command": choice.command[variant]})
    return {
        "target": choice.plan.targets[0],
        "method": taken.method,
        "settings": dict(taken.settings),
        "command": choice.command[taken],
        "labels": len(choice.right[taken]),
        "looks": drawn.looks,
        "seeds": list(choice.plan.seeds),
        "candidates": rows,
        "folders": [str(folder) for folder in choice.folders],
    }


def as_markdown(choice: Choice) -> str:
    """Which method to take, and a table of all."""
    taken, labels = choice.chosen, len(choice.right[choice.chosen])
    looks = counted(choice.labels.drawn.looks, "look")
    order = sorted(choice.right, key=lambda v: -sum(choice.right[v]))
    rows = []
    for variant in order:
        found = choice.interval(variant)
        row = [variant.name, f"{found.right} of {found.n}", f"{100 * found.accuracy:.1f}"]
        row += [f"{100 * found.low:.0f} to {100 * found.high:.0f}"]
        own = variant == choice.reference
        rows.append([*row, "" if own else f"{choice.differs(variant):.2g}"])
    rights = [sum(right) for right in choice.right.values()]
    why = "It has more of the labelled images right than any other."
    if sum(choice.right[taken]) < max(rights):
        why = "The labels do not tell it from those that have more images right."
    elif rights.count(max(rights)) > 1:
        why = "None has more of the labelled images right."
    if doubt := choice.interval(taken).doubt(choice.classes):
        why += f" But {doubt}."
    heads = ["refined", "right", "accuracy in %", "interval", f"p beside {choice.reference.name}"]
    return "\n".join(
        [
            f"## A method for {printable(choice.plan.targets[0])}",
            "",
            f"Take {taken.name}, refined. {why}",
            "",
            f"    {choice.command[taken]}",
            "",
            f"{counted(labels, 'label')}, {counted(len(choice.plan.seeds), 'seed')}; the intervals "
            f"hold for {looks} at these labels together.",
            "",
            *markdown(heads, rows),
            "",
        ]
    )
