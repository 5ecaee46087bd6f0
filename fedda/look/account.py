"""What one site tells of its data: a table and, of enough examples, packed statistics.

table    role, name, kind, shape, names of a table's columns, examples and, at a source, classes
         with counts: in tens, and classes below ten are not named
look     per column `low` .. `missing` (d,) and `share` (d, BINS); of images also `feature-mean`
         and `feature-deviation` (2 GRID^2,): what drift is computed of
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedda.config import is_site_name
from fedda.data.naming import can_be_brief, is_one_line
from fedda.errors import WireError
from fedda.maths import summaries
from fedda.maths.summaries import BINS, FLOOR, GRID
from fedda.wire import LOOK, Role
from fedda.wire.packing import Entry, Kind, Manifest, Packed, pack

SIDE = 32  # pixels to which images are reduced
SHARES = ("missing", "share")
NUMBERS = ("low", "high", "mean", "deviation", "missing")
MOST_CLASSES = 10_000
MOST_COLUMNS = 2**20
MODEL = Manifest(Kind.MODEL, "float32", ())  # none is sent


@dataclass(frozen=True)
class Account:
    """What a site told; `arrays` are by name, empty if it has too few examples for them."""

    role: Role
    name: str
    kind: str
    shape: tuple[int, ...]
    examples: int
    classes: Mapping[str, int] = field(default_factory=dict)
    arrays: Mapping[str, Tensor] = field(default_factory=dict)
    columns: tuple[str, ...] = ()  # as `fedda.data.naming.brief` has them; none: not known

    def column(self, c: int) -> str:
        """What a column is called, or which one it is."""
        return self.columns[c] if len(self.columns) == self.shape[0] else f"column {c + 1}"

    @property
    def images(self) -> bool:
        return self.kind == "image"

    @property
    def features(self) -> tuple[Tensor, Tensor]:
        """Mean and deviation of what drift is computed of."""
        before = "feature-" if self.images else ""
        return self.arrays[f"{before}mean"], self.arrays[f"{before}deviation"]

    @property
    def known(self) -> Tensor:
        """The columns of which enough examples have a value -> (d,) bool."""
        return self.arrays["share"].sum(dim=1) + self.arrays["deviation"] > 0

    def table(self) -> dict[str, Any]:
        """The part that is sent as a table."""
        about = {name: getattr(self, name) for name in ("role", "name", "kind", "examples")}
        classes = {"classes": list(self.classes), "counts": list(self.classes.values())}
        return about | {"shape": list(self.shape), "columns": list(self.columns)} | classes

    def to_json(self) -> dict[str, Any]:
        """All of it as plain JSON types."""
        about = {**vars(self), "shape": list(self.shape), "classes": dict(self.classes)}
        told = 0 if self.images or not self.arrays else self.shape[0]
        about["columns"] = [self.column(c) for c in range(told)]
        return about | {"arrays": {name: a.tolist() for name, a in self.arrays.items()}}

    @classmethod
    def read(cls, table: Mapping[str, Any], arrays: Mapping[str, Packed]) -> "Account":
        """Read what a site sent, and check every part of it.

        Raises:
            WireError: something is missing, not allowed or out of bounds.
            NotFiniteError: a value is not finite.
        """
        try:
            given = {**table, **{k: tuple(table[k]) for k in ("shape", "columns")}}
            names, counts = given.pop("classes"), given.pop("counts")
            made = cls(**given, classes=dict(zip(names, counts, strict=True)))
            if not _plausible(made) or len(made.classes) != len(names):
                raise ValueError
        except (KeyError, TypeError, ValueError, AttributeError):
            raise WireError(
                "A site's account of its data cannot be read; install the same fedda everywhere."
            ) from None
        layouts, where = {"look": layout(made)}, f"{made.name} ({made.role})"
        LOOK.leaves.check(arrays, {}, model=MODEL, sites=1, where=where, layouts=layouts)
        for packed in arrays.values():
            packed.check_finite(made.name)
        values = arrays["look"].unpack() if "look" in arrays else {}
        if any(v.min() < 0 or v.max() > 1 for n, v in values.items() if n in SHARES):
            raise WireError(f"{where} told shares that are not from 0 to 1.")
        return replace(made, arrays={n: torch.from_numpy(v.copy()) for n, v in values.items()})


def _plausible(told: Account) -> bool:
    """Whether a site may tell this, apart from its statistics."""
    counts = (told.examples, *told.classes.values())
    return (
        told.role in ("source", "target")
        and is_site_name(told.name)
        and told.kind in ("image", "vector")
        and len(told.shape) == (3 if told.images else 1)
        and all(type(n) is int and n >= 0 for n in (*counts, *told.shape))
        and (told.shape[0] in (1, 3) if told.images else 1 <= told.shape[0] <= MOST_COLUMNS)
        and not any(n % FLOOR for n in counts)
        and all(told.classes.values())
        and (told.role == "source" or not told.classes)
        and len(told.classes) <= MOST_CLASSES
        and all(map(is_one_line, told.classes))
        and can_be_brief(told.columns, 0 if told.images else told.shape[0])
        and not told.arrays
    )


def layout(told: Account) -> Manifest:
    """The layout of a site's statistics, which follows from what it says of its examples."""
    d, features = told.shape[0], 2 * GRID**2
    shapes: dict[str, tuple[int, ...]] = {name: (d,) for name in NUMBERS} | {"share": (d, BINS)}
    if told.images:
        shapes |= {"feature-mean": (features,), "feature-deviation": (features,)}
    entries = (Entry(name, "float32", shape) for name, shape in shapes.items())
    return Manifest(Kind.STATISTICS, "float32", tuple(entries))


def statistics(x: Tensor, noise: float, draws: np.random.Generator) -> Packed:
    """What leaves of a site's examples, uint8 (N, channels, H, W) or float32 (N, d)."""

    def summed(x: Tensor, unit: int, bounds: tuple[float, float] | None) -> list[summaries.Column]:
        columns = (x[:, c].reshape(len(x), -1) / unit for c in range(x.shape[1]))
        return [summaries.column(v, bounds, noise, draws) for v in columns]

    images = x.dim() == 4
    found = summed(x, 255, (0.0, 1.0)) if images else summed(x, 1, None)
    arrays = {n: np.array([getattr(each, n) for each in found], np.float32) for n in NUMBERS}
    arrays["share"] = torch.stack([each.share for each in found]).numpy()
    if images:
        seen = summed(summaries.features(x), 1, None)
        arrays["feature-mean"] = np.array([each.mean for each in seen], np.float32)
        arrays["feature-deviation"] = np.array([each.deviation for each in seen], np.float32)
    return pack(arrays, Kind.STATISTICS)
