"""What crosses the wire in each method, as a table read from the contracts that the code checks."""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from fedda import plugins
from fedda.methods import Phase
from fedda.secure import hiding
from fedda.wire import LOOK, LOOK_TABLE, Part, Rule
from fedda.wire.packing import Kind


class Crossing(NamedTuple):
    """What may enter and leave a site in one kind of request and its reply."""

    part: str  # the site's part: source, collaborator or target
    when: str  # the phase, and the hop if its name differs; `test` for the test of a round
    enters: str  # arrays and numbers that the site accepts
    leaves: str  # arrays, numbers and sums of gradients that it may send


def of_method(method: str) -> list[Crossing]:
    """List what a method's contracts allow; optional arrays are in brackets."""
    about = plugins.method(method)
    phases, crossings = about.phases, []
    for phase in phases:
        for hop, parts in phase.hops.items():
            when = _when(hop, phase, phases)
            crossings += [_crossing(name, when, part) for name, part in parts.items()]
    others: list[tuple[str, Phase]] = []
    if hiding.can_mask(about):
        others += [("secure=sum", phase) for phase in hiding.masked(about).phases]
    if hiding.can_seal(about):
        others += [(f"{method}.relay=sealed", phase) for phase in hiding.sealed(about).phases]
    for setting, phase in others:
        for hop, parts in phase.hops.items():
            when = _when(hop, phase, phases)
            rows = [_crossing(name, when, part) for name, part in parts.items()]
            new = [row for row in rows if row not in crossings]
            crossings += [row._replace(when=f"{when}, if `{setting}`") for row in new]
    tests: list[tuple[str, Part]] = []  # each different test, with its first phase
    for phase in phases:
        if all(phase.test != test for _, test in tests):
            tests.append((phase.name, phase.test))
    for name, test in tests:
        when = "test" if len(tests) == 1 else f"{name}: test"
        crossings.append(_crossing("target", when, test))
    return crossings


def _when(hop: str, phase: Phase, phases: Sequence[Phase]) -> str:
    """The hop, after its phase if that has another name and is not the only one."""
    return hop if hop == phase.name or len(phases) == 1 else f"{phase.name}: {hop}"


def _crossing(name: str, when: str, part: Part) -> Crossing:
    leaves = [_text(part.leaves)]
    leaves += [f"sums of gradients: {_listed(sorted(part.gradients))}"] if part.gradients else []
    return Crossing(name, when, _text(part.enters), "; ".join(leaves))


def table() -> str:
    """Return all methods as a Markdown table; methods with the same row share it."""
    lines: dict[Crossing, list[str]] = {}
    for method in plugins.methods():
        for crossing in of_method(method):
            lines.setdefault(crossing, []).append(method)
    rows = ["| method | part | when | enters | leaves |", "| --- | --- | --- | --- | --- |"]
    rows += [
        f"| {', '.join(names)} | {' | '.join(crossing)} |"
        for crossing, names in _parts_together(lines)
    ]
    leaves = f"{_text(LOOK.leaves)}; {_listed(sorted(LOOK_TABLE))}"
    looked = (
        f"| | source, target | before any run: `fedda look` | {_text(LOOK.enters)} | {leaves} |"
    )
    return "\n".join([*rows, looked])


def _parts_together(
    lines: Mapping[Crossing, list[str]],
) -> Iterator[tuple[Crossing, list[str]]]:
    """Merge the rows of parts that are equal and belong to the same methods."""
    for crossing, names in lines.items():
        others = [crossing._replace(part=p) for p in ("source", "collaborator", "target")]
        alike = [other for other in others if lines.get(other) == names]
        if crossing == alike[0]:
            yield crossing._replace(part=", ".join(other.part for other in alike)), names


def _text(rule: Rule) -> str:
    arrays = [_named(name, kind) for name, kind in rule.arrays.items()]
    arrays += [f"[{_named(name, kind)}]" for name, kind in rule.optional.items()]
    parts = [", ".join(arrays), _listed(sorted(rule.numbers)), _listed(sorted(rule.counts))]
    return "; ".join(part for part in parts if part) or "nothing"


def _named(name: str, kind: Kind) -> str:
    return f"`{name}`" if name == kind else f"`{name}` ({kind})"


def _listed(names: list[str]) -> str:
    return f"`{', '.join(names)}`" if names else ""
