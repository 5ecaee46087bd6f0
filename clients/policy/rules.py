"""A site's policy: which requests it answers, what may leave it, and how often.

The file is TOML; `fedda policy init` writes one. A key that is left out does not restrict anything,
but for code of other packages, which allow.plugins has to name. Hidden sums are bounded by [secure]
with or without a file, and `fedda look` is answered only if it has leaving.look.
"""

import datetime as dt
import re
import tomllib
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Self

from pydantic import Field, field_validator

from fedda.config import WIDEST
from fedda.config.sections import Section, validate
from fedda.errors import ConfigError, reason, typed
from fedda.files import unmarked
from fedda.ops.distributions import ANY, check_entry

# Bounds that hold without a policy, too; a policy can only lower them.
MOST_CLASSES = 10_000
SPARE = 40  # classes that a site without limits.classes lets others have: each is a row of the head
MOST_SIDE = 4096  # pixels
MOST_PARAMETERS = 2**28  # 1 GiB as float32
MOST_VIEWS = 64
DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
HOURS = re.compile(
    rf"(?P<first>{'|'.join(DAYS)})(-(?P<last>{'|'.join(DAYS)}))? "
    r"(?P<begin>([01]\d|2[0-3]):[0-5]\d)-(?P<end>([01]\d|2[0-3]):[0-5]\d|24:00)"
)

Names = tuple[str, ...]


class Allow(Section):
    """What a request may ask for, by name; `*` stands for any text.

    norms    the model's normalisation (`model.norm`): batch, whose moments are means over the
             site's images, or group
    plugins  packages whose methods, networks, readers and augmentations may be used, by name and
             version (`fedda.ops.distributions`); none by default
    """

    methods: Names = ANY
    networks: Names = ANY
    norms: Names = ANY
    phases: Names = ANY
    plugins: Names = ()

    @field_validator("plugins")
    @classmethod
    def _are_packages(cls, plugins: Names) -> Names:
        for text in plugins:
            check_entry(text)
        return plugins


class Limits(Section):
    """The largest model, input and hidden layer of a request, and views of each image.

    classes  names of classes, a source's own among them; None: `SPARE` more than it has itself
    """

    image_side: int = Field(default=MOST_SIDE, ge=1, le=MOST_SIDE)
    classes: int | None = Field(default=None, ge=2, le=MOST_CLASSES)
    parameters: int = Field(default=MOST_PARAMETERS, ge=1, le=MOST_PARAMETERS)
    views: int = Field(default=MOST_VIEWS, ge=1, le=MOST_VIEWS)
    hidden: int = Field(default=WIDEST, ge=0, le=WIDEST)


class Leaving(Section):
    """What may leave the site, by its kind (`fedda.wire.packing.Kind`), and the numbers of tests.

    taught  a model that learnt what other models say, or a target's that learnt of atoms or means,
            which the server sent in the open (KD3A without a seal, FACT)
    classes how many tests of each class are answered how, in tens, in a training's last test
    look    what `fedda look` asks for (`clients.site.site_statistics`): not unless it says so
    """

    models: bool = True
    taught: bool = True
    atoms: bool = True
    statistics: bool = True
    gradients: bool = True
    tests: bool = True
    classes: bool = True
    look: bool = False


class Protect(Section):
    """What protects single examples; the stricter of this, the run and the command line holds."""

    min_images: int = Field(default=2, ge=2)
    min_examples: int = Field(default=1, ge=1)
    clip: float | None = Field(default=None, gt=0)
    noise: float = Field(default=0.0, ge=0)
    test_noise: float = Field(default=0.0, ge=0, le=1)


class Budget(Section):
    """How much the site gives in all, over all runs; None: no limit.

    looks    how often it says what its data look like; two answers together can tell an example
    """

    rounds: int | None = Field(default=None, ge=0)
    tests: int | None = Field(default=None, ge=0)
    trainings: int | None = Field(default=None, ge=0)
    megabytes: float | None = Field(default=None, ge=0)
    looks: int = Field(default=1, ge=0)


class Secure(Section):
    """Sums of models or gradients of which the server sees no single one.

    demand   models and gradients leave in such sums only
    least    the smallest group, this site included
    pairs    whether masked gradients may also be summed by two sites, of which each knows the
             other's
    changes  how often the group may change, over all runs
    """

    demand: bool = False
    least: int = Field(default=3, ge=3)
    pairs: bool = False
    changes: int = Field(default=0, ge=0)


class Privacy(Section):
    """Differential privacy of each labelled example; a target's have no labels, and no noise.

    noise    least noise of a step, in units of the clip; 0: a run may go without, unless epsilon
             is set
    epsilon  the most that all runs may spend together; then no run may go without noise. None: no
             limit
    delta    at which epsilon is computed; less than one over the number of examples
    """

    noise: float = Field(default=0.0, ge=0)
    epsilon: float | None = Field(default=None, gt=0)
    delta: float = Field(default=1e-5, gt=0, lt=1)

    @property
    def demanded(self) -> bool:
        """Whether nothing of labelled examples may leave without noise."""
        return self.noise > 0 or self.epsilon is not None


class Times(Section):
    """When the site answers, in its local time; without any entry always."""

    hours: Names = ()

    @field_validator("hours")
    @classmethod
    def _are_hours(cls, hours: Names) -> Names:
        for text in hours:
            if HOURS.fullmatch(text) is None:
                raise ValueError(f"'{text[:40]}' is not like 'mon-fri 20:00-06:00'")
        return hours

    def hold(self, now: dt.datetime) -> bool:
        """Whether the site answers at this time; hours after midnight belong to the day before."""
        return not self.hours or any(_within(text, now) for text in self.hours)


class Keep(Section):
    """What the site keeps on its own disk."""

    notes: bool = True
    megabytes: float | None = Field(default=None, gt=0)


class AuditRules(Section):
    """What attacks on the site's own data may reach in `fedda audit all`; None: any.

    images      share of the images recovered from a step over protect.min-images or more
    membership  share of the members found, at one in a thousand others taken for members
    shares      how much of the class shares is told: 0 what guesses reach, 1 all
    """

    images: float | None = Field(default=None, ge=0, le=1)
    membership: float | None = Field(default=None, ge=0, le=1)
    shares: float | None = Field(default=None, ge=0, le=1)


class Policy(Section):
    """All of a site's policy."""

    allow: Allow = Allow()
    limits: Limits = Limits()
    leaving: Leaving = Leaving()
    protect: Protect = Protect()
    budget: Budget = Budget()
    secure: Secure = Secure()
    privacy: Privacy = Privacy()
    times: Times = Times()
    keep: Keep = Keep()
    audit: AuditRules = AuditRules()

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a policy's file.

        Raises:
            ConfigError: it cannot be read, a key is unknown, or a value is out of range; the error
                names the file.
        """
        try:
            tree = tomllib.loads(unmarked(path.read_bytes()).decode())
            if not tree:
                raise ValueError("it is empty, and would allow nearly all")
        except OSError as error:
            raise ConfigError(
                f"the policy {path} cannot be read ({reason(error)}); give another file, or make "
                f"one with `{typed('fedda', 'policy', 'init', path)}`"
            ) from None
        except ValueError as error:  # no TOML, or no text
            raise ConfigError(
                f"the policy {path} is none in TOML ({error}); correct it, or compare it with a "
                "fresh one of `fedda policy init`"
            ) from None
        odd = _unknown(cls, tree)
        if odd:
            raise ConfigError(
                f"the policy {path} has the key '{odd}', which is unknown, so what it forbids "
                "would not hold; correct it: `fedda policy init` writes all keys"
            )
        try:
            return validate(cls, tree)
        except (ConfigError, ValueError) as error:
            text = str(error).replace("Value error, ", "").replace("a valid tuple", "a list in [ ]")
            raise ConfigError(f"the policy {path} does not hold: {text}") from None

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what `model_dump_json` wrote; an empty text is no policy, which allows all."""
        return cls.model_validate_json(text) if text else cls(allow=Allow(plugins=ANY))


def named(name: str, patterns: Names) -> bool:
    """Whether one of the patterns stands for this name."""
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _unknown(section: type[Section], tree: object, prefix: str = "") -> str:
    """The first key that a section does not have; empty if there is none."""
    if not isinstance(tree, dict):
        return ""
    fields = {f.alias or name: f.annotation for name, f in section.model_fields.items()}
    for key, value in tree.items():
        if key not in fields:
            return f"{prefix}{key}"
        below = fields[key]
        if isinstance(below, type) and issubclass(below, Section):
            odd = _unknown(below, value, f"{prefix}{key}.")
            if odd:
                return odd
    return ""


def _within(text: str, now: dt.datetime) -> bool:
    found = HOURS.fullmatch(text)
    assert found is not None  # checked when the policy was read
    first = DAYS.index(found["first"])
    last = DAYS.index(found["last"] or found["first"])
    days = {(first + i) % 7 for i in range((last - first) % 7 + 1)}
    begin, end, minute = (_minutes(t) for t in (found["begin"], found["end"], f"{now:%H:%M}"))
    if begin < end:
        return now.weekday() in days and begin <= minute < end
    yesterday = (now.weekday() - 1) % 7
    return (now.weekday() in days and minute >= begin) or (yesterday in days and minute < end)


def _minutes(text: str) -> int:
    hours, minutes = text.split(":")
    return 60 * int(hours) + int(minutes)
