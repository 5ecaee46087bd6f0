"""Waiting for sites, asking them what they offer, and noticing when they come back."""

import time
from collections.abc import Iterable

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from fedda import records
from fedda.config import RunConfig
from fedda.errors import FeddaError, QuorumError

from .folders import mail, roster
from .journal import Journal

ANSWER = 15.0  # seconds a site has to say what it offers
AGAIN = 20.0  # seconds until a node that gave no offer is asked again
LOOK = 0.2  # seconds between looks at who is connected


class Sites:
    """The nodes Flower sees, and what each of them offers."""

    def __init__(self, grid: Grid, config: RunConfig, journal: Journal) -> None:
        self.grid = grid
        self.config = config
        self.journal = journal
        self.offers: dict[int, roster.Node] = {}
        self._asked: dict[int, float] = {}

    def gather(self) -> roster.Roster:
        """Wait until enough sites have joined and make a roster of their offers.

        Raises:
            RosterError: the offers make no run, or too few came in `wait.sites` seconds.
        """
        wait, expect = self.config.wait, self.config.run.expect
        deadline, steady, last = time.monotonic() + wait.sites, 0.0, None
        while True:
            self.look()
            roles = [n.role for n in self.offers.values()]
            sources, targets = roles.count("source"), roles.count("target")
            enough = sources >= wait.min_sources and targets >= 1 and len(roles) >= expect
            now = time.monotonic()
            if (sources, targets) != last:
                last, steady = (sources, targets), now
                self.journal.write("waiting", sources=sources, targets=targets, enough=enough)
            settled = enough and (len(roles) == expect or now - steady >= wait.settle)
            if settled or now > deadline:
                if not enough and sources and targets:
                    offers = "".join(f"\n  {n}" for n in self.offers.values())
                    needed = max(expect, wait.min_sources + 1)
                    raise QuorumError(
                        f"{len(roles)} sites joined in {wait.sites:g} s, but the run needs "
                        f"{needed}; start more clients or raise wait.sites.{offers}"
                    )
                return roster.form(self.offers.values(), self.config.input)
            time.sleep(LOOK)

    def back(self, known: roster.Roster, needed: Iterable[str], sources: int) -> roster.Roster:
        """Wait until the named sites and so many sources of a roster are connected again.

        Raises:
            QuorumError: they were not within `wait.sites` seconds.
            RosterError: one came back with another offer.
        """
        needed = set(needed)
        deadline = time.monotonic() + self.config.wait.sites
        while True:
            self.look()
            known = known.updated(self.offers.values())
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

    def look(self) -> None:
        """Ask every node that has newly connected what it offers; forget who left."""
        online, now = set(self.grid.get_node_ids()), time.monotonic()
        self.offers = {i: n for i, n in self.offers.items() if i in online}
        self._asked = {i: t for i, t in self._asked.items() if i in online and now - t < AGAIN}
        new = online - set(self.offers) - set(self._asked)
        if not new:
            return
        self._asked |= dict.fromkeys(new, now)
        questions = [
            Message(RecordDict(), node, "query", ttl=ANSWER, group_id="roster")
            for node in sorted(new)
        ]
        for reply in mail.Mail(self.grid).deliver(questions, ANSWER):
            node_id = reply.metadata.src_node_id
            try:
                if reply.has_error():
                    raise FeddaError(reply.error.reason or "no reason given")
                offer = records.read(reply.content)[1].get("offer", {})
                node = roster.Node.read(node_id, offer)
            except FeddaError as error:
                self.journal.trouble("no offer", f"node {node_id}", str(error))
                continue
            self.offers[node_id] = node
            self.journal.write("joined", site=node.name, role=node.role, text=str(node))
