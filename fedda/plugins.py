"""What is installed: fedda's own methods, and methods, networks and readers of other packages.

A package adds to fedda by entry points, in its pyproject.toml:

    [project.entry-points."fedda.methods"]
    tent = "fedda_tent"              # a package with three modules:
                                     #   algorithm   METHOD, a fedda.methods.Method named tent
                                     #   strategy    STRATEGY, a fedda.strategies.base.FedDA
                                     #   client      Source, Target: fedda.clients.base.Client
    [project.entry-points."fedda.models"]
    tiny-vit = "fedda_tent.vit:build"    # (ModelConfig, shape of one input) -> encoder, its width

    [project.entry-points."fedda.data"]
    dicom = "fedda_tent.dicom:open_dicom"    # Path -> fedda.data.Reader, or None if not for it

A method without a `strategy` or `client` module is FedAvg there. Its halves import the program's
own as `fedda.strategies` and `fedda.clients`, wherever these lie (`fedda.halves`). What cannot be
loaded, or takes a name that is taken, is left out and named by `fedda methods`. A site runs only
what is installed on its own machine: a server can ask for a name, and never send code.
"""

import pkgutil
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from types import ModuleType
from typing import Any, Literal, get_args

from fedda import algorithms, halves
from fedda.config import NETWORKS, Scalar, Section, flatten, unflatten, validate
from fedda.errors import ConfigError, FeddaError
from fedda.methods import Method, PartName

Group = Literal["methods", "models", "data"]
Half = Literal["strategies", "clients"]

OWN = "fedda"  # where fedda's own methods come from
MODULES: dict[Half, str] = {"strategies": "strategy", "clients": "client"}
KINDS: dict[Group, str] = {"methods": "method", "models": "network", "data": "reader"}

# A method's settings stand beside these in a run's, and --baseline takes `none` for no method.
SECTIONS = frozenset(
    {"run", "input", "model", "train", "wire", "wait", "guard", "exchange", "track"}
)
TAKEN = SECTIONS | {"method", "rounds", "sources-per-round", "options", "none"}
METHOD_NAME = r"[a-z][a-z0-9-]{0,39}"
NETWORK_NAME = r"[\w.:-]{1,100}"  # what `model.name` takes

# Whatever code of others does when it is loaded, fedda goes on without it.
FAILURES = (Exception, SystemExit)


@dataclass(frozen=True)
class Installed:
    """Something that a package adds.

    Attributes:
        name: by which settings choose it.
        origin: the package and its version.
        value: what the entry point names: a method's package, or a function.
        about: what it says of itself, in a line.
    """

    name: str
    origin: str
    value: Any
    about: str = ""


@dataclass(frozen=True)
class Broken:
    """Something that a package meant to add."""

    group: Group
    name: str
    origin: str
    why: str

    def __str__(self) -> str:
        return f"The {KINDS[self.group]} {self.name} of {self.origin} is left out: {self.why}"


def methods() -> list[str]:
    """Names of the methods that are there."""
    return sorted([*own_methods(), *installed("methods")])


@cache
def own_methods() -> tuple[str, ...]:
    """Names of fedda's own methods: one module each in fedda/algorithms."""
    return tuple(sorted(m.name for m in pkgutil.iter_modules(algorithms.__path__)))


def algorithm(name: str) -> ModuleType:
    """The module with a method's formulas and its `METHOD`.

    Raises:
        ConfigError: there is no such method.
    """
    if name in own_methods():
        return import_module(f"fedda.algorithms.{name}")
    if name in installed("methods"):
        return import_module(f"{installed('methods')[name].value.__name__}.algorithm")
    known, why = ", ".join(methods()), why_not("methods", name)
    raise ConfigError(f"There is no method '{name}'; choose one of {known}.{why}")


def method(name: str) -> Method:
    """What a method is.

    Raises:
        ConfigError: there is no such method.
    """
    return algorithm(name).METHOD


def strategy(name: str) -> Any:
    """The class of a method's server half; FedAvg's where the method has none of its own.

    Raises:
        ConfigError: there is no such method, or its package has no such class.
    """
    return _member("strategies", name, "STRATEGY")


def client(name: str, part: PartName) -> Any:
    """The class that plays a part of a method at a site; FedAvg's where it has none of its own.

    Raises:
        ConfigError: there is no such method, or its package has no such class.
    """
    return _member("clients", name, part.capitalize())


def check(name: str) -> None:
    """See that a method has whatever its phases ask for: a strategy, and a function per hop.

    Raises:
        ConfigError: naming what is missing.
    """
    _check_class(strategy(name), "strategies", "FedDA")
    _check_class(client(name, "target"), "clients", "Client")  # every method is tested
    for phase in method(name).phases:
        for hop, parts in phase.hops.items():
            for part in parts:
                found = client(name, part)
                _check_class(found, "clients", "Client")
                if not callable(getattr(found, hop, None)):
                    raise ConfigError(
                        f"{_called(found)} has no function '{hop}', for which the phase "
                        f"'{phase.name}' asks a {part}."
                    )


def origin(name: str) -> str:
    """Where a method comes from: `fedda`, or the package that adds it and its version."""
    return OWN if name in own_methods() else installed("methods")[name].origin


def about(name: str) -> str:
    """The first line of what a method's module says of itself."""
    return _first_line(algorithm(name))


def networks() -> dict[str, Callable[..., Any]]:
    """Encoders that other packages add, by the `model.name` that chooses them."""
    return {name: found.value for name, found in installed("models").items()}


def readers() -> dict[str, Callable[..., Any]]:
    """Readers of `--data` that other packages add, by name."""
    return {name: found.value for name, found in installed("data").items()}


def installed(group: Group) -> dict[str, Installed]:
    """What other packages add, by name."""
    return _found(group)[0]


def broken() -> list[Broken]:
    """What other packages meant to add and is left out."""
    return [each for group in get_args(Group) for each in _found(group)[1]]


def unfinished() -> list[Broken]:
    """Methods of other packages that are known by their settings and cannot run.

    Finding them takes importing both halves of each, so only who lists the methods asks.
    """
    found = []
    for name, added in installed("methods").items():
        try:
            check(name)
        except FAILURES as error:
            found.append(Broken("methods", name, added.origin, _why(error)))
    return found


def why_not(group: Group, name: str) -> str:
    """Why a thing of a name is left out, as a sentence to add to another; empty if none is."""
    return "".join(f" {each}" for each in broken() if (each.group, each.name) == (group, name))


def forget() -> None:
    """Look anew at what is installed, for a process that has just installed something."""
    _found.cache_clear()


# ---- loading ------------------------------------------------------------------------------------


@cache
def _found(group: Group) -> tuple[dict[str, Installed], tuple[Broken, ...]]:
    good: dict[str, Installed] = {}
    bad: list[Broken] = []
    for point in sorted(entry_points(group=f"fedda.{group}"), key=lambda p: (p.name, p.value)):
        package = point.dist
        origin = f"{package.name} {package.version}" if package else "an unknown package"
        try:
            if point.name in good:
                raise ConfigError(f"{good[point.name].origin} has the name, too.")
            _check_name(group, point.name)
            good[point.name] = _load(group, point, origin)
        except FAILURES as error:
            bad.append(Broken(group, point.name, origin, _why(error)))
    return good, tuple(bad)


def _check_name(group: Group, name: str) -> None:
    """Refuse a name that no setting can choose, or that chooses something else."""
    own = {"methods": own_methods(), "models": NETWORKS, "data": ()}[group]
    if name in own:
        raise ConfigError(f"fedda has a {KINDS[group]} of that name itself.")
    if group == "methods" and name in TAKEN:
        raise ConfigError("the name has another meaning in a run's settings.")
    pattern = {"methods": METHOD_NAME, "models": NETWORK_NAME, "data": ".+"}[group]
    if not re.fullmatch(pattern, name):
        raise ConfigError(f"its name does not match {pattern}.")


def _load(group: Group, point: EntryPoint, origin: str) -> Installed:
    value = point.load()
    if group == "methods":
        made = _method_of(value, point)
        _check_settings(made)
    elif not callable(value):
        raise ConfigError(f"{point.value} is no function.")
    return Installed(point.name, origin, value, _first_line(value))


def _method_of(package: Any, point: EntryPoint) -> Method:
    if not isinstance(package, ModuleType) or not hasattr(package, "__path__"):
        raise ConfigError(f"{point.value} is no package with a module 'algorithm'.")
    module = f"{package.__name__}.algorithm"
    if find_spec(module) is None:
        raise ConfigError(f"{package.__name__} has no module 'algorithm'.")
    made = getattr(import_module(module), "METHOD", None)
    if not isinstance(made, Method):
        raise ConfigError(f"{module} has no METHOD, a fedda.methods.Method.")
    if made.name != point.name:
        raise ConfigError(f"the METHOD of {module} is named '{made.name}'.")
    return made


def _check_settings(made: Method) -> None:
    """See that every run can hold a method's settings, whether it trains it or not."""
    if not (isinstance(made.config, type) and issubclass(made.config, Section)):
        raise ConfigError("its config is no class derived from fedda.config.Section.")
    defaults = flatten(validate(made.config, {}, made.name).model_dump(by_alias=True))
    odd = [key for key, value in defaults.items() if not isinstance(value, Scalar)]
    if odd:
        raise ConfigError(f"the default of '{odd[0]}' is no text, number or truth value.")
    for preset in made.presets.values():
        validate(made.config, unflatten(preset), made.name)


def _half(folder: Half, name: str) -> ModuleType:
    if name in own_methods():
        return halves.load_half(folder, name)
    algorithm(name)  # says so if there is no such method
    added = installed("methods")[name]
    module = f"{added.value.__name__}.{MODULES[folder]}"
    if find_spec(module) is None:
        return halves.load(folder, "fedavg")
    try:
        return import_module(module)
    except FAILURES as error:
        raise ConfigError(
            f"{module} of {added.origin} cannot be imported: {_why(error)}"
        ) from error


def _member(folder: Half, name: str, wanted: str) -> Any:
    module = _half(folder, name)
    found = getattr(module, wanted, None)
    if found is None:
        raise ConfigError(
            f"{module.__name__} has no {wanted}, which {name} needs; FedAvg's is in "
            f"fedda.{folder}.fedavg."
        )
    return found


def _check_class(found: Any, folder: Half, base: str) -> None:
    wanted = getattr(halves.load(folder, "base"), base)
    if not (isinstance(found, type) and issubclass(found, wanted)):
        raise ConfigError(f"{_called(found)} is not derived from fedda.{folder}.base.{base}.")


def _called(found: Any) -> str:
    if not isinstance(found, type):
        return repr(found)[:80]
    return f"{found.__module__}.{found.__qualname__}"


def _first_line(thing: Any) -> str:
    return (getattr(thing, "__doc__", None) or "").strip().partition("\n")[0]


def _why(error: BaseException) -> str:
    """What went wrong, in a line."""
    text = " ".join(str(error).split())[:300]
    return text if isinstance(error, FeddaError) else f"{type(error).__name__}: {text}"
