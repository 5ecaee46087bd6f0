"""The run's sites, who learned from whom, what went wrong, and the run's settings and versions."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from fedda.errors import FeddaError
from fedda.results.read import counted, spans
from fedda.results.remarks import doubted
from fedda.results.selection import headings, outcome, rows

from .html import NOTHING, Html, e, folded, join, note, section, table
from .series import RunSeries

MOST_EVENTS = 500  # most rows; the rest is in results.json
CLASSES = 40  # most class names that are listed
# Settings of where results go and how the run was started, not of what it computes.
PLACE = ("run.dir", "run.name", "run.resume", "run.expect")

WORDS = {
    "absent": "not connected",
    "silent": "no reply",
    "failed": "reported a failure",
    "refused": "reply or offer refused",
    "stale": "reply nobody asked for",
    "clipped": "longer than the others', scaled down",
    "paused": "run paused",
    "resumed": "run went on",
    "no offer": "gave no usable offer",
    "negative transfer": "adaptation made it worse",
    "bounded": "counts for fewer examples",
    "classes": "names classes that no other source has",
    "small": "too few examples to sum gradients",
}


def sites(run: RunSeries) -> Html:
    """Make the section of sites: data, weights, rounds, time and troubles of each."""
    weights = {m: run.summary["methods"][m]["weights"] for m in run.methods}
    weights = {m: w for m, w in weights.items() if w}
    troubles = [event.get("site") for event in run.results["events"]]
    seconds = {s["name"]: _seconds(run, s["name"]) for s in run.results["sites"]}
    timed = any(value is not None for value in seconds.values())
    rows = []
    for site in run.results["sites"]:
        name = site["name"]
        row: list[Any] = [
            name,
            site["role"],
            _number(site.get("examples")),
            _number(site.get("tested")),
        ]
        row += [f"{w[name]:.3f}" if name in w else NOTHING for w in weights.values()]
        row += [_rounds(run, name, site["role"])]
        row += [NOTHING if seconds[name] is None else f"{seconds[name]:.2f} s"] if timed else []
        count = troubles.count(name)
        row.append(e("span", f"{count:,}", class_="bad") if count else "0")
        rows.append(row)
    head = ["site", "role", "examples", "tests"]
    head += [f"weight, {run.short(m)}" for m in weights]
    head += ["rounds averaged", *(["training, median"] if timed else []), "troubles"]
    made = table(head, rows, left=2, wrap=[0], label="Sites", open_=len(rows) <= 15)
    remark = "Weights are those of the last round" + f", mean of the {run.every}" * bool(run.over)
    about = [remark]
    if shape := run.results.get("shape"):
        about.append(f"Inputs of {'x'.join(map(str, shape))}")
    if classes := [str(c) for c in run.results.get("classes") or []]:
        more = "…" if len(classes) > CLASSES else ""
        about.append(f"{len(classes)} classes: {', '.join(classes[:CLASSES])}{more}")
    return section("sites", "Sites", made, note(". ".join(about) + "."))


def _number(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int) else NOTHING


def _rounds(run: RunSeries, site: str, role: str) -> str:
    """Count the rounds whose average had this site, of those that could have had it."""
    had = all_ = 0
    for method in run.methods:
        if site not in run.keys(method, "weights"):
            if role == "target":
                continue  # it does not train in this method
            all_ += sum(1 for _ in run.entries(method))
            continue
        for _, entry in run.entries(method, site):
            all_ += 1
            had += site in (entry.get("weights") or {})
    return f"{had:,} of {all_:,}" if all_ else NOTHING


def _seconds(run: RunSeries, site: str) -> float | None:
    seconds = [
        entry["site_seconds"][site]
        for method in run.methods
        for _, entry in run.entries(method)
        if site in (entry.get("site_seconds") or {})
    ]
    return statistics.median(seconds) if seconds else None


def events(run: RunSeries) -> Html:
    """Make the section of troubles, with one row per kind, site and training."""
    troubles = run.results["events"]
    if not troubles:
        return section("events", "Troubles", e("p", "None: every site answered in every round."))
    gathered: dict[tuple[str, ...], list[int]] = {}
    counts: dict[tuple[str, ...], int] = {}
    for event in troubles:
        where = f"{run.short(event['method'])}, seed {event['seed']}" if "seed" in event else ""
        where += f" on {event['target']}" if "target" in event else ""
        parts = (where, event.get("what", ""), event.get("site", ""), event.get("text", ""))
        key = tuple(map(str, parts))
        gathered.setdefault(key, []).extend([event["round"]] if "round" in event else [])
        counts[key] = counts.get(key, 0) + 1
    rows = [
        [
            spans(numbers) or NOTHING,
            where or NOTHING,
            site or NOTHING,
            e("span", WORDS.get(what, what), class_="tag"),
            text,
            f"{counts[where, what, site, text]:,}",
        ]
        for (where, what, site, text), numbers in list(gathered.items())[:MOST_EVENTS]
    ]
    head = ["rounds", "training", "site", "what", "in words", "times"]
    made = table(head, rows, left=5, wrap=[0, 4], label="Troubles", open_=len(rows) <= 12)
    more = len(gathered) - len(rows)
    extra = f" {more:,} more kinds are in results.json." if more > 0 else ""
    remark = (
        f"{counted(len(troubles), 'event')} in {len(gathered):,} rows, "
        f"in the order they began.{extra}"
    )
    return section("events", "Troubles", made, note(remark))


def doubts(run: RunSeries) -> Html | None:
    """Make the section of signs, seen without labels, that trainings may have gone wrong."""
    rows = [[str(round_), about, text] for about, round_, text in doubted(run.results)]
    if not rows:
        return None
    made = table(["round", "training", "in words"], rows, left=3, wrap=[2], label="Doubts")
    remark = "Signs without labels that a training may have gone wrong; none of them is a proof."
    return section("doubts", "Doubts", made, note(remark))


def settings(run: RunSeries) -> Html:
    """Make the section of settings: those that are not the defaults, all, and the versions."""
    config, usual = run.config, _defaults(run)
    changed = [k for k, v in config.items() if k not in PLACE and k in usual and usual[k] != v]
    unknown = [k for k in config if usual and k not in usual]
    rows = [[e("code", k), _value(config[k]), _value(usual[k])] for k in changed]
    rows += [[e("code", k), _value(config[k]), "not known to this version"] for k in unknown]
    if not config:
        own: Html = e("p", "The results do not hold the run's settings.")
    elif rows:
        own = table(
            ["setting", "this run", "default"], rows, label="Settings that differ", wrap=[1]
        )
    else:
        own = e("p", "All settings are the defaults.")
    rest = [[e("code", k), _value(v)] for k, v in config.items()]
    whole = folded(
        f"All {len(rest)} settings",
        table(["setting", "this run"], rest, label="All settings", wrap=[1], open_=False),
    )
    versions: Mapping[str, Any] = run.results.get("versions") or {}
    used = ", ".join(f"{name} {version}" for name, version in versions.items())
    return section(
        "settings",
        "Settings",
        note("What differs from the defaults:") if rows else None,
        own,
        whole if rest else None,
        note(f"Made with {used}." if used else "The results do not say which versions made them."),
    )


def _defaults(run: RunSeries) -> Mapping[str, Any]:
    """Each setting's default: as the run noted it, or of this version, which loads torch."""
    if noted := run.results.get("defaults"):
        return noted
    from fedda.settings import defaults

    try:
        return defaults()
    except FeddaError:  # an incomplete method must not prevent the page
        return {}


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.6g}"
    return str(value) if value != "" else "(empty)"


Training = Mapping[str, Any]


def collaborators(run: RunSeries) -> Html | None:
    """Make the section of the targets' choices; None if no method of the run has any."""
    chains: dict[tuple[str, Any], list[Training]] = {}
    for method in run.methods:
        for training in run.results["trainings"][method]:
            if "selection" in training:
                chains.setdefault((method, training["seed"]), []).append(training)
    if not chains:
        return None
    parts: list[Html] = []
    for (method, seed), trainings in chains.items():
        about = run.short(method) + (f", seed {seed}" if len(run.seeds) > 1 else "")
        parts.append(e("h3", f"Who learned from whom: {about}"))
        parts.append(tree(trainings))
        tables = [_table(training, about) for training in trainings]
        parts.append(folded("All candidates of each target", *tables))
    parts.append(
        note(
            "eps: a candidate's error on its own data, carried forward along the chain where it "
            "has no labels. theta: Lipschitz constant of its classifier. W1: distance of features, "
            "± how far two halves of the data disagree. The smallest bound is chosen."
        )
    )
    return section("collaborators", "Collaborators", *parts)


def tree(trainings: Sequence[Training]) -> Html:
    """Make nested lists: under each site the targets that have adapted from it."""
    children: dict[str, list[Training]] = {}
    for training in trainings:
        children.setdefault(training["selection"]["collaborator"], []).append(training)
    targets = {training["target"] for training in trainings}

    def below(name: str, above: frozenset[str]) -> Html | None:
        mine = [t for t in children.get(name, ()) if t["target"] not in above]
        if not mine:
            return None
        items = [
            e("li", described(t), below(t["target"], above | {name, t["target"]})) for t in mine
        ]
        return e("ul", *items, class_="tree")

    roots = [name for name in children if name not in targets]
    return e(
        "ul",
        *(e("li", e("b", name), " (source)", below(name, frozenset({name}))) for name in roots),
        class_="tree",
    )


def described(training: Training) -> Html:
    """Describe a target: its accuracy where it was tested, else its bound; negative transfer."""
    accuracy, after = training.get("final_accuracy"), training["selection"].get("after") or {}
    if accuracy is not None:
        words = f": accuracy {100 * accuracy:.1f} %"
    elif "eps" in after:
        words = f": error at most {after['eps']:.3f}"
    else:
        words = ": not adapted"
    bad = after.get("kept") == "before"
    transfer = e("span", ", negative transfer", class_="bad") if bad else None
    return join(e("b", training["target"]), words, transfer)


def _table(training: Training, about: str) -> Html:
    selection, target = training["selection"], training["target"]
    named = f"Candidates for {target} ({about})"
    made = table(headings(selection), rows(selection), label=named)
    return join(e("h4", f"{target}, by {selection['selector']}"), made, note(outcome(selection)))
