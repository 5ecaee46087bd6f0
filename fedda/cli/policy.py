"""`fedda policy`: write and check a site's policy, see its budgets, read the site's audit log."""

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.markup import escape
from rich.table import Table

from fedda.cli.as_json import JsonOption, print_json
from fedda.errors import ConfigError
from fedda.files import put, states
from fedda.halves import load
from fedda.results.escaping import PlainConsole, echo
from fedda.results.read import CROSSED, printable

if TYPE_CHECKING:
    from fedda.ops.chain import CheckedChain, Entry

SHOWN = 3  # payloads that only one log has, and are told one by one

app = typer.Typer(
    no_args_is_help=True,
    help="""Decide what a server may do at this site, and see what it did.

    A site's policy is a file that its client reads; no server can change it.

      fedda policy init policy.toml

      fedda policy plugins                   (the line that allows installed packages)

      fedda policy check policy.toml

      fedda-client --policy policy.toml ...

      fedda policy log --state-dir STATE --verify
    """,
)

File = Annotated[Path, typer.Argument(metavar="FILE", help="The policy.", dir_okay=False)]
State = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        file_okay=False,
        help="The client's --state-dir. Default: the only one below ~/.local/state/fedda.",
    ),
]


@app.command()
def init(
    path: File,
    classes: Annotated[
        int, typer.Option(min=2, max=10_000, help="Most classes of a run, all sites' together.")
    ] = 40,
    vectors: Annotated[
        bool,
        typer.Option("--vectors", help="Networks for vectors and tables, which show more."),
    ] = False,
) -> None:
    """Write a policy with comments and safe values, to be changed as needed."""
    if path.exists():
        raise ConfigError(f"{path} exists already; give another name, or move it away")
    put(path, load("clients", "policy.describe").fresh(classes, vectors))
    echo(f"{path}: change it as needed, then give it to `fedda-client --policy {path}`")


@app.command()
def check(path: File, as_json: JsonOption = False) -> None:
    """Say in plain words what a policy allows, or what is wrong with it (exit code 1)."""
    policy = load("clients", "policy.rules").Policy.read(path)
    if as_json:
        return print_json({"policy": policy.model_dump(by_alias=True)})
    for line in load("clients", "policy.describe").words(policy):
        echo(line)


@app.command()
def plugins() -> None:
    """Write the line of a policy that allows the packages which are installed here now.

    A package is named by the hash of its files, so that a change of any is refused; one whose code
    lies elsewhere, as after an editable install, by its version, which anybody can give it.
    """
    from fedda.ops.distributions import entries
    from fedda.plugins import KINDS

    found = entries(KINDS)
    if not found:
        return echo("plugins = []  # no installed package adds anything to fedda")
    echo("plugins = [")
    for entry, parts in found:
        echo(f'    "{entry}",  # {parts}')
    echo("]")


@app.command()
def show(path: File, state_dir: State = None, as_json: JsonOption = False) -> None:
    """Show a policy beside what was used of its budgets."""
    policy = load("clients", "policy.rules").Policy.read(path)
    spent = load("clients", "policy.budget").Spent(_state(state_dir), policy.budget)
    words = load("clients", "policy.describe")
    rows = [*words.left(policy, spent)]
    used = {**vars(spent.used()), "epsilon": spent.epsilon(policy.privacy.delta)}
    if as_json:
        return print_json({"policy": policy.model_dump(by_alias=True), "used": used})
    for line in words.words(policy):
        echo(line)
    table = Table("budget", "used", "in all")
    for row in rows:
        table.add_row(*row)
    PlainConsole().print(table)


@app.command()
def log(
    state_dir: State = None,
    verify: Annotated[bool, typer.Option("--verify")] = False,
    against: Annotated[Path | None, typer.Option(metavar="RUN", file_okay=False)] = None,
    site: str | None = None,
    last: Annotated[int, typer.Option(min=0)] = 40,
    as_json: JsonOption = False,
) -> None:
    """Show a site's audit log: every message in and out, and never a value.

    fedda policy log --state-dir STATE

    fedda policy log --state-dir STATE --verify --against runs/kd3a

    Options:
        verify: Check the whole log; exit code 1 if a line was changed.
        against: With --verify: a run's folder of the server. Every hash that the server kept of
            this site must be in this log, and the other way round; else exit code 1.
        site: With --against: the site's name. Default: as the client gave it last.
        last: How many of the last lines to show.
    """
    from fedda.ops import chain

    if as_json and verify:
        raise ConfigError("--verify says in sentences what it found; leave out --json")
    if against is not None and not verify:
        raise ConfigError("--against compares logs that were checked; give --verify, too")
    state = _state(state_dir)
    compared = load("clients", "policy.audit_log")
    found = chain.check(state / compared.AUDIT)
    there = None if against is None else chain.check(against / CROSSED)
    if not verify:
        shown = found.entries[len(found.entries) - min(last, len(found.entries)) :]
        return print_json({"entries": shown}) if as_json else _table(shown)
    good = _said("the site's log", found)
    if there is not None:
        good = _said("the server's record", there) and good
        names = [str(e["site"]) for e in found.entries if e.get("event") == "started"]
        name = site or (names[-1] if names else state.name)
        of_record = sorted({str(e["site"]) for e in there.entries if "site" in e})
        if not (site or names) and name not in of_record:
            text = f"the log in {state} does not say which site's it is: give --site NAME"
            echo(f"error: {text} (the record has {', '.join(of_record) or 'none'})", err=True)
            raise typer.Exit(1)
        both, odd = compared.compare(name, found.entries, there.entries)
        echo(f"{both} payloads of {name} are in both")
        for sentence in odd[:SHOWN]:
            echo(f"error: {sentence}", err=True)
        if len(odd) > SHOWN:
            echo(f"error: {len(odd)} such payloads in all are in only one of the two", err=True)
        if odd:
            echo("note: what a break or the end of a program cut off is in one of the two alone")
        if not both and not odd:
            echo(f"error: the record has no payload of {name}", err=True)
        good = good and bool(both) and not odd
    if not good:
        raise typer.Exit(1)


def _said(name: str, found: "CheckedChain") -> bool:
    """Print what a check found -> whether all lines hold."""
    for note in found.notes:
        echo(f"note: {note}")
    if found.bad:
        echo(f"error: {name}: {found.bad}; the lines from there on prove nothing", err=True)
        return False
    echo(f"{name}: {len(found.entries)} lines hold; the last has the hash {found.last}")
    return True


def _table(entries: "list[Entry]") -> None:
    table = Table("time", "event", "kind", "run", "round", "what", "bytes", "hash")
    for entry in entries:
        clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(entry.get("time", 0))))
        run = str(entry.get("run", entry.get("run_id", "")))
        cells = [clock, entry.get("event"), entry.get("kind"), run, entry.get("round")]
        cells += [_what(entry), entry.get("bytes"), str(entry.get("sha256", ""))[:12]]
        table.add_row(*(_cell(cell) for cell in cells))
    PlainConsole().print(table)


def _what(entry: "Entry") -> str:
    if "code" in entry:
        return str(entry["code"])
    if "frames" in entry:
        return f"{entry['frames']} gradients in {entry.get('group')}"
    arrays = [f"{a['name']} ({a['kind']}, {a['dtype']})" for a in entry.get("arrays", [])]
    return ", ".join([*arrays, *entry.get("numbers", [])])


def _cell(value: Any) -> str:
    """Text from a server, without what a terminal would obey."""
    return "" if value is None else escape(printable(str(value)))


def _state(given: Path | None) -> Path:
    """The client's state folder.

    Raises:
        ConfigError: none was given, and there is not exactly one.
    """
    if given is not None:
        return given.absolute()
    base = states()
    found = [path for path in base.glob("*") if path.is_dir()] if base.is_dir() else []
    if len(found) != 1:
        raise ConfigError(f"{base} holds {len(found)} clients' folders; choose with --state-dir")
    return found[0]
