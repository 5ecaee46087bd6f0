# ruff: noqa: F401
"""All that fedda uses of Flower beyond its public interface, which only this package imports.

Flower keeps `flwr.app`, `flwr.clientapp`, `flwr.serverapp`, `flwr.client` and `flwr.simulation`
from version to version; whatever else it has may change with each. So a new version of Flower
breaks here if anywhere, and what differs between versions is known here only.

The imports below are never run: type checkers read them, and `_places`. A name is loaded when it
is first used, so no site loads parts of the server, and `--help` loads nothing.

    from fedda.flower import message_to_proto  # loads flwr.common.serde
    from fedda import flower  # loads nothing, until flower.message_to_proto is called
"""

import ast
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedda.errors import RunError
from fedda.flower.supported import RANGE, installed, refusal

OF_THE_SERVER = ("flwr.cli.build", "flwr.superlink.main")  # what a server imports of it
TRACING_LAYER = "RuntimeTracingMiddleware"  # of the server of 1.41; 1.42 has no such layer

if TYPE_CHECKING:
    from flwr.app.message import make_message
    from flwr.cli.build import build_fab_from_disk
    from flwr.common.config import get_project_dir
    from flwr.common.constant import SUPERLINK_NODE_ID, ErrorCode
    from flwr.common.serde import message_from_proto
    from flwr.proto import control_pb2, fleet_pb2, heartbeat_pb2, node_pb2
    from flwr.supercore.task_identity import TaskIdentity
    from flwr.superlink.cli.flower_superlink import SuperLinkLifespan
    from flwr.superlink.config_loader import SuperLinkLifespanConfig, load_control_authn_plugin
    from flwr.superlink.main import create_app

else:

    def __getattr__(name: str) -> Any:
        """Load a name when it is first asked for."""
        if (place := _places().get(name)) is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        globals()[name] = found = _load(place, name)
        return found


@cache
def _places() -> dict[str, str]:
    """The module in which each name is, from the imports above."""
    tree = ast.parse(Path(__file__).read_text(encoding="utf-8"))
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {
        each.name: place
        for node in imports
        for each in node.names
        if (place := node.module or "").startswith("flwr.")
    }


def _load(place: str, name: str) -> Any:
    """Return what a module of Flower calls by this name: an attribute, or a module below it.

    Raises:
        RunError: the installed Flower has no such name; most often it is of another version.
    """
    try:
        module = import_module(place)
        return getattr(module, name) if hasattr(module, name) else import_module(f"{place}.{name}")
    except ImportError as error:
        gone = f"{installed()} has no {place}.{name}, which fedda needs ({error}): "
        raise RunError(refusal() or f"{gone}install another flwr {RANGE}") from error
