"""Pages that MkDocs makes from the code and from files outside `docs`, and links to such files.

    methods/NAME.md   a method: its module's docstring, `methods/notes/NAME.md` if there is one,
                      what crosses, settings and presets, all from the code that runs
    reference/*.md    the public functions and classes of a package, from their docstrings
    FILES             files of the repository that are pages, too

So no table of settings or contracts is copied by hand.
"""

import importlib
import pkgutil
import posixpath
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

from fedda import plugins
from fedda.cli import settings, wire_table
from fedda.settings import presets

ROOT = Path(__file__).resolve().parent.parent
RESULTS = "examples/benchmarks/results"
FILES = {
    "README.md": "index.md",
    f"{RESULTS}/README.md": "results/measured/index.md",
    "deploy/README.md": "containers.md",
    "SECURITY.md": "trust/security.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "examples/plugin/README.md": "plugin-example.md",
}
# Packages of the reference, by page.
REFERENCE = {
    "formulas": ("fedda.maths", "fedda.algorithms", "fedda.adversarial"),
    "library": ("fedda.library", "fedda.models", "fedda.data", "fedda.settings", "fedda.results"),
    "contracts": ("fedda.methods", "fedda.wire", "fedda.secure", "fedda.exchange", "fedda.errors"),
}
LINK = re.compile(r"(\[[^\]\n]*\])\(([^)\s]+)\)")


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages."""
    for name, text in pages():
        files.append(File.generated(config, name, content=text))
    for picture in sorted((ROOT / RESULTS).glob("*.png")):
        name = f"results/measured/{picture.name}"
        files.append(File.generated(config, name, content=picture.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Point links to files of the repository at their pages; others become plain text."""
    return linked(markdown, page.file.src_uri)


def pages() -> Iterator[tuple[str, str]]:
    """Every generated page: its path below `docs`, and its text."""
    for name in sorted(plugins.own_methods()):
        yield f"methods/{name}.md", method(name)
    for name, packages in REFERENCE.items():
        yield f"reference/{name}.md", reference(name, packages)
    for path, name in FILES.items():
        yield name, moved((ROOT / path).read_text(), path, name)
    for table in sorted((ROOT / RESULTS).glob("*.md")):
        if table.name != "README.md":
            yield f"results/measured/{table.name}", "#" + table.read_text().lstrip("#")


# ---- methods -----------------------------------------------------------------------------------


def method(name: str) -> str:
    """The page of a method."""
    module = plugins.algorithm(name)
    first, _, rest = (module.__doc__ or "").partition("\n")
    chosen = plugins.method(name)
    about = first.partition(": ")[2] or first
    parts = [f"# {chosen.title}", escaped(about[0].upper() + about[1:]), escaped(rest.strip())]
    notes = ROOT / "docs" / "methods" / "notes" / f"{name}.md"
    if notes.is_file():
        parts += ["## In use", notes.read_text()]
    crossing = [(c.part, c.when, c.enters, c.leaves) for c in wire_table.of_method(name)]
    parts += ["## What crosses", "What else crosses is refused, on the way out and on the way in."]
    parts += [table(("part", "when", "enters", "leaves"), crossing)]
    own = settings.rows(chosen.config)
    if own:
        described = [(f"`{name}.{k}`", f"`{v}`" if v != "" else "", about) for k, v, about in own]
        parts += ["## Settings", table(("setting", "default", "meaning"), described)]
    for preset, values in presets.table(name).items():
        mine = {k: given for k, given in values.items() if k.startswith(f"{name}.")}
        if preset in chosen.presets and mine:
            rows = [(f"`{k}`", f"`{g.value}`", g.source) for k, g in sorted(mine.items())]
            parts += [f"### --preset {preset}", table(("setting", "value", "source"), rows)]
    files = [f"{half}/{name}.py" for half in ("fedda/algorithms", "strategies", "clients")]
    present = [f"`{file}`" for file in files if (ROOT / file).is_file()]
    parts += ["## Code", f"{', '.join(present)}; where one is missing, FedAvg's is used."]
    return "\n\n".join(part for part in parts if part) + "\n"


def table(heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown."""
    lines = [f"| {' | '.join(heads)} |", f"|{' --- |' * len(heads)}"]
    for row in rows:
        cells = (str(cell).replace("|", "\\|").replace("\n", " ") for cell in row)
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def escaped(text: str) -> str:
    """A docstring as Markdown: * and < are no markup, and indented lines stay as they are."""
    return "\n".join(
        line if line.startswith("    ") else re.sub(r"([*<])", r"\\\1", line)
        for line in text.splitlines()
    )


# ---- reference ---------------------------------------------------------------------------------


def reference(name: str, packages: Iterable[str]) -> str:
    """The page of some packages: each of their modules, from its docstrings."""
    parts = [f"# Reference: {name}"]
    parts += [f"::: {module}" for package in packages for module in modules(package)]
    return "\n\n".join(parts) + "\n"


def modules(package: str) -> list[str]:
    """A package's public modules; a module that is no package is its own only one."""
    found = importlib.import_module(package)
    inside = [each.name for each in pkgutil.iter_modules(getattr(found, "__path__", []))]
    return [f"{package}.{name}" for name in sorted(inside) if name[0] != "_"] or [package]


# ---- links -------------------------------------------------------------------------------------


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
        at = posixpath.relpath(inside, posixpath.dirname(name) or ".")
        return f"{label}({at}{hash_}{anchor})"

    return LINK.sub(link, text)
