"""What Prometheus asks for at /metrics: sites, the newest run's round, seconds, bytes and troubles.

Labels take few values: kinds, roles, directions, and one run's method. No site's name is a label.
"""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric

from fedda.results.snapshot import Run, Snapshot
from fedda.results.story import Story
from fedda.wire import COUNTED

ROLES = ("source", "target", "unknown")
OTHER = "other"
LONGEST = 80  # characters of a label's value
WHAT = {  # kinds of troubles that have a label of their own
    "absent",
    "silent",
    "failed",
    "refused",
    "stale",
    "paused",
    "resumed",
    "untested",
    "no offer",
}


def metrics(snapshot: Snapshot, run: Run | None, story: Story) -> bytes:
    """Write the metrics of this moment.

    Args:
        snapshot: the sites and runs.
        run: the newest run, or None.
        story: what its journal has said so far.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Found([*_of_sites(snapshot), *(_of_run(run, story) if run else ())]))
    return generate_latest(registry)


class _Found:
    """What a registry asks for its metrics."""

    def __init__(self, found: list[Metric]) -> None:
        self._found = found

    def collect(self) -> list[Metric]:
        """Return them."""
        return self._found


def _of_sites(snapshot: Snapshot) -> Iterator[Metric]:
    sites = snapshot.sites
    yield _gauge("sites_registered", "Sites that the server admits.", len(sites))
    yield _gauge("sites_reachable", "Sites that are reachable.", sum(s.online for s in sites))
    training = sum(bool(s.work) and s.online for s in sites)
    yield _gauge("sites_working", "Sites that have not answered a request yet.", training)
    going = sum(not run.ended for run in snapshot.runs)
    yield _gauge("runs_going_on", "Runs that have not ended.", going)


def _of_run(run: Run, story: Story) -> Iterator[Metric]:
    about = GaugeMetricFamily(
        "fedda_run_info", "The newest run; the other metrics are its own.", labels=["run", "method"]
    )
    about.add_metric([run.name[:LONGEST], run.method[:LONGEST]], 1)
    yield about
    ended = run.ended or story.ended
    yield _gauge("run_going_on", "1 while the newest run goes on, else 0.", int(not ended))
    method = (story.current[0] if story.current else run.method)[:LONGEST]
    yield _gauge("round", "Rounds that its current training has done.", story.round, method)
    yield _gauge("rounds", "Rounds of its current training in all.", story.rounds, method)
    if story.per_round is not None:
        yield _gauge("round_seconds", "Seconds per round, mean so far.", story.per_round, method)
    newest = story.newest
    if "seconds" in newest:
        words = "Seconds that its newest round took."
        yield _gauge("newest_round_seconds", words, newest["seconds"], method)
    if story.left is not None:
        yield _gauge("left_seconds", "Estimated seconds until the run ends.", story.left)
    for key, name in (("accuracy", "accuracy"), ("infomax", "infomax"), ("loss", "training_loss")):
        if key in newest:
            yield _gauge(name, f"The {key} of its newest round.", newest[key], method)
    estimate = ((newest.get("worth") or {}).get("estimate") or {}).get("accuracy")
    if estimate is not None:
        words = "Accuracy of its newest model, estimated without labels."
        yield _gauge("estimated_accuracy", words, estimate, method)
    yield _bytes(story)
    yield _troubles(story)


def _gauge(name: str, words: str, value: float, method: str = "") -> Metric:
    family = GaugeMetricFamily(f"fedda_{name}", words, labels=["method"] if method else [])
    family.add_metric([method] if method else [], float(value))
    return family


def _bytes(story: Story) -> Metric:
    """Bytes by direction, role and kind; what is of no known kind counts together."""
    sums: dict[tuple[str, str, str], int] = {}
    for key, count in story.bytes().items():
        way, role, kind = [*key.split(" ", 2), "", ""][:3]
        known = (
            way if way in ("to", "from") else OTHER,
            role if role in ROLES else OTHER,
            kind if kind in COUNTED else OTHER,
        )
        sums[known] = sums.get(known, 0) + count
    words = "Bytes of the run's messages so far, seen from the server."
    family = GaugeMetricFamily("fedda_bytes", words, labels=["direction", "role", "kind"])
    for labels, count in sorted(sums.items()):
        family.add_metric(list(labels), count)
    return family


def _troubles(story: Story) -> Metric:
    counts: dict[str, int] = {}
    for trouble in story.troubles:
        what = str(trouble.get("what"))
        what = what if what in WHAT else OTHER
        counts[what] = counts.get(what, 0) + 1
    words = "Troubles of the run so far, by what happened."
    family = GaugeMetricFamily("fedda_troubles", words, labels=["what"])
    for what, count in sorted(counts.items()):
        family.add_metric([what], count)
    return family
