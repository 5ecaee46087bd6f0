"""Find fedda's own methods, and the methods, networks and other parts that other packages add.

A package adds them as entry points in its pyproject.toml:

    [project.entry-points."fedda.methods"]
    tent = "fedda_tent"              # a package with three modules:
                                     #   algorithm   METHOD, a fedda.methods.Method named tent
                                     #   strategy    STRATEGY, a fedda.strategies.base.FedDA
                                     #   client      Source, Target: fedda.clients.base.Client
    [project.entry-points."fedda.models"]
    tiny-vit = "fedda_tent.vit:build"    # (ModelConfig, shape of one input) -> encoder, its width

    [project.entry-points."fedda.data"]
    dicom = "fedda_tent.dicom:open_dicom"    # Path -> fedda.data.Reader, or None if not for it

    [project.entry-points."fedda.images"]
    raw = "fedda_tent.raw:opened"    # file of an image -> fedda.data.pixels.ImageFile, or None

    [project.entry-points."fedda.arrays"]
    mat = "fedda_tent.mat:Mat"    # Path of a file with this ending -> fedda.data.npz.Npz

    [project.entry-points."fedda.augment"]
    noisy = "fedda_tent.noise:noisy"    # (images, torch.Generator) -> images, for train.augment

    [project.entry-points."fedda.commands"]
    tent = "fedda_tent.cli:tent"    # a function or an app of typer: `fedda tent`; fedda's own win

    [project.entry-points."fedda.listeners"]
    mail = "fedda_tent.mail:mail"    # (results.json as a dict, folder) -> None, after `fedda run`

    [project.entry-points."fedda.pages"]
    live = "fedda_tent.page:page"    # (Snapshot, run, version) -> HTML, which a server shows

A method without a `strategy` or `client` module uses FedAvg's. Both modules import fedda's own as
`fedda.strategies` and `fedda.clients`, wherever these are installed (`fedda.halves`). An addition
that cannot be loaded, or whose name is in use, is left out, and `fedda methods` says why. A site
runs only code that is installed on its own machine: a server can send a name, but never code. With
a policy it runs only the packages that the policy names (`restrict`), and imports no others. What
fedda's own pyproject.toml adds, from `fedda/contrib`, is fedda's own.
"""

import pkgutil
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args

from fedda import algorithms, halves
from fedda.config import AUGMENTATIONS, NETWORKS
from fedda.errors import ConfigError, FeddaError, PolicyError, RunError
from fedda.methods import SECTIONS, Method, PartName, check_added
from fedda.ops.distributions import ANY, OWN, check_allowed, origin_of

Group = Literal[
    "methods", "models", "data", "images", "arrays", "augment", "commands", "listeners", "pages"
]
Half = Literal["strategies", "clients"]

MODULES: dict[Half, str] = {"strategies": "strategy", "clients": "client"}
KINDS: dict[Group, str] = {
    "methods": "method",
    "models": "network",
    "data": "reader",
    "images": "reader of images",
    "arrays": "reader of arrays",
    "augment": "augmentation",
    "commands": "command",
    "listeners": "listener",
    "pages": "page",
}

# Names that no method may have: a run's other settings, and `none`, a value of --baseline.
TAKEN = SECTIONS | {"method", "rounds", "sources-per-round", "secure", "hidden", "options", "none"}
METHOD_NAME = r"[a-z][a-z0-9-]{0,39}"
NETWORK_NAME = r"[\w.:-]{1,100}"  # what `model.name` and `train.augment` take

# Errors that other packages may raise; fedda then goes on without them.
FAILURES = (Exception, SystemExit)


@dataclass(frozen=True)
class Installed:
    """Something that a package adds.

    Attributes:
        name: the name by which settings choose it.
        origin: the package and its version.
        value: the object that the entry point names: a method's package, or a function.
        about: the first line of that object's docstring.
    """

    name: str
    origin: str
    value: Any
    about: str = ""


@dataclass(frozen=True)
class Broken:
    """Something that a package tries to add but that cannot be used."""

    group: Group
    name: str
    origin: str
    why: str
    barred: bool = False  # by the site's policy

    def __str__(self) -> str:
        return f"The {KINDS[self.group]} {self.name} of {self.origin} is left out: {self.why}"


_allowed: tuple[str, ...] = ANY
_LENT: dict[Group, dict[str, Installed]] = {group: {} for group in get_args(Group)}


def methods() -> list[str]:
    """Names of all methods: fedda's own and the installed ones."""
    return sorted([*core_methods(), *installed("methods")])


def own_methods() -> list[str]:
    """Names of fedda's own methods: those of the core and those in fedda/contrib."""
    return [name for name in methods() if origin(name) == OWN]


@cache
def core_methods() -> tuple[str, ...]:
    """Names of the methods of the core: one module each in fedda/algorithms."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(algorithms.__path__)))


def algorithm(name: str) -> ModuleType:
    """Import the module with a method's formulas and its `METHOD`.

    Raises:
        ConfigError: there is no such method.
        PolicyError: the site's policy does not allow the package that adds it.
    """
    if name in core_methods():
        return import_module(f"fedda.algorithms.{name}")
    if name in installed("methods"):
        return import_module(f"{installed('methods')[name].value.__name__}.algorithm")
    check_barred("methods", name)
    known, why = ", ".join(methods()), why_not("methods", name)
    meant = f"did you mean {name.lower()}? Or " if name.lower() in methods() else ""
    raise ConfigError(f"There is no method '{name}'; {meant}choose one of {known}.{why}")


def method(name: str) -> Method:
    """Return the `METHOD` of a method.

    Raises:
        ConfigError: there is no such method.
    """
    return algorithm(name).METHOD


def strategy(name: str) -> Any:
    """Return the class of a method's server half, or FedAvg's if the method has none of its own.

    Raises:
        ConfigError: there is no such method, or its package has no such class.
    """
    return _member("strategies", name, "STRATEGY")


def client(name: str, part: PartName) -> Any:
    """Return the class of a part at a site, or FedAvg's if the method has none of its own.

    Raises:
        ConfigError: there is no such method, or its package has no such class.
    """
    return _member("clients", name, part.capitalize())


def check(name: str) -> None:
    """Check that a method has all that its phases need: a strategy, and a function for each hop.

    Raises:
        ConfigError: a class or function is missing; the error names it.
    """
    halves.check(method(name).phases, strategy(name), partial(client, name))


def origin(name: str) -> str:
    """Where a method comes from: `fedda`, or the package that adds it and its version."""
    return OWN if name in core_methods() else installed("methods")[name].origin


def full_key(method: str, key: str) -> str:
    """A key of a method's preset as a run has it: `train.lr` is a run's own, `gate.low` is not."""
    return key if key.partition(".")[0] in SECTIONS else f"{method}.{key}"


def about(name: str) -> str:
    """The first line of the docstring of a method's module."""
    return _first_line(algorithm(name))


def installed(group: Group) -> dict[str, Installed]:
    """Everything of a group that other packages add, by name, and what `lending` adds."""
    return _scan(group)[0] | _LENT[group]


@contextmanager
def lending(group: Group, name: str, value: Any) -> Iterator[None]:
    """Add something for a `with` block, in this process alone.

    Raises:
        ConfigError: the name is in use, or cannot be a name.
    """
    _check_name(group, name)
    if name in installed(group):
        raise ConfigError(f"There is a {KINDS[group]} '{name}' already; give it another name.")
    _LENT[group][name] = Installed(name, "this program", value, _first_line(value))
    try:
        yield
    finally:
        del _LENT[group][name]


@contextmanager
def blaming(method: str) -> Iterator[None]:
    """Let an error in another package's method name the package, and the line of its code.

    Raises:
        RunError: instead of that error.
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, FeddaError) or origin(method) == OWN:
            raise
        raise RunError(f"{method} of {origin(method)} {failed(error)}") from error


def failed(error: BaseException) -> str:
    """How something failed, in words: with the line of an added method's code, if it has one."""
    what = f"with {type(error).__name__}: {error}"
    frames = traceback.extract_tb(error.__traceback__)
    if isinstance(error, FeddaError) or not frames:
        return f"failed {what}"
    added = [each.value for each in installed("methods").values() if each.origin != OWN]
    folders = [folder for package in added for folder in getattr(package, "__path__", ())]
    own = [f for f in frames if any(Path(f.filename).is_relative_to(d) for d in folders)]
    at = (own or frames)[-1]
    return f"failed at {at.filename}:{at.lineno} (in {at.name}) {what}"


def restrict(allowed: tuple[str, ...]) -> None:
    """Use only these packages in this process from now on, and import no others.

    Args:
        allowed: entries as `fedda.ops.distributions` describes them.
    """
    global _allowed
    if allowed != _allowed:
        _allowed = allowed
        forget()


def barred() -> list[Broken]:
    """Everything that is left out because the site's policy does not allow its package."""
    return [each for each in broken() if each.barred]


def check_barred(group: Group, name: str) -> None:
    """Refuse a name that only a package has which the site's policy does not allow.

    Raises:
        PolicyError: with the reason.
    """
    for each in barred():
        if (each.group, each.name) == (group, name) and name not in installed(group):
            raise PolicyError(str(each))


def broken() -> list[Broken]:
    """Everything that other packages try to add and that is left out."""
    return [each for group in get_args(Group) for each in _scan(group)[1]]


def unfinished() -> list[Broken]:
    """Methods of other packages whose settings can be loaded but which cannot run.

    To find them, both halves of each method are imported. So this is called only to list methods.
    """
    incomplete = []
    for name, added in installed("methods").items():
        if added.origin == OWN:
            continue
        try:
            check(name)
        except FAILURES as error:
            incomplete.append(Broken("methods", name, added.origin, _why(error)))
    return incomplete


def why_not(group: Group, name: str) -> str:
    """A sentence that says why the thing with this name is left out; empty if none is."""
    return "".join(f" {each}" for each in broken() if (each.group, each.name) == (group, name))


def forget() -> None:
    """Look again at what is installed, for a process that has just installed something."""
    _scan.cache_clear()
    _half.cache_clear()


@cache
def _scan(group: Group) -> tuple[dict[str, Installed], tuple[Broken, ...]]:
    good: dict[str, Installed] = {}
    bad: list[Broken] = []
    points = [(origin_of(point), point) for point in entry_points(group=f"fedda.{group}")]
    for origin, point in sorted(points, key=lambda p: (p[0] != OWN, p[1].name, p[1].value)):
        try:
            if point.name in good:
                raise ConfigError(f"{good[point.name].origin} already has this name.")
            _check_name(group, point.name)
            if origin != OWN:
                check_allowed(point, _allowed)
            good[point.name] = _load(group, point, origin)
        except FAILURES as error:
            stopped = isinstance(error, PolicyError)
            bad.append(Broken(group, point.name, origin, _why(error), stopped))
    return good, tuple(bad)


def _check_name(group: Group, name: str) -> None:
    """Refuse a name that settings cannot hold, or that already means something else."""
    own = {"methods": core_methods(), "models": NETWORKS, "augment": AUGMENTATIONS}
    if name in own.get(group, ()):
        raise ConfigError(f"fedda itself has a {KINDS[group]} of that name.")
    if group == "methods" and name in TAKEN:
        raise ConfigError("the name has another meaning in a run's settings.")
    pattern = {"methods": METHOD_NAME, "data": ".+"}.get(group, NETWORK_NAME)
    if not re.fullmatch(pattern, name):
        raise ConfigError(f"its name does not match {pattern}.")


def _load(group: Group, point: EntryPoint, origin: str) -> Installed:
    value = point.load()
    if group == "methods":
        check_added(value, point)
    elif not callable(value):
        raise ConfigError(f"{point.value} is not a function.")
    return Installed(point.name, origin, value, _first_line(value))


@cache
def _half(folder: Half, name: str) -> ModuleType:
    if name in core_methods():
        return halves.load_half(folder, name)
    algorithm(name)  # raises if there is no such method
    added = installed("methods")[name]
    module = f"{added.value.__name__}.{MODULES[folder]}"
    if find_spec(module) is None:
        return halves.load(folder, halves.REFERENCE)
    try:
        return import_module(module)
    except FAILURES as error:
        raise ConfigError(
            f"{module} of {added.origin} cannot be imported: {_why(error)}"
        ) from error


def _member(folder: Half, name: str, wanted: str) -> Any:
    module = _half(folder, name)
    member = getattr(module, wanted, None)
    if member is None:
        raise ConfigError(
            f"{module.__name__} has no {wanted}, which {name} needs; FedAvg's is in "
            f"fedda.{folder}.{halves.REFERENCE}."
        )
    return member


def _first_line(thing: Any) -> str:
    return (getattr(thing, "__doc__", None) or "").strip().partition("\n")[0]


def _why(error: BaseException) -> str:
    """Describe an error in one line."""
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, FeddaError) else f"{type(error).__name__}: {text}"
