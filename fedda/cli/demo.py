"""`fedda demo`: a whole federation on this machine, from certificates to results."""

import contextlib
import shutil
import signal
from pathlib import Path
from typing import Annotated, Any

import typer

from fedda.cli.exits import interruptible
from fedda.errors import RunError, typed
from fedda.ops.lock import alone
from fedda.results.escaping import echo
from fedda.settings import RunConfig, presets, seeds_of

TARGET = "fonts"

# Chosen on development seeds 100 to 103, never on those reported (docs/getting-started.md).
SETTINGS: dict[str, Any] = {
    "method": "kd3a",
    "rounds": 8,
    "run.baseline": "fedavg",
    "input.channels": 1,
    "input.size": 16,
    # A small network and KD3A by its paper's formulas, for the sake of minutes.
    "model.hidden": "",
    "model.dropout": 0.0,
    "train.steps": 0,
    "train.carry-momentum": False,
    "train.weight-decay": 0.0,
    "kd3a.focus-from": 0.01,
    "train.batch-size": 64,
    "train.rounds-per-epoch": 1 / 8,
    "train.lr": 0.02,
    "train.lr-end": 0.008,
    "kd3a.gate.low": 0.95,
    "kd3a.gate.high": 0.99,
    "wait.min-sources": 3,
}
SECONDS = 1800.0
MADE = ("journal.jsonl", "digits", "config.json")  # any of these marks a demo's folder


def demo(
    directory: Annotated[Path, typer.Option("--dir", file_okay=False)] = Path("runs"),
    seeds: str = "3",
    rounds: Annotated[int, typer.Option(min=1)] = SETTINGS["rounds"],
    keep: Annotated[bool, typer.Option("--keep")] = False,
    insecure: Annotated[bool, typer.Option("--insecure")] = False,
) -> None:
    """Run KD3A over three labelled sites and an unlabelled one, each in its own process.

    Makes four small domains of digits, a certificate authority and a key per site; starts a
    server and four clients on this machine, talking TLS; trains FedAvg and KD3A from the same
    seeds with the same steps; stops everything it started; prints the target's accuracy, the
    sources' weights and every byte that crossed; and writes a page with all of it. The page also
    shows the sites' own notes, because all sites are on this machine. Nothing is downloaded and
    nothing leaves this machine. It takes a few minutes on two cores.

    Options:
        directory: Results go to DIR/demo, which is emptied first.
        seeds: One training of each method per seed: how many, or a list with a comma, as in fedda
            compare.
        rounds: Communication rounds.
        keep: Leave the federation up for more runs, until Ctrl-C.
        insecure: Without TLS and keys.
    """
    from fedda.cli.launch import on_terminate, present
    from fedda.cli.watching import watch
    from fedda.data.digits import DOMAINS, build
    from fedda.ops.bundle import stage
    from fedda.ops.federation import Deployment
    from fedda.results.progress import Display
    from fedda.results.read import JOURNAL

    on_terminate()
    folder = directory.absolute() / "demo"
    flat = (
        presets.settings("kd3a", ["paper"])
        | SETTINGS
        | {
            "rounds": rounds,
            "run.seeds": ",".join(map(str, seeds_of(seeds))),
            "run.name": "demo",
            "run.dir": str(folder.parent),
            "run.expect": len(DOMAINS),
        }
    )
    config = RunConfig.parse(flat)
    clear(folder)
    with interruptible("stopped, with everything that was started"):
        made = {path.parent.name: path.parent for path in build(folder / "digits")}
        echo(f"made {len(made)} domains of digits in {folder / 'digits'}")
        sites = {
            name: ("target" if name == TARGET else "source", path) for name, path in made.items()
        }
        echo(f"starting a server and {len(sites)} sites; logs are in {folder / 'logs'}")
        federation = Deployment(folder, sites, insecure=insecure)
        with federation as deployment, Display(config) as display:
            run_id = deployment.submit(stage(folder / "app", config.flat()), config.flat())
            watch(folder / JOURNAL, 0, lambda: deployment.status(run_id).ending, display)
            deployment.wait(run_id, SECONDS)
            if keep:
                present(folder)
                again = typed("fedda", "run", "fedprox", "--server", folder / "server")
                echo(f"the federation stays up; try: {again}")  # until Ctrl-C
                with contextlib.suppress(KeyboardInterrupt):
                    signal.pause()
    if not keep:
        present(folder)  # the sites' notes are in the folder, too
    echo(f"bytes per route, as the server's gateway saw them: {folder / 'traffic.json'}")
    echo("next: open the page in a browser; begin a study of your own: fedda new study")


def clear(folder: Path) -> None:
    """Remove an earlier demo, and nothing else.

    Raises:
        RunError: the folder holds other files, or a demo that is still running.
    """
    if not folder.exists():
        return
    plain = folder.is_dir() and not folder.is_symlink()
    if not plain or (any(folder.iterdir()) and not any((folder / m).exists() for m in MADE)):
        raise RunError(
            f"{folder} would be emptied for the demo, but holds something else; move it away, or "
            "give another --dir."
        )
    with alone(folder):
        shutil.rmtree(folder)
