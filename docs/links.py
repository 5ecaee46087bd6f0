"""Links of pages that are made from other files, and of pages to files that are no page."""

import posixpath
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = "examples/benchmarks/results"
# Files of the repository that are pages, and where.
FILES = {
    "README.md": "overview.md",
    f"{RESULTS}/README.md": "results/measured/index.md",
    "deploy/README.md": "containers.md",
    "SECURITY.md": "trust/security.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/plugin/README.md": "plugin-example.md",
}
LINK = re.compile(r"(\[[^\]\n]*\])\(([^)\s]+)\)")


def moved(text: str, path: str, name: str) -> str:
    """A file of the repository as a page: its relative links now start from the page."""

    def link(found: re.Match[str]) -> str:
        label, to = found.groups()
        if re.match(r"https?:|#", to):
            return found[0]
        file, hash_, anchor = to.partition("#")
        target = posixpath.normpath(posixpath.join(posixpath.dirname(path), file))
        here = posixpath.join("docs", posixpath.dirname(name))
        return f"{label}({posixpath.relpath(target, here)}{hash_}{anchor})"

    return LINK.sub(link, text)


def linked(text: str, name: str) -> str:
    """A page's text with links that lead out of `docs` pointed at pages, or made plain text."""
    here = posixpath.join("docs", posixpath.dirname(name))

    def link(found: re.Match[str]) -> str:
        label, to = found.groups()
        if re.match(r"https?:|#", to):
            return found[0]
        file, hash_, anchor = to.partition("#")
        target = posixpath.normpath(posixpath.join(here, file))
        inside = target.removeprefix("docs/")
        if target in FILES:
            inside = FILES[target]
        elif target.startswith(RESULTS + "/") and target.endswith((".md", ".png")):
            inside = f"results/measured/{posixpath.basename(target)}"
        elif not target.startswith("docs/"):
            return label[1:-1]
        inside = inside.replace("methods/notes/", "methods/")  # notes are a part of the page
        at = posixpath.relpath(inside, posixpath.dirname(name) or ".")
        return f"{label}({at}{hash_}{anchor})"

    return LINK.sub(link, text)
