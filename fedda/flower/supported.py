"""The versions of Flower that fedda works with; `pyproject.toml` names the same range."""

from functools import cache
from importlib import metadata

RANGE = ">=1.41,<1.43"
FIRST, UNTRIED = (1, 41), (1, 43)  # the range's ends, as numbers


@cache
def installed() -> str:
    """The installed Flower, such as "flwr 1.42.0", or "no flwr"."""
    try:
        return f"flwr {metadata.version('flwr')}"
    except metadata.PackageNotFoundError:
        return "no flwr"


def refusal() -> str:
    """Say in a sentence why fedda does not work with the installed Flower; "" if it does."""
    found = installed()
    numbers = found.removeprefix("flwr ").split(".")[:2]
    if FIRST <= tuple(int(each) for each in numbers if each.isdigit()) < UNTRIED:
        return ""
    return f"{found} is installed, and fedda needs flwr {RANGE}: type pip install 'flwr{RANGE}'"
