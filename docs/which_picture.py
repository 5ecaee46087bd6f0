"""The decision tree of `which-method.md` as a picture, drawn from the page's own headings.

A heading that ends in a question mark is a question; the bold words that follow it are the answer
to a yes. So picture and page cannot say different things. Colours are classes in `site.css`.
"""

import re
import textwrap

from round_picture import LINE, PAD, TIP, TIP_MARK, WIDTH, Drawing

MARK = "<!-- the tree -->"  # where the page has the picture
QUESTION = re.compile(r"^## ([^\n]+\?)\n+\*\*(.+?)\*\*", re.MULTILINE | re.DOTALL)
ASKED, ANSWERED = (170, 165), (590, 205)  # middle of a column of boxes and half its width, pixels
LETTERS = {ASKED: 42, ANSWERED: 54}  # that fit into a line
GAP = 30  # pixels between two questions, in which the arrow of a no is


def questions(page: str) -> list[tuple[str, str]]:
    """The questions of a page and what to do if the answer is yes, in their order."""
    return [(asked, " ".join(answer.split())) for asked, answer in QUESTION.findall(page)]


def with_tree(page: str) -> str:
    """A page's text with the picture in place of its mark."""
    return page.replace(MARK, tree(questions(page)))


def tree(asked: list[tuple[str, str]]) -> str:
    """Questions with their answers -> an SVG in a figure, 800 pixels wide."""
    drawing = Drawing(y=4)
    for question, answer in asked:
        step(drawing, question, answer)
    box(drawing, ASKED, "AdaBN or FedAvg, refined", "box target")
    label = "Which method, or none: questions from top to bottom"
    return (
        f'<figure class="round"><svg viewBox="0 0 {WIDTH} {drawing.y + 50}" role="img" '
        f'aria-label="{label}">{TIP_MARK}{"".join(drawing.pieces)}</svg>'
        "<figcaption>Right: yes. Down: no. The target refines whatever was trained.</figcaption>"
        "</figure>"
    )


def step(drawing: Drawing, question: str, answer: str) -> None:
    """One question, its answer beside it, and the arrow to the next question."""
    own = box(drawing, ASKED, question, "box")
    height = max(own, box(drawing, ANSWERED, answer, "box source"))
    (x, half), (to, width), y = ASKED, ANSWERED, drawing.y + 18
    arrow(drawing, (x + half, y), (to - width - 4, y))
    arrow(drawing, (x, drawing.y + own), (x, drawing.y + height + GAP - 4))
    drawing.y += height + GAP


def box(drawing: Drawing, column: tuple[int, int], text: str, kind: str) -> int:
    """A box with its top at `y` -> the height that its text takes."""
    x, half = column
    lines = textwrap.wrap(text, LETTERS[column])
    height = 2 * PAD + LINE * len(lines)
    drawing.pieces.append(
        f'<rect x="{x - half}" y="{drawing.y}" width="{2 * half}" height="{height}" rx="6" '
        f'class="{kind}"/>'
    )
    for i, line in enumerate(lines):
        drawing.text(
            x, drawing.y + PAD + 12 + LINE * i, line, "" if column == ANSWERED else "title"
        )
    return height


def arrow(drawing: Drawing, start: tuple[int, int], end: tuple[int, int]) -> None:
    """An arrow between two points."""
    (x, y), (to_x, to_y) = start, end
    drawing.pieces.append(f'<line x1="{x}" y1="{y}" x2="{to_x}" y2="{to_y}" class="arrow" {TIP}/>')
