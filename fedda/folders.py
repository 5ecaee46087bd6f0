"""Finding clients/, strategies/ and server/, which lie beside this package or inside it.

In a checkout and in a Flower App Bundle the folders are siblings of fedda/ and import under their
own names; in the wheel they are fedda.clients, fedda.strategies and fedda.server, so that pip adds
a single name to site-packages.
"""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Literal

HERE = Path(__file__).resolve().parent
IN_WHEEL = (HERE / "clients").is_dir()
ROOT = HERE if IN_WHEEL else HERE.parent

Folder = Literal["clients", "strategies", "server"]


def load(folder: Folder, module: str) -> ModuleType:
    """Import one module of a folder, whatever the packaging calls it.

    Raises:
        ModuleNotFoundError: the folder has no such module.
    """
    return importlib.import_module(f"{_package(folder)}.{module}")


def load_half(folder: Folder, method: str) -> ModuleType:
    """Import a method's half, or FedAvg's where the method needs none of its own."""
    own = ROOT / folder / f"{method}.py"
    return load(folder, method if own.is_file() else "fedavg")


def _package(folder: Folder) -> str:
    if IN_WHEEL:
        return f"fedda.{folder}"
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    return folder
