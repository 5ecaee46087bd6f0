"""What follows from what sites tell: who is alike, who is odd, what is hard, what to type next."""

import statistics
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import torch

from fedda.data.naming import listed, option, quoted, unlike
from fedda.maths.summaries import FLOOR, drift

from .account import Account

ALIKE = 0.3  # sites with less drift are called alike
ODD = 1.5  # times the others' median drift, from which on a site is odd
SMALL = 5  # times fewer examples than the median
WIDTH = 5  # times wider or narrower than the others' range
PART = 16  # images that use less than such a part of black to white are read wrongly, perhaps
TINY = 64  # pixels a side; no preset is for smaller images
MANY = 128  # columns, from which on vectors without gaps are taken for features
OFTEN = 0.05  # share of columns with another range, from which on it is said
UNLIKE = 0.25  # difference of a class's shares at two sources

Drifts = list[list[float | None]]


def compared(told: Sequence[Account]) -> dict[str, Any]:
    """Compare what sites told -> the content of look.json but who refused, and bytes."""
    found = [[_between(a, b) for b in told] for a in told]
    parts = (_alike(told, found), _odd(told, found), _forms(told), _classes(told))
    parts += (_sizes(told), _ranges(told), _dark(told), _scale(told), _gaps(told), _words(told))
    return {
        "sites": [site.to_json() for site in told],
        "drift": found,
        "text": " ".join(sentence for part in parts for sentence in part),
        "settings": settings(told),
        "target": next((site.name for site in told if site.role == "target"), ""),
    }


def _between(a: Account, b: Account) -> float | None:
    """Drift between two sites; None where their data have no common form, or are too few."""
    if not (a.arrays and b.arrays) or a.kind != b.kind or (not a.images and a.shape != b.shape):
        return None
    both = slice(None) if a.images else a.known & b.known
    means, deviations = zip(a.features, b.features, strict=True)
    if not len(means[0][both]):
        return None
    return round(drift([m[both] for m in means], [s[both] for s in deviations]), 2)


def _alike(told: Sequence[Account], found: Drifts) -> Iterator[str]:
    pairs = {
        (a.name, b.name): found[told.index(a)][told.index(b)] for a, b in combinations(told, 2)
    }
    known = {pair: d for pair, d in pairs.items() if d is not None}
    near = [f"{a} and {b} ({d})" for (a, b), d in known.items() if d < ALIKE]
    if known and len(near) == len(known):
        yield f"All sites are alike: no drift is {ALIKE} or more."
    elif known:
        words = f"Alike (drift below {ALIKE}) are {listed(near)}."
        yield words if near else f"No two sites are alike: every drift is {ALIKE} or more."


def _odd(told: Sequence[Account], found: Drifts) -> Iterator[str]:
    """The site that is farther from the others than they are from each other."""
    middle: list[tuple[float, str]] = []
    for i, site in enumerate(told):
        if others := [d for j, d in enumerate(found[i]) if j != i and d is not None]:
            middle.append((statistics.median(others), site.name))
    if len(middle) > 2:
        *rest, (its, name) = sorted(middle)
        usual = statistics.median(d for d, _ in rest)
        if its >= max(ALIKE, ODD * usual):
            yield f"{name} is odd: its median drift is {its:.2f}, the others' {usual:.2f}."


def _forms(told: Sequence[Account]) -> Iterator[str]:
    if len({site.kind for site in told}) > 1:
        images = [site.name for site in told if site.images]
        yield f"There are images at {listed(images)} alone: no run takes these sites together."
    elif not told[0].images:
        if len({site.shape for site in told}) > 1:
            each = [f"{site.name} {site.shape[0]}" for site in told]
            yield f"Sites have different numbers of columns ({listed(each)}): no run is possible."
        named = [site for site in told if site.columns]
        for site in named[1:]:
            if other := unlike(site.columns, named[0].columns):
                yield f"Beside {named[0].name}, {site.name} has {other}: no run is possible."
    else:
        gray, sizes = [s.name for s in told if s.shape[0] == 1], {s.shape[1:] for s in told}
        if 0 < len(gray) < len(told):
            yield f"Images are gray at {listed(gray)}, else in colour: input.channels settles it."
        if len(sizes) > 1 or (0, 0) in sizes:
            yield "Images have several sizes: input.size settles it."


def _classes(told: Sequence[Account]) -> Iterator[str]:
    every = dict.fromkeys(name for site in told for name in site.classes)
    for site in told:
        lacks = [name for name in every if name not in site.classes]
        if site.role == "source" and lacks:
            names = listed([quoted(name) for name in lacks])
            yield f"{site.name} has fewer than {FLOOR} examples, or none, of the classes {names}."
    totals = [(site, sum(site.classes.values())) for site in told if site.classes]
    for name in every:
        shares = [(site.classes.get(name, 0) / total, site.name) for site, total in totals]
        (low, few), (high, many) = min(shares), max(shares)
        if high - low > UNLIKE:
            words = f"about {100 * high:.0f} % at {many}, {100 * low:.0f} % at {few}"
            yield f"Classes are not equally frequent: {quoted(name)} is {words}."
            return


def _sizes(told: Sequence[Account]) -> Iterator[str]:
    middle = statistics.median(site.examples for site in told)
    for site in told:
        if SMALL * site.examples < middle:
            count = f"{site.examples} or so" if site.examples else f"fewer than {FLOOR}"
            yield f"{site.name} is much smaller than the others ({count} examples)."


def _ranges(told: Sequence[Account]) -> Iterator[str]:
    for site in told:
        form = (site.kind, site.shape[0])
        others = [o for o in told if o is not site and o.arrays and (o.kind, o.shape[0]) == form]
        if site.images or not site.arrays or not others:
            continue
        odd = _other_ranges(site, others)
        if len(odd) > OFTEN * site.shape[0]:  # of many columns some are apart by chance
            yield f"{site.name} has another value range in {listed(odd)}: other units, perhaps;"
            yield "input.window=own lets each site scale its own."


def _dark(told: Sequence[Account]) -> Iterator[str]:
    """Images that use a small part of their range, as scans of 12 bits in files of 16 do."""
    for site in (site for site in told if site.images and site.arrays):
        low, high = float(site.arrays["low"].min()), float(site.arrays["high"].max())
        if (high - low) * PART < 1:
            yield f"At {site.name} nearly all values are {low:.3g} to {high:.3g}, of 0 to 1: if"
            yield "scans have 12 bits in files of 16, give --gray-bits 12, as at all such sites."


def _middle(sites: Sequence[Account], name: str) -> torch.Tensor:
    """The median of one number of each column over some sites -> (d,); NaN where none knows it."""
    values = [torch.where(site.known, site.arrays[name], torch.nan) for site in sites]
    return torch.stack(values).nanmedian(dim=0).values


def _other_ranges(site: Account, others: Sequence[Account]) -> list[str]:
    """The columns whose range is apart from the others', or much wider or narrower."""
    (low, high), (low2, high2) = (
        [_middle(some, end) for end in ("low", "high")] for some in ([site], others)
    )
    wide, wide2 = high - low, high2 - low2
    uneven = (wide > WIDTH * wide2) & (wide2 > 0) | (wide2 > WIDTH * wide) & (wide > 0)
    odd = (low > high2) | (high < low2) | uneven
    return [site.column(c) for c in odd.nonzero()[:, 0].tolist()]


def _scale(told: Sequence[Account]) -> Iterator[str]:
    """One scale for a table's columns at all sites: the medians of their means and deviations."""
    known, first = [site for site in told if site.arrays], told[0]
    alike = not first.images and len({site.columns for site in told}) == 1
    if not alike or not known or not 1 < len(first.columns) == first.shape[0] < MANY:
        return
    numbers = (_middle(known, name).tolist() for name in ("mean", "deviation"))
    scales = zip(first.columns, *numbers, strict=True)
    if its := ",".join(f"{n}={m:.3g}/{d:.3g}" for n, m, d in scales if d > 0 and "," not in n):
        yield "Presets scale each column by each site's own values, which hides how sites differ;"
        yield f"if all measure in the same units, give one: {option('input.window', its)}."


def _gaps(told: Sequence[Account]) -> Iterator[str]:
    found = []
    for site in told:
        if gaps := [share for share in _missing(site) if 0 < share < 1]:
            most = f"up to about {100 * max(gaps):.0f} %"
            found.append(f"{site.name} in {len(gaps)} or more of {site.shape[0]} columns ({most})")
    if found:
        yield f"There are gaps at {listed(found)}: input.missing fills them."


def _missing(site: Account) -> list[float]:
    """The share of examples without a number, by column; none where the site told none."""
    return site.arrays["missing"].tolist() if site.arrays else []


def _words(told: Sequence[Account]) -> Iterator[str]:
    """Columns with hardly a number at a site, as of texts."""
    blank = {s.name: [c for c, share in enumerate(_missing(s)) if share == 1] for s in told}
    columns = dict.fromkeys(site.column(c) for site in told for c in blank[site.name])
    if columns:
        where = listed([name for name, some in blank.items() if some])
        yield f"Hardly an example has a number in {listed([*columns])} at {where}: texts, perhaps,"
        yield "which a run takes by input.categories; `fedda data check` at a site names them."


def settings(told: Sequence[Account]) -> list[str]:
    """The options with which to begin, as words of a command; none if no run is possible."""
    first = told[0]
    if len({(site.kind, () if site.images else site.shape) for site in told}) > 1:
        return []
    if len({site.columns for site in told if site.columns}) > 1:
        return []
    if not first.images:
        gaps = any(share for site in told for share in _missing(site))
        return ["--preset", "table" if first.shape[0] < MANY or gaps else "vectors"]
    sides = Counter(max(site.shape[1:]) for site in told)
    if 0 in sides or max(sides) >= TINY:
        return ["--preset", "photos"]
    size, channels = sides.most_common(1)[0][0], max(site.shape[0] for site in told)
    return ["-c", f"input.size={size}", "-c", f"input.channels={channels}"]
