"""The Flower app that `fedda run` submits: this installation, laid out as in the repository.

Flower imports an app's parts by the names in its pyproject.toml, with the app's folder first on the
path. In the wheel clients/, strategies/ and server/ lie inside the package, so they are copied out
beside it. The app is then the same whether fedda was installed from a wheel or a repository.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from fedda import __version__
from fedda.errors import RunError
from fedda.halves import HERE, ROOT
from fedda.settings import defaults

COMPONENTS = {"serverapp": "server.app:app", "clientapp": "clients.app:app"}
FOLDERS = ("clients", "strategies", "server")
PYPROJECT = """\
[project]
name = "fedda"
version = "{version}"
description = "Federated unsupervised domain adaptation"
license = "Apache-2.0"

[tool.flwr.app]
publisher = "fedda"
fab-include = ["fedda/**/*.py", "clients/**/*.py", "strategies/**/*.py", "server/**/*.py"]

[tool.flwr.app.components]
{components}

[tool.flwr.app.config]
{config}
"""


def stage(folder: Path, settings: Collection[str] | None = None) -> Path:
    """Write the app into a folder and return it.

    Args:
        folder: empty, or to be made.
        settings: keys that a run may set; by default every one there is.

    Raises:
        RunError: the folder is not empty.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()):
        raise RunError(
            f"{folder} holds files already, and all files of a folder become part of the Flower "
            "app: give an empty or a new one"
        )
    for source, name in modules():
        copy = folder / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_bytes(source.read_bytes())
    (folder / "pyproject.toml").write_text(
        PYPROJECT.format(
            version=__version__,
            components=_table(COMPONENTS),
            config=config_table(settings),
        ),
        encoding="utf-8",
    )
    return folder


def config_table(settings: Collection[str] | None = None) -> str:
    """Settings with their defaults, as the lines of `[tool.flwr.app.config]`; by default all."""
    known = defaults()
    chosen = known if settings is None else {k: v for k, v in known.items() if k in settings}
    return _table(chosen)


def _table(entries: Mapping[str, Any]) -> str:
    # A text, number or truth value is written the same way in JSON and TOML.
    return "\n".join(f"{key} = {json.dumps(value)}" for key, value in entries.items())


def modules() -> Iterator[tuple[Path, Path]]:
    """Every module's file, and its path in the app."""
    for path in sorted(HERE.rglob("*.py")):
        inside = path.relative_to(HERE)
        if inside.parts[0] not in FOLDERS:  # in the wheel these folders are in here too
            yield path, "fedda" / inside
    for name in FOLDERS:
        for path in sorted((ROOT / name).rglob("*.py")):
            yield path, path.relative_to(ROOT)
