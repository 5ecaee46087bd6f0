"""A site's own page, for whoever runs it: what it was asked, what left, what it may still give."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fedda.results.read import human

from .html import Html, e
from .page import document
from .parts import note, section, table
from .script import SCRIPT, allowed

POLICY = (
    f"default-src 'none'; style-src 'unsafe-inline'; script-src {allowed(SCRIPT)}; "
    "base-uri 'none'; form-action 'self'"
)
LEFT = (
    "Of replies and of sums of gradients, by the audit log, without headers and TLS. "
    "The command fedda policy log shows every message, and checks the log."
)


@dataclass(frozen=True)
class SiteRequest:
    """A request, without a value: when, of which run, training and round, and what came with it.

    `size` is in bytes; `why` says why it was refused, empty if it was not.
    """

    time: float
    run: str
    training: str
    round: str
    what: str
    came: str
    size: int
    why: str = ""


@dataclass(frozen=True)
class OwnSite:
    """What a site's page shows.

    Attributes:
        standing: how it stands with its server, in a sentence.
        since: when the audit log's newest file begins, in seconds since 1970; 0: it is empty.
        asked: the last requests, the newest first.
        refused: those of them that were refused.
        left: bytes that left, by kind.
        messages: in how many messages, by kind.
        budgets: name, what was used, and what there is in all.
        policy: the policy in force, a sentence each.
    """

    standing: str
    since: float
    asked: Sequence[SiteRequest]
    refused: Sequence[SiteRequest]
    left: Mapping[str, int]
    messages: Mapping[str, int]
    budgets: Sequence[tuple[str, str, str]]
    policy: Sequence[str]


def page(name: str, now: OwnSite, stop: str, ending: bool) -> str:
    """Return the whole document.

    Args:
        name: the site's.
        now: what to show.
        stop: the address that the button asks to stop the site.
        ending: whether it was asked to stop already.
    """
    since = f"Since {_clock(now.since)}. " if now.since else ""
    left = [[k, human(n), f"{now.messages[k]:,}"] for k, n in sorted(now.left.items())]
    return document(
        f"{name}: what a server asks of it",
        e("h1", name),
        e("p", now.standing, class_="sub"),
        _button(stop, ending),
        section(
            "left",
            "What left",
            table(["kind", "bytes", "messages"], left, label="What left"),
            note(since + LEFT),
        ),
        section(
            "refused", "What was refused", _requests(now.refused, "why"), note("Its log says more.")
        ),
        section("asked", "What it was asked", _requests(now.asked, "what came with it")),
        section(
            "budgets",
            "Budgets, over all runs",
            table(["budget", "used", "in all"], now.budgets, left=3, label="Budgets"),
        ),
        section("policy", "The policy in force", e("ul", *(e("li", line) for line in now.policy))),
        policy=POLICY,
    )


def _button(stop: str, ending: bool) -> Html:
    if ending:
        return e("p", "This site leaves its server when the round is over, and ends.", class_="bad")
    words = "Stop this site after the round"
    return e("form", e("button", words, type="submit"), method="post", action=stop)


def _requests(asked: Sequence[SiteRequest], last: str) -> Html:
    """A table of requests, whose last column says why each was refused or what came with it."""
    head = ["when", "run", "training", "round", "what", "bytes", last]
    rows = [
        [_clock(a.time), a.run, a.training, a.round, a.what, human(a.size), a.why or a.came]
        for a in asked
    ]
    return table(head, rows, left=len(head), wrap=[len(head) - 1], label=last)


def _clock(seconds: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
