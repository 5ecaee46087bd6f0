"""Who is there: asking nodes what they offer, doubting those who fell silent, waiting for both."""

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedda import records
from fedda.errors import FeddaError, QuorumError, public
from fedda.settings import RunConfig

from .journal import Journal
from .strategy_modules import mail, roster

ANSWER = 60.0  # seconds for which a question is worth answering
AGAIN = 20.0  # seconds until a node that has not answered is asked again
LOOK = 0.1  # seconds between looks at who is there
OF_SOURCES = {"source", "collaborator"}  # the parts that sources play


class Sites:
    """The nodes that answer, and what each of them offers.

    Flower calls a node online for up to a minute after it died, and a busy one is online too. So a
    node counts as there only while it has answered a question since it last failed to reply.
    """

    def __init__(self, grid: Grid, config: RunConfig, journal: Journal) -> None:
        self.grid = grid
        self.config = config
        self.journal = journal
        self.offers: dict[int, roster.Node] = {}
        self._asked: dict[int, float] = {}
        self._open: dict[str, int] = {}  # question -> node

    def gather(self, class_names: tuple[str, ...] = ()) -> roster.Roster:
        """Wait until enough sites have joined and make a roster of their offers.

        Args:
            class_names: of the model that the run starts from, if it can do without sources.

        Raises:
            RosterError: the offers make no run, or none is of the target that the run names.
            QuorumError: too few came in `wait.sites` seconds.
        """
        wait, expect, aim = self.config.wait, self.config.run.expect, self.config.run.target
        least = 0 if class_names else wait.min_sources
        deadline, steady, last = time.monotonic() + wait.sites, 0.0, None
        while True:
            self.look()
            roles = [n.role for n in self.offers.values()]
            sources, targets = roles.count("source"), roles.count("target")
            there = sources >= least and targets >= 1 and len(roles) >= expect
            awaited = bool(aim) and aim not in [n.name for n in self.offers.values()]
            enough = there and (not awaited or 0 < expect <= len(roles))
            now = time.monotonic()
            if (sources, targets) != last:
                last, steady = (sources, targets), now
                self.journal.write("waiting", sources=sources, targets=targets, enough=enough)
            complete = enough and 0 < expect == len(roles)
            late = now > deadline
            if complete or (enough and now - steady >= wait.settle) or (late and there):
                found = roster.form(self.offers.values(), self.config.input, class_names)
                found.aims(aim)  # says so if the one that the run names is no target
                return found
            if late:
                offers = "".join(f"\n  {n}" for n in self.offers.values())
                needed = (
                    f"{expect} sites" if expect > least + 1 else f"{least} sources and a target"
                )
                raise QuorumError(
                    f"After {wait.sites:g} s {sources} sources and {targets} targets have joined, "
                    f"but the run needs {needed}; start more clients or raise wait.sites."
                    f"{offers or ''}"
                )
            time.sleep(LOOK)

    def reunite(self, known: roster.Roster, left: Mapping[str, Collection[str]]) -> roster.Roster:
        """Wait for the sites of a roster; when the time is up, go on with those that are needed.

        Args:
            known: as the run began.
            left: the parts that are still to be played, by the target that is adapted; whoever has
                none of them may be away.

        Raises:
            QuorumError: the needed ones are not there.
            RosterError: one came back with another offer.
        """
        parts = {part for of_target in left.values() for part in of_target}
        sources = known.sources if OF_SOURCES & parts else ()
        targets = [node for node in known.targets if node.name in left]
        among = replace(known, nodes=(*sources, *targets))
        try:
            everyone = {node.name for node in among.nodes}
            found = self.back(among, everyone, len(sources), strict=True)
        except QuorumError:
            needed = {name for name, of_target in left.items() if "target" in of_target}
            found = self.back(among, needed, self.config.wait.min_sources if sources else 0)
        return known.taking(found)

    def refresh(self, known: roster.Roster, strict: bool = False) -> roster.Roster:
        """The roster under the node ids of now; gives doubted sites a moment to answer.

        A site that came back with another offer is no reason to end everybody's run: it is named
        and stays away, unless `strict`.

        Raises:
            RosterError: a site came back with another offer, and `strict`.
        """
        deadline = time.monotonic() + self.config.wait.settle
        while True:
            self.look()
            for node in [] if strict else known.changed(self.offers.values()):
                text = f"came back with another offer and is left out: {node}"
                self.journal.trouble("refused", node.name, text)
                del self.offers[node.id]
            known = known.updated(self.offers.values())
            pending = {self._open[q] for q in self._open} & {n.id for n in known.nodes}
            if not pending or time.monotonic() > deadline:
                return known
            time.sleep(LOOK)

    def back(
        self, known: roster.Roster, needed: Iterable[str], sources: int, strict: bool = False
    ) -> roster.Roster:
        """Wait until the named sites and so many sources of a roster are there again.

        Raises:
            QuorumError: they were not within `wait.sites` seconds.
            RosterError: one came back with another offer, and `strict`.
        """
        needed = set(needed)
        deadline = time.monotonic() + self.config.wait.sites
        while True:
            known = self.refresh(known, strict)
            there = {n.name for n in known.nodes if n.id in self.offers}
            count = sum(n.name in there for n in known.sources)
            missing = sorted(needed - there)
            if not missing and count >= sources:
                return known
            if time.monotonic() > deadline:
                who = f"{', '.join(missing)} did" if missing else f"only {count} sources did"
                raise QuorumError(
                    f"The run waited {self.config.wait.sites:g} s, but {who} not come back; "
                    "start the clients again and resume the run."
                )
            time.sleep(LOOK)

    def there(self) -> set[int]:
        """The ids of the nodes that count as there."""
        return set(self.offers)

    def doubt(self, node_id: int) -> None:
        """A node failed to reply: it counts as away until it answers again."""
        self.offers.pop(node_id, None)
        self._asked.pop(node_id, None)

    def look(self) -> None:
        """Ask nodes that are new or doubted, take answers that have come; does not wait."""
        online, now = set(self.grid.get_node_ids()), time.monotonic()
        self.offers = {i: n for i, n in self.offers.items() if i in online}
        self._asked = {i: t for i, t in self._asked.items() if i in online and now - t < AGAIN}
        for node_id in sorted(online - set(self.offers) - set(self._asked)):
            self._asked[node_id] = now
            question = Message(RecordDict(), node_id, "query", ttl=ANSWER, group_id="roster")
            for message_id in self.grid.push_messages([question]):
                if message_id:
                    self._open[message_id] = node_id
        for message_id in list(self._open):
            for reply in self.grid.pull_messages([message_id]):
                self._answered(self._open.pop(message_id), reply)
        self._open = {q: i for q, i in self._open.items() if i in self._asked}

    def _answered(self, node_id: int, reply: Message) -> None:
        if mail.given_up(reply):
            return
        try:
            if reply.has_error():
                raise FeddaError(public(reply.error.code))
            node = roster.Node.read(node_id, records.read(reply.content)[1].get("offer", {}))
        except FeddaError as error:
            self.journal.trouble("no offer", self._registered(node_id), str(error))
            return
        self.offers[node_id] = node
        self.journal.write("joined", site=node.name, role=node.role, text=str(node))

    def _registered(self, node_id: int) -> str:
        """What the operator called a node when its key was admitted, or else its number."""
        names = {node.node_id: node.name for node in self.grid.get_nodes()}
        return names.get(node_id) or f"node {node_id}"
