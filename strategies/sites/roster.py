"""Who takes part: every site's offer, and whether the offers make a run."""

import json
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

from fedda import __version__
from fedda.config import InputConfig, is_site_name
from fedda.errors import RosterError
from fedda.wire import Role

OFFER = {"role", "name", "examples", "tested", "classes", "shape", "version"}


@dataclass(frozen=True)
class Node:
    """One site's offer, with the id Flower gave it."""

    id: int
    role: Role
    name: str
    examples: int
    tested: int
    classes: tuple[str, ...]
    shape: tuple[int, ...]
    version: str

    @classmethod
    def read(cls, node_id: int, offer: Mapping[str, Any]) -> "Node":
        """From the reply to a query.

        Raises:
            RosterError: the reply is not an offer.
        """
        if set(offer) != OFFER or offer["role"] not in ("source", "target"):
            raise RosterError(
                f"Node {node_id} answered the roster's question with {sorted(offer)}, not with an "
                f"offer of {sorted(OFFER)}; is its fedda of version {__version__}?"
            )
        try:
            node = cls(
                node_id,
                cast(Role, offer["role"]),
                str(offer["name"]),
                int(offer["examples"]),
                int(offer["tested"]),
                tuple(map(str, offer["classes"])),
                tuple(int(n) for n in offer["shape"]),
                str(offer["version"]),
            )
            plain = node.version.isprintable() and len(node.version) <= 64
            if not plain or len(node.shape) not in (1, 3) or min(node.shape) < 0:
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            raise RosterError(f"Node {node_id} sent an offer that cannot be read.") from None
        if not is_site_name(node.name):
            raise RosterError(  # names are parts of array names, and of keys in checkpoints
                f"Node {node_id} calls itself {node.name[:64]!r}; a site's --name has 1 to 64 "
                "printable characters and no slash."
            )
        if not all(c.isprintable() for c in node.classes):
            raise RosterError(f"{node.name} has a class whose name is not one line of plain text.")
        if node.examples < 1 or node.tested < 0:
            raise RosterError(
                f"{node.name} offers {node.examples} examples and {node.tested} labelled tests; "
                "at least one example is needed."
            )
        return node

    def same_offer(self, other: "Node") -> bool:
        """Whether two offers differ in the node id at most."""
        return self == Node(self.id, *(v for k, v in vars(other).items() if k != "id"))

    def __str__(self) -> str:
        classes = f", {len(self.classes)} classes" if self.classes else ""
        shape = "mixed sizes" if 0 in self.shape else "x".join(map(str, self.shape))
        return (
            f"{self.name}: {self.role}, {self.examples} examples of {shape}{classes}, "
            f"{self.tested} labelled tests, fedda {self.version}"
        )


@dataclass(frozen=True)
class Roster:
    """The sites of a run or of one training, sources by name and then targets.

    `counts` are the examples by which sites weigh in averages. They are fixed here, once; no later
    message can change them.
    """

    nodes: tuple[Node, ...]
    shape: tuple[int, ...]
    counts: Mapping[str, int]
    class_names: tuple[str, ...] = ()  # of the model that a run without sources starts from
    several: bool = False  # whether the run has other targets beside

    @property
    def sources(self) -> tuple[Node, ...]:
        return tuple(n for n in self.nodes if n.role == "source")

    @property
    def targets(self) -> tuple[Node, ...]:
        return tuple(n for n in self.nodes if n.role == "target")

    @property
    def target(self) -> Node:
        """The one that adapts."""
        return self.targets[0]

    @property
    def classes(self) -> tuple[str, ...]:
        return self.sources[0].classes if self.sources else self.class_names

    def facing(self, target: Node) -> "Roster":
        """Those who take part in a training that adapts one of the targets."""
        several = len(self.targets) > 1
        return replace(self, nodes=(*self.sources, target), several=several)

    def aims(self, name: str = "") -> "tuple[Roster, ...]":
        """A roster per target that a run adapts to: the one of a name, or each in turn.

        Raises:
            RosterError: there is no target of that name.
        """
        chosen = [node for node in self.targets if name in ("", node.name)]
        if not chosen:
            known = ", ".join(node.name for node in self.targets)
            raise RosterError(f"No target is called '{name}'; set run.target to one of {known}.")
        return tuple(self.facing(node) for node in chosen)

    def taking(self, other: "Roster") -> "Roster":
        """The roster with the node ids of another one, whose sites may have come back since."""
        ids = {node.name: node for node in other.nodes}
        return replace(self, nodes=tuple(ids.get(node.name, node) for node in self.nodes))

    def by_id(self, node_id: int) -> Node | None:
        """The node with this id, if it takes part."""
        return next((n for n in self.nodes if n.id == node_id), None)

    def updated(self, joined: Iterable[Node]) -> "Roster":
        """The roster with sites that came back under another node id.

        Raises:
            RosterError: a site came back with another offer than it was counted with.
        """
        known = {n.name: n for n in self.nodes}
        for node in self._returned(joined):
            if not known[node.name].same_offer(node):
                was = known[node.name]
                raise RosterError(f"A site came back with another offer: {was}; now {node}.")
            known[node.name] = node
        return replace(self, nodes=tuple(known[n.name] for n in self.nodes))

    def changed(self, joined: Iterable[Node]) -> list[Node]:
        """The sites that came back with another offer than they were counted with."""
        known = {n.name: n for n in self.nodes}
        return [n for n in self._returned(joined) if not known[n.name].same_offer(n)]

    def _returned(self, joined: Iterable[Node]) -> list[Node]:
        """Those who are in the roster by name, and do not take the name of one still there."""
        joined = list(joined)
        there = {(n.id, n.name) for n in joined}
        known = {n.name: n for n in self.nodes}
        found = [n for n in joined if n.name in known]
        return [
            n for n in found if known[n.name].id == n.id or (known[n.name].id, n.name) not in there
        ]

    def text(self) -> str:
        """JSON, for a run's folder."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def parse(cls, text: str) -> "Roster":
        """Read what `text` wrote.

        Raises:
            RosterError: it is something else.
        """
        try:
            found = json.loads(text)
            nodes = tuple(Node.read(n.pop("id"), n) for n in found["nodes"])
            names = tuple(found.get("class_names", ()))
            return cls(nodes, tuple(found["shape"]), found["counts"], names)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RosterError(f"The roster of the run cannot be read ({error}).") from None

    def bounded(self, most: float) -> "Roster":
        """The roster in which no site counts more than `most` times the sources' median.

        Of two sources the smaller is the median, so that the larger cannot raise its own bound.
        Nobody can verify what a site claims, but the harm of a false claim can be limited.
        """
        if not most or not self.sources:
            return self
        median = statistics.median_low(n.examples for n in self.sources)
        bound = max(1, int(most * median))
        return replace(self, counts={n: min(c, bound) for n, c in self.counts.items()})


def form(
    offers: Iterable[Node],
    unified: InputConfig | None = None,
    class_names: tuple[str, ...] = (),
) -> Roster:
    """Make a roster of offers.

    Args:
        offers: one per node.
        unified: the shape that images are brought to, if the run sets one.
        class_names: of the model that the run starts from, if it can do without sources.

    Raises:
        RosterError: listing every offer, and what keeps them from making a run.
    """
    unified = unified or InputConfig()
    nodes = sorted(offers, key=lambda n: (n.role, n.name))
    sources = [n for n in nodes if n.role == "source"]
    targets = [n for n in nodes if n.role == "target"]
    names = [n.name for n in nodes]
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        _refuse(nodes, f"'{twice[0]}' is the name of two sites; give each its own with --name")
    if not sources and not class_names:
        _refuse(nodes, "there is no source; start fedda-client --role source where labels are")
    if not targets:
        _refuse(nodes, "there is no target; start fedda-client --role target where labels are not")
    if len({n.version for n in nodes}) > 1:
        _refuse(nodes, "the sites run different versions of fedda; install the same everywhere")
    if len({n.classes for n in sources}) > 1:
        _refuse(nodes, f"the sources' classes differ: {_odd_classes(sources)}")
    counts = {n.name: n.examples for n in nodes}
    shape = _common_shape(nodes, unified)
    return Roster(tuple(sources + targets), shape, counts, () if sources else class_names)


def _odd_classes(sources: list[Node]) -> str:
    """Which classes only some of the sources have."""
    everywhere = set.intersection(*(set(n.classes) for n in sources))
    odd = {n.name: [c for c in n.classes if c not in everywhere] for n in sources}
    told = [f"{name} has {', '.join(c[:5])}" for name, c in odd.items() if c]
    if not told:
        return "they are the same in another order"
    return f"{' and '.join(told)}, which the others have not; all need the same class names"


def _common_shape(nodes: list[Node], unified: InputConfig) -> tuple[int, ...]:
    shapes = {n.shape for n in nodes}
    images = all(len(s) != 1 for s in shapes)
    if not images and len(shapes) > 1:
        _refuse(nodes, "the sites' data have different shapes; vectors must be equally long")
    if not images:
        return next(iter(shapes))
    channels = {unified.channels} if unified.channels else {s[0] for s in shapes}
    sizes = {(unified.size,) * 2} if unified.size else {s[1:] for s in shapes}
    if len(channels) != 1:
        _refuse(nodes, "some images are grayscale and some RGB; set input.channels to 1 or 3")
    if len(sizes) != 1 or sizes == {(0, 0)}:  # (0, 0): they differ within one site already
        _refuse(nodes, "the images have different sizes; set input.size")
    height, width = next(iter(sizes))
    if height != width:
        _refuse(nodes, f"the images are {height}x{width}, not square; set input.size")
    return (channels.pop(), height, width)


def _refuse(nodes: list[Node], why: str) -> None:
    offers = "".join(f"\n  {n}" for n in nodes) or "\n  (no site has joined)"
    raise RosterError(f"These sites make no run: {why}.{offers}")
