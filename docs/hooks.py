"""Pages that MkDocs makes from the code and from files outside `docs`, and links to such files.

    methods/NAME.md   a method: a picture of its round, `methods/notes/NAME.md`, what was measured,
                      what crosses, settings and presets; all but the notes from the code that runs
                      and from the tables of results (`method_page`)
    reference/*.md    the public functions and classes of a package, from their docstrings
    FILES             files of the repository that are pages, too
    <!-- a mark -->   in a page, what it names: a table, or the tree of methods

So no table of settings or contracts is copied by hand.
"""

import ast
import importlib
import pkgutil
from collections.abc import Iterable, Iterator
from typing import Any

from formulas import Formulas, font
from links import FILES, RESULTS, ROOT, linked, moved
from method_page import page_of, table, to_decide_by
from mkdocs.structure.files import File
from which_picture import with_tree

from fedda import plugins
from fedda.cli import wire_table

# Packages of the reference, by page.
REFERENCE = {
    "formulas": ("fedda.maths", "fedda.algorithms", "fedda.adversarial"),
    "library": ("fedda.library", "fedda.models", "fedda.data", "fedda.settings", "fedda.results"),
    "halves": (
        *("strategies.base", "strategies.sites.correspondence", "clients.base"),
        *("clients.site.trainer", "clients.shared.exchanging"),
    ),
    "contracts": ("fedda.methods", "fedda.wire", "fedda.secure", "fedda.exchange", "fedda.errors"),
}


def on_config(config: Any) -> Any:
    """Typeset formulas in all pages."""
    config.markdown_extensions.append(Formulas())
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages, and the font of formulas."""
    files.append(File.generated(config, "math.woff", content=font()))
    for name, text in pages():
        files.append(File.generated(config, name, content=text))
    for picture in sorted((ROOT / RESULTS).glob("*.png")):
        name = f"results/measured/{picture.name}"
        files.append(File.generated(config, name, content=picture.read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Fill in marks, and point links to files of the repository at their pages or nowhere."""
    return linked(filled(markdown), page.file.src_uri)


def filled(page: str) -> str:
    """A page's text with what its marks stand for."""
    tables = {
        "what crosses": wire_table.table,
        "what was measured": lambda: moved(to_decide_by(), "docs/methods/x.md", "which-method.md"),
        "the packages": packages,
        "the methods": methods,
    }
    for mark, made in tables.items():
        if f"<!-- {mark} -->" in page:
            page = page.replace(f"<!-- {mark} -->", made())
    return with_tree(page)


def methods() -> str:
    """A table of all methods, with the first line of their formulas' docstring."""
    rows = [
        (f"[`{name}`]({name}.md)", plugins.about(name)) for name in sorted(plugins.own_methods())
    ]
    return table(("method", "what it does"), rows)


def packages() -> str:
    """A table of all packages, with the first line of their docstrings."""
    rows = []
    for top in ("fedda", "strategies", "clients", "server"):
        for file in sorted((ROOT / top).rglob("__init__.py")):
            name = str(file.parent.relative_to(ROOT))
            if about := ast.get_docstring(ast.parse(file.read_text())):
                rows.append((f"`{name}`", about.partition("\n")[0]))
    return table(("package", "what it has"), rows)


def pages() -> Iterator[tuple[str, str]]:
    """Every generated page: its path below `docs`, and its text."""
    for name in sorted(plugins.own_methods()):
        yield f"methods/{name}.md", page_of(name)
    for name, packages in REFERENCE.items():
        yield f"reference/{name}.md", reference(name, packages)
    for path, name in FILES.items():
        yield name, moved((ROOT / path).read_text(), path, name)
    for file in sorted((ROOT / RESULTS).glob("*.md")):
        if file.name != "README.md":
            yield f"results/measured/{file.name}", "#" + file.read_text().lstrip("#")


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
