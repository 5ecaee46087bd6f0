"""A site's answer to a request, by the client of its method and part: what every engine calls."""

from collections.abc import Mapping
from typing import Any, cast

from fedda import plugins
from fedda.errors import WireError
from fedda.methods import PartName
from fedda.wire.packing import Packed, shown

from .base import Client
from .site.boundary import SiteReply
from .site.memory import Site
from .site.request import Request


def answer(
    site: Site, arrays: Mapping[str, Packed], tables: Mapping[str, Mapping[str, Any]], test: bool
) -> SiteReply:
    """Let the method's client train or test.

    Args:
        site: this site.
        arrays: of the request, by name.
        tables: of the request: task, step, and maybe exchange.
        test: whether it came where a model is tested, and not trained.

    Raises:
        FeddaError: the site cannot or may not serve it, or the reply may not leave.
    """
    client = client_for(site, tables["task"], tables["step"])
    request = Request.make(tables["task"], tables["step"], arrays, tables.get("exchange"))
    return client.answer(request, test)


def client_for(site: Site, task: Mapping[str, Any], step: Mapping[str, Any]) -> Client:
    """Make the client that serves a request.

    Raises:
        WireError: the request names no part of a method.
        PolicyError: the site's policy does not allow the method.
        ConfigError: there is no such method.
    """
    method, hop, part = str(task.get("method")), str(step.get("hop")), str(step.get("part"))
    parts = {part for phase in plugins.method(method).phases for part in phase.parts}
    if part not in parts | {"target"}:  # which every method has, for its test
        raise WireError(
            f"{method} asks no {shown(part)[:40]} for '{shown(hop)[:40]}'; server and site need "
            "the same version of fedda."
        )
    site.gate.check_method(method)
    return plugins.client(method, cast(PartName, part))(site)
