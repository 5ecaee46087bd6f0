r"""Formulas between dollar signs in a page, typeset as MathML while the site is built.

    $p_i$                           in a line
    $$Q = \sum_i n_i \tag{eq. 7}$$   on a line of its own, with its number at the right

Browsers draw MathML themselves, so a page needs no script and asks no other server. They need a
font that says how high an index stands: the site brings its own. Code keeps its dollar signs. In a
table, write \lvert for a bar.
"""

import io
import re
from html import escape
from importlib.resources import files
from typing import Any

from fontTools.subset import Options, Subsetter
from fontTools.ttLib import TTFont
from latex2mathml.converter import convert
from markdown import Markdown
from markdown.extensions import Extension
from markdown.inlinepatterns import InlineProcessor

DISPLAYED = r"(?<!\\)\$\$(.+?)\$\$"
INLINE = r"(?<![\\$\w])\$(?=[^\s$])([^$]*?[^\s$\\])\$(?![\w$])"
BEFORE_ESCAPES = 186  # after code (190), before backslashes (180), which TeX is full of
TAG = re.compile(r"\\tag\{([^}]*)\}")
PRIMED = re.compile(r"<msup>(<mi>[^<]*</mi>)<mi>&#x02032;</mi></msup>")
# Latin, Greek, punctuation, letter-like signs, arrows and operators, the alphabets of mathematics.
USED = ((0x20, 0x100), (0x391, 0x3F6), (0x2010, 0x2040), (0x2100, 0x2300), (0x1D400, 0x1D7D0))


def font() -> bytes:
    """The characters of STIX Two Math (SIL Open Font Licence) that formulas use, as WOFF."""
    kept = Options(layout_features=["ssty"], hinting=False)  # ssty: primes and indices
    whole = TTFont(io.BytesIO((files("ziamath") / "fonts/STIXTwoMath-Regular.ttf").read_bytes()))
    subset = Subsetter(kept)
    subset.populate(unicodes=[code for first, end in USED for code in range(first, end)])
    subset.subset(whole)
    whole.flavor = "woff"
    written = io.BytesIO()
    whole.save(written)
    return written.getvalue()


def typeset(tex: str, display: bool = False) -> str:
    """A formula in TeX -> MathML.

    Raises:
        ValueError: it has a command that is not known, which would stand there as it is written.
    """
    made = convert(tex.strip(), display="block" if display else "inline")
    if unknown := re.search(r"\\\w+", made):
        raise ValueError(f"The formula {tex.strip()} has {unknown[0]}, which cannot be typeset.")
    # A font's prime is as high as it should be: it would be raised twice.
    return PRIMED.sub(r'<mrow>\1<mo lspace="0" rspace="0">&#x02032;</mo></mrow>', made)


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
