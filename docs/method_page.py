"""The page of a method: its notes, and around them all that follows from the code and the results.

The notes, `methods/notes/NAME.md`, begin with a head that only this module reads:

    settings            the three settings that matter most, by their full keys
    PART HOP            what the part does in that hop, for the picture
    server HOP          what the server does with the replies

Before their heading `HELPS` come the symbols of its formulas, and under it the method's row of each
table of results that has one.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

from links import RESULTS, ROOT, moved
from mkdocs.utils import meta
from round_picture import picture

from fedda import plugins
from fedda.cli import settings, wire_table
from fedda.settings import RunConfig, presets

GRAND = ("grand", "grand-methods", "grand-centring")  # tables of results with a row for each method
# Those that `which-method.md` has.
DECISIVE = {
    "grand": ("FedAvg", "AdaBN", "KD3A", "f-DANN", "FADA"),
    "grand-methods": ("FedDaDiL-R", "DECISION", "SHOT"),
    "grand-centring": ("FedAvg", "Centring"),
    "grand-heart": ("FedAvg", "KD3A", "f-DANN", "FADA"),
}
HEADS = ("measured on", "", "gain", "worst target", "refined: gain", "worst target")
HEADS += ("MB a round", "s a round")
HELPS = "## When it helps, and when not"
ABOUT = (
    "Points of accuracy at the target over FedAvg's unrefined model: the mean over the targets "
    "with its 95 % interval, and the worst target. Refined: after the target's "
    "[last step](../last-step.md). MB and seconds: of a mean round there, on two CPU "
    "cores that other programs shared."
)
SYMBOLS = ("symbol", "shape or kind", "meaning")
PLACES = (
    *("fedda/algorithms/{}.py", "strategies/{}.py", "clients/{}.py"),
    "fedda/contrib/methods/{}",
)


def page_of(name: str) -> str:
    """The page of a method -> Markdown, with links as from `docs/methods/`."""
    chosen, (about, known, rest) = plugins.method(name), docstring(name)
    text, head = notes(name)
    parts = [f"# {chosen.title}", about, picture(chosen, head)]
    parts += [text.replace(HELPS, f"{known}\n\n{HELPS}\n\n{measured(chosen.title)}", 1)]
    parts += ["## What crosses", "What else crosses is refused, on the way out and on the way in."]
    crossing = [(c.part, c.when, c.enters, c.leaves) for c in wire_table.of_method(name)]
    parts += [table(("part", "when", "enters", "leaves"), crossing)]
    parts += ["## Settings", chosen_settings(name, head["settings"])]
    parts += preset_columns(name)
    files = [place.format(name) for place in PLACES]
    present = [f"`{file}`" for file in files if (ROOT / file).exists()]
    parts += ["## In the code", f"{', '.join(present)}; where one is missing, FedAvg's is used."]
    return "\n\n".join(part for part in [*parts, rest] if part) + "\n"


def notes(name: str) -> tuple[str, Mapping[str, str]]:
    """A method's notes with links as from its page, and their head."""
    path = f"docs/methods/notes/{name}.md"
    body, head = meta.get_data((ROOT / path).read_text())
    return moved(body.strip(), path, f"methods/{name}.md"), head


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for row in rows:
        cells = (str(cell).replace("|", "\\|").replace("\n", " ") for cell in row)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


# ---- what was measured -------------------------------------------------------------------------


class Row(NamedTuple):
    """A method's row in a table of results, as texts; bytes and seconds are a mean round's."""

    method: str
    gain: str
    worst: str
    refined: str
    refined_worst: str
    megabytes: str
    seconds: str


def measured(title: str) -> str:
    """A method's rows beside FedAvg's, of each table that has it."""
    title = title.partition(" (")[0]
    lines: list[tuple[str, ...]] = []
    for name in GRAND:
        mine = [m for m in rows_in(name) if m == title or m.startswith(f"{title}-")]
        lines += lines_of(name, [*mine, "FedAvg"]) if mine else []
    if not lines:
        return "The tables of all methods do not have this one."
    return f"{ABOUT}\n\n{table(HEADS, lines)}"


def to_decide_by() -> str:
    """The rows of several tables by which the page on which method to take decides."""
    return table(
        HEADS, [row for name, chosen in DECISIVE.items() for row in lines_of(name, chosen)]
    )


def rows_in(name: str) -> dict[str, Row]:
    """The rows of a table of results, by their method."""
    return {row.method: row for row in rows_of((ROOT / RESULTS / f"{name}.md").read_text())}


def lines_of(name: str, chosen: Iterable[str]) -> list[tuple[str, ...]]:
    """Some methods' rows of a table of results, each once, behind a link to it."""
    size = re.search(r"(\d+ targets), (\d+ seeds?)", (ROOT / RESULTS / f"{name}.md").read_text())
    assert size is not None
    where, rows = f"[{size[1]}, {size[2]}](../../{RESULTS}/{name}.md)", rows_in(name)
    return [(where, *rows[method]) for method in dict.fromkeys(chosen)]


def rows_of(text: str) -> Iterator[Row]:
    """The rows of the first table of a file with results."""
    lines = text[text.index("\n|") + 1 :].partition("\n\n")[0].splitlines()
    for line in lines[2:]:
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        method, gain, worst, refined, refined_worst = cells[0], *cells[3:7]
        rounds = rounds_of(text, method)
        share = len(rounds) / sum(rounds)  # of a training that is a round
        moved, took = f"{float(cells[8]) * share:.1f}", f"{float(cells[9]) * share:.2f}"
        yield Row(method, gain, worst, refined, refined_worst, moved, took)


def rounds_of(text: str, method: str) -> list[int]:
    """How many rounds the method trained for each target that it has, from the tables by set."""
    rounds: list[int] = []
    for part in text.split("\n### ")[1:]:
        length = re.search(r"^(\d+) rounds", part, flags=re.MULTILINE)
        line = re.search(rf"^\| {re.escape(method)} +\|(.*)\|$", part, flags=re.MULTILINE)
        if length and line:
            rounds += [int(length[1]) for cell in line[1].split("|") if cell.strip() != "–"]
    return rounds


# ---- settings and presets ----------------------------------------------------------------------


def every_setting(name: str) -> dict[str, tuple[str, str]]:
    """Default and meaning of every setting that a run of a method has, the method's own first."""
    own = [(f"{name}.{key}", value, text) for key, value, text in of(name)]
    return {
        k: (f"`{v}`" if v != "" else "", text) for k, v, text in [*own, *settings.rows(RunConfig)]
    }


def of(name: str) -> list[tuple[str, object, str]]:
    """Key, default and meaning of a method's own settings."""
    return settings.rows(plugins.method(name).config)


def chosen_settings(name: str, first: str) -> str:
    """Three settings in sight, the method's others folded."""
    known = every_setting(name)
    keys = [key.strip() for key in first.split(",")]
    heads = ("setting", "default", "meaning")
    parts = ["Those that matter most:", table(heads, [(f"`{k}`", *known[k]) for k in keys])]
    if rest := [key for key in (f"{name}.{k}" for k, _, _ in of(name)) if key not in keys]:
        folded = table(heads, [(f"`{k}`", *known[k]) for k in rest])
        summary = (
            f"<summary>The other {len(rest)}</summary>"
            if rest[1:]
            else "<summary>One more</summary>"
        )
        parts += [f'<details markdown="1">{summary}\n\n{folded}\n\n</details>']
    return "\n\n".join(parts)


def preset_columns(name: str) -> list[str]:
    """A method's presets side by side, and what those for data of one's own set of it."""
    columns: dict[str, Mapping[str, presets.Given]] = {}
    for preset, values in presets.table(name).items():
        own = preset in plugins.method(name).presets
        shown = {k: v for k, v in values.items() if own or k.startswith(f"{name}.")}
        if shown and (own or preset in presets.STARTS):
            columns[preset] = shown
    if not columns:
        return []
    known = every_setting(name)
    keys = sorted({key for values in columns.values() for key in values})
    rows = [
        [f"`{k}`", known[k][0], *(f"`{c[k].value}`" if k in c else "" for c in columns.values())]
        for k in keys
    ]
    heads = ["setting", "default", *(f"`{preset}`" for preset in columns)]
    own = {p: next(iter(v.values())).source for p, v in columns.items() if p not in presets.STARTS}
    sources = "; ".join(f"`{preset}`: {source}" for preset, source in own.items())
    return ["## Presets", sources and f"Where the values come from: {sources}.", table(heads, rows)]


# ---- docstrings --------------------------------------------------------------------------------


def docstring(name: str) -> tuple[str, str, str]:
    """What a method does in a line, its symbols, and what else its module's docstring says.

    Without its first paragraph, which cites the paper, as the notes do.
    """
    first, _, rest = (plugins.algorithm(name).__doc__ or "").partition("\n")
    about = first.partition(": ")[2] or first
    _, known, *blocks = re.split(r"\n\s*\n", rest.strip("\n"))
    made = [symbols(each) if each.startswith("    ") else escaped(each) for each in blocks]
    return escaped(about[0].upper() + about[1:]), symbols(known), "\n\n".join(made)


def symbols(block: str) -> str:
    """An indented list of symbols as a table, whose cells wrap where lines of code are cut off."""
    rows: list[list[str]] = []
    for line in block.splitlines():
        if line.startswith("     "):  # it goes on with the line above
            rows[-1][-1] += f" {line.strip()}"
        else:
            rows.append(re.split(r"\s{2,}", line.strip()))
    width = max(map(len, rows))
    full = [[row[0], *[""] * (width - len(row)), *row[1:]] for row in rows]
    heads = SYMBOLS if width == 3 else (SYMBOLS[0], SYMBOLS[-1])
    return table(heads, [[f"`{row[0]}`", *map(escaped, row[1:])] for row in full])


def escaped(text: str) -> str:
    """Plain text as Markdown: * and < are no markup."""
    return re.sub(r"([*<])", r"\\\1", text)
