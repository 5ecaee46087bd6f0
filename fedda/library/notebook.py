"""Results as HTML for a notebook; all text in it, such as sites' names, is escaped."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from fedda.page.html import Html, e, join
from fedda.results import read

from .outcome import Results, Training, percent

if TYPE_CHECKING:
    from .comparing import Comparison


def results(found: Results) -> str:
    """A run's trainings, its sites' weights, and what is to be doubted."""
    raw = found.raw
    what = f"{read.title(raw, found.method)} on {read.target(raw)}"
    rows = [_row(raw, training) for training in found.trainings]
    heading = ("method", "seed", "target", "accuracy", "estimated", "crossed", "seconds")
    weighed = [t for t in found.of(found.method) if t.weights]
    return join(
        e("p", e("b", what)),
        table(heading, rows),
        _weights(weighed) if weighed else None,
        _listed("doubts", (f"{about}, round {n}: {text}" for about, n, text in read.doubted(raw))),
        _listed("troubles", (f"{t['site']}: {t['text']}" for t in found.troubles)),
    )


def comparison(found: "Comparison") -> str:
    """The mean accuracy of each variant, and which trainings failed."""
    rows = [
        (name, *(percent(values.get(each)) for each in found.targets))
        for name, values in found.accuracies.items()
    ]
    return join(
        e("p", e("b", f"Accuracy after the last round, mean over {len(found.seeds)} seeds")),
        table(("variant", *found.targets), rows),
        _listed("failed", (f"{what}: {why}" for what, why in found.failures.items())),
    )


def table(heading: Sequence[str], rows: Iterable[Sequence[Any]]) -> Html:
    """A plain table, which the notebook's own style dresses."""
    head = e("thead", e("tr", *(e("th", each) for each in heading)))
    body = e("tbody", *(e("tr", *(e("td", each) for each in row)) for row in rows))
    return e("table", head, body)


def _row(raw: read.Results, training: Training) -> tuple[Any, ...]:
    estimate = training.estimate
    between = f"{percent(estimate.low)} to {percent(estimate.high)}" if estimate else "–"
    return (
        read.short_title(raw, training.method),
        training.seed,
        training.target,
        percent(training.accuracy),
        f"{percent(estimate.accuracy)} ({between})" if estimate else "–",
        read.human(sum(training.bytes.values())),
        f"{training.seconds:.1f}",
    )


def _weights(trainings: Sequence[Training]) -> Html:
    sites = list(dict.fromkeys(site for t in trainings for site in t.weights))
    rows = [
        (t.seed, *(f"{t.weights[s]:.3f}" if s in t.weights else "–" for s in sites))
        for t in trainings
    ]
    return join(e("p", "Weights of the sites in the last round"), table(("seed", *sites), rows))


def _listed(what: str, texts: Iterable[str]) -> Html | None:
    lines = [e("li", text) for text in texts]
    return e("details", e("summary", f"{what}: {len(lines)}"), e("ul", *lines)) if lines else None
