"""Keep track of the sites that are connected: ask what they offer, and wait for missing ones."""

import time
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedda import models, records
from fedda.errors import FeddaError, QuorumError, RosterError, public
from fedda.results.read import counted
from fedda.settings import RunConfig

from .journal import Journal, Reminder
from .strategy_modules import mail, roster
from .superlink import registered

ANSWER = 60.0  # seconds after which a question expires unanswered
AGAIN = 20.0  # seconds after which a node that has not answered is asked again
PAUSE = 1.0  # seconds until a node is asked again that gave up two questions in a row; it doubles
LOOK = 0.1  # seconds between two looks at the connected nodes
LATE = "it joined after the run had begun, so it takes no part; the next run counts it in"
OF_SOURCES = {"source", "collaborator"}  # the parts that sources play


class Sites:
    """The nodes that answer, and what each of them offers.

    Flower lists a node as online for up to a minute after it died, and while it is busy. So a node
    counts as present only if it has answered a question since it last failed to reply.
    """

    def __init__(self, grid: Grid, config: RunConfig, journal: Journal) -> None:
        self.grid = grid
        self.config = config
        self.journal = journal
        self.offers: dict[int, roster.Node] = {}
        self._again: dict[int, float] = {}  # when a node may be asked again
        self._failed: dict[int, int] = {}  # how many questions in a row a node's program gave up
        self._open: dict[str, int] = {}  # question -> node
        self._wrong: set[str] = set()  # offers that were refused, in words
        self._began: set[str] = set()  # names of the sites that were there when the run began

    def gather(self, class_names: tuple[str, ...] = ()) -> roster.Roster:
        """Wait until enough sites have joined and make a roster of their offers.

        Args:
            class_names: the class names of the model that the run starts from, if the run needs no
                sources.

        Raises:
            RosterError: the offers do not fit together, or a source or target that the run names is
                not among them.
            QuorumError: too few sites joined within `wait.sites` seconds.
        """
        wait, expect, aim = self.config.wait, self.config.run.expect, self.config.run.target
        chosen = self.config.sources
        least = 0 if class_names else wait.min_sources
        deadline, steady, last = time.monotonic() + wait.sites, 0.0, None
        while True:
            self.look()
            roles = [n.role for n in self.offers.values()]
            sources, targets = roles.count("source"), roles.count("target")
            quorum = sources >= least and targets >= 1 and len(roles) >= expect
            named = {aim, *chosen} - {""}
            awaited = named - {n.name for n in self.offers.values()}
            hopeless = 0 < expect <= len(roles) and not awaited <= registered.names()
            enough = quorum and (not awaited or hopeless)
            now = time.monotonic()
            if (sources, targets) != last:
                last, steady = (sources, targets), now
                self.journal.write("waiting", sources=sources, targets=targets, enough=enough)
            # Nobody else can join if every registered site has.
            everyone = registered.everyone() == self.offers.keys()
            complete = enough and (everyone or 0 < expect == len(roles))
            late = now > deadline
            if complete or (enough and now - steady >= wait.settle) or (late and quorum):
                wanted = models.inputs(self.config.input, self.config.model)
                joined = roster.form(self.offers.values(), wanted, class_names, chosen)
                joined.aims(aim)  # raises if the site that the run names is not a target
                self._began = {node.name for node in self.offers.values()}
                return joined
            if late:
                offers = "".join(f"\n  {n}" for n in (*self.offers.values(), *sorted(self._wrong)))
                needed = f"{expect} sites"
                if expect <= least + 1:
                    needed = f"{counted(least, 'source')} and a target"
                raise QuorumError(
                    f"After {wait.sites:g} s {counted(sources, 'source')} and "
                    f"{counted(targets, 'target')} have joined, "
                    f"but the run needs {needed}; start more clients or raise wait.sites."
                    f"{getattr(self.grid, 'advice', str)()}"
                    f"{offers}"
                )
            time.sleep(LOOK)

    def reunite(self, known: roster.Roster, left: Mapping[str, Collection[str]]) -> roster.Roster:
        """Wait for the sites of a resumed run; when time is up, go on if the needed ones are back.

        Args:
            known: the roster with which the run began.
            left: for each target, the parts that its remaining rounds need. A site that plays none
                of these parts may stay away.

        Raises:
            QuorumError: a needed site did not come back.
            RosterError: a site came back with another offer.
        """
        parts = {part for of_target in left.values() for part in of_target}
        self._began = {node.name for node in known.nodes}
        sources = known.sources if OF_SOURCES & parts else ()
        targets = [node for node in known.targets if node.name in left]
        among = replace(known, nodes=(*sources, *targets))
        try:
            everyone = {node.name for node in among.nodes}
            present = self.back(among, everyone, len(sources), strict=True)
        except QuorumError:
            needed = {name for name, of_target in left.items() if "target" in of_target}
            present = self.back(among, needed, self.config.wait.min_sources if sources else 0)
        return known.taking(present)

    def refresh(self, known: roster.Roster, strict: bool = False) -> roster.Roster:
        """Return the roster with current node ids; wait up to `wait.settle` s for pending answers.

        A site that came back with another offer is left out and named in the journal, so that the
        run can go on for the others. With `strict` it is an error.

        Raises:
            RosterError: `strict` is set and a site came back with another offer.
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
        """Wait until the needed sites and a number of a roster's sources have come back.

        Args:
            known: the roster.
            needed: names of sites that must be back.
            sources: how many sources must be back.
            strict: raise if a site came back with another offer, instead of leaving it out.

        Raises:
            QuorumError: they did not come back within `wait.sites` seconds.
            RosterError: `strict` is set and a site came back with another offer.
        """
        needed = set(needed)
        deadline, reminder = time.monotonic() + self.config.wait.sites, Reminder()
        while True:
            known = self.refresh(known, strict)
            present = {n.name for n in known.nodes if n.id in self.offers}
            count = sum(n.name in present for n in known.sources)
            missing = sorted(needed - present)
            if not missing and count >= sources:
                return known
            if time.monotonic() > deadline:
                text = (
                    f"{', '.join(missing)} did not come back"
                    if missing
                    else f"only {counted(count, 'source')} came back, of {sources} that it needs"
                )
                raise QuorumError(
                    f"The run waited {self.config.wait.sites:g} s, but {text}; "
                    "start the clients again and resume the run."
                )
            if seconds := reminder.due():
                away = [n.name for n in known.sources if n.name not in present]
                self.journal.write("waiting-for", sites=missing or away, seconds=seconds)
            time.sleep(LOOK)

    def there(self) -> set[int]:
        """The ids of the nodes that count as present."""
        return set(self.offers)

    def doubt(self, node_id: int) -> None:
        """Count a node that failed to reply as absent until it answers a question again."""
        self.offers.pop(node_id, None)
        self._again.pop(node_id, None)

    def look(self) -> None:
        """Ask every node without a current offer and read the answers that arrived; do not wait."""
        online = set(self.grid.get_node_ids())
        now = time.monotonic()
        self.offers = {i: n for i, n in self.offers.items() if i in online}
        self._again = {i: t for i, t in self._again.items() if i in online}
        self._failed = {i: n for i, n in self._failed.items() if i in online}
        self._open = {q: i for q, i in self._open.items() if i in self._again}
        absent = online - set(self.offers)
        self._ask(i for i in absent if now >= self._again.get(i, 0.0))
        for reply in self.grid.pull_messages(list(self._open)) if self._open else ():
            about = reply.metadata
            node_id = self._open.pop(about.reply_to_message_id, None)
            if node_id is None:
                continue  # nobody asked
            if mail.given_up(reply) or mail.restarted(reply):
                if node_id not in self._open.values():
                    self._gave_up(node_id)
            elif about.src_node_id == node_id:
                self._answered(node_id, reply)

    def _ask(self, node_ids: Iterable[int]) -> None:
        for node_id in sorted(node_ids):
            self._again[node_id] = time.monotonic() + AGAIN
            question = Message(RecordDict(), node_id, "query", ttl=ANSWER, group_id="roster")
            for message_id in self.grid.push_messages([question]):
                if message_id:
                    self._open[message_id] = node_id

    def _gave_up(self, node_id: int) -> None:
        """Ask a node again whose program was restarted: at once, but not if it happens again."""
        times = self._failed[node_id] = self._failed.get(node_id, 0) + 1
        pause = 0.0 if times == 1 else min(AGAIN, PAUSE * 2.0 ** (times - 2))
        self._again[node_id] = time.monotonic() + pause

    def _answered(self, node_id: int, reply: Message) -> None:
        try:
            if reply.has_error():
                raise FeddaError(public(reply.error.code))
            node = roster.Node.read(node_id, records.read(reply.content)[1].get("offer", {}))
        except FeddaError as error:
            self._refused(self._registered(node_id), str(error), "no offer")
            return
        if wrong := registered.objection(node_id, node.name, node.role):
            self._refused(self._registered(node_id), wrong)
            return
        known, self.offers[node_id] = self.offers.get(node_id), node
        self._failed.pop(node_id, None)
        taken = node.role == "target" or node.name in (self.config.sources or [node.name])
        if self._began and taken and node.name not in self._began and not self.config.open:
            self._refused(node.name, LATE)
        elif node != known:  # one that was stopped answers several questions at once
            self.journal.write("joined", site=node.name, role=node.role, text=str(node))

    def _refused(self, name: str, why: str, what: str = "refused") -> None:
        """Note once that a site takes no part, though it is asked again."""
        if (text := f"{name}: {why}") not in self._wrong:
            self._wrong.add(text)
            self.journal.trouble(what, name, why)

    def _registered(self, node_id: int) -> str:
        """The name under which the operator registered the node's key, else the node's number."""
        names = {node.node_id: node.name for node in self.grid.get_nodes()}
        return names.get(node_id) or f"node {node_id}"


class Newcomers:
    """Waits, in an open run, for targets that the run has not adapted to yet."""

    def __init__(self, sites: Sites, config: RunConfig, journal: Journal) -> None:
        self._sites = sites
        self._shape = models.inputs(config.input, config.model)
        self._journal = journal
        self._turned_away: set[str] = set()  # they are not tried again before they have left

    def wait(self, members: roster.Roster) -> tuple[roster.Roster, list[str]]:
        """Wait, without end, for targets that are not in the roster -> it with them, their names.

        Sources that join are not waited for: a source takes part from the run's beginning.
        """
        self._journal.write("open", targets=[node.name for node in members.targets])
        while True:
            self._sites.look()
            known = {node.name for node in members.nodes}
            there = list(self._sites.offers.values())
            self._turned_away &= {node.name for node in there}
            joined = []
            for node in there:
                if node.role != "target" or node.name in known | self._turned_away:
                    continue
                try:
                    members = members.joined(node, self._shape)
                except RosterError as error:
                    self.turn_away(node.name, str(error))
                else:
                    joined.append(node.name)
            if joined:
                return members, joined
            time.sleep(LOOK)

    def turn_away(self, target: str, why: str) -> None:
        """Leave a target out until it has disconnected and joined again."""
        self._turned_away.add(target)
        text = f"{why} The run goes on without it; it is tried again when it joins again."
        self._journal.trouble("left out", target, text)
