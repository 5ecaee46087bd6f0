"""What Prometheus asks for at /metrics: sites, the newest run's round, seconds, bytes and troubles.

Labels take few values: kinds, roles, directions, and one run's method. No site's name is a label.
"""

from collections import Counter
from collections.abc import Iterator, Mapping

from prometheus_client import generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from fedda.results.snapshot import RunNow, Snapshot
from fedda.results.story import Story
from fedda.wire.packing import COUNTED

ROLES = ("source", "target", "unknown")
OTHER = "other"
LONGEST = 80  # characters of a label's value
WHAT = {  # kinds of troubles that have a label of their own
    "absent",
    "silent",
    "failed",
    "refused",
    "stale",
    "clipped",
    "paused",
    "resumed",
    "untested",
    "no offer",
}


def metrics(snapshot: Snapshot, story: Story) -> bytes:
    """Write the metrics of this moment.

    Args:
        snapshot: the sites and runs.
        story: what the newest run's journal has said so far.
    """
    run = snapshot.run()
    return generate_latest(_Found([*_of_sites(snapshot), *(_of_run(run, story) if run else ())]))


class _Found(Collector):
    """What is asked for its metrics."""

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


def _of_run(run: RunNow, story: Story) -> Iterator[Metric]:
    about = "The newest run; the other metrics are its own."
    yield _gauges("run_info", about, "run method", {(run.name[:LONGEST], run.method[:LONGEST]): 1})
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
    yield _bytes(story)
    yield _troubles(story)


def _gauge(name: str, words: str, value: float, *method: str) -> Metric:
    return _gauges(name, words, "method" if method else "", {method: value})


def _gauges(name: str, words: str, labels: str, values: Mapping[tuple[str, ...], float]) -> Metric:
    """A metric with a value for each of several lists of labels."""
    family = GaugeMetricFamily(f"fedda_{name}", words, labels=labels.split())
    for each, value in sorted(values.items()):
        family.add_metric(list(each), float(value))
    return family


def _bytes(story: Story) -> Metric:
    """Bytes by direction, role and kind; what is of no known kind counts together."""
    sums = Counter[tuple[str, ...]]()
    for key, count in story.bytes().items():
        known = zip([*key.split(" ", 2), "", ""], (("to", "from"), ROLES, COUNTED), strict=False)
        sums[tuple(part if part in few else OTHER for part, few in known)] += count
    words = "Bytes of the run's messages so far, seen from the server."
    return _gauges("bytes", words, "direction role kind", sums)


def _troubles(story: Story) -> Metric:
    counts = Counter(
        (what if (what := str(trouble.get("what"))) in WHAT else OTHER,)
        for trouble in story.troubles
    )
    words = "Troubles of the run so far, by what happened."
    return _gauges("troubles", words, "what", counts)
