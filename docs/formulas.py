r"""Formulas between dollar signs in a page, typeset as MathML while the site is built.

    $p_i$                           in a line
    $$Q = \sum_i n_i \tag{eq. 7}$$   on a line of its own, with its number at the right

Browsers draw MathML themselves, so a page needs no script and asks no other server. Code keeps its
dollar signs. In a table, write \lvert for a bar.
"""

import re
from html import escape
from typing import Any

from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor

DISPLAYED = r"(?<!\\)\$\$(.+?)\$\$"
INLINE = r"(?<![\\$\w])\$(?=[^\s$])([^$]*?[^\s$\\])\$(?![\w$])"
BEFORE_ESCAPES = 186  # after code (190), before backslashes (180), which TeX is full of
TAG = re.compile(r"\\tag\{([^}]*)\}")


def typeset(tex: str, display: bool = False) -> str:
    """A formula in TeX -> MathML.

    Raises:
        ValueError: it has a command that is not known, which would stand there as it is written.
    """
    made = convert(tex.strip(), display="block" if display else "inline")
    if unknown := re.search(r"\\\w+", made):
        raise ValueError(f"The formula {tex.strip()} has {unknown[0]}, which cannot be typeset.")
    return made


class Displayed(InlineProcessor):
    """A formula on a line of its own."""

    def handleMatch(self, m: re.Match[str], data: str) -> tuple[str, int, int]:
        """Typeset one -> a placeholder of what it becomes, its start and end."""
        assert self.md is not None
        tag = TAG.search(m[1])
        number = f'<span class="number">{escape(tag[1])}</span>' if tag else ""
        made = typeset(TAG.sub("", m[1]), display=True)
        text = f'<div class="formula">{made}{number}</div>'
        return self.md.htmlStash.store(text), m.start(0), m.end(0)


class Inline(InlineProcessor):
    """A formula in a line."""

    def handleMatch(self, m: re.Match[str], data: str) -> tuple[str, int, int]:
        """Typeset one -> a placeholder of what it becomes, its start and end."""
        assert self.md is not None
        return self.md.htmlStash.store(typeset(m[1])), m.start(0), m.end(0)


class Formulas(Extension):
    """The extension for Markdown that typesets formulas."""

    def extendMarkdown(self, md: Any) -> None:
        """Add both kinds of formulas to what is looked for in a line."""
        assert isinstance(md, Markdown)
        md.inlinePatterns.register(Displayed(DISPLAYED, md), "displayed", BEFORE_ESCAPES + 1)
        md.inlinePatterns.register(Inline(INLINE, md), "formula", BEFORE_ESCAPES)
