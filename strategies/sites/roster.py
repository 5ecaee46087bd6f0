"""The sites of a run: read their offers, and check that the offers fit together."""

import json
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, NoReturn, cast

from fedda import __version__
from fedda.config import InputConfig, is_site_name
from fedda.config.inputs import INDICATOR, categories_of
from fedda.data.categories import coded
from fedda.data.naming import LETTERS, can_be_brief, is_one_line, united, unlike
from fedda.errors import DataError, RosterError
from fedda.wire import Role

MADE_UP = 1000  # the most classes that one source alone may name beside others
OFFER = {"role", "name", "examples", "tested", "classes", "shape", "columns", "version", "keys"}


@dataclass(frozen=True)
class Node:
    """One site's offer, with the node id that Flower gave the site."""

    id: int
    role: Role
    name: str
    examples: int
    tested: int
    classes: tuple[str, ...]
    shape: tuple[int, ...]
    version: str
    keys: bool = False  # whether it has its own key and the others', to hide its models
    columns: tuple[str, ...] = ()  # of vectors, if the site's file names them

    @classmethod
    def read(cls, node_id: int, offer: Mapping[str, Any]) -> "Node":
        """Read an offer from a site's reply to a query.

        Raises:
            RosterError: the reply is not a valid offer.
        """
        if set(offer) != OFFER or offer["role"] not in ("source", "target"):
            raise RosterError(
                f"Node {node_id} sent an offer with the fields {sorted(offer)}; needed are "
                f"{sorted(OFFER)}, with a role of source or target. Check that it runs fedda "
                f"{__version__}, as this server does."
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
                offer["keys"] is True,
                tuple(map(str, offer["columns"])),
            )
            plain = node.version.isprintable() and len(node.version) <= 64
            if not plain or len(node.shape) not in (1, 3) or min(node.shape) < 0:
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            raise RosterError(f"Node {node_id} sent an offer that cannot be read.") from None
        if not is_site_name(node.name):
            raise RosterError(  # names are parts of array names, and of keys in checkpoints
                f"Node {node_id} has the name {node.name[:64]!r}; a site's --name needs 1 to 64 "
                "printable characters and no slash."
            )
        if not all(map(is_one_line, node.classes)):
            raise RosterError(
                f"{node.name} has a class whose name is not one line of plain text of up to "
                f"{LETTERS} characters."
            )
        if not can_be_brief(node.columns, node.shape[0] if len(node.shape) == 1 else 0):
            raise RosterError(
                f"{node.name} names {len(node.columns)} columns of its data in another way than "
                f"fedda {__version__} does; install the same everywhere."
            )
        if node.examples < 1 or node.tested < 0:
            raise RosterError(
                f"{node.name} offers {node.examples} examples and {node.tested} labelled tests; "
                "at least one example is needed."
            )
        return node

    def same_offer(self, other: "Node") -> bool:
        """Whether two offers are the same, apart from the node id, and names that this one lacks.

        A run's folder of before columns had names has none.
        """
        return self == replace(other, id=self.id, columns=self.columns and other.columns)

    def __str__(self) -> str:
        classes = f", {len(self.classes)} classes" if self.classes else ""
        shape = "mixed sizes" if 0 in self.shape else "x".join(map(str, self.shape))
        return (
            f"{self.name}: {self.role}, {self.examples} examples of {shape}{classes}, "
            f"{self.tested} labelled tests, fedda {self.version}"
        )


@dataclass(frozen=True)
class Roster:
    """The sites of a run or of one training: sources first, then targets, each sorted by name.

    Targets that join an open run are the last. In a training its target is the first; in a chain
    those that adapted before it follow, in order.

    `counts` are the sites' numbers of examples, the weights in averages. They are fixed when the
    roster is made; no later message can change them.
    """

    nodes: tuple[Node, ...]
    shape: tuple[int, ...]
    counts: Mapping[str, int]
    class_names: tuple[str, ...] = ()  # of all sources, or of the model that the run starts from
    several: bool = False  # whether the run has further targets
    columns: tuple[str, ...] = ()  # of vectors, if sites name them

    @property
    def sources(self) -> tuple[Node, ...]:
        return tuple(n for n in self.nodes if n.role == "source")

    @property
    def targets(self) -> tuple[Node, ...]:
        return tuple(n for n in self.nodes if n.role == "target")

    @property
    def keyed(self) -> bool:
        """Whether every site can hide its models from the server."""
        return all(node.keys for node in self.nodes)

    @property
    def target(self) -> Node:
        """The target that the training adapts to; if there are several, the first."""
        return self.targets[0]

    @property
    def classes(self) -> tuple[str, ...]:
        return self.class_names or self.sources[0].classes

    def alone(self) -> dict[str, list[str]]:
        """The classes that one source alone names beside others, by source.

        Every site's model has them, whether they are a slip or a claim that nobody can check.
        """
        if len(self.sources) < 2:
            return {}
        named = Counter(name for node in self.sources for name in node.classes)
        own = {node.name: [c for c in node.classes if named[c] == 1] for node in self.sources}
        return {name: classes for name, classes in own.items() if classes}

    def lacking(self) -> dict[str, list[str]]:
        """The classes that two or more other sources name and a source does not, by source."""
        named = Counter(name for node in self.sources for name in node.classes)
        own = {
            n.name: [c for c in named if named[c] > 1 and c not in n.classes] for n in self.sources
        }
        return {name: classes for name, classes in own.items() if classes}

    def facing(self, target: Node, earlier: Sequence[Node] = ()) -> "Roster":
        """Return the roster of one training: all sources, this target, and those adapted before."""
        several = len(self.targets) > 1
        return replace(self, nodes=(*self.sources, target, *earlier), several=several)

    def aims(self, name: str = "") -> "tuple[Roster, ...]":
        """Return a roster for the target of this name, or for every target if the name is empty.

        Raises:
            RosterError: there is no target of that name.
        """
        chosen = [node for node in self.targets if name in ("", node.name)]
        if not chosen:
            known = ", ".join(node.name for node in self.targets)
            raise RosterError(f"No target is called '{name}'; set run.target to one of {known}.")
        return tuple(self.facing(node) for node in chosen)

    def joined(self, target: Node, unified: InputConfig) -> "Roster":
        """Return the roster with one more target, the last.

        Args:
            target: its offer.
            unified: the shape to which images are converted, if the run sets one.

        Raises:
            RosterError: its offer does not fit to the others.
        """
        together = form((*self.nodes, target), unified, self.class_names)
        if together.shape != self.shape:
            mine, theirs = ("x".join(map(str, shape)) for shape in (together.shape, self.shape))
            _refuse([target], f"its examples are {mine}, those of the run {theirs}")
        counts = {**self.counts, target.name: target.examples}
        return replace(self, nodes=(*self.nodes, target), counts=counts)

    def without(self, name: str) -> "Roster":
        """Return the roster without a site."""
        counts = {n: c for n, c in self.counts.items() if n != name}
        nodes = tuple(node for node in self.nodes if node.name != name)
        return replace(self, nodes=nodes, counts=counts)

    def taking(self, other: "Roster") -> "Roster":
        """Return this roster with another one's nodes, whose ids may be newer."""
        newer = {node.name: node for node in other.nodes}
        return replace(self, nodes=tuple(newer.get(node.name, node) for node in self.nodes))

    def by_id(self, node_id: int) -> Node | None:
        """Return the node with this id, or None if it takes no part."""
        return next((n for n in self.nodes if n.id == node_id), None)

    def updated(self, joined: Iterable[Node]) -> "Roster":
        """Return the roster with the new node ids of sites that came back.

        Raises:
            RosterError: a site came back with another offer than before.
        """
        known = {n.name: n for n in self.nodes}
        for node in self._returned(joined):
            if not known[node.name].same_offer(node):
                was = known[node.name]
                raise RosterError(
                    f"A site came back with another offer: {was}; now {node}. Let it start with "
                    "the former data and version, or begin a new run."
                )
            known[node.name] = node
        return replace(self, nodes=tuple(known[n.name] for n in self.nodes))

    def changed(self, joined: Iterable[Node]) -> list[Node]:
        """Return the sites that came back with another offer than before."""
        known = {n.name: n for n in self.nodes}
        return [n for n in self._returned(joined) if not known[n.name].same_offer(n)]

    def _returned(self, joined: Iterable[Node]) -> list[Node]:
        """Return the joined nodes that are sites of this roster.

        A node that uses the name of a site that is still connected itself is left out.
        """
        joined = list(joined)
        connected = {(n.id, n.name) for n in joined}
        known = {n.name: n for n in self.nodes}
        named = [n for n in joined if n.name in known]
        return [
            n
            for n in named
            if known[n.name].id == n.id or (known[n.name].id, n.name) not in connected
        ]

    def text(self) -> str:
        """Write the roster as JSON, for a run's folder."""
        return json.dumps(asdict(self), indent=1)

    @classmethod
    def parse(cls, text: str) -> "Roster":
        """Read a roster from the JSON that `text` wrote.

        Raises:
            RosterError: the text is not such JSON.
        """
        try:
            table = json.loads(text)
            nodes = tuple(Node.read(n.pop("id"), {"columns": (), **n}) for n in table["nodes"])
            names, columns = (tuple(table.get(k, ())) for k in ("class_names", "columns"))
            return cls(nodes, tuple(table["shape"]), table["counts"], names, columns=columns)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise RosterError(f"The roster of the run cannot be read ({error}).") from None

    def bounded(self, most: float) -> "Roster":
        """Return the roster with no count above `most` times the other sources' median.

        Of two others the larger count is the median: one that claims few must not make another
        count less. Nobody can verify the count that a site claims, but no site can raise its own
        bound, which limits the harm of a false claim.
        """
        bounds = _bounds(self.nodes, most)
        return replace(self, counts={n: min(c, bounds.get(n, c)) for n, c in self.counts.items()})

    def counted(self, nodes: Sequence[Node], most: float) -> dict[str, int]:
        """The examples of some sites, none above `most` times the median of the sources among them.

        A source is not among its own. Without a source among them they count as in averages.
        """
        if not most or all(n.role == "target" for n in nodes):
            return {n.name: self.counts[n.name] for n in nodes}
        bounds = _bounds(nodes, most)
        return {n.name: min(n.examples, bounds.get(n.name, n.examples)) for n in nodes}


def _bounds(nodes: Sequence[Node], most: float) -> dict[str, int]:
    """The most that each site counts, by name; of one beside no other source nothing."""
    bounds = {}
    for node in nodes if most else ():
        others = [n.examples for n in nodes if n.role == "source" and n is not node]
        if others:
            bounds[node.name] = max(1, int(most * statistics.median_high(others)))
    return bounds


def form(
    offers: Iterable[Node],
    unified: InputConfig | None = None,
    class_names: tuple[str, ...] = (),
    chosen: Sequence[str] = (),
) -> Roster:
    """Make a roster from offers.

    Args:
        offers: one per node.
        unified: the shape to which images are converted, if the run sets one.
        class_names: the classes of the model that the run starts from, if it needs no sources.
        chosen: names of the sources that take part; if there are none, all do.

    Raises:
        RosterError: no run is possible with these offers; the message lists them and says why.
    """
    unified = unified or InputConfig()
    nodes = sorted(offers, key=lambda n: (n.role, n.name))
    joined = {n.name for n in nodes if n.role == "source"}
    if missing := [name for name in chosen if name not in joined]:
        _refuse(nodes, f"run.sources names '{missing[0]}', but no such source has joined")
    nodes = [n for n in nodes if n.role == "target" or not chosen or n.name in chosen]
    sources = [n for n in nodes if n.role == "source"]
    targets = [n for n in nodes if n.role == "target"]
    names = [n.name for n in nodes]
    twice = sorted({n for n in names if names.count(n) > 1})
    if twice:
        _refuse(
            nodes,
            f"'{twice[0]}' is the name of two sites; give each its own with "
            "--name, or a key with a name of its own (fedda keys add NAME)",
        )
    if not sources and not class_names:
        _refuse(nodes, "there is no source; add a site with labels (fedda-client --role source)")
    if not targets:
        _refuse(nodes, "there is no target; add one without labels (fedda-client --role target)")
    if len({n.version for n in nodes}) > 1:
        _refuse(nodes, "the sites run different versions of fedda; install the same everywhere")
    try:
        classes = united({n.name: n.classes for n in sources}) if sources else class_names
    except DataError as error:
        _refuse(nodes, str(error))
    counts = {n.name: n.examples for n in nodes}
    shape, columns = _common_shape(nodes, unified), _columns(nodes)
    if declared := categories_of(unified.categories):
        try:
            columns = coded(columns if all(n.columns for n in nodes) else (), declared)
        except DataError as error:
            _refuse(nodes, str(error))
        shape = (len(columns) * (2 if unified.missing == INDICATOR else 1),)
    made = Roster(tuple(sources + targets), shape, counts, classes, columns=columns)
    for name, own in made.alone().items():
        if len(own) > MADE_UP:
            _refuse(
                nodes,
                f"{name} alone names {len(own)} classes, which would make every site's model "
                f"larger, and {MADE_UP} at most are taken from one; leave it out with run.sources, "
                "or ask its operator what they are",
            )
    return made


def _common_shape(nodes: list[Node], unified: InputConfig) -> tuple[int, ...]:
    shapes = {n.shape for n in nodes}
    images = all(len(s) != 1 for s in shapes)
    if not images and len(shapes) > 1:
        _refuse(nodes, "the sites' data have different shapes; vectors must be equally long")
    if not images:
        columns = 2 if unified.missing == INDICATOR else 1
        return tuple(columns * d for d in next(iter(shapes)))
    channels = {unified.channels} if unified.channels else {s[0] for s in shapes}
    sizes = {(unified.size,) * 2} if unified.size else {s[1:] for s in shapes}
    if len(channels) != 1:
        _refuse(nodes, "some images are grayscale and some RGB; set input.channels to 1 or 3")
    if len(sizes) != 1 or sizes == {(0, 0)}:  # (0, 0): they differ even within one site
        _refuse(nodes, "the images have different sizes; set input.size")
    height, width = next(iter(sizes))
    if height != width:
        _refuse(nodes, f"the images are {height}x{width}, not square; set input.size")
    return (channels.pop(), height, width)


def _columns(nodes: list[Node]) -> tuple[str, ...]:
    """The names of the columns of vectors, the same at all sites that name them; else none."""
    named = [node for node in nodes if node.columns]
    for node in named:
        if other := unlike(node.columns, named[0].columns):
            _refuse(
                nodes,
                f"beside {named[0].name}, {node.name} has {other}; columns need the same names "
                "and order at all sites: rename them in the files, or name those to take, in "
                "their order, with --columns values=age+weight",
            )
    return named[0].columns if named else ()


def _refuse(nodes: list[Node], why: str) -> NoReturn:
    offers = "".join(f"\n  {n}" for n in nodes) or "\n  (no site has joined)"
    raise RosterError(f"No run is possible with these sites: {why}.{offers}")
