"""A site as a Flower NumPyClient: each request is served by the client of its method and part."""

from collections.abc import Mapping
from typing import Any, cast

import numpy as np
from flwr.app import Context
from flwr.client import Client as FlowerClient
from flwr.client import NumPyClient

from fedda import plugins
from fedda.errors import WireError
from fedda.methods import PartName
from fedda.wire import shown

from .base import Client
from .site import doors
from .site.memory import Site, resident
from .site.request import Numbers


class Face(NumPyClient):
    """A site, whatever the training.

    Flower's `to_client()` makes of it what a ClientApp's `client_fn` returns. `fedda-client` has
    `clients.node.bridge` in its place, which also keeps the audit log, and says no more about an
    error than a code: Flower would send its text to the server.
    """

    def __init__(self, site: Site) -> None:
        self.site = site

    def get_properties(self, config: Mapping[str, Any]) -> Numbers:
        """Tell what this site offers a run."""
        return doors.offered(self.site, None)

    def fit(
        self, parameters: list[np.ndarray], config: Mapping[str, Any]
    ) -> tuple[list[np.ndarray], int, Numbers]:
        """Let the method's client train; see `Client.fit`."""
        return client_for(self.site, config).fit(parameters, config)

    def evaluate(
        self, parameters: list[np.ndarray], config: Mapping[str, Any]
    ) -> tuple[float, int, Numbers]:
        """Let the method's client test; see `Client.evaluate`."""
        return client_for(self.site, config).evaluate(parameters, config)


def client_fn(context: Context) -> FlowerClient:
    """Make the client of a Flower node, whose configuration is that of a site."""
    return Face(resident(tuple(sorted(context.node_config.items())))).to_client()


def client_for(site: Site, config: Mapping[str, Any]) -> Client:
    """Make the client that serves a request.

    Args:
        site: this site.
        config: of the request, as `clients.site.request.flat` writes it.

    Raises:
        WireError: the request names no part of a method.
        PolicyError: the site's policy does not allow the method.
        ConfigError: there is no such method.
    """
    method, hop, part = (str(config.get(n)) for n in ("task.method", "step.hop", "step.part"))
    parts = {part for phase in plugins.method(method).phases for part in phase.parts}
    if part not in parts | {"target"}:  # which every method has, for its test
        raise WireError(
            f"{method} asks no {shown(part)[:40]} for '{shown(hop)[:40]}'; server and site need "
            "the same version of fedda."
        )
    site.gate.check_method(method)
    return plugins.client(method, cast(PartName, part))(site)
