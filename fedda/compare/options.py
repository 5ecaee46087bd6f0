"""What the words of `fedda compare` mean, and what is wrong with those that mean nothing."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import typer

from fedda import config as settings
from fedda import presets
from fedda.config import Flat
from fedda.errors import ConfigError, RunError

from .cells import Plan, domains
from .variants import SHARED, Variant, is_shared, parse


def variants_of(methods: Sequence[str], baseline: str) -> tuple[list[Variant], str]:
    """What is compared, the baseline first if it was not named, and what the baseline is called."""
    variants = parse(methods)
    if baseline == "none":
        return variants, ""
    base = parse([baseline])
    if len(base) > 1:
        raise ConfigError(f"--baseline '{baseline}' is more than one method; give one, or none.")
    if base[0] not in variants:
        variants = [*base, *variants]
    return variants, base[0].name


def shared_of(change: list[str], chosen: list[str], rounds: int) -> Flat:
    """The settings of all variants."""
    flat: Flat = {}
    for name in chosen:
        if name not in presets.BENCHMARKS:
            raise ConfigError(
                f"There is no preset '{name}' for all methods; a method's own is written "
                f"METHOD:{name}, and those of benchmarks are {', '.join(presets.BENCHMARKS)}."
            )
        flat |= {key: given.value for key, given in presets.BENCHMARKS[name].items()}
    flat |= {"rounds": rounds} if rounds else {}
    own = settings.overrides("", change)
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
) -> Plan:
    """The whole comparison, checked as far as names go.

    Raises:
        ConfigError: seeds or percents are malformed.
        RunError: there are no such domains.
    """
    found = domains(data)
    if len(found) < 2:
        raise RunError(
            f"{data} holds {' and '.join(found) or 'no domain'}; a comparison needs a target and "
            "at least one source, so give a folder with two domains or more."
        )
    targets = found if target == "all" else [t for t in target.split(",") if t]
    odd = next((t for t in targets if t not in found), None)
    if odd is not None or not targets:
        raise RunError(
            f"{data} has no domain '{odd or ''}', it has {', '.join(found)}; choose --target "
            "among them, several with commas, or all."
        )
    if len(set(targets)) < len(targets):
        raise ConfigError(f"--target {target} names a domain twice; name each once.")
    wrong = poison_of(poison)
    if not set(wrong) <= set(found):
        odd = next(name for name in wrong if name not in found)
        raise RunError(f"--poison {odd}: {data} has no such domain, it has {', '.join(found)}.")
    always = [name for name in wrong if targets == [name]]
    if always:
        raise RunError(
            f"--poison {always[0]}: it is the target, whose labels nobody uses; choose a source."
        )
    for name in set(wrong) & set(targets):
        typer.echo(f"note: {name} has no wrong labels while it is the target", err=True)
    return Plan(data, out, variants, targets, seeds_of(seeds), flat, wrong, engine, threads)


def seeds_of(text: str) -> list[int]:
    """3 -> 0, 1, 2; 5,6 -> 5, 6; 7, -> 7."""
    try:
        found = [int(s) for s in text.split(",") if s.strip()]
    except ValueError:
        found = []
    if "," not in text:
        found = list(range(sum(found)))
    if not found or min(found) < 0 or len(set(found)) < len(found):
        raise ConfigError(
            f"--seeds '{text}' cannot be; give how many, such as 3 for 0, 1 and 2, or different "
            "ones with commas, such as 5,6 (or 7, for one)."
        )
    return found


def poison_of(text: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for pair in filter(None, text.split(",")):
        name, _, percent = pair.partition("=")
        try:
            found[name] = float(percent)
        except ValueError:
            found[name] = -1.0
        if not 0 < found[name] <= 100:
            raise ConfigError(f"--poison {pair!r} is not NAME=PERCENT, such as svhn=30.")
    return found


def jobs_of(jobs: int, threads: int, engine: str) -> int:
    """How many trainings at a time."""
    if engine == "ray":
        if jobs > 1:
            raise ConfigError(
                f"--jobs {jobs} cannot be with --engine ray, which uses all cores for one "
                "training; leave one of them out."
            )
        return 1
    if jobs:
        return jobs
    import torch  # takes a second

    return 1 if torch.cuda.is_available() else max(len(os.sched_getaffinity(0)) // threads, 1)
