"""A site's audit log beside the record that a server kept of a run: every hash must be in both."""

from collections import Counter
from collections.abc import Iterable, Mapping

from fedda.ops.chain import Entry

AUDIT = "audit.jsonl"  # the audit log's name in the client's state folder

# What a site calls an event -> what the server calls it.
AT_SERVER = {
    "received": "sent",
    "answered": "received",
    "refused": "received",
    "summed": "summed",
}
WORDS = {
    "sent": "a request of the server",
    "received": "a reply of this site",
    "summed": "gradients of this site",
}


def compare(site: str, here: Iterable[Entry], there: Iterable[Entry]) -> tuple[int, list[str]]:
    """Compare two logs -> how many payloads are in both, and a sentence about each other one.

    Compared are the runs of the server's record. Questions about what a site offers are in no
    run's record, nor are sums of which no gradient left.
    """
    theirs = [entry for entry in there if entry.get("site") == site]
    runs = {entry.get("run_id") for entry in theirs}
    mine = [e for e in here if e.get("run_id") in runs and e.get("event") in AT_SERVER]
    mine = [e for e in mine if e.get("kind") != "query" and e.get("frames") != 0]
    ours = Counter((AT_SERVER[str(e["event"])], str(e.get("sha256"))) for e in mine)
    known = Counter((str(e.get("event")), str(e.get("sha256"))) for e in theirs)
    rounds = {str(e.get("sha256")): e.get("round") for e in (*mine, *theirs)}
    odd = [
        f"{_words(key, count, rounds)} in this site's log, but not in the server's record"
        for key, count in (ours - known).items()
    ]
    odd += [
        f"{_words(key, count, rounds)} in the server's record, but not in this site's log"
        for key, count in (known - ours).items()
    ]
    return sum((ours & known).values()), odd


def _words(key: tuple[str, str], count: int, rounds: Mapping[str, object]) -> str:
    event, digest = key
    often = f", {count} times," if count > 1 else ""
    when = rounds[digest]
    of = f" of round {when}" if isinstance(when, int) else ""
    return f"{WORDS.get(event, event)}{of} (hash {digest[:16]}) is{often}"
