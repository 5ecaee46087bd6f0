"""A round of a method as a picture: who sends what to whom, drawn from the method's contract.

Phases, hops, parts, and what enters and leaves come from `METHOD`, so an arrow cannot be wrong.
What a part does with it is told in words, which the method's notes give by part and hop. The
colours are classes in `site.css`, so they follow the light and the dark scheme.
"""

import textwrap
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from html import escape

from fedda.methods import Hop, Method, Phase
from fedda.wire import Rule

WIDTH = 800
LANES = {"source": 130, "collaborator": 130, "server": 400, "target": 670}  # their middle, pixels
HALF = 118  # of the width of a box
LINE, PAD = 17, 9  # pixels: of a line of text, and between text and the box around it
LETTERS = 32  # that fit into a line of a box, and of an arrow
GAP = 14
TRIAL = (20, 40)  # rounds of two trainings, which tell how a phase's length follows from theirs
TEST = "tests the model without labels; with labels, if it has some, it also counts errors"
LEGEND = (
    "From top to bottom. In brackets: in some rounds, or with some settings. <code>name/*</code>: "
    "one for each source. Dashed: only sums of gradients cross, step by step."
)
TIP = 'marker-end="url(#tip)"'
TIPS = f'marker-start="url(#tip)" {TIP}'
TIP_MARK = (
    '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
    'markerHeight="7" orient="auto-start-reverse"><path d="M0 0L8 4L0 8z"/></marker></defs>'
)
Words = Mapping[str, str]


@dataclass
class Drawing:
    """Pieces of SVG, from top to bottom; `y` is where the next piece begins, in pixels."""

    y: int = 0
    pieces: list[str] = field(default_factory=list)

    def text(self, x: int, y: int, text: str, kind: str = "") -> None:
        """One line of text, centred at x."""
        self.pieces.append(f'<text x="{x}" y="{y}" class="{kind}">{escape(text)}</text>')

    def box(self, lane: str, title: str, text: str) -> int:
        """A box in a lane, with its top at `y` -> its height."""
        x, lines = LANES[lane], textwrap.wrap(text, LETTERS)
        height = 2 * PAD + LINE * (len(lines) + 1)
        self.pieces.append(
            f'<rect x="{x - HALF}" y="{self.y}" width="{2 * HALF}" height="{height}" rx="6" '
            f'class="box {lane}"/>'
        )
        self.text(x, self.y + PAD + 12, title, "title")
        for i, line in enumerate(lines):
            self.text(x, self.y + PAD + 12 + LINE * (i + 1), line)
        return height

    def arrow(self, start: str, end: str, text: str) -> int:
        """An arrow between two lanes, its text above it -> its height."""
        lines = textwrap.wrap(text, LETTERS)
        from_, to = LANES[start], LANES[end]
        y = self.y + LINE * len(lines) + 6
        for i, line in enumerate(lines):
            self.text((from_ + to) // 2, self.y + LINE * (i + 1) - 3, line, "what")
        tip = to + (4 if to < from_ else -4)
        self.pieces.append(f'<line x1="{from_}" y1="{y}" x2="{tip}" y2="{y}" class="arrow" {TIP}/>')
        return y - self.y


def picture(method: Method, words: Words) -> str:
    """The rounds of a method with default settings -> an SVG in a figure, 800 pixels wide.

    Args:
        method: whose phases are drawn.
        words: what happens in a box, by `PART HOP`, and by `server HOP` after the replies.

    Raises:
        KeyError: a box has no words.
    """
    drawing = Drawing()
    heads(drawing, method)
    drawn = list(phases(method))
    for phase, when in drawn:
        title(drawing, when)
        for hop, parts in phase.hops.items():
            exchange(drawing, hop, parts, words)
        if phase is drawn[-1][0]:
            exchange(drawing, "test", {"target": phase.test}, {"target test": TEST} | dict(words))
    lifelines = "".join(
        f'<line x1="{x}" y1="46" x2="{x}" y2="{drawing.y}" class="life"/>'
        for x in sorted(set(LANES.values()))
    )
    label = escape(f"A round of {method.title}: who sends what to whom")
    return (
        f'<figure class="round"><svg viewBox="0 0 {WIDTH} {drawing.y + 4}" role="img" '
        f'aria-label="{label}">{TIP_MARK}{lifelines}{"".join(drawing.pieces)}</svg><figcaption>'
        f"{LEGEND}</figcaption></figure>"
    )


def heads(drawing: Drawing, method: Method) -> None:
    """The three who take part, at the top."""
    parts = frozenset[str]().union(*(phase.parts for phase in method.phases))
    left = "sources, with labels" if "source" in parts else "collaborator, with labels"
    for lane, name in (("source", left), ("server", "server"), ("target", "target, no labels")):
        drawing.text(LANES[lane], 30, name, f"head {lane}")
    drawing.y = 52


def phases(method: Method) -> Iterator[tuple[Phase, str]]:
    """The phases that a training with default settings has, and when each takes place."""
    options, before = method.config(), False
    for phase in method.phases:
        if phase.rounds is None:
            when = "all later rounds" if before else "every round"
        else:
            short, long = (phase.rounds(options, rounds) for rounds in TRIAL)
            if not long:
                continue
            count = "round" if short == 1 else f"{short} rounds"
            first = "the next" if before else "the first"
            share = f"{first} {100 * short / TRIAL[0]:.0f} % of the rounds"
            when = f"{first} {count}" if short == long else share
        before = True
        yield phase, when if len(method.phases) == 1 else f"{phase.name}: {when}"


def title(drawing: Drawing, text: str) -> None:
    """A line across the picture that begins a phase."""
    drawing.y += 4
    drawing.pieces.append(f'<rect x="0" y="{drawing.y}" width="{WIDTH}" height="24" class="band"/>')
    drawing.text(WIDTH // 2, drawing.y + 17, text, "title")
    drawing.y += 24 + GAP


def exchange(drawing: Drawing, hop: str, parts: Hop, words: Words) -> None:
    """A request to one part or two, what they do, and their replies."""
    drawing.y += max(
        drawing.arrow("server", part, content(about.enters) or "request")
        for part, about in parts.items()
    )
    drawing.y += 6
    height = max(
        drawing.box(part, f"{part}: {hop.replace('_', ' ')}", words[f"{part} {hop}"])
        for part in parts
    )
    sums = sorted({name for about in parts.values() for name in about.gradients})
    if sums:
        summed(drawing, names(sums), height)
    drawing.y += height + 2
    replies = {p: text for p, about in parts.items() if (text := content(about.leaves))}
    drawing.y += max((drawing.arrow(p, "server", text) for p, text in replies.items()), default=0)
    if after := words.get(f"server {hop}"):
        drawing.y += 6
        drawing.y += drawing.box("server", "server", after)
    drawing.y += GAP


def summed(drawing: Drawing, what: str, height: int) -> None:
    """The dashed line between two boxes, over which gradients are summed."""
    left, right = LANES["source"] + HALF + 4, LANES["target"] - HALF - 4
    y = drawing.y + height // 2
    drawing.pieces.append(f'<line x1="{left}" y1="{y}" x2="{right}" y2="{y}" class="sums" {TIPS}/>')
    drawing.text(LANES["server"], y - 8, f"sums: {what}", "what")
    drawing.text(LANES["server"], y + LINE, "many times within a round", "what")


def content(rule: Rule) -> str:
    """What one direction carries, in a few words; empty if it carries nothing."""
    parts = [names(rule.arrays)] if rule.arrays else []
    parts += [f"[{names(rule.optional)}]"] if rule.optional else []
    parts += ["numbers"] if rule.numbers else []
    return " + ".join(parts)


def names(arrays: Iterable[str]) -> str:
    """Names of arrays; of `x` and `x/*` one or the other crosses."""
    known = list(arrays)
    single = {name for name in known if f"{name}/*" in known}
    return ", ".join(
        f"{name} or {name}/*" if name in single else name
        for name in known
        if name.removesuffix("/*") not in single or name in single
    )
