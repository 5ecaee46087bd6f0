"""Which methods and settings are tried: each method as it is, and a few drawn settings of it."""

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from itertools import product
from typing import Any

import torch

from fedda import models, plugins
from fedda.comparison import Cell, Plan, Variant
from fedda.config import Flat, Scalar
from fedda.data import Reading, describe
from fedda.errors import ConfigError, FeddaError
from fedda.halves import REFERENCE, load
from fedda.settings import RunConfig
from fedda.train import generator

USUAL = (REFERENCE, "adabn", "kd3a", "fdann", "mdan")
_described = cache(describe)  # cached, as describing reads the header of every image


def methods_of(
    names: Sequence[str], why_not: Callable[[str], str]
) -> tuple[list[str], dict[str, str]]:
    """The methods to try, FedAvg first -> their names, and why others are left out.

    Args:
        names: what the user asked for; if none, the usual ones that fit are taken.
        why_not: says why a method does not fit; empty if it does.

    Raises:
        ConfigError: a named method does not exist, or cannot be a candidate.
    """
    for name in names:
        if plugins.method(name).chain is not None:
            raise ConfigError(
                f"{name} adapts a chain of targets, and a choice is for one; leave it out of "
                "--method."
            )
    if names:
        return [REFERENCE, *(n for n in dict.fromkeys(names) if n != REFERENCE)], {}
    why = {name: why_not(name) for name in USUAL if name != REFERENCE}
    left_out = {name: text for name, text in why.items() if text}
    costly = "not tried unless --method names it: it needs a set-up of its own, or costs more"
    others = dict.fromkeys(sorted({*plugins.methods()} - {*USUAL}), costly)
    return [m for m in USUAL if m not in left_out], left_out | others


def candidates(methods: Sequence[str], drawn: int, shared: Flat, seed: int) -> list[Variant]:
    """Each method as the shared settings have it, and so many settings drawn from its `search`.

    They are drawn without replacement, from a generator of the seed and the method's name, so that
    a method's settings do not depend on which others are tried.
    """
    plain = [Variant(name) for name in methods]
    usual = {v.method: {**RunConfig.parse({**shared, **v.flat()}).flat()} for v in plain}
    more = []
    for variant in plain:
        space = {
            plugins.full_key(variant.method, k): values
            for k, values in plugins.method(variant.method).search.items()
        }
        choices = [c for c in _settings(space) if not c.items() <= usual[variant.method].items()]
        order = torch.randperm(len(choices), generator=generator(seed, variant.method, "search"))
        for i in order[:drawn].tolist():
            own = {k: v for k, v in choices[i].items() if usual[variant.method].get(k) != v}
            more.append(Variant(variant.method, settings=own))
    return plain + more


def _settings(space: Mapping[str, Sequence[Scalar]]) -> list[dict[str, Scalar]]:
    return [dict(zip(space, values, strict=True)) for values in product(*space.values())]


def obstacle(name: str, plan: Plan) -> str:
    """Why a method does not fit data, network and number of sources; empty if it does."""
    cell = Cell(Variant(name), plan.targets[0], plan.seeds[0])
    config, sites = plan.config(cell), plan.sites(cell)
    if why := unfit(name, config.model.name, len(sites) - 1, lambda: _has_batchnorm(config, sites)):
        return why
    try:
        load("server", "simulation").rehearse(config, sites, _described)
    except FeddaError as error:
        return str(error)
    return ""


def unfit(name: str, network: str, sources: int, has_batchnorm: Callable[[], bool]) -> str:
    """Why a method does not fit a network or a number of sources; empty if it does."""
    method = plugins.method(name)
    if method.batchnorm and not has_batchnorm():
        return f"model.name={network} has no BatchNorm layer"
    if sources < method.sources:
        return f"it is for {method.sources} sources or more, and there is {sources}"
    return ""


def _has_batchnorm(config: RunConfig, sites: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the part of the network that learns has a BatchNorm layer."""
    site = next(s for s in sites if s["role"] == "target")
    reading = Reading.said(site)
    found = _described(site["data"], "target", reading)
    given, shape = models.inputs(config.input, config.model), found.shape
    if found.kind == "image":
        side = (given.size, given.size) if given.size else shape[1:]
        shape = (given.channels or shape[0], *side)
    network = models.blank(config.model, shape, 2, device="meta")
    return any(name.endswith("running_mean") for name in network.state_dict())
