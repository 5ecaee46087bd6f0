"""Finding clients/, strategies/ and server/, which lie beside this package or inside it.

In a checkout and in a Flower App Bundle the folders are siblings of fedda/ and import under their
own names; in the wheel they are fedda.clients, fedda.strategies and fedda.server, so that pip adds
a single name to site-packages. For other packages the names of the wheel hold everywhere, and give
the very modules that the program itself uses: `from fedda.strategies.base import FedDA`.
"""

import importlib
import importlib.util
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, get_args

from fedda.errors import ConfigError

if TYPE_CHECKING:
    from fedda.methods import PartName, Phase

HERE = Path(__file__).resolve().parent
IN_WHEEL = (HERE / "clients").is_dir()
ROOT = HERE if IN_WHEEL else HERE.parent

Folder = Literal["clients", "strategies", "server"]

REFERENCE = "fedavg"  # lends its halves to methods without their own; what others are compared with


def load(folder: Folder, module: str) -> ModuleType:
    """Import one module of a folder, whatever the packaging calls it.

    Raises:
        ModuleNotFoundError: the folder has no such module.
    """
    return importlib.import_module(f"{_package(folder)}.{module}")


def load_half(folder: Folder, method: str) -> ModuleType:
    """Import a method's half, or FedAvg's where the method needs none of its own."""
    own = ROOT / folder / f"{method}.py"
    return load(folder, method if own.is_file() else REFERENCE)


def check(phases: "Sequence[Phase]", strategy: Any, client: "Callable[[PartName], Any]") -> None:
    """Check that a method's halves have all that its phases need.

    Args:
        phases: of the method.
        strategy: the class of its server half.
        client: the class of each part at a site.

    Raises:
        ConfigError: a class is of another kind, or lacks the function of a hop; the error names it.
    """
    _check_class(strategy, "strategies", "FedDA")
    _check_class(client("target"), "clients", "Client")  # every method is tested
    for phase in phases:
        for hop, parts in phase.hops.items():
            for part in parts:
                kind = client(part)
                _check_class(kind, "clients", "Client")
                if not callable(getattr(kind, hop, None)):
                    raise ConfigError(
                        f"{_called(kind)} has no function '{hop}', for which the phase "
                        f"'{phase.name}' asks a {part}."
                    )


def _check_class(kind: Any, folder: Folder, base: str) -> None:
    wanted = getattr(load(folder, "base"), base)
    if not (isinstance(kind, type) and issubclass(kind, wanted)):
        raise ConfigError(f"{_called(kind)} is not derived from fedda.{folder}.base.{base}.")


def _called(kind: Any) -> str:
    if not isinstance(kind, type):
        return repr(kind)[:80]
    return f"{kind.__module__}.{kind.__qualname__}"


def name_as_in_wheel() -> None:
    """Let the names of the wheel hold where the folders lie beside this package.

    Asked before all others: an editable install's finder, and the plain one once it knows a
    folder, would find the same files anew and make second modules of them.
    """
    if not IN_WHEEL and not any(isinstance(each, Beside) for each in sys.meta_path):
        sys.meta_path.insert(0, Beside())


class Beside:
    """Finds `fedda.clients.base` as the module `clients.base`, and so on; imports nothing twice."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """What `import` asks; a spec for a module of the folders, None for any other."""
        own = _own_name(fullname)
        if not own or importlib.util.find_spec(own) is None:
            return None
        # A loader by what it can do; importing the class that says so would take 30 ms.
        return ModuleSpec(fullname, self)  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> None:
        """Import the module itself; `import` makes an empty one, which is thrown away."""
        importlib.import_module(_own_name(spec.name))

    def exec_module(self, module: ModuleType) -> None:
        """Put the module in the place of the empty one: `import` goes on with what lies there."""
        sys.modules[module.__name__] = sys.modules[_own_name(module.__name__)]


def _own_name(name: str) -> str:
    """The name without `fedda.` of a module of the folders; "" of any other."""
    top, _, rest = name.partition(".")
    folder = rest.partition(".")[0]
    for known in get_args(Folder) if top == __package__ else ():
        if folder == known:
            _package(known)
            return rest
    return ""


def _package(folder: Folder) -> str:
    if IN_WHEEL:
        return f"fedda.{folder}"
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    return folder
