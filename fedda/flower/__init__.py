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
    from flwr.app.metadata import Metadata
    from flwr.cli.archive_utils import safe_extract_zip
    from flwr.cli.build import build_fab_from_disk
    from flwr.cli.config_utils import get_fab_metadata
    from flwr.cli.install import install_from_fab
    from flwr.common.config import get_project_dir, parse_config_args
    from flwr.common.constant import (
        ISOLATION_MODE_SUBPROCESS,
        SUPERLINK_NODE_ID,
        SYSTEM_TIME_TOLERANCE,
        TIMESTAMP_HEADER,
        TIMESTAMP_TOLERANCE,
        TRANSPORT_TYPE_GRPC_RERE,
        ErrorCode,
    )
    from flwr.common.serde import fab_to_proto, message_from_proto, user_config_to_proto
    from flwr.compat.common.recorddict_compat import (
        evaluateins_to_recorddict,
        fitins_to_recorddict,
        recorddict_to_evaluateres,
        recorddict_to_fitres,
    )
    from flwr.proto import control_pb2, fleet_pb2, heartbeat_pb2, message_pb2, node_pb2
    from flwr.proto.heartbeat_pb2 import SendNodeHeartbeatRequest
    from flwr.proto.node_pb2 import Node
    from flwr.supercore.constant import (
        FLEET_HTTP_PUBLIC_KEY_HEADER,
        FLEET_HTTP_SIGNATURE_HEADER,
        FLWR_IN_MEMORY_DB_NAME,
    )
    from flwr.supercore.control import ControlHttpClient
    from flwr.supercore.corestate import in_memory_corestate, sql_corestate
    from flwr.supercore.date import now
    from flwr.supercore.error import ApiErrorCode, FlowerError
    from flwr.supercore.fab import Fab
    from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
    from flwr.supercore.primitives.asymmetric import (
        bytes_to_public_key,
        generate_key_pairs,
        public_key_to_bytes,
        sign_message,
        verify_signature,
    )
    from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE
    from flwr.supercore.protobuf.translation import PROTOBUF_REQUEST_TYPES
    from flwr.supercore.run import Run
    from flwr.supercore.task_identity import TaskIdentity
    from flwr.superlink.cli.flower_superlink import SuperLinkLifespan
    from flwr.superlink.config_loader import SuperLinkLifespanConfig, load_control_authn_plugin
    from flwr.superlink.main import create_app
    from flwr.superlink.routers.fleet.router import router
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

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
