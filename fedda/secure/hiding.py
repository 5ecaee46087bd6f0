"""How the sources' models reach the server: as they are, added up under masks, or sealed.

A method's contract says what the server needs of the models that a part sends (`Part.needed`):

    each    single models; they always come as they are
    mean    their mean by examples; with `secure=sum` they come under masks (`fedda.secure.masks`)
    relay   none, as they go on to the target; with `METHOD.relay=sealed` the target alone can read
            them (`fedda.secure.seal`), and makes the mean

From the phases of a method this module makes those that go through masks or seals. The halves of a
channel are `strategies/upload_channel.py` at the server and `clients/site/boundary.py` at a site.

And it refuses settings of a training that would not hide single examples though noise is added.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from fedda.config import ModelConfig, PrivacyConfig, Secure, TrainConfig
from fedda.config.inputs import OWN, REFUSE, Missing
from fedda.errors import ConfigError
from fedda.methods import Layouts, Method, Phase
from fedda.wire import LOSS, REFUSED, SECONDS, Number, Part, Rule
from fedda.wire.packing import Kind, Manifest

from . import masks, seal

Hidden = Literal["none", "sum", "sealed"]

KEYS = "keys"  # the hop in which sites sign keys, before the one in which sources send models
KEY = {"key/*": Kind.KEY}
SIGNED = Rule({"key": Kind.KEY}, frozenset({SECONDS}))
ALPHA = Number("alpha/*", 0.001)

# What a target that averages does in place of the server's guard; `most` bounds a site's examples.
GUARD = frozenset({"liars", "most", "max-change", "max-statistics", "max-update"})


@dataclass(frozen=True)
class Both:
    """The layouts of a phase, and those of its channel."""

    own: Layouts
    more: Layouts

    def __call__(self, options: Any, model: Manifest) -> Mapping[str, Manifest]:
        return {**self.own(options, model), **self.more(options, model)}


def averages(method: Method) -> bool:
    """Whether the server needs the mean of the sources' models alone, by any rule."""
    return {part.needed for _, part in _sending(method)} == {"mean"}


def can_mask(method: Method) -> bool:
    """Whether the sources' models can be added up under masks.

    Not where their hop also sums gradients: then they must all answer at the same time, and a site
    that has left would end the hop after its key is in the masks of the others.
    """
    return averages(method) and not any(part.gradients for _, part in _sending(method))


def seals(method: Method, options: Any) -> bool:
    """Whether the sources' models are sealed with these settings of a method."""
    return getattr(options, "relay", "open") == "sealed" and can_seal(method)


def can_seal(method: Method) -> bool:
    """Whether the server does nothing with the sources' models but send them to the target."""
    return {part.needed for _, part in _sending(method)} == {"relay"}


def through(method: Method, secure: Secure, options: Any) -> Method:
    """Return a method with the phases of the channel that a run's and its own settings ask for.

    Raises:
        ConfigError: the server would see sums alone, but the method needs single models.
    """
    if secure != "sum":
        return sealed(method) if seals(method, options) else method
    if not can_mask(method):
        raise ConfigError(
            f"secure is sum, but {method.name} needs single models; set it to none, or choose a "
            "method whose sources' models are only added up, such as fedavg."
        )
    return masked(method)


def masked(method: Method) -> Method:
    """A method whose sources sign keys, and then send their models under masks."""
    return replace(method, phases=tuple(map(_masked, method.phases)))


def sealed(method: Method) -> Method:
    """A method whose target signs a key, to which the sources seal their models."""
    return replace(method, phases=tuple(map(_sealed, method.phases)))


def _sending(method: Method) -> list[tuple[str, Part]]:
    """The parts that send the sources' models, each with its hop."""
    sending = ((phase.sending_hop, phase) for phase in method.phases)
    return [(hop, phase.hops[hop]["source"]) for hop, phase in sending if hop]


def _masked(phase: Phase) -> Phase:
    if not (hop := phase.sending_hop):
        return phase
    part = phase.hops[hop]["source"]
    signs = Part(Rule(numbers=frozenset({"attempt"})), SIGNED, labels=part.labels)
    hides = _hiding(part, "masked", Kind.MASKED, frozenset({"attempt", "most"}))
    hops = {KEYS: {"source": signs}, **phase.hops, hop: {**phase.hops[hop], "source": hides}}
    return replace(phase, hops=hops, layouts=Both(phase.layouts, masks.layouts))


def _sealed(phase: Phase) -> Phase:
    if not (hop := phase.sending_hop):
        return phase
    hides = _hiding(phase.hops[hop]["source"], "sealed", Kind.SEALED)
    hops = {KEYS: {"target": Part(leaves=SIGNED)}, **phase.hops}
    hops[hop] = {**phase.hops[hop], "source": hides}
    for name, parts in phase.hops.items():
        if "target" in parts and _relayed(parts["target"]):
            hops[name] = {**parts, "target": _averaging(parts["target"])}
    return replace(phase, hops=hops, layouts=Both(phase.layouts, seal.layouts))


def _hiding(part: Part, name: str, kind: Kind, numbers: frozenset[str] = frozenset()) -> Part:
    """A part that sends its model hidden, and no loss beside it."""
    enters = replace(
        part.enters, arrays={**part.enters.arrays, **KEY}, numbers=part.enters.numbers | numbers
    )
    return replace(part, enters=enters, leaves=Rule({name: kind}, part.leaves.numbers - {LOSS}))


def _relayed(part: Part) -> set[str]:
    """The patterns of the sources' models that a target receives."""
    return {n for n, k in part.enters.arrays.items() if k is Kind.MODEL and "*" in n}


def _averaging(part: Part) -> Part:
    """A target's part that opens sealed models, and sends their mean and its weights."""
    own = {n: k for n, k in part.enters.arrays.items() if n not in _relayed(part)}
    told = {n for n in part.leaves.numbers if "*" not in n} | {ALPHA, REFUSED}
    return replace(
        part,
        enters=Rule({**own, "sealed/*": Kind.SEALED}, GUARD),
        leaves=replace(part.leaves, numbers=frozenset(told)),
    )


def is_private(method: Method) -> bool:
    """Whether sources train on nothing but a loss per example, by DP-SGD where a run asks for it.

    BatchNorm mixes the examples of a batch, so a method that adapts such layers is not.
    """
    parts = [
        part
        for phase in method.phases
        for hop in phase.hops.values()
        for name, part in hop.items()
        if name != "target"
    ]
    return all(part.private for part in parts) and not method.batchnorm


def check_noise(
    method: Method,
    privacy: PrivacyConfig,
    model: ModelConfig,
    train: TrainConfig,
    window: str,
    missing: Missing,
) -> None:
    """Refuse settings of a training with which single examples would not be private.

    Raises:
        ConfigError: naming the setting.
    """
    if not privacy.noise:
        return
    asked = f"privacy.noise is {privacy.noise:g}"
    if not is_private(method):
        raise ConfigError(
            f"{asked}, but sources of {method.name} send more than what they train on single "
            "examples; set it to 0, or choose fedavg, fedprox or kd3a. (exchange.noise is for "
            "gradients that are exchanged.)"
        )
    if model.norm != "group":
        raise ConfigError(
            f"{asked}, but model.norm is {model.norm}, which mixes the examples of a batch; "
            "set it to group."
        )
    if window == OWN:
        raise ConfigError(
            f"{asked}, but input.window is own, so that each example changes the scale of all; "
            "leave it empty."
        )
    if missing != REFUSE:
        raise ConfigError(
            f"{asked}, but input.missing is {missing}, so that each example changes what fills the "
            f"gaps of all; set it to {REFUSE}."
        )
    others = {"sampler": "shuffle", "accumulate": 1, "precision": "float32"}
    for key, needed in others.items():
        if (found := getattr(train, key)) != needed:
            raise ConfigError(
                f"{asked}, but train.{key} is {found}; DP-SGD draws and clips single examples "
                f"in full precision, so set it to {needed}."
            )
