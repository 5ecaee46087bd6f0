"""The page on adding a method names everything that a method may use."""

import re
from pathlib import Path
from typing import Any

import pytest

from clients.base import Client
from clients.shared.exchanging import Summing
from fedda.methods import Method, Phase, Stage
from fedda.wire import Part
from strategies.base import FedDA

PAGE = (Path(__file__).parents[1] / "docs" / "adding-a-method.md").read_text()
PROSE = re.sub(r"```.*?```", "", PAGE, flags=re.S)
NAMED = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", PROSE))))


def public(kind: Any) -> set[str]:
    """Return the names without an underscore that a class itself defines or annotates."""
    names = {*vars(kind), *vars(kind).get("__annotations__", {})}
    names |= set(re.findall(r"^        (\w+): ", kind.__doc__ or "", re.M))  # its Attributes
    return {name for name in names if not name.startswith("_")}


@pytest.mark.parametrize("kind", [FedDA, Client, Summing, Method, Phase, Part, Stage])
def test_every_public_name_is_on_the_page(kind: Any) -> None:
    assert public(kind) <= NAMED, public(kind) - NAMED
    assert len(public(kind)) >= 3
