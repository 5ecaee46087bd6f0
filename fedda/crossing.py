"""What crosses the wire in each method, as a table read from the contracts that the code checks."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, get_args

from fedda.config import method_module, methods
from fedda.wire import EVALUATION, Contract, Kind, Role, Rule

ROLES: tuple[Role, ...] = get_args(Role)


class Crossing(NamedTuple):
    """One kind of request, and its reply.

    Attributes:
        role: of the site.
        when: training, test, or for a method with an encoder of its own first: training, encoder.
        enters: arrays and numbers that the site accepts.
        leaves: arrays, numbers and sums of gradients that it may send.
    """

    role: str
    when: str
    enters: str
    leaves: str


def of_method(method: str) -> list[Crossing]:
    """All that a method's contracts list; brackets stand around what is not always there."""
    module: Any = method_module(method)
    contracts: dict[str, Contract] = {"training": module.CONTRACT}
    if hasattr(module, "ENCODER"):
        contracts = {"training, encoder": module.ENCODER} | contracts
    contracts["test"] = getattr(module, "EVALUATION", EVALUATION)
    found = []
    for when, contract in contracts.items():
        for role in ROLES:
            if role in contract.enters:
                gradients = sorted(contract.gradients.get(role, ()))
                leaves = [_text(contract.leaves.get(role, Rule()))]
                leaves += [f"sums of gradients: {_listed(gradients)}"] if gradients else []
                found.append(Crossing(role, when, _text(contract.enters[role]), "; ".join(leaves)))
    return found


def table() -> str:
    """Markdown of all methods; those with the same line share it."""
    lines: dict[Crossing, list[str]] = {}
    for method in methods():
        for crossing in of_method(method):
            lines.setdefault(crossing, []).append(method)
    rows = ["| method | role | when | enters | leaves |", "| --- | --- | --- | --- | --- |"]
    rows += [
        f"| {', '.join(names)} | {' | '.join(crossing)} |"
        for crossing, names in _roles_together(lines)
    ]
    return "\n".join(rows)


def _roles_together(
    lines: Mapping[Crossing, list[str]],
) -> Iterator[tuple[Crossing, list[str]]]:
    """A line for both roles where theirs are the same, of the same methods."""
    for crossing, names in lines.items():
        other = crossing._replace(role="source" if crossing.role == "target" else "target")
        if lines.get(other) != names:
            yield crossing, names
        elif crossing.role == "source":
            yield crossing._replace(role="both"), names


def _text(rule: Rule) -> str:
    arrays = [_named(name, kind) for name, kind in rule.arrays.items()]
    arrays += [f"[{_named(name, kind)}]" for name, kind in rule.optional.items()]
    parts = [", ".join(arrays), _listed(sorted(rule.numbers))]
    return "; ".join(part for part in parts if part) or "nothing"


def _named(name: str, kind: Kind) -> str:
    return f"`{name}`" if name == kind else f"`{name}` ({kind})"


def _listed(names: list[str]) -> str:
    return f"`{', '.join(names)}`" if names else ""
