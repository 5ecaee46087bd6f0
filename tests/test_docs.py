"""README and the documentation: nothing is missing, and what they tell to type exists."""

import importlib
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from html import unescape
from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import markdown
import pytest
import yaml
from fontTools.ttLib import TTFont

from fedda import plugins
from fedda.cli import exits, wire_table
from fedda.settings import overrides
from tests.command_lines import below, whole

pytestmark = pytest.mark.contrib

ROOT = Path(__file__).resolve().parent.parent
DOCS = sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md", "deploy/README.md"]
PAGES += ["examples/benchmarks/results/README.md", *DOCS]
WITH_COMMANDS = ["README.md", "deploy/README.md", "CONTRIBUTING.md", *DOCS]
# What else the documentation as a site is made from.
SITE = ["docs", "mkdocs.yml", "deploy", "examples", "fedda/algorithms", "fedda/cli"]
SITE += ["fedda/contrib"]
# Pages of methods, which are made from the code.
MADE = {ROOT / "docs" / "methods" / f"{name}.md" for name in plugins.own_methods()}


def missing(text: str, folder: Path) -> set[Path]:
    """The files to which a page of a folder links, and which do not exist."""
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)", text)
    found = {(folder / link).resolve() for link in links}
    return {file for file in found if not file.exists()} - MADE


def test_pages_are_whole_and_the_readme_is_short_enough_to_be_read() -> None:
    for path in (ROOT / page for page in PAGES):
        text = path.read_text()
        assert not missing(text, path.parent), path
        assert not re.findall(r"@[A-Z]+@|TODO|FIXME|XXX", text), path
    assert len((ROOT / "README.md").read_text().split()) <= 1000


def test_the_paper_of_every_method_can_be_cited() -> None:
    """By the first address in its formulas' docstring; a method of ours cites none."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text())["references"]
    urls = {reference["url"] for reference in cited}
    assert all(r["title"] and r["authors"] and r["year"] > 1990 for r in cited)
    for name in plugins.own_methods():
        text = plugins.algorithm(name).__doc__ or ""
        found = re.search(r"https://(?:arxiv|doi)\.org/[\w./]*\w", text)
        assert name == "centring" or (found and found[0] in urls), (name, found)


def test_every_method_is_in_the_readme_and_in_the_navigation(hooks: Any) -> None:
    readme = (ROOT / "README.md").read_text()
    index = hooks.filled((ROOT / "docs/methods/index.md").read_text())
    navigation = (ROOT / "mkdocs.yml").read_text()
    for name in plugins.own_methods():
        assert f"`{name}`" in readme
        assert f"({name}.md)" in index and f"- methods/{name}.md" in navigation


def test_named_files_exist() -> None:
    pages = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.md")]
    inside = r"(?<![\w/])((?:fedda|clients|strategies|server|examples|tests)/[\w/]+\.py)"
    named = {name for page in pages for name in re.findall(inside, page.read_text())}
    assert len(named) > 20
    placeholders = ("x.py", "test_x_maths.py")  # of the page on adding a method
    gone = [name for name in named if not (ROOT / name).is_file()]
    assert not [name for name in gone if not name.endswith(placeholders)]


def typed(text: str) -> Iterator[list[str]]:
    """Yield the words of every `fedda` and `fedda-client` command in code; `...` ends one."""
    fenced = False
    for line in text.replace("\\\n", " ").splitlines():
        fenced ^= line.startswith("```")
        found = re.match(r"(?:\$ )?((?:fedda|fedda-client) .*)$", line.strip())
        if found and (fenced or line.startswith("    ")):
            words = shlex.split(found[1], comments=True)
            yield words[: words.index("...")] if "..." in words else words


def command_of(words: list[str]) -> tuple[click.Command, list[str]]:
    """Return the command that words name, and the words after its name."""
    command: Any = whole("fedda")
    rest = ["client", *words[1:]] if words[0] == "fedda-client" else words[1:]
    while (known := below(command)) and rest and rest[0][0] != "-":
        command, rest = known[rest[0]], rest[1:]
    return command, rest


def test_commands_options_and_settings_exist() -> None:
    found = [(page, words) for page in WITH_COMMANDS for words in typed((ROOT / page).read_text())]
    assert len(found) > 50 and {words[0] for _, words in found} == {"fedda", "fedda-client"}
    for page, words in found:
        command, rest = command_of(words)
        known = {name for p in command.params for name in (*p.opts, *p.secondary_opts)}
        used = {word.partition("=")[0] for word in rest if re.match(r"--?[a-z]", word)}
        assert used <= known | {"--help"}, (page, words)
        if words[:2] == ["fedda", "run"] and words[2] in plugins.methods():
            overrides(words[2], [b for a, b in pairwise(words) if a == "-c"])


@pytest.fixture(scope="module")
def hooks() -> Iterator[Any]:
    """The modules that make pages, which MkDocs imports from their folder."""
    sys.path.insert(0, str(ROOT / "docs"))
    try:
        yield importlib.import_module("hooks")
    finally:
        sys.path.remove(str(ROOT / "docs"))


def made(hooks: Any, text: str) -> str:
    """Markdown as HTML, with formulas."""
    return markdown.markdown(text, extensions=["tables", "md_in_html", hooks.Formulas()])


@pytest.mark.parametrize("name", sorted(plugins.own_methods()))
def test_a_methods_page_teaches_the_method(hooks: Any, name: str) -> None:
    text = hooks.page_of(name)
    html = made(hooks, text)
    assert html.count('<figure class="round"><svg ') == 1
    assert html.count('<div class="formula"><math ') >= 1 and 'class="number"' in html
    assert "$" not in re.sub(r"<code>.*?</code>", "", html, flags=re.DOTALL)
    headings = re.findall(r"^## (.+)", text, flags=re.MULTILINE)
    wanted = ["In short", "Formulas", "When it helps, and when not", "What must hold"]
    assert headings[:4] == wanted
    short = text.partition("## In short")[2].partition("## ")[0]
    assert 4 <= len(re.findall(r"^\d+\. ", short, flags=re.MULTILINE)) <= 10
    assert not missing(text, ROOT / "docs" / "methods")
    assert text.startswith(f"# {plugins.method(name).title}\n")
    for crossing in wire_table.of_method(name):
        assert f"| {crossing.part} | {crossing.when} | {crossing.enters} |" in text
    for field in plugins.method(name).config.model_fields:
        assert f"`{name}.{field.replace('_', '-')}" in text
    in_sight = text.partition("## Settings")[2].partition("<details")[0].partition("## ")[0]
    assert len(re.findall(r"^\| `", in_sight, flags=re.MULTILINE)) == 3


def test_links_out_of_the_documentation_lead_to_its_pages_or_nowhere(hooks: Any) -> None:
    text = "[a](../deploy/README.md#b) [c](../pyproject.toml) [d](choosing.md) [e](https://x.org)"
    wanted = "[a](containers.md#b) c [d](choosing.md) [e](https://x.org)"
    assert hooks.linked(text, "own-data.md") == wanted
    text = "[a](../../examples/benchmarks/results/robust.md)"
    assert hooks.linked(text, "trust/limits.md") == "[a](../results/measured/robust.md)"


@pytest.mark.nightly(*(page for page in PAGES if "/" not in page), *SITE)
def test_the_documentation_is_built_and_asks_nobody(tmp_path: Path) -> None:
    """Strictly: a link to nothing fails. No page loads anything from another server."""
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > 40
    typeset = "".join(re.findall(r"<math.+?</math>", "".join(map(Path.read_text, pages))))
    drawn = TTFont(tmp_path / "math.woff").getBestCmap() or {}
    assert {ord(sign) for sign in unescape(re.sub(r"<[^>]*>", "", typeset))} <= {*drawn}
    for page in pages:
        loads = r"<(?:script|link|img|iframe)[^>]+(?:src|href)=\"?https?:"
        assert not re.findall(loads, page.read_text()), page
    for name in plugins.own_methods():
        html = (tmp_path / "methods" / name / "index.html").read_text()
        assert "<svg viewBox" in html and '<div class="formula"><math' in html, name


def test_the_pages_are_filled_with_what_crosses_and_the_packages(hooks: Any) -> None:
    table = wire_table.table()
    assert table in hooks.filled((ROOT / "docs" / "trust" / "wire.md").read_text())
    assert all(
        any(method in line.split("|")[1] for line in table.splitlines())
        for method in plugins.methods()
    )
    code = hooks.filled((ROOT / "docs" / "code.md").read_text())
    assert "| `clients/policy` | What a site allows a server to do" in code


def test_the_table_of_exit_codes_has_those_of_the_code() -> None:
    text = (ROOT / "docs" / "troubles.md").read_text()
    section = text.partition("## Exit codes")[2].partition("\n## ")[0]
    prove = importlib.import_module("fedda.contrib.audit.prove")
    codes = {int(code) for code in re.findall(r"^\| (\d+) \|", section, re.MULTILINE)}
    assert codes == {0, 1, exits.USAGE, exits.KEY_TROUBLE, prove.ABOVE, exits.INTERRUPTED}
