"""`fedda new`: a small study, or a method, of one's own, to begin with and to change."""

import json
import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from string import Template
from typing import Annotated

import typer

from fedda.cli.demo import SETTINGS, TARGET
from fedda.errors import ConfigError, DataError, typed
from fedda.files import filling
from fedda.halves import REFERENCE
from fedda.results.escaping import echo

TEMPLATES = Path(__file__).parent / "templates"  # what is written, by kind of folder

# The demo's settings, which were chosen on other seeds than the study has.
DIGITS = {k: v for k, v in SETTINGS.items() if k not in ("method", "run.baseline")}

EXPECTED = """
What `python study.py` prints, within a point or two, after about a minute on two quiet cores:

    Comparison(FedAvg on fonts 74.4 %, AdaBN on fonts 72.8 %, KD3A paper on fonts 86.4 %)
"""


def new(
    directory: Annotated[Path, typer.Argument(metavar="DIR|method")],
    name: Annotated[str, typer.Argument(metavar="[NAME]", show_default=False)] = "",
    data: Annotated[Path | None, typer.Option(exists=True, file_okay=False)] = None,
    target: str = "",
    preset: str = "",
) -> None:
    """Begin a study of your own: settings, a short script, and a README that says what to type.

    Or a method of your own: a package with its three short files, which can be installed.

    With the demo's digits, to see how it works, or with your own data:

      fedda new study

      fedda new study --data ./clinics --target north --preset photos

      fedda new method norms

    Then `cd study` and `python study.py`. Everything there is yours to change.

    Options:
        directory: The study's folder; it must not exist yet. Or the word method.
        name: The method's name; its package is written to fedda_NAME.
        data: A folder with a folder or file per site. Default: the demo's digits.
        target: With --data: the site whose labels nobody uses.
        preset: With --data: a preset, such as photos, vectors or table.
    """
    if bool(name) != (str(directory) == "method"):
        raise ConfigError(
            f"{name or 'the word method alone'} has no place here; to begin a method: "
            f"{typed('fedda', 'new', 'method', name or 'NAME')}"
        )
    echo(begin_method(Path(), name) if name else begin(directory, data, target, preset))


def begin_method(where: Path, name: str) -> str:
    """Write a package with a method of a name -> what to do next, as text.

    Raises:
        ConfigError: the name cannot be a method's, or is one's.
        DataError: the folder exists.
    """
    from fedda.plugins import METHOD_NAME, TAKEN, methods

    if not re.fullmatch(METHOD_NAME, name) or name in {*methods(), *TAKEN}:
        raise ConfigError(
            f"{name!r} is a method already, or no name for one; give one of small letters, digits "
            "and dashes that `fedda methods` does not list."
        )
    package = f"fedda_{name.replace('-', '_')}"
    folder = where / package
    if folder.exists():
        raise DataError(f"{folder} exists; choose another name, or move it away.")
    with filling(folder):
        inner = folder / package
        inner.mkdir()
        _write("method", inner, {"name": name, "package": package})
        (inner / "pyproject.toml").rename(folder / "pyproject.toml")
    return (
        f"a method is in {folder}; next: {typed('pip', 'install', '-e', folder)}, then "
        f"{typed('fedda', 'run', name, '--simulate', 'DIR', '--target', 'NAME')}"
    )


def begin(directory: Path, data: Path | None = None, target: str = "", preset: str = "") -> str:
    """Write a study's files -> what to do next, as text.

    Raises:
        DataError: the folder exists, or the data have no such target.
        ConfigError: there is no such preset.
    """
    from fedda.data import domains
    from fedda.data.digits import build
    from fedda.settings import presets

    if directory.exists():
        raise DataError(f"{directory} exists; give the name of a folder that does not.")
    if data is None:
        chosen, target, preset = DIGITS, TARGET, ""
        words = "-c input.size=16 -c input.channels=1"
    else:
        known = domains(data, targets=[target])
        if target not in known:
            found = f"'{target}' is none of its sites" if target else "--target names no site"
            raise DataError(f"{data}: {found}; give --target as one of {', '.join(known)}.")
        presets.settings(REFERENCE, [preset] if preset else [])  # raises if there is no such
        chosen, words = {"rounds": 10}, f"--preset {preset}" if preset else ""
    sites = "sites" if data is None else str(data.absolute())
    filled = {
        "sites_text": _toml(sites),
        "sites_word": shlex.quote(sites),
        "target": target,
        "target_text": _toml(target),
        "target_word": shlex.quote(target),
        "preset": preset,
        "formulas": "" if data else ":paper",  # as the demo has them
        "words": words,
        "settings": "\n".join(f'"{key}" = {_toml(value)}' for key, value in chosen.items()),
        "expected": EXPECTED if data is None else "",
        "about": "Four small domains of digits lie in `sites`."
        if data is None
        else f"The data stay where they are, in {sites}.",
    }
    with filling(directory):
        if data is None:
            build(directory / "sites")
        _write("study", directory, filled)
    return f"a study is in {directory}; next: {typed('cd', directory)} && python study.py"


def _write(kind: str, folder: Path, filled: Mapping[str, str]) -> None:
    """Write the files of a kind of folder, with names and settings filled in."""
    for file in (TEMPLATES / kind).iterdir():
        made = Template(file.read_text("utf-8")).substitute(filled)
        (folder / file.stem).write_text(made.replace(" \n", "\n"))


def _toml(value: object) -> str:
    """A text, number or truth value as TOML, which writes these as JSON does."""
    return json.dumps(value, ensure_ascii=False)
