"""`fedda-client`: joins a site to a federation and answers for its data."""

import fcntl
import json
import logging
import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TextIO

import typer

from fedda.cli.exits import clear_exit
from fedda.config import FEATURES_HIDE, is_site_name
from fedda.errors import ConfigError, KeyFileError
from fedda.halves import load
from fedda.ops import keys
from fedda.ops.spawn import die_with_parent, free_port, watch_parent
from fedda.ops.submit import OFFLINE

if TYPE_CHECKING:  # torch takes seconds to import, and --help should not
    from fedda.data import Description

app = typer.Typer(add_completion=False)


@app.command()
def client(
    role: Annotated[
        Literal["source", "target"],
        typer.Option(help="source: brings labelled data. target: brings data without labels."),
    ],
    data: Annotated[
        Path, typer.Option(metavar="DIR", help="The site's data; see `fedda data check --help`.")
    ],
    superlink: Annotated[str, typer.Option(metavar="HOST:PORT", help="The server to join.")],
    name: Annotated[
        str | None,
        typer.Option(help="What the server calls this site. Default: the data folder's name."),
    ] = None,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda:N.")] = "auto",
    ca: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="ca.crt, as the server's operator handed it out."),
    ] = None,
    key: Annotated[
        Path | None, typer.Option(metavar="FILE", help="This site's own private key.")
    ] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="No TLS, no key: for trying out on one machine.")
    ] = False,
    state_dir: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            file_okay=False,
            help="Where this site keeps its own files; one folder per running client. "
            "Default: ~/.local/state/fedda/NAME.",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(min=1, help="CPU threads to use. Default: all.", show_default=False),
    ] = None,
    poison: Annotated[
        float,
        typer.Option(
            min=0, max=100, metavar="PERCENT", help="Give so many labels wrongly, for experiments."
        ),
    ] = 0.0,
    min_images: Annotated[
        int,
        typer.Option(
            min=2,
            help="Train no round on fewer images: the model after a step on a few of them tells "
            "too much about them. The server cannot change this.",
        ),
    ] = 16,
    min_examples: Annotated[
        int,
        typer.Option(
            min=1,
            help="Let no gradient leave that is summed over fewer examples: from one over a few, "
            "their features can be computed (`fedda audit gradients` tries it). The server cannot "
            "change this; a site with fewer examples takes part in no method that sums gradients.",
        ),
    ] = FEATURES_HIDE,
    noise: Annotated[
        float,
        typer.Option(
            min=0,
            help="Add at least so much Gaussian noise to each gradient that leaves, in multiples "
            "of the norm it is clipped to; the server can only ask for more (exchange.noise).",
        ),
    ] = 0.0,
    no_notes: Annotated[
        bool,
        typer.Option(
            "--no-notes",
            help="Keep no features and no confusion matrix of a training. They are written under "
            "--state-dir for this site's own eyes, and never sent.",
        ),
    ] = False,
    stock: Annotated[
        bool,
        typer.Option(
            "--stock",
            help="Run Flower's own SuperNode instead. Slower, and it executes whatever program "
            "the server sends.",
        ),
    ] = False,
    log: Annotated[
        Path | None,
        typer.Option(metavar="FILE", dir_okay=False, help="Write the full log here as well."),
    ] = None,
    patience: Annotated[float, typer.Option(hidden=True)] = 120.0,
    parent_pid: Annotated[int | None, typer.Option(hidden=True)] = None,
) -> None:
    """Join a federation with this site's data, and answer until Ctrl-C.

    A hospital whose labelled scans lie in /data/scans/train/<diagnosis>/*.png got ca.crt and
    hospital-a.key from the project's operator. It first looks at what would be used, then joins:

      fedda data check /data/scans

      fedda-client --role source --data /data/scans --superlink hub.example.org:8443
      --ca ca.crt --key hospital-a.key

    The hospital that wants a model for its unlabelled scans joins with --role target.

    The data stay in this process. It opens connections to the server only, one to --superlink and,
    while a round sums gradients, one to the exchange there (port 8444, unless the operator chose
    another), and runs only the program installed here; what leaves are models, atoms, gradients
    of the method's discriminators and the numbers of its contract (`fedda methods --wire`). If the
    server is away it waits and joins again. Exit code 3 means trouble with a key or certificate,
    1 any other trouble, 0 that it was asked to stop.
    """
    with clear_exit():
        _parent(parent_pid, stock)
        _check_options(superlink, ca, key, insecure)
        data = data.absolute()
        name = name or (data.stem if data.is_file() else data.name)
        if not is_site_name(name):
            raise ConfigError(
                f"{name!r} cannot be a site's name: give --name with 1 to 64 printable characters, "
                "no '/', and no '.' in front"
            )
        state = (state_dir or _default_state(name)).absolute()
        config: dict[str, bool | int | float | str] = {
            "role": role,
            "name": name,
            "data": str(data),
            "device": device,
            "state-dir": str(state),
            "poison": poison,
            "min-images": min_images,
            "min-examples": min_examples,
            "noise": noise,
            "server": superlink.rpartition(":")[0].strip("[]"),
            "notes": not no_notes,
        }
        if threads is not None:
            config["threads"] = threads
            os.environ["OMP_NUM_THREADS"] = str(threads)
        os.environ.update(OFFLINE)
        _logging(log)
        load("clients", "site.memory").pick_device(
            device
        )  # refused here, not in the middle of a run
        from fedda.data import describe

        typer.echo(_understood(describe(data, role)))
        # Held until the process ends: two clients of one folder would fight over one session.
        with _lock(state) as lock:
            if stock:
                _exec_stock(config, superlink, ca, key, state, lock)
            if threads is not None:
                import torch

                torch.set_num_threads(threads)
            resident, installed = load("clients", "node.resident"), load("clients", "app").app
            logging.getLogger("fedda.client").info("connecting to %s", superlink)
            resident.serve(
                installed,
                superlink=superlink,
                node_config=config,
                root_certificates=ca,
                key=key,
                insecure=insecure,
                on_event=_say,
                state=state,
                patience=patience,
            )


def _say(kind: str, text: str) -> None:
    logging.getLogger("fedda.client").info("%s: %s", kind, text)


def _logging(file: Path | None) -> None:
    handlers: list[logging.Handler] = [logging.StreamHandler(sys.stdout)]
    if file is not None:
        file.parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(file))
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", handlers=handlers
    )
    for noisy in ("httpx", "httpcore"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _parent(pid: int | None, stock: bool) -> None:
    if pid is None:
        return
    if stock:
        die_with_parent()
    else:
        watch_parent(pid)


def _check_options(superlink: str, ca: Path | None, key: Path | None, insecure: bool) -> None:
    host, _, port = superlink.rpartition(":")
    if not host or not port.isdigit() or "/" in superlink:
        raise ConfigError(
            f"--superlink {superlink!r} is not HOST:PORT: give it like hub.example.org:8443, "
            "without https://"
        )
    if insecure and (ca or key):
        raise ConfigError(
            "--insecure contradicts --ca and --key: leave it out to speak TLS, or leave them out"
        )
    if insecure:
        return
    if ca is not None:
        keys.check_certificate(ca)
    if key is None:
        raise KeyFileError(
            "no --key was given and the server admits registered sites only: give this site's "
            "private key, or --insecure to try out on one machine"
        )
    keys.load_node_key(key)


def _default_state(name: str) -> Path:
    base = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(base) / "fedda" / name


def _understood(found: "Description") -> str:
    shape = " x ".join(str(n) for n in found.shape)
    parts = [f"{found.train} {found.kind}s of {shape}"]
    if found.role == "source":
        parts.append(f"{len(found.classes)} classes: {', '.join(found.classes[:12])}")
    parts.append(f"{found.test} labelled test examples" if found.test else "no test set")
    lines = [f"{found.path} as a {found.role}: {'; '.join(parts)}"]
    return "\n".join(lines + [f"warning: {text}" for text in found.warnings])


def _lock(state: Path) -> TextIO:
    state.mkdir(parents=True, exist_ok=True)
    lock = (state / "lock").open("a+")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise ConfigError(
            f"another fedda-client uses {state}: stop it, or give this one its own --state-dir"
        ) from error
    return lock


def _exec_stock(
    config: Mapping[str, bool | int | float | str],
    superlink: str,
    ca: Path | None,
    key: Path | None,
    state: Path,
    lock: TextIO,
) -> None:
    """Become Flower's own SuperNode with the same configuration."""
    program = shutil.which("flower-supernode", path=sysconfig.get_path("scripts"))
    program = program or shutil.which("flower-supernode")
    if program is None:
        raise ConfigError("flwr's program flower-supernode is not installed: install flwr")
    # A file, because flower-supernode's own quoting knows no way to write every path.
    node = state / "node.toml"
    node.write_text(
        "".join(f"{k} = {json.dumps(v, ensure_ascii=False)}\n" for k, v in config.items())
    )
    home = state / "flwr"
    home.mkdir(exist_ok=True)
    os.environ["FLWR_HOME"] = str(home)
    os.environ["PATH"] = os.pathsep.join([str(Path(program).parent), os.environ.get("PATH", "")])
    command = [program, "--superlink", superlink, "--node-config", str(node)]
    command += ["--port", str(free_port())]
    # Without a key the connection is insecure: _check_options has seen to it.
    command += ["--auth-supernode-private-key", str(key.absolute())] if key else ["--insecure"]
    command += ["--root-certificates", str(ca.absolute())] if ca else []
    os.set_inheritable(lock.fileno(), True)
    sys.stdout.flush()
    os.execv(program, command)
