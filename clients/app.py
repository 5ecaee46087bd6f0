"""The ClientApp: one for every engine, method and role."""

from collections.abc import Mapping, Sequence
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from .node import bridge


def make_app(
    sites: Sequence[Mapping[str, Any]] = (), failures: bridge.Failures | None = None
) -> ClientApp:
    """Make a ClientApp for real nodes, or for simulated ones.

    Args:
        sites: node configurations by partition, for engines that number their nodes; a real node
            brings its own configuration.
        failures: keeps the sites' exceptions, where server and sites are one process.
    """
    made = ClientApp()

    def node(context: Context) -> Mapping[str, Any]:
        own = context.node_config
        return sites[int(own["partition-id"])] if sites else own

    @made.query()
    def query(message: Message, context: Context) -> Message:
        return bridge.guarded(bridge.query, message, node(context), failures)

    @made.query("look")
    def look(message: Message, context: Context) -> Message:
        return bridge.guarded(bridge.look, message, node(context), failures)

    @made.train()
    def train(message: Message, context: Context) -> Message:
        return bridge.guarded(bridge.train, message, node(context), failures)

    @made.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        return bridge.guarded(bridge.evaluate, message, node(context), failures)

    return made


app = make_app()
