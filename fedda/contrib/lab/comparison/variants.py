"""What is compared: a method, its preset and the settings in which it differs from the others."""

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from fedda import plugins
from fedda.config.sections import Flat
from fedda.errors import ConfigError
from fedda.halves import REFERENCE
from fedda.settings import overrides

ORACLE = "Oracle"
SHARED = "a comparison sets method, seeds, target and folders itself, alike for all variants"


@dataclass(frozen=True)
class Variant:
    """One row of a comparison.

    Args:
        method: the method's name.
        preset: the name of one of its presets; empty for the defaults.
        settings: flat settings that only this variant has.
        label: the variant's name in tables; if empty, made from the other fields.
        poison: percent of labels that are flipped, by source.
        without: domains that take no part.
        oracle: whether the only source is the target's own training images with their labels.
    """

    method: str
    preset: str = ""
    settings: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    label: str = ""
    poison: Mapping[str, float] = field(default_factory=dict)
    without: Sequence[str] = ()
    oracle: bool = False

    def __hash__(self) -> int:
        return hash(self.slug)  # a mapping has no hash of its own

    @property
    def name(self) -> str:
        """The variant's name in tables."""
        if self.label:
            return self.label
        own = [f"{k.removeprefix(f'{self.method}.')}={v}" for k, v in self.settings.items()]
        own += [f"poison {site}={percent:g}" for site, percent in self.poison.items()]
        own += [f"without {site}" for site in self.without]
        title = plugins.method(self.method).title.partition(" (")[0]
        short = ORACLE if self.oracle else title
        return ", ".join([" ".join(filter(None, (short, self.preset))), *own])

    @property
    def slug(self) -> str:
        """A file name that no variant with other fields has; the label does not change it."""
        facts = (self.method, self.preset, sorted(self.settings.items()))
        facts += (sorted(self.poison.items()), sorted(self.without))
        facts += (ORACLE,) if self.oracle else ()
        digest = hashlib.blake2b(repr(facts).encode(), digest_size=4).hexdigest()
        readable = re.sub(r"[^\w]+", "-", replace(self, label="").name.lower()).strip("-")[:40]
        return f"{readable}-{digest}"

    @property
    def source_only(self) -> "Variant | None":
        """FedAvg with all settings that are not the method's own; None of FedAvg itself."""
        if self.method == REFERENCE:
            return None
        own = ("method", f"{self.method}.")
        shared = {k: v for k, v in self.flat().items() if not k.startswith(own)}
        return Variant(REFERENCE, settings=shared, poison=self.poison, without=self.without)

    def flat(self) -> Flat:
        """All settings of the variant: the preset's, overridden by its own."""
        presets = plugins.method(self.method).presets
        if self.preset and self.preset not in presets:
            known = ", ".join(presets) or "none"
            raise ConfigError(f"{self.method} has no preset '{self.preset}'; it has {known}.")
        own = presets.get(self.preset, {})
        chosen = {plugins.full_key(self.method, k): v for k, v in own.items()}
        return {"method": self.method, **chosen, **self.settings}


def oracle() -> Variant:
    """FedAvg with one source, which has the target's training images and their labels.

    It is no method: no site of a federation could play this part, and no command but a comparison
    over folders of one machine knows it.
    """
    return Variant(REFERENCE, oracle=True)


def is_shared(key: str) -> bool:
    """Whether the comparison itself sets a setting, so that no variant may."""
    return key == "method" or key.startswith("run.")


def parse(texts: Sequence[str]) -> list[Variant]:
    """Read `kd3a`, `kd3a:official`, `kd3a:paper,vote=hard`, or several joined by commas.

    A part with `=` is a setting of the method before it, a part that begins with a digit continues
    the value before it, and any other part begins a new variant.

    Raises:
        ConfigError: there is no such method, preset or setting, or a variant is given twice.
    """
    groups: list[tuple[str, list[str]]] = []
    for part in filter(None, (p.strip() for text in texts for p in text.split(","))):
        if part[0].isdigit() and groups and groups[-1][1]:
            groups[-1][1][-1] += f",{part}"  # model.hidden=200,100
        elif "=" not in part:
            groups.append((part, []))
        elif groups:
            groups[-1][1].append(part)
        else:
            raise ConfigError(f"'{part}' is a setting of no method; write METHOD,{part}.")
    if not groups:
        raise ConfigError(f"Say which methods to compare: {', '.join(plugins.methods())}.")
    variants = []
    for head, pairs in groups:
        method, _, preset = head.partition(":")
        plugins.method(method)
        own = overrides(method, pairs)
        for key in filter(is_shared, own):
            raise ConfigError(f"'{head},{key}=' is not taken here; {SHARED}.")
        variants.append(Variant(method, preset, own))
        variants[-1].flat()
    repeated = next((v for v in variants if variants.count(v) > 1), None)
    if repeated:
        raise ConfigError(f"'{repeated.name}' is given twice; name each variant once.")
    return variants
