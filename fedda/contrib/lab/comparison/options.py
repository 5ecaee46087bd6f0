"""Reading the options of `fedda compare`, and refusing those that make no sense."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from fedda import plugins
from fedda.config.sections import Flat
from fedda.data import Reading, domains
from fedda.errors import ConfigError, RunError
from fedda.halves import load
from fedda.library.simulated import poison_of
from fedda.ops import system
from fedda.ops.engines import check_engine
from fedda.results.escaping import echo
from fedda.settings import overrides, presets, seeds_of

from .plan import Plan
from .variants import SHARED, Variant, is_shared, oracle, parse


def variants_of(
    methods: Sequence[str], baseline: str, with_oracle: bool = False
) -> tuple[list[Variant], str]:
    """The variants, with the baseline first if METHODS lacks it, and the baseline's name."""
    variants = [*parse(methods), *([oracle()] if with_oracle else [])]
    base = [] if baseline == "none" else parse([baseline])
    if len(base) > 1:
        raise ConfigError(f"--baseline '{baseline}' is more than one method; give one, or none.")
    variants = [*(b for b in base if b not in variants), *variants]
    first = [variants.index(b) for b in base]
    names = [v.name for v in variants]  # methods of two packages may have one title
    for i, variant in enumerate(variants):
        if names.count(variant.name) > 1:
            variants[i] = replace(variant, label=f"{variant.name} ({variant.method})")
    return variants, variants[first[0]].name if first else ""


def shared_of(change: list[str], chosen: list[str], rounds: int) -> Flat:
    """The settings that all variants share."""
    flat: Flat = {}
    for name in chosen:
        if name not in presets.FOR_ALL:
            raise ConfigError(
                f"There is no preset '{name}' for all methods; a method's own goes with it, as in "
                f"kd3a:paper, and those of all methods are {', '.join(presets.FOR_ALL)}."
            )
        values = presets.for_all(name, plugins.methods())
        flat |= {key: given.value for key, given in values.items()}
    flat |= {"rounds": rounds} if rounds else {}
    own = overrides("", change)
    for key in filter(is_shared, own):
        raise ConfigError(f"-c {key}= is not taken here; {SHARED}.")
    return flat | own


def plan_of(
    data: Path,
    target: str,
    seeds: str,
    variants: Sequence[Variant],
    flat: Flat,
    out: Path,
    poison: str,
    engine: Literal["process", "ray"],
    threads: int,
    reading: Reading,
    device: str = "auto",
) -> Plan:
    """The plan of the whole comparison; the names of domains are checked.

    Raises:
        ConfigError: seeds or percents are malformed.
        RunError: there are no such domains.
    """
    load("clients", "site.memory").pick_device(device)
    known = list(domains(data, reading, target.split(",")))
    if len(known) < 2:
        raise RunError(
            f"{data} holds {' and '.join(known) or 'no domain'}; a comparison needs a target and "
            "at least one source, so give a folder with two domains or more."
        )
    targets = known if target == "all" else [t for t in target.split(",") if t]
    unknown = next((t for t in targets if t not in known), None)
    if unknown is not None or not targets:
        raise RunError(
            f"{data} has no domain '{unknown or ''}', it has {', '.join(known)}; choose --target "
            "among them, several with commas, or all."
        )
    if len(set(targets)) < len(targets):
        raise ConfigError(f"--target {target} names a domain twice; name each once.")
    percents = poison_of(poison)
    if not set(percents) <= set(known):
        unknown = next(name for name in percents if name not in known)
        raise RunError(
            f"--poison {unknown}: {data} has no such domain, it has {', '.join(known)}; choose "
            "among them."
        )
    always = [name for name in percents if targets == [name]]
    if always:
        raise RunError(
            f"--poison {always[0]}: it is the target, whose labels nobody uses; choose a source."
        )
    for name in set(percents) & set(targets):
        echo(f"note: {name} has no wrong labels while it is the target", err=True)
    how = engine, threads, reading, device
    return Plan(data, out, variants, targets, seeds_of(seeds), flat, percents, *how)


def jobs_of(jobs: int, threads: int, engine: str) -> int:
    """How many trainings at a time."""
    check_engine(engine)
    if engine == "ray":
        if jobs > 1:
            raise ConfigError(
                f"--jobs {jobs} does not go with --engine ray, which uses all cores for one "
                "training; leave one of them out."
            )
        return 1
    if jobs:
        return jobs
    import torch  # takes a second

    return 1 if torch.cuda.is_available() else max(system.cores() // threads, 1)
