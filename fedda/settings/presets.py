"""Presets: named groups of settings, from the papers, for a benchmark or for a method.

    start       model, input and schedule for data of your own, for any method: `photos`, `vectors`,
                and `table`, for numbers with gaps; a method's `on_features` adds its own
    benchmark   the same for a published data set, for any method: the table below
    method      settings of the method, `PRESETS` of its module, such as `paper` and `official`

If several are given, the last one wins. A benchmark's `kd3a.gate` has no effect on other methods;
`fedavg.weighting` also holds for methods that average models as FedAvg does. A value that no paper
gives has "ours" as its source, and the reason.
"""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from fedda import plugins
from fedda.config.sections import Flat, Scalar
from fedda.errors import ConfigError
from fedda.halves import REFERENCE


class Given(NamedTuple):
    """A value and its source."""

    value: Scalar
    source: str


Preset = dict[str, Given]

# Feng et al., KD3A, ICML 2021: the columns of table 5 in appendix F; for digits also table 4.
TABLE_5 = "KD3A, table 5"
# On mnistm, with syn drawn by the project, FedAvg stayed between 71 and 75 % from 350 steps of a
# source on, and KD3A had 73.3, 79.9, 85.0 and 89.9 % after 350, 700, 1,400 and 2,800 (one seed).
STEPS = "ours: so many of 128 images, in 40 rounds, took KD3A on mnistm from 73 to 90 %"
# Fernandes Montesuma et al., FedDaDiL: appendix C.2, table 4, lists how they trained KD3A.
TABLE_4 = "FedDaDiL, appendix C.2, table 4"

KD3A: Preset = {
    "rounds": Given(40, f"{TABLE_5}: total epochs"),
    "train.rounds-per-epoch": Given(1.0, f"{TABLE_5}: r = 1"),
    "train.optimizer": Given("sgd", TABLE_5),
    "train.momentum": Given(0.9, TABLE_5),
    "train.schedule": Given("cosine", TABLE_5),
    "train.weight-decay": Given(0.0005, "KD3A's code; the paper gives none"),
    "train.carry-momentum": Given(True, "KD3A's code"),
    "train.steps": Given(0, f"{TABLE_5}: r = 1"),
    "model.hidden": Given("", f"{TABLE_5}: none behind its ResNets"),
    "model.dropout": Given(0.0, f"{TABLE_5}: none"),
}
COLOUR: Preset = {"input.channels": Given(3, "ours: all domains in colour, or copied to three")}
SIZE_224: Preset = COLOUR | {
    "input.size": Given(224, "ours: what torchvision's weights were trained on; no paper says"),
}
RESNET101: Preset = SIZE_224 | {
    "model.name": Given("resnet101", TABLE_5),
    "model.weights": Given(
        "IMAGENET1K_V1", f"{TABLE_5}: pretrained = True, in torchvision these weights"
    ),
    "train.lr": Given(0.005, TABLE_5),
    "train.lr-end": Given(0.0001, TABLE_5),
    "kd3a.gate.low": Given(0.8, TABLE_5),
    "kd3a.gate.high": Given(0.95, TABLE_5),
}
SMALL: Preset = {
    "train.lr": Given(0.05, TABLE_5),
    "train.lr-end": Given(0.001, TABLE_5),
    "kd3a.gate.low": Given(0.9, TABLE_5),
    "kd3a.gate.high": Given(0.95, TABLE_5),
}


def _feddadil(model: str, lr: float, low: float) -> Preset:
    """A row of FedDaDiL's table 4; values that the table lacks are KD3A's."""
    base = {k: KD3A[k]._replace(source="KD3A, section 5, which FedDaDiL follows") for k in KD3A}
    return (
        base
        | SIZE_224
        | {
            "rounds": Given(100, f"{TABLE_4}: epochs, and models averaged after each"),
            "train.weight-decay": Given(0.0005, f"{TABLE_4} has it for its FedAvg alone"),
            "model.name": Given(model, "FedDaDiL, table 1"),
            "model.weights": Given("IMAGENET1K_V2", "FedDaDiL, appendix C.1"),
            "train.batch-size": Given(32, TABLE_4),
            "train.lr": Given(lr, TABLE_4),
            "train.lr-end": Given(lr / 50, "ours: a fiftieth, as KD3A's table 5 for its ResNets"),
            "kd3a.gate.low": Given(low, TABLE_4),
            "kd3a.gate.high": Given(0.95, TABLE_4),
        }
    )


# Chosen with features of EfficientNet-Lite0 for images of 128 pixels, on one seed. There FedAvg
# with the general defaults was up to 11 points below one linear head on the sources' pooled
# features; with these values it is within 2 of it on every target.
OURS = "ours: with it FedAvg is nearest to training on pooled features"
HEADS: Preset = {
    "model.hidden": Given("", "ours: features that do not move need none"),
    "model.bottleneck": Given(256, "Liang et al., SHOT, ICML 2020, section 4.2"),
    "model.dropout": Given(0.5, OURS),
    "fedavg.weighting": Given("uniform", "ours: small sources may be nearest to the target"),
    "kd3a.focus-by-examples": Given(False, "ours: as for fedavg.weighting; KD3A's code"),
    "rounds": Given(60, OURS),
    "train.steps": Given(0, "ours: a pass a round"),
    "train.batch-size": Given(64, "ours: as many as a site lets a step have by default"),
    "train.optimizer": Given("sgd", "ours: as SHOT"),
    "train.momentum": Given(0.0, OURS),
    "train.weight-decay": Given(0.0, OURS),
    "train.lr": Given(0.05, OURS),
    "train.lr-end": Given(0.001, "ours: a fiftieth, as KD3A's table 5"),
    "train.schedule": Given("cosine", "ours: as KD3A"),
}

# What to start from with data of your own.
STARTS: dict[str, Preset] = {
    "photos": COLOUR
    | HEADS
    | {
        "model.name": Given("efficientnet-lite0", "ours: its weights come with fedda[pretrained]"),
        "model.weights": Given("package", "ours: as above"),
        "model.train": Given("bottleneck", "ours: a round takes as long as one of a small network"),
    },
    "vectors": HEADS
    | {
        "model.name": Given("identity", "ours: the vectors are features already"),
        "input.window": Given("own", "ours: FedAvg +3.4 points over 23 trainings, -3.5 at worst"),
    },
}
# Chosen on tables of scikit-learn that are in no table of results (`docs/own-data.md`), seed 10.
STARTS["table"] = STARTS["vectors"] | {
    "input.missing": Given("mean", "ours: FedAvg +.7 points over the median, +4 over indicators"),
    "rounds": Given(15, "ours: with 30 FedAvg had .2 points less"),
    "train.lr": Given(0.02, "ours: FedAvg +.2 points over .05"),
    "train.lr-end": Given(0.0004, "ours: a fiftieth, as for vectors"),
}

BENCHMARKS: dict[str, Preset] = {
    "digit5": KD3A
    | SMALL
    | COLOUR
    | {
        "input.size": Given(32, "FRUDA, appendix F.0.2, digits: 32 x 32 x 3"),
        "model.name": Given("digit-cnn", "KD3A, table 4"),
        "model.hidden": Given(
            "512,256",
            "ours: KD3A's code has 3072,2048, seven times the bytes, with which it had as much on "
            "mnistm and 3 points more on svhn",
        ),
        "model.dropout": Given(0.5, "KD3A's code"),
        "model.weights": Given("none", "KD3A, table 5: only its ResNets are pretrained"),
        "train.batch-size": Given(100, TABLE_5),
        "train.steps": Given(70, STEPS),
    },
    # Reviews are vectors, on which input.channels and input.size have no effect.
    "amazon-review": KD3A
    | SMALL
    | {
        "model.name": Given("mlp", f"{TABLE_5}: 3-layer MLP"),
        "model.hidden": Given(
            "500,100",
            "ours: three layers with the head; KD3A gives no widths, its code four layers",
        ),
        "model.weights": Given("none", "KD3A, table 5: only its ResNets are pretrained"),
        "train.batch-size": Given(50, TABLE_5),
        "kd3a.mixup": Given(0.0, f"{TABLE_5}: data augmentation none"),
    },
    "office-caltech10": KD3A | RESNET101 | {"train.batch-size": Given(32, TABLE_5)},
    "domainnet": KD3A | RESNET101 | {"train.batch-size": Given(50, TABLE_5)},
    "office31": _feddadil("resnet50", 0.01, 0.9),
    "office-home": _feddadil("resnet101", 0.01, 0.9),
    "imageclef": _feddadil("resnet50", 0.001, 0.9),
    "adaptiope": _feddadil("resnet101", 0.01, 0.8),
    # Gan et al., FRUDA, appendix F.0.2: how it trains its source models. LeNet has no BatchNorm.
    "rotated-mnist": {
        "input.channels": Given(1, "ours: MNIST is grayscale"),
        "input.size": Given(28, "ours: MNIST's own"),
        "model.name": Given("lenet", "FRUDA, appendix F.0.2"),
        "model.hidden": Given("", "FRUDA, appendix F.0.2"),
        "model.dropout": Given(0.0, "FRUDA, appendix F.0.2"),
        "train.steps": Given(0, "FRUDA, appendix F.0.2"),
        "train.weight-decay": Given(0.0, "FRUDA, appendix F.0.2"),
        "model.weights": Given("none", "FRUDA, appendix F.0.2"),
        "train.batch-size": Given(32, "FRUDA, appendix F.0.2"),
        "train.optimizer": Given("adam", "FRUDA, appendix F.0.2"),
        "train.lr": Given(0.0001, "FRUDA, appendix F.0.2"),
        "train.schedule": Given("constant", "ours: FRUDA gives one rate and no schedule"),
        "train.carry-momentum": Given(
            True, "ours: FRUDA trains in one go, so Adam keeps its state"
        ),
        "rounds": Given(20, "ours: FRUDA gives no number of epochs"),
        "dils.lr": Given(0.001, "FRUDA, appendix F.0.2: target extractor"),
        "dils.discriminator.lr": Given(0.01, "FRUDA, appendix F.0.2: discriminators"),
        "fruda.lr": Given(0.001, "FRUDA, appendix F.0.2: target extractor"),
        "fruda.discriminator.lr": Given(0.01, "FRUDA, appendix F.0.2: discriminators"),
    },
}

FOR_ALL = STARTS | BENCHMARKS  # methods


def names(method: str) -> list[str]:
    """Names that `--preset` takes for a method: first the method's own, then those for all."""
    return [*plugins.method(method).presets, *FOR_ALL]


def table(method: str) -> dict[str, Preset]:
    """Every preset that a method can use, with full dotted keys, values and sources."""
    own: Mapping[str, Mapping[str, Scalar]] = plugins.method(method).presets
    sources = {
        "paper": "the method's paper",
        "official": "the authors' code",
        "parent": "code of the method that it builds on",
    }
    other = "ours" if plugins.origin(method) == plugins.OWN else plugins.origin(method)
    chosen = {
        name: {
            plugins.full_key(method, k): Given(v, sources.get(name.split("-")[0], other))
            for k, v in values.items()
        }
        for name, values in own.items()
    }
    return chosen | {name: for_all(name, [method]) for name in FOR_ALL}


def for_all(name: str, methods: Iterable[str]) -> Preset:
    """A start's or benchmark's values, those for FedAvg also for methods with FedAvg's settings.

    A start has also what each of the methods declares as its own `on_features`.
    """
    preset, mark = dict(FOR_ALL[name]), f"{REFERENCE}."
    fedavg = plugins.method(REFERENCE).config
    averaged = {k.removeprefix(mark): v for k, v in preset.items() if k.startswith(mark)}
    for each in map(plugins.method, methods):
        own = averaged if issubclass(each.config, fedavg) else {}
        if name in STARTS:
            ours = f"{each.name}'s own, where features are finished"
            own = own | {k: Given(v, ours) for k, v in each.on_features.items()}
        preset = {f"{each.name}.{k}": v for k, v in own.items()} | preset
    return preset


def gives(key: str, value: Scalar) -> bool:
    """Whether some start or benchmark has this value of a method's setting."""
    method, _, own = key.partition(".")
    given = [p[k] for p in FOR_ALL.values() for k in (key, f"{REFERENCE}.{own}") if k in p]
    return value in (*(g.value for g in given), plugins.method(method).on_features.get(own))


def settings(method: str, chosen: Sequence[str]) -> Flat:
    """Merge the settings of presets; the last one wins -> dotted keys.

    Raises:
        ConfigError: a preset or the method does not exist.
    """
    known = table(method)
    flat: Flat = {}
    for name in chosen:
        if name not in known:
            own = ", ".join(n for n in known if n not in FOR_ALL) or "none"
            others = [
                m for m in plugins.methods() if m != method and name in plugins.method(m).presets
            ]
            near = difflib.get_close_matches(name, known, n=1)
            hint = f" (did you mean {near[0]}?)" if near else ""
            hint = f" (it is one of {', '.join(others)})" if others else hint
            raise ConfigError(
                f"There is no preset '{name}' for {method}{hint}; its own are {own}, and those of "
                f"all methods are {', '.join(FOR_ALL)}."
            )
        flat |= {key: given.value for key, given in known[name].items()}
    return flat
