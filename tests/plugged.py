"""What tests of the core need of fedda/contrib, which may be away: then these are left out.

A test is left out that is marked `contrib`, or of which a parameter names one of its parts.
"""

import re
from importlib.util import find_spec

import pytest

HERE = find_spec("fedda.contrib") is not None
# The names in parameters of what plugs in: methods, and endings of files.
PARTS = frozenset({"autodial", "centring", "comda", "decision", "fact", "fdan", "dcm", "h5"})
AWAY = pytest.mark.skip(reason="fedda/contrib is away")


def is_about(item: pytest.Item) -> bool:
    """Whether a test needs fedda/contrib."""
    if item.get_closest_marker("contrib"):
        return True
    given = getattr(item, "callspec", None)
    return given is not None and not PARTS.isdisjoint(re.findall(r"[a-z0-9]+", f"{given.params}"))


def leave_out(items: list[pytest.Item]) -> None:
    """Skip the tests that need fedda/contrib where it is away."""
    for item in items if not HERE else ():
        if is_about(item):
            item.add_marker(AWAY)
