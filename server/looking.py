"""`fedda look`: ask sites what their data look like, outside any training, and compare it.

It is a run without a training, with a journal, a record of what crossed, and bytes by kind. No site
needs to fit to the others, so none is asked what it offers a run.
"""

import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from fedda import records
from fedda.errors import FeddaError, QuorumError, WireError, public
from fedda.look.account import Account
from fedda.look.advice import compared
from fedda.ops.lock import alone
from fedda.results.read import LOOKED
from fedda.settings import RunConfig

from . import checkpoint
from .journal import Journal, by_reason
from .ledger import Ledger
from .run import claim
from .strategy_modules import mail
from .superlink import registered

PAUSE = 0.1  # seconds between two looks at the connected nodes
MOST_BYTES = 2**26  # of one reply
ROUND = 1  # of the ledger and the record


def execute(
    config: RunConfig, grid: Grid, journal: Journal, names: Mapping[int, str] | None = None
) -> dict[str, Any]:
    """Look, and write down what was seen -> the content of look.json.

    Args:
        config: the run; of it only its folder, its waits and `run.expect` count.
        grid: the way to the sites.
        journal: receives every event.
        names: of the nodes; by default those of their registered keys.

    Raises:
        QuorumError: fewer than two sites joined, or told something.
        RunError: the run's folder holds a run already, or cannot be written.
    """
    folder = Path(config.run.dir) / config.run.name
    with alone(folder):
        claim(folder, config)
        nodes = _joined(grid, config, journal)
        if names is None:
            names = {node.node_id: node.name for node in grid.get_nodes()}
        called = {node: names.get(node) or f"node {node}" for node in nodes}
        accounts: dict[str, Account] = {}

        def take(reply: Message) -> None:
            site = _read(reply, accounts)
            accounts[site.name] = site
            journal.write("joined", site=site.name, role=site.role, text=f"{site.name} told")

        refused, ledger = _asked(config, grid, journal, called, take)
        told = [accounts[name] for name in sorted(accounts)]
        if len(told) < 2:
            raise QuorumError(
                f"{len(told)} of {len(nodes)} sites told what their data look like, and 2 are "
                "needed to compare; a site does if its policy has leaving.look = true."
                f"{by_reason(refused)}"
            )
        seen = compared(told) | {"refused": refused, "bytes": ledger.total()}
        checkpoint.replace(folder / LOOKED, json.dumps(seen, indent=1).encode())
        journal.write("done", results=str(folder / LOOKED))
    return seen


def _joined(grid: Grid, config: RunConfig, journal: Journal) -> list[int]:
    """Wait as a run does -> the nodes that are connected."""
    wait, least = config.wait, max(config.run.expect, 2)
    deadline, steady, last = time.monotonic() + wait.sites, 0.0, None
    while True:
        nodes, now = {*grid.get_node_ids()}, time.monotonic()
        if nodes != last:
            last, steady = nodes, now
            journal.write("looking", sites=len(nodes))
        calm = nodes == registered.everyone() or now - steady >= wait.settle
        if len(nodes) >= least and (config.run.expect or calm):
            return sorted(nodes)
        if now > deadline:
            raise QuorumError(
                f"After {wait.sites:g} s {len(nodes)} of {least} sites that are needed have "
                "joined; start more clients, or lower --expect."
            )
        time.sleep(PAUSE)


def _asked(
    config: RunConfig,
    grid: Grid,
    journal: Journal,
    names: Mapping[int, str],
    take: Callable[[Message], None],
) -> tuple[dict[str, str], Ledger]:
    """Ask the nodes -> why some told nothing, by name; the bytes."""
    refused = {name: f"no reply within {config.wait.train:g} s" for name in names.values()}
    ledger = Ledger(Path(config.run.dir) / config.run.name, grid, "look")

    def sent(message: Message) -> None:
        ledger.message("to", names[message.metadata.dst_node_id], "site", ROUND, message)

    def received(message: Message) -> None:
        ledger.message("from", names[message.metadata.src_node_id], "site", ROUND, message)

    def question(node: int) -> Message:
        content = records.write(look={"run": config.run.name})
        return Message(content, node, "query.look", ttl=config.wait.train, group_id="look")

    if expect := getattr(grid, "expect", None):  # a `LaneGrid`, which simulations do not load
        expect(MOST_BYTES)
    post = mail.Mail(grid, sent, received)
    for reply in post.deliver(map(question, names), config.wait.train):
        name = names[reply.metadata.src_node_id]
        try:
            take(reply)
        except FeddaError as error:
            refused[name] = str(error).rstrip(".")
            continue
        del refused[name]
    for name, text in refused.items():
        journal.trouble("refused", name, text)
    return refused, ledger


def _read(reply: Message, others: Mapping[str, Account]) -> Account:
    """What a site told.

    Raises:
        FeddaError: it told nothing, or something else than it may.
    """
    if reply.has_error():
        raise FeddaError(public(reply.error.code))
    arrays, tables = records.read(reply.content)
    site = Account.read(tables.pop("look", {}), arrays)
    if tables:
        raise WireError(f"It sent {sorted(tables)} beside what its data look like.")
    if wrong := registered.objection(reply.metadata.src_node_id, site.name, site.role):
        raise WireError(wrong)
    if site.name in others:
        raise WireError(f"'{site.name}' is the name of two sites; give each its own with --name.")
    return site
