"""A site as a Flower NumPyClient, whose messages hold flat arrays and one table of numbers.

Flower's `to_client()` makes of it what a ClientApp's `client_fn` returns. `fedda-client` has
`clients.app` in its place, which also keeps the audit log, and says no more about an error
than a code: Flower would send its text to the server.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import Context
from flwr.client import Client as FlowerClient
from flwr.client import NumPyClient

from fedda.errors import WireError
from fedda.wire import ANSWERS
from fedda.wire.packing import Manifest, Packed

from .app import answer
from .site import boundary
from .site.memory import Site, resident
from .site.request import Numbers

MANIFESTS = "manifests"  # the key under which the layouts of the arrays travel beside them
TABLES = ("task", "step", "exchange")  # of a request; in one flat table their keys are `step.round`


class NumPySite(NumPyClient):
    """A site, whatever the training."""

    def __init__(self, site: Site) -> None:
        self.site = site

    def get_properties(self, config: Mapping[str, Any]) -> Numbers:
        """Tell what this site offers a run."""
        return boundary.offered(self.site, None)

    def fit(
        self, parameters: list[np.ndarray], config: Mapping[str, Any]
    ) -> tuple[list[np.ndarray], int, Numbers]:
        """Train -> packed arrays as flat ones, examples, numbers; the arguments are of `flat`."""
        reply = answer(self.site, unflat(parameters, dict(config)), _tables(config), test=False)
        arrays, layouts = flat(reply.arrays, {})
        return arrays, self.site.examples, reply.numbers | layouts

    def evaluate(
        self, parameters: list[np.ndarray], config: Mapping[str, Any]
    ) -> tuple[float, int, Numbers]:
        """Test -> loss, tested examples, numbers; the first two are 0 if they are not told."""
        reply = answer(self.site, unflat(parameters, dict(config)), _tables(config), test=True)
        told = {n: json.dumps(v) if isinstance(v, list) else v for n, v in reply.numbers.items()}
        return float(told.get("loss", 0.0)), int(told.get("tested", 0)), told


def client_fn(context: Context) -> FlowerClient:
    """Make the client of a Flower node, whose configuration is that of a site."""
    return NumPySite(resident(tuple(sorted(context.node_config.items())))).to_client()


def flat(
    arrays: Mapping[str, Packed], tables: Mapping[str, Mapping[str, Any]]
) -> tuple[list[np.ndarray], Numbers]:
    """Lay a request or reply out as a NumPyClient takes it -> flat arrays, one flat table.

    Args:
        arrays: packed arrays by name; they are not copied.
        tables: those of a request; `kept` is none of them.
    """
    config = {f"{name}.{k}": v for name in TABLES for k, v in tables.get(name, {}).items()}
    config[MANIFESTS] = json.dumps([[n, p.manifest.text] for n, p in arrays.items()])
    return [np.frombuffer(p.buffer, np.uint8) for p in arrays.values()], config


def unflat(parameters: Sequence[np.ndarray], table: Numbers) -> dict[str, Packed]:
    """Read the arrays that `flat` laid out, and take their layouts out of the table.

    Tables in it that travel as texts, as Flower takes no others, become tables again.

    Raises:
        WireError: the arrays do not fit their layouts.
    """
    try:
        table |= {name: json.loads(str(table[name])) for name in ANSWERS & {*table}}
        layouts = [(str(n), str(text)) for n, text in json.loads(str(table.pop(MANIFESTS, "[]")))]
        pairs = zip(layouts, parameters, strict=True)
        return {name: Packed(Manifest.parse(text), array.data) for (name, text), array in pairs}
    except (TypeError, ValueError):
        raise WireError("A message's arrays do not fit the layouts that came with them.") from None


def _tables(config: Mapping[str, Any]) -> dict[str, Numbers]:
    """The tables of a request in a flat one."""
    tables = {
        name: {k.removeprefix(f"{name}."): v for k, v in config.items() if k.startswith(f"{name}.")}
        for name in TABLES
    }
    return {name: table for name, table in tables.items() if table or name != "exchange"}
