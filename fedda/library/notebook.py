"""Results as HTML for a notebook; all text in it, such as sites' names, is escaped."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from fedda.page.html import Html, e, join
from fedda.results import read


class Found(Protocol):
    """A comparison's results, as far as they are shown."""

    targets: tuple[str, ...]
    seeds: tuple[int, ...]
    failures: dict[str, str]

    @property
    def accuracies(self) -> dict[str, dict[str, float]]: ...


def results(raw: read.Results) -> str:
    """A run's trainings, its sites' weights, and what is to be doubted.

    Args:
        raw: the content of results.json.
    """
    what = f"{read.title(raw, raw['method'])} on {read.target(raw)}"
    every = [(method, each) for method, runs in raw["trainings"].items() for each in runs]
    heading = ("method", "seed", "target", "accuracy", "refined", "crossed", "seconds")
    weighed = [t for t in raw["trainings"][raw["method"]] if t["rounds"][-1].get("weights")]
    return join(
        e("p", e("b", what)),
        table(heading, [_row(raw, method, training) for method, training in every]),
        _weights(weighed) if weighed else None,
        _listed("doubts", (f"{about}, round {n}: {text}" for about, n, text in read.doubted(raw))),
        _listed("troubles", (f"{t['site']}: {t['text']}" for t in raw["events"])),
    )


def comparison(found: Found) -> str:
    """The mean accuracy of each variant, and which trainings failed."""
    rows = [
        (name, *(read.percent(values.get(each)) for each in found.targets))
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


def _row(raw: read.Results, method: str, training: Mapping[str, Any]) -> tuple[Any, ...]:
    return (
        read.short_title(raw, method),
        training["seed"],
        training["target"],
        read.percent(training["final_accuracy"]),
        read.percent((training.get(read.REFINED) or {}).get("accuracy")),
        read.human(sum(training["bytes"].values())),
        f"{training['seconds']:.1f}",
    )


def _weights(trainings: Sequence[Mapping[str, Any]]) -> Html:
    found = [(t["seed"], t["rounds"][-1]["weights"]) for t in trainings]
    sites = list(dict.fromkeys(site for _, weights in found for site in weights))
    rows = [
        (seed, *(f"{weights[s]:.3f}" if s in weights else "–" for s in sites))
        for seed, weights in found
    ]
    return join(e("p", "Weights of the sites in the last round"), table(("seed", *sites), rows))


def _listed(what: str, texts: Iterable[str]) -> Html | None:
    lines = [e("li", text) for text in texts]
    return e("details", e("summary", f"{what}: {len(lines)}"), e("ul", *lines)) if lines else None
