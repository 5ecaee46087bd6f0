"""`fedda look`: what the sites' data look like, and whether they fit, before any training."""

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedda.cli.as_json import JsonOption, print_json
from fedda.cli.exits import interruptible
from fedda.cli.its_files import OPTIONS, reads_files
from fedda.cli.launch import apart, on_server, on_terminate, refuse_local
from fedda.errors import ConfigError, DataError, FeddaError, RunError, typed
from fedda.files import put
from fedda.halves import REFERENCE
from fedda.library.beginning import Launch, new_settings, unless
from fedda.results.escaping import PlainConsole, echo
from fedda.results.read import JOURNAL, LOOKED, counted
from fedda.settings import RunConfig, overrides

if TYPE_CHECKING:
    from fedda.data import Reading

NOTHING = "–"
LOCAL = ("target", *OPTIONS)


@reads_files
def look(
    context: typer.Context,
    data: Annotated[Path | None, typer.Option(metavar="DIR")] = None,
    target: Annotated[str, typer.Option(metavar="NAME", show_default=False)] = "",
    server: Annotated[Path | None, typer.Option(metavar="DIR")] = None,
    expect: Annotated[int, typer.Option(min=0, show_default=False)] = 0,
    out: Annotated[Path, typer.Option(metavar="DIR", file_okay=False)] = Path("look"),
    as_json: JsonOption = False,
    *,
    reading: "Reading",
) -> None:
    """Look before you train: sizes, classes, value ranges, gaps and drift of all sites.

      fedda look --data ./clinics --target north

    On a server it asks the sites that have joined. A site answers only if its policy has
    leaving.look = true; counts leave in tens, and no number is about fewer than 10 examples:

      fedda look --server ./hub --expect 4

    Writes look.json and journal.jsonl, and says which sites are alike, which is odd,
    what will make training hard, and which command to type next.

    Options:
        data: Folder with one folder or file per site; all in this process.
        target: With --data: the site without labels, or several with commas. Default: those that
            have no labels.
        server: Instead of --data: the folder that `fedda superlink` was given as --dir.
        expect: With --server: wait for so many sites.
        out: Where the numbers go.
    """
    on_terminate()
    with interruptible("stopped"):
        if (data is None) == (server is None):
            raise ConfigError("Give --data DIR, or --server DIR.")
        if data is None:
            refuse_local(context, LOCAL)
        folder = out.absolute()
        flat = {"run.look": True, "run.expect": expect}
        config = RunConfig.parse(flat | {"run.dir": str(folder.parent), "run.name": folder.name})
        if server is not None:
            said = (lambda event: None) if as_json else _shown
            on_server(config, Launch(server=str(server.absolute())), folder, said)
        elif data is not None:
            apart(folder, "--out", data, "--data")
            with unless(lambda: False, folder):
                _simulated(config, data, target, reading, folder)
        _present(folder, server, ["--data", str(data), *reading.words], as_json)


def _shown(event: dict[str, Any]) -> None:
    """Say what happens at a server while it happens."""
    if event["event"] == "looking":
        echo(f"joined: {counted(event['sites'], 'site')}")
    if event["event"] == "joined":
        echo(event["text"])


def _simulated(
    config: RunConfig, root: Path, target: str, reading: "Reading", folder: Path
) -> None:
    """Look at folders of this machine."""
    from fedda.data import domains, passed_over
    from fedda.halves import load

    targets = {*target.split(",")} - {""}
    found = domains(root, reading, targets)
    if odd := passed_over(root, reading, targets):
        echo(f"note: {odd}", err=True)
    if len(found) < 2:
        raise RunError(
            f"{root} has {len(found)} sites ({', '.join(found) or 'none'}), and 2 are needed to "
            "compare; give a folder that holds a folder or file per site."
        )
    if odd := targets - {*found}:
        names = ", ".join(found)
        raise RunError(f"{root} has no site '{min(odd)}', it has {names}; give one as --target.")
    targets = targets or {n for n, p in found.items() if not _labelled(p, reading.at(n))}
    sites = [
        {"role": "target" if name in targets else "source", "name": name, "data": str(path)}
        | reading.at(name).flat()
        for name, path in found.items()
    ]
    journal = load("server", "journal").Journal(folder / JOURNAL)
    with journal.ending():
        seen = load("server", "simulation").look(config, sites, journal)
    if seen["settings"]:
        put(folder / LOOKED, json.dumps(seen | _rehearsed(seen, sites), indent=1))


def _rehearsed(seen: dict[str, Any], sites: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """What a run over the sites that told takes besides, as far as their files alone say it."""
    from fedda.data import Reading, describe, leaks
    from fedda.data.categories import alone, apart, together
    from fedda.halves import load

    told = {site["name"] for site in seen["sites"]}
    roles = {name: "target" if name in _targets(seen) else "source" for name in told}
    sites = [s | {"role": roles[s["name"]]} for s in sites if s["name"] in told]
    words = [*seen["settings"]]
    texts = {s["name"]: describe(s["data"], s["role"], Reading.said(s)).texts for s in sites}
    odd = [*alone(texts, {}), *leaks(sites)]
    said = " ".join([seen["text"], *(f"Note: {text}." for text in odd)])
    if seen["refused"]:
        sources = [site["name"] for site in sites if site["role"] == "source"]
        words += ["-c", f"run.sources={','.join(sources)}"]
    listed = together(texts)
    undecided = ["-c", f"input.categories={together(texts, apart(texts, {}))}"]
    options = [*zip(words[::2], words[1::2], strict=True)]
    presets, changes = ([v for o, v in options if o == kind] for kind in ("--preset", "-c"))
    changes.append(f"input.categories={listed}")
    try:
        flat = new_settings(REFERENCE, presets, {}, "", overrides(REFERENCE, changes))
        load("server", "simulation").rehearse(RunConfig.parse(flat), sites)
    except FeddaError as error:
        return {"settings": [], "text": f"{said} A run would fail: {error}".strip()}
    return {"settings": words + undecided * bool(listed), "text": said}


def _targets(seen: dict[str, Any]) -> list[str]:
    """The targets of a run over the sites that told; if all have labels, the first is one."""
    sites = seen["sites"]
    return [s["name"] for s in sites if s["role"] == "target"] or [sites[0]["name"]]


def _labelled(path: Path, reading: "Reading") -> bool:
    """Whether a site's data can be a source's."""
    from fedda.data import describe

    with suppress(DataError):
        return bool(describe(path, "source", reading).counts)
    return False


def _present(folder: Path, server: Path | None, files: Sequence[str], as_json: bool) -> None:
    """Print the table and what follows."""
    seen = json.loads((folder / LOOKED).read_text())
    where = ["--server", server] if server else [*files, "--target", ",".join(_targets(seen))]
    begin = typed("fedda", "run", REFERENCE, *where, *seen["settings"])
    if as_json:
        return print_json(seen)
    PlainConsole().print(_table(seen))
    echo(f"\n{seen['text']}")
    for name, why in seen["refused"].items():
        echo(f"{name} told nothing: {why}.")
    unsure = server and any(1 in s["arrays"].get("missing", ()) for s in seen["sites"])
    if seen["settings"] and not unsure:  # texts are known at their sites alone
        echo(f"\nnext: {begin}")
    echo(f"numbers: {folder / LOOKED}")


def _table(seen: dict[str, Any]) -> Any:
    from rich import box
    from rich.markup import escape
    from rich.table import Table

    head, *rows = _rows(seen)
    made = Table(box=box.SIMPLE_HEAD)
    for name in head:
        made.add_column(escape(name), no_wrap=name == head[0])
    for row in rows:
        made.add_row(*map(escape, row))
    return made


def _rows(seen: dict[str, Any]) -> list[list[str]]:
    """The table of the sites: its heads, and a row per site."""
    head = ["site", "role", "examples", "form", "values", "gaps", "classes"]
    made, target = [_row(site) for site in seen["sites"]], seen["target"]
    if target:
        head.append(f"drift to {target}")
        place = [row[0] for row in made].index(target)
        for row, drift in zip(made, seen["drift"], strict=True):
            its = drift[place]
            row.append(NOTHING if its is None else f"{its:.2f}")
    return [head, *made]


def _row(site: dict[str, Any]) -> list[str]:
    from fedda.maths.summaries import FLOOR

    shape, its = site["shape"], site["arrays"]
    form = f"{shape[0]} columns"
    if site["kind"] == "image":
        size = f"{shape[2]} x {shape[1]}" if shape[1] else "several sizes"
        form = f"{'colour' if shape[0] == 3 else 'gray'}, {size}"
    known = [c for c, share in enumerate(its.get("share", ())) if any(share) or its["deviation"][c]]
    low, high = ([its[end][c] for c in known] for end in ("low", "high"))
    values = f"{min(low):.3g} to {max(high):.3g}" if known else NOTHING
    missing = [share for share in its.get("missing", ()) if share < 1]
    gaps = f"{100 * max(missing):.0f} %" if missing else NOTHING
    counts = [*site["classes"].values()]
    classes = f"{len(counts)}, {min(counts)}+ to {max(counts)}+" if counts else NOTHING
    examples = f"{site['examples']}+" if site["examples"] else f"fewer than {FLOOR}"
    return [site["name"], site["role"], examples, form, values, gaps, classes]
