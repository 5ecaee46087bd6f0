"""The settings of a run, chosen by the operator: the shared sections and one per method.

The defaults are repeated in pyproject.toml, where Flower reads them; a test compares the two.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Self

from pydantic import Field

from fedda import config, plugins
from fedda.config import inputs, sections
from fedda.errors import ConfigError
from fedda.methods import Stage, write_schedule
from fedda.secure import hiding

from . import presets
from .task import Task

MASKED_CLIP = 1024  # largest clip for which a masked gradient still has 20 bits behind the point


class RunConfig(sections.Section):
    """All settings of a run."""

    method: str = config.DEFAULT
    """the method; `fedda methods` lists them"""
    rounds: int = Field(default=40, ge=1)
    """communication rounds"""
    sources_per_round: int = Field(default=0, ge=0)
    """number of sources drawn at random for each round; 0: all"""
    secure: config.Asked = "auto"
    """sum: the server learns the sum of the sources' models, and no single one (fedavg, fedprox,
    adabn, fedbn, autodial, centring); needs three sources and --peers; none: it sees all; auto: sum
    where the method allows it and all sites have --peers, else none"""
    run: config.RunSection = config.RunSection()
    input: config.InputConfig = config.InputConfig()
    # What methods need to work, as measured (docs/methods/notes/kd3a.md): layers that can change
    # and steps enough, which sites with few images would not have in as many rounds.
    model: config.ModelConfig = config.ModelConfig(hidden="256", dropout=0.5)
    train: config.TrainConfig = config.TrainConfig(
        steps=50, carry_momentum=True, weight_decay=0.0005
    )
    privacy: config.PrivacyConfig = config.PrivacyConfig()
    refine: config.RefineConfig = config.RefineConfig()
    wire: config.WireConfig = config.WireConfig()
    wait: config.WaitConfig = config.WaitConfig()
    guard: config.GuardConfig = config.GuardConfig()
    exchange: config.ExchangeConfig = config.ExchangeConfig()
    track: config.TrackSection = config.TrackSection()
    options: dict[str, Any] = Field(default_factory=dict, exclude=True)
    hidden: frozenset[str] = Field(default=frozenset(), exclude=True)  # methods that take sums

    @classmethod
    def parse(cls, flat: Mapping[str, Any]) -> Self:
        """Check a flat table and fill in the defaults.

        Raises:
            ConfigError: a key is unknown, or a value has the wrong type or range.
        """
        tree = sections.unflatten(flat)
        if "options" in tree:  # a field of this class, not a setting
            raise ConfigError("There is no setting 'options'; see fedda settings.")
        section = tree.get("run")
        baseline = section.get("baseline") if isinstance(section, Mapping) else None
        for name in (tree.get("method"), baseline):  # so an unknown method is named first
            if isinstance(name, str) and name and name != "none":
                plugins.method(name)
        options = {
            m: sections.validate(plugins.method(m).config, tree.pop(m, {}), m)
            for m in plugins.methods()
        }
        made = sections.validate(cls, tree).model_copy(update={"options": options})
        made.check()
        return made

    def check(self) -> None:
        """Refuse settings that contradict each other.

        Raises:
            ConfigError: naming the settings.
        """
        if len(set(self.seeds)) < len(self.seeds):  # equal results would give a spread of 0
            raise ConfigError(f"run.seeds is '{self.run.seeds}'; name each seed once.")
        if self.run.patience:
            self._check_patience()
        known = [*config.NETWORKS, *plugins.installed("models")]
        if self.model.name not in known and not self.model.name.startswith(config.TIMM):
            raise ConfigError(
                f"There is no network '{self.model.name}'; set model.name to {config.TIMM}NAME or "
                f"one of {', '.join(known)}."
            )
        names = [name.strip() for name in self.train.augment.split(",")]
        known = [*config.AUGMENTATIONS, *plugins.installed("augment")]
        odd = [name for name in names if name not in known or (name == "none" and len(names) > 1)]
        if odd:
            raise ConfigError(
                f"train.augment names '{odd[0]}'; set it to none, or to some of "
                f"{', '.join(known[1:])}.{plugins.why_not('augment', odd[0])}"
            )
        if self.input.resize == "crop" and not self.input.size and self.model.weights == "none":
            raise ConfigError(
                "input.resize is crop, which needs a size to crop to; set input.size, for example "
                "to 224."
            )
        if self.guard.mean != "weighted" and not hiding.averages(plugins.method(self.method)):
            robust = ", ".join(m for m in plugins.methods() if hiding.averages(plugins.method(m)))
            raise ConfigError(
                f"guard.mean is {self.guard.mean}, but {self.method} combines the sites' models in "
                f"a way of its own; set it to weighted, or choose one of {robust}."
            )
        for name in self.trainings:
            about = self.privacy, self.model, self.train, self.input.window, self.input.missing
            hiding.check_noise(plugins.method(name), *about)
            plugins.method(name).check_encoder(self.options[name], self.model)
            plugins.method(name).check_steps(self.options[name], self.model, self.train)
        if self.secure == "sum":
            self._check_secure()
        if len(set(self.sources)) < len(self.sources) or not all(
            map(config.is_site_name, self.sources)
        ):
            raise ConfigError(f"run.sources is '{self.run.sources}'; name each source once.")
        if 0 < len(self.sources) < self.wait.min_sources:
            raise ConfigError(
                f"run.sources names {len(self.sources)}, but wait.min-sources asks for "
                f"{self.wait.min_sources}; lower the latter or name more."
            )
        if 0 < self.sources_per_round < self.wait.min_sources:
            raise ConfigError(
                f"sources-per-round is {self.sources_per_round}, but wait.min-sources asks for "
                f"{self.wait.min_sources}; lower the latter or raise the former."
            )
        few = self.exchange.min_examples
        if few < config.FEATURES_HIDE and not self.exchange.expose_features:
            raise ConfigError(
                f"exchange.min-examples is {few}, but from a gradient over fewer than "
                f"{config.FEATURES_HIDE} examples their features can be computed (fedda audit "
                "gradients shows it); raise it, or accept that with exchange.expose-features=true."
            )
        largest = self.exchange.clip * (1 + self.exchange.noise)
        if self.exchange.masked and largest > MASKED_CLIP:
            raise ConfigError(
                f"exchange.masked is true, but exchange.clip is {self.exchange.clip:g} and "
                f"exchange.noise {self.exchange.noise:g}; masked gradients are in fixed point with "
                f"room for the longest one, so lower them until clip (1 + noise) is {MASKED_CLIP}."
            )
        batch, p = self.train.batch_size, self.summing.p
        if batch * p < few and any(self._sums(m) for m in self.trainings):
            raise ConfigError(
                f"exchange.p is {p} and train.batch-size {batch}, so a gradient is over "
                f"{batch * p} examples, but exchange.min-examples asks for {few}; raise "
                f"exchange.p to {-(-few // batch)} or train.batch-size to {-(-few // p)}."
            )

    def _check_patience(self) -> None:
        """Refuse patience where no test of a training's last phase says what it waits for."""
        if not self.run.evaluate:
            raise ConfigError(
                f"run.patience is {self.run.patience}, which needs the target's tests; set "
                "run.evaluate to true, or run.patience to 0."
            )
        for name in self.trainings:
            if "infomax" not in plugins.method(name).phases[-1].test.leaves.numbers:
                raise ConfigError(
                    f"run.patience is {self.run.patience}, but {name}'s tests say no infomax, by "
                    "which a training without labels is seen to rise; set run.patience to 0."
                )

    def _check_secure(self) -> None:
        """Refuse what a sum without single models cannot do."""
        for name in self.trainings:
            hiding.through(plugins.method(name), "sum", self.options[name])  # or it raises
        if self.guard.mean != "weighted":
            raise ConfigError(
                f"secure is sum, but guard.mean is {self.guard.mean}, which compares single "
                "models; set one of them to its default (none, weighted)."
            )
        if self.sources_per_round:
            raise ConfigError(
                f"secure is sum, but sources-per-round is {self.sources_per_round}: sums over "
                "changing groups would reveal single models; set sources-per-round to 0."
            )

    def hiding(self, sources: int) -> Self:
        """Return the run as it is over sites that all can hide their models from the server.

        What is `auto` becomes protection in every method that has it; a run that names another
        rule for its mean, draws sources, or has fewer than three of them cannot have sums.
        """
        able = self.guard.mean == "weighted" and not self.sources_per_round
        able = able and self.secure == "auto" and sources >= config.LEAST_HIDDEN
        hidden = {m for m in self.trainings if able and hiding.can_mask(plugins.method(m))}
        options = dict(self.options)
        for method in self.trainings:
            own = options[method]
            if getattr(own, "relay", "") == "auto" and own.can_seal:
                options[method] = own.model_copy(update={"relay": "sealed"})
        return self.model_copy(update={"hidden": frozenset(hidden), "options": options})

    def secure_of(self, method: str) -> config.Secure:
        """Whether the server learns sums alone in the trainings of a method."""
        return "sum" if self.secure == "sum" or method in self.hidden else "none"

    def _sums(self, method: str) -> bool:
        """Whether a training of a method sums gradients with these settings."""
        about = plugins.method(method)
        return about.gradients and about.sums(self.options[method])

    @property
    def hides(self) -> bool:
        """Whether a training hides single models or gradients, so that sites need keys."""
        sealed = any(hiding.seals(plugins.method(m), self.options[m]) for m in self.trainings)
        masked = self.exchange.masked and any(self._sums(m) for m in self.trainings)
        return self.secure == "sum" or sealed or masked

    @property
    def summing(self) -> config.ExchangeConfig:
        """How gradients are summed, with the number of steps that `exchange.p=0` stands for."""
        p = self.exchange.p or config.steps_per_window(
            self.exchange.min_examples, self.train.batch_size
        )
        return self.exchange.model_copy(update={"p": p})

    @property
    def seeds(self) -> list[int]:
        return [int(s) for s in self.run.seeds.split(",")]

    @property
    def sources(self) -> list[str]:
        """The names of the sources that take part; none if all do."""
        return [name.strip() for name in self.run.sources.split(",")] if self.run.sources else []

    @property
    def trainings(self) -> list[str]:
        """The methods to train, the baseline first."""
        baseline = [self.run.baseline] if self.run.baseline not in ("", self.method) else []
        return [*baseline, self.method]

    @property
    def open(self) -> bool:
        """Whether the run goes on with targets that join later, until somebody stops it."""
        return plugins.method(self.method).open(self.options[self.method])

    def parts(self, method: str, after: int = 0, later: bool = False) -> frozenset[str]:
        """The parts that a method gives to sites in the rounds after round `after`."""
        stages = self.stages(method, later)
        return frozenset(p for stage in stages if stage.last > after for p in stage.phase.parts)

    def stages(self, method: str, later: bool = False) -> tuple[Stage, ...]:
        """How a method's phases fall on the rounds of a training.

        Args:
            method: its name.
            later: whether the training follows others in a chain. It starts from their models, so
                it has no rounds that prepare one, and all others as often as the first.
        """
        options = self.options[method]
        about = hiding.through(plugins.method(method), self.secure_of(method), options)
        stages = about.schedule(options, self.rounds, bool(self.run.start_from))
        if not later:
            return stages
        spared = sum(s.last - s.first + 1 for s in stages if s.phase.prepares)
        return about.schedule(options, self.rounds - spared, prepared=True)

    def task(
        self,
        method: str,
        seed: int,
        shape: tuple[int, ...],
        classes: Sequence[str],
        sites: int,
        target: str = "",
        later: bool = False,
        columns: Sequence[str] = (),
    ) -> Task:
        """Make the description of one training that its sites receive.

        Raises:
            ConfigError: vectors are to be augmented as if they were images.
        """
        if len(shape) == 1 and self.train.augment != "none":
            raise ConfigError(
                f"train.augment is {self.train.augment}, but the sites' examples are vectors of "
                f"{shape[0]} numbers, not images; set it to none."
            )
        if len(shape) == 3 and self.input.missing != inputs.REFUSE:
            raise ConfigError(
                f"input.missing is {self.input.missing}, which is for vectors, but the sites' "
                f"examples are images; leave it {inputs.REFUSE}."
            )
        scales = inputs.scales_of(self.input.window)
        if len(shape) == 3 and (scales or self.input.window == inputs.OWN):
            raise ConfigError(
                f"input.window is {self.input.window[:80]}, which is for vectors, but the sites' "
                "examples are images; leave it empty, or give the values that become black and "
                "white, low,high."
            )
        if odd := [name for name in scales if name not in columns]:
            raise ConfigError(
                f"input.window scales the column {odd[0]!r}, which the sites' data do not have, or "
                "not by name; give names of their columns."
            )
        stages = self.stages(method, later)
        return Task(
            run=self.run.name,
            method=method,
            seed=seed,
            rounds=stages[-1].last if stages else self.rounds,
            schedule=write_schedule(stages),
            target=target,
            shape=",".join(map(str, shape)),
            resize=self.input.resize,
            window=self.input.window,
            missing=self.input.missing,
            column_names="\n".join(columns),
            class_names="\n".join(classes),
            sites=sites,
            secure=self.secure_of(method),
            model=self.model,
            train=self.train,
            privacy=self.privacy,
            refine=self.run.refine,
            shares=self.refine.shares,
            wire=self.wire,
            options=self.options[method],
        )

    @property
    def idle(self) -> list[str]:
        """Settings of methods that are not trained, which somebody and no preset changed."""
        others = {m: o.model_dump(by_alias=True) for m, o in self.options.items()}
        idle = sections.flatten({m: o for m, o in others.items() if m not in self.trainings})
        plain = defaults()
        return [k for k, v in idle.items() if v != plain[k] and not presets.gives(k, v)]

    def flat(self) -> sections.Flat:
        """Every setting under its dotted key, the methods' own sections included.

        Of the methods that other packages add it holds only those that are trained, as a machine
        that reads the table may not have the others installed.
        """
        methods = {*plugins.own_methods(), *self.trainings}
        options = {m: o.model_dump(by_alias=True) for m, o in self.options.items() if m in methods}
        return sections.flatten(self.model_dump(by_alias=True)) | sections.flatten(options)


def defaults() -> sections.Flat:
    """Every key with its default, as repeated in the table `[tool.flwr.app.config]`."""
    made = RunConfig.parse({})
    every = {m: o.model_dump(by_alias=True) for m, o in made.options.items()}
    return made.flat() | sections.flatten(every)


# Settings that change no result: where results go, how long the server waits, and the like.
_FREE = ("run.dir", "run.name", "run.resume", "run.expect", "run.transport", "run.listen", "wait.")
_FREE += ("track.", "exchange.join", "exchange.wait", "exchange.rejoin")


def lasting(flat: Mapping[str, Any], trained: Sequence[str]) -> sections.Flat:
    """The settings that can change the results of these methods."""
    others = tuple(f"{method}." for method in plugins.methods() if method not in trained)
    return {k: v for k, v in flat.items() if not k.startswith((*_FREE, *others))}
